"""hvdkit: Horovod-based ring-allreduce training on the PyTorch and TensorFlow of today."""

from typing import Any

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # `horovod.run(function, ...)`. Imported on use, because it is slow to import.
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
