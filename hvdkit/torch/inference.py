"""Collectives inside `torch.inference_mode()`.

In the collectives of `_RESIZED`, ranks send different amounts, so Horovod's background thread
resizes the output. Inference mode is a setting of one thread. A tensor that was created in this
mode cannot be resized by a thread outside of it. So these collectives create their outputs outside
of inference mode.
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
    """Replace the collectives of `_RESIZED` by ones that work in inference mode.

    Args:
        modules: the modules in which to replace them. The first one has the functions.
    """
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
