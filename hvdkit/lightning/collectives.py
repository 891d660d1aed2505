"""The collectives of a Lightning strategy, by Horovod."""

from typing import Any

import torch
from torch.distributed import ReduceOp

import hvdkit.torch as hvd
from hvdkit.errors import UsageError

# torch.distributed's operation, Lightning's names for it, and Horovod's operation.
_OPERATIONS = (
    (ReduceOp.AVG, ("mean", "avg"), hvd.Average),
    (ReduceOp.SUM, ("sum",), hvd.Sum),
    (ReduceOp.MIN, ("min",), hvd.Min),
    (ReduceOp.MAX, ("max",), hvd.Max),
    (ReduceOp.PRODUCT, ("product", "prod"), hvd.Product),
)


def reduce(tensor: Any, group: Any, operation: Any) -> Any:
    """Reduce a tensor over all ranks, in place. All ranks call it.

    Args:
        tensor: the tensor; anything else is returned unchanged.
        group: None. hvdkit has no groups of torch.distributed.
        operation: "mean", "sum", "min", "max", "product" or a `torch.distributed.ReduceOp`. None
            is the sum, as in Lightning. The mean of integers is rounded towards zero.

    Returns:
        `tensor`.

    Raises:
        UsageError: the operation or the group is not supported.
    """
    _check_group(group)
    op = _operation(operation)
    if not isinstance(tensor, torch.Tensor):
        return tensor
    exact = tensor.is_floating_point() or tensor.is_complex()
    with torch.no_grad():
        sent = hvd.Sum if op == hvd.Average and not exact else op
        result = hvd.allreduce(tensor.detach().contiguous(), op=sent, name="lightning.reduce")
        if sent != op:
            result = result / hvd.size()
        return tensor.copy_(result)


def all_gather(tensor: torch.Tensor, group: Any, sync_grads: bool) -> torch.Tensor:
    """Stack the tensors of all ranks, in a new first dimension. All ranks call it.

    Args:
        tensor: a tensor of the same shape on all ranks.
        group: None. hvdkit has no groups of torch.distributed.
        sync_grads: whether backward passes go through the result. The gradient of `tensor` is then
            the sum over all ranks of the gradients of this rank's part.

    Raises:
        UsageError: the group is not supported.
    """
    _check_group(group)
    if sync_grads:
        return hvd.gather_for_loss(tensor.unsqueeze(0), name="lightning.all_gather")
    with torch.no_grad():
        return hvd.allgather(tensor.detach().unsqueeze(0), name="lightning.all_gather")


def _operation(operation: Any) -> int:
    if operation is None:
        return int(hvd.Sum)
    name = operation.lower() if isinstance(operation, str) else None
    for torch_operation, names, op in _OPERATIONS:
        if name in names or (name is None and operation == torch_operation):
            return int(op)
    raise UsageError(
        f"reduce_op is {operation!r}: expected mean, sum, min, max or product, or a ReduceOp for "
        f"one of them"
    )


def _check_group(group: Any) -> None:
    # By default, Lightning passes torch.distributed's group of all ranks. It is None here, because
    # torch.distributed is not initialised.
    if group is not None:
        raise UsageError(
            f"group is a {type(group).__name__} of torch.distributed: expected None, because a "
            f"strategy of hvdkit reduces over all ranks by Horovod"
        )
