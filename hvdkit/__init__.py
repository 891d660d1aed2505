"""Data-parallel training with ring-allreduce, built on Horovod.

Import the adapter of the framework: `hvdkit.torch`, `hvdkit.tensorflow` or `hvdkit.keras`. The
function `run` has the arguments of `horovod.run`: it calls a function on several ranks of this
machine, and returns their results.
"""

from typing import Any

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    # Imported on use, because it is slow to import.
    if name == "run":
        from hvdkit.launch.run_function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
