"""Collectives inside `torch.inference_mode()`.

A tensor that is made in inference mode can only be resized in this mode, which belongs to a thread.
For these collectives, Horovod's thread resizes the output, because ranks send different amounts.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_RESIZED = (
    "allgather_async",
    "alltoall_async",
    "grouped_allgather_async",
    "grouped_reducescatter_async",
    "reducescatter_async",
)


def allow_inference_mode(*modules: ModuleType) -> None:
    """Make the functions of these modules create their outputs outside of inference mode."""
    for name in _RESIZED:
        function = _outside(getattr(modules[0], name))
        for module in modules:
            setattr(module, name, function)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return called
