"""Announce the collectives of torch.distributed, so that hangs in them get a verdict.

Accelerate calls torch.distributed for metrics, data and checkpoints. The flight recorder sees only
Horovod's collectives. So a small one with the name of the call runs before each call.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from horovod.torch import mpi_ops

_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


def announce_calls() -> None:
    """Replace the collectives in the module torch.distributed by ones that announce themselves.

    Only blocking calls in the group of all ranks are announced. A second call changes nothing.
    """
    for name in _FUNCTIONS:
        function = getattr(torch.distributed, name)
        if not hasattr(function, "announced_by_hvdkit"):
            setattr(torch.distributed, name, _announced(name, function))


def _announced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        everyone = given.get("group") in (None, torch.distributed.group.WORLD)
        if everyone and not given.get("async_op") and mpi_ops.is_initialized():
            mpi_ops.allreduce(
                torch.zeros(1, device="cpu"), op=mpi_ops.Sum, name=f"torch.distributed.{name}"
            )
        return function(*args, **kwargs)

    call.announced_by_hvdkit = True  # type: ignore[attr-defined]
    return call
