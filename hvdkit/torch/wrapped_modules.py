"""Find modules of PyTorch that reduce gradients themselves.

DistributedDataParallel and FullyShardedDataParallel reduce the gradients of their parameters in the
backward pass. A `DistributedOptimizer` of the same parameters would reduce them a second time.
(The parameters of FSDP2 are DTensors: see `hvdkit.torch.meshes`.)
"""

import gc
import sys
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdkit.errors import UsageError


def check_not_reduced(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Check that no module reduces the gradients of these parameters.

    It costs a pass over Python's objects if torch.distributed is initialised, otherwise nothing.

    Raises:
        UsageError: a parameter belongs to such a module.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    named = list(named_parameters)
    if _first_reduced(named) is None:
        return
    gc.collect()  # The module may be unused, in a reference cycle.
    found = _first_reduced(named)
    if found is not None:
        name, owner = found
        raise UsageError(
            f"the parameter {name!r} belongs to a {owner} module, which reduces its gradients. A "
            f"DistributedOptimizer would reduce them a second time. Use the plain model, without "
            f"{owner}. With Accelerate and transformers, use hvdkit.accelerate"
        )


def _first_reduced(named: list[tuple[str, torch.nn.Parameter]]) -> tuple[str, str] | None:
    """Return the name of the first parameter in such a module, and the module's class."""
    # PyTorch keeps no list of these modules, and a parameter does not know its modules.
    reducing = _reducing_classes()
    owners = {
        id(parameter): type(module).__name__
        for module in gc.get_objects()
        # Not isinstance, which calls code of proxies.
        if issubclass(type(module), reducing)
        for parameter in module.parameters()
    }
    return next(((name, owners[id(p)]) for name, p in named if id(p) in owners), None)


def _reducing_classes() -> tuple[type[torch.nn.Module], ...]:
    # An import of FSDP takes a second, because FSDP imports SymPy. Without an import by the script,
    # no module is of this class.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return (DistributedDataParallel,)
    return (DistributedDataParallel, fsdp.FullyShardedDataParallel)
