"""Reduced gradients of which each rank has a share: `p.grad` of an optimizer with `shard`.

Rank r of n has the elements from r x `hvdkit.reduction.bucketing.share` on, in the order of the
parameter's memory.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from hvdkit.errors import UsageError
from hvdkit.torch.reduction.casting import dense_strides

_aten = torch.ops.aten

# What can be computed from the shares alone, and what `zero_grad` calls.
_ELEMENTWISE = {
    getattr(_aten, name)
    for name in (
        *("detach", "alias", "clone", "_to_copy", "zero_", "mul_", "div_", "add_", "mul", "div"),
        *("neg", "neg_", "_foreach_zero_", "_foreach_mul_", "_foreach_div_"),
    )
}


class DividedGradient(torch.Tensor):
    """A gradient with the shape, dtype and device of its parameter, of which this rank has a share.

    It can be multiplied by numbers, added to another one and set to 0. Other operations raise an
    error, because they would need the other shares.

    Args:
        like: a tensor with the shape, strides and device of the parameter.
        own: the share of this rank, of shape [elements]; None while it is reduced.
        collectives: the collectives of the ranks that have the shares.
    """

    own: torch.Tensor | None
    collectives: Any

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        own: torch.Tensor | None,
        collectives: Any,
        dtype: torch.dtype | None = None,
    ) -> "DividedGradient":
        result: DividedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=dtype or (like.dtype if own is None else own.dtype),
            device=like.device if own is None else own.device,
        )
        result.own, result.collectives = own, collectives
        return result

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: Any = None
    ) -> str:
        elements = "a share" if self.own is None else f"{self.own.numel()} elements"
        return f"DividedGradient(shape={list(self.shape)}, dtype={self.dtype}, here {elements})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if func.overloadpacket not in _ELEMENTWISE or not isinstance(first, DividedGradient):
            raise _refusal(func)

        def share(value: Any) -> Any:
            if isinstance(value, DividedGradient):
                if value.own is None:
                    raise _refusal(func)
                return value.own
            if isinstance(value, torch.Tensor) and value.dim():
                raise _refusal(func)
            return value

        if func.overloadpacket is _aten.detach and first.own is None:
            return cls(first, None, first.collectives)
        result = func(*tree_map(share, args), **tree_map(share, kwargs or {}))
        if str(func.overloadpacket).endswith("_"):
            return first if isinstance(result, torch.Tensor) else None
        return cls(first, result, first.collectives)


def _refusal(func: Any) -> UsageError:
    return UsageError(
        f"{func.overloadpacket} was called with a gradient that is divided among the ranks, "
        f"because hvd.DistributedOptimizer has shard=...: expected "
        f"hvd.clip_grad_norm_(optimizer, ...), max_grad_norm=..., or "
        f"optimizer.full_gradients() for whole gradients"
    )


def in_memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of another one's memory.

    Args:
        tensor: the tensor.
        like: a dense tensor of the same shape.

    Returns:
        A tensor of shape [elements]: a view if the tensor has the strides of `like`.
    """
    if like.is_contiguous():
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are contiguous in some order."""
    return dense_strides(tensor) is not None
