"""Data-parallel training with ring-allreduce, built on Horovod.

Import the adapter of the framework: `hvdkit.torch`, `hvdkit.tensorflow` or `hvdkit.keras`. The
function `run` is Horovod's `horovod.run`, which runs code of anyone who reaches its port: use it on
a network and hosts of your own only.
"""

from typing import Any

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # Imported on use, because it is slow to import.
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
