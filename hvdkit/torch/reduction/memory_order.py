"""The order of a tensor's dimensions in memory.

A copy of a tensor with another order has the same values. But a matrix product with the copy may
have other last bits, because it adds in another order. So copies of optimizer state keep the order:
some optimizers have matrices in column-major order, as `torch.linalg.qr` returns them.
"""

import torch


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a strided tensor, that with the largest stride first.

    `torch.empty_permuted(tensor.shape, memory_order(tensor))` has the same order.
    """
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))
