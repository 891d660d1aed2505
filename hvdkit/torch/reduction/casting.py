"""Cast and scale the gradients of a bucket, each rounded once."""

from collections.abc import Sequence

import torch

# The number of elements of a piece, which fits into the cache. PyTorch has no CPU operation that
# multiplies and casts in one pass, so both are done piece by piece.
_PIECE = 1 << 17

_NARROW = (torch.float16, torch.bfloat16)

# On an accelerator, tensors of at most this many elements share kernels: to start a kernel takes
# longer (6 us on an H100) than to compute one of them.
_SMALL = 1 << 20


class _Scale:
    """A factor for all gradients of a bucket.

    Attributes:
        factor: the factor as a number.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._tensors: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the factor as a tensor of shape [1], made once per dtype."""
        if dtype not in self._tensors:
            self._tensors[dtype] = torch.full((1,), self.factor, dtype=dtype, device=device)
        return self._tensors[dtype]


def cast_scaled_all(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], factor: float
) -> None:
    """Compute target = source x factor for each pair, rounded once to the target's dtype.

    All tensors are on one device.
    """
    scale = _Scale(factor)
    share = bool(targets) and targets[0].device.type != "cpu"
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    pairs = {}
    written = set()
    for source, target in zip(sources, targets, strict=True):
        # A kernel that writes a tensor twice would write it in any order.
        if share and _is_small(source, target) and target.data_ptr() not in written:
            written.add(target.data_ptr())
            these, those = pairs.setdefault((source.dtype, target.dtype), ([], []))
            these.append(source)
            those.append(target)
        else:
            _cast_scaled(source, target, scale)
    for dtypes, (these, those) in pairs.items():
        if _fit(*dtypes):
            _cast_scaled_together(these, those, factor)
        else:
            for source, target in zip(these, those, strict=True):
                _cast_scaled(source, target, scale)


def _is_small(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether `torch._foreach_` functions take this pair, and are faster for it."""
    return 0 < source.numel() <= _SMALL and not (source.is_neg() or target.is_neg())


def _fit(first: torch.dtype, second: torch.dtype) -> bool:
    """Return whether one of two floating dtypes of 16 bits or more holds the other's values."""
    return (
        first.is_floating_point
        and second.is_floating_point
        and min(first.itemsize, second.itemsize) > 1
        and torch.promote_types(first, second) in (first, second)
    )


def _cast_scaled_together(
    sources: list[torch.Tensor], targets: list[torch.Tensor], factor: float
) -> None:
    """Compute target = source x factor for pairs of equal dtypes that `_fit`, in a few kernels."""
    # Multiply in the wider dtype. Not in place in 16 bits: on a CPU, `_foreach_mul_` rounds the
    # factor to 16 bits.
    narrow = targets[0].dtype in _NARROW
    multiply_first = factor != 1.0 and (
        narrow or sources[0].dtype.itemsize > targets[0].dtype.itemsize
    )
    if multiply_first:
        sources = list(torch._foreach_mul(sources, factor))
    torch._foreach_copy_(targets, sources)
    if factor != 1.0 and not multiply_first:
        torch._foreach_mul_(targets, factor)


def _cast_scaled(source: torch.Tensor, target: torch.Tensor, scale: _Scale) -> None:
    """Compute target = source x scale, rounded once to the target's dtype."""
    factor = scale.factor
    if factor == 1.0:
        target.copy_(source)
    elif source.dtype == target.dtype and (
        target.dtype.is_floating_point or target.dtype.is_complex
    ):
        torch.mul(source, factor, out=target)
    elif not (target.dtype.is_floating_point or target.dtype.is_complex):
        # Round towards zero, as PyTorch casts.
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)
    elif source.device.type != "cpu":
        _cast_scaled_at_once(source, target, scale)
    elif source.dtype in _NARROW and target.dtype not in _NARROW:
        for part, into in _pieces(source, target):
            into.copy_(part).mul_(factor)
    else:
        for part, into in _pieces(source, target):
            into.copy_(part * factor)


def _cast_scaled_at_once(source: torch.Tensor, target: torch.Tensor, scale: _Scale) -> None:
    """Cast and scale in one kernel, which computes in the wider of the two dtypes."""
    # PyTorch computes in the promoted dtype of the operands. A tensor of shape [1] takes part in
    # the promotion; a number, or a tensor without dimensions, does not.
    wide = torch.promote_types(source.dtype, target.dtype)
    if not source.dim():
        # The scale has shape [1], so the result has one dimension too: `out` must have it already.
        source, target = source.view(1), target.view(1)
    torch.mul(source, scale.tensor(wide, source.device), out=target)


def _pieces(
    source: torch.Tensor, target: torch.Tensor
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    count = source.numel()
    strides = dense_strides(source) if count > _PIECE else None
    if strides is None or strides != target.stride():
        return [(source, target)]
    flat, into = source.as_strided((count,), (1,)), target.as_strided((count,), (1,))
    return list(zip(flat.split(_PIECE), into.split(_PIECE), strict=True))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides if the elements are contiguous in some order, otherwise None."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return None
        expected *= size
    return tensor.stride()
