"""Check the options that Lightning or Accelerate passes on to `hvd.DistributedOptimizer`."""

import inspect
from collections.abc import Mapping
from typing import Any

from horovod.torch import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.torch.optimizer import DistributedOptimizer

_LIBRARY_DECIDES = {
    "optimizer": "the library passes its optimizers",
    "named_parameters": "the names are those of the model",
    "backward_passes_per_step": "use the accumulation of the library",
    "accumulation_steps": "use the accumulation of the library",
    "process_set": "the library trains on all ranks",
}


def check_options(
    options: Mapping[str, Any], receiver: str, refused: Mapping[tuple[str, Any], str] | None = None
) -> dict[str, Any]:
    """Return a copy of the options.

    Args:
        options: option name -> value.
        receiver: the name of the class that the user gave the options to, for errors.
        refused: (option name, value) -> the reason why the library does not support this value;
            None for no such values.

    Raises:
        UsageError: an option does not exist, or the library decides it.
    """
    known = inspect.signature(DistributedOptimizer).parameters.keys() - _LIBRARY_DECIDES.keys()
    reasons = {
        ("op", mpi_ops.Adasum): "Adasum reduces in the step, after gradients were clipped. Use "
        "hvd.Average or hvd.Sum",
        **(refused or {}),
    }
    for name, value in options.items():
        reason = _LIBRARY_DECIDES.get(name)
        if reason is None and name in known:
            reason = next((r for (n, v), r in reasons.items() if n == name and v == value), None)
            if reason is None:
                continue
        if reason is None:
            reason = f"expected options of hvd.DistributedOptimizer: {', '.join(sorted(known))}"
        raise UsageError(f"{receiver} was given {name}={value!r}, which is not supported: {reason}")
    return dict(options)
