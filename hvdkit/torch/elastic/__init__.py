"""Horovod's elastic training, with this package's `init`, optimizer and broadcasts."""

from collections.abc import Callable
from typing import Any

from horovod.common.elastic import run_fn

from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import TorchState
from hvdkit.torch.runtime import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for an elastic training function; the first argument is the state to keep."""
    decorated: Callable[..., Any] = run_fn(func, _reset)
    return decorated


def _reset() -> None:
    shutdown()
    init()
