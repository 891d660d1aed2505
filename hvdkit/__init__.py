"""hvdkit: Horovod-based ring-allreduce training on the PyTorch and TensorFlow of today."""

from typing import Any

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # `horovod.run(function, ...)`; imported when it is asked for, because it loads much else.
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
