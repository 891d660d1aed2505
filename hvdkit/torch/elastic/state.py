"""The state of an elastic job: save it, restore it, and broadcast it to new ranks."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from horovod.common import elastic as horovod_elastic
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch import mpi_ops
from horovod.torch.elastic import state as horovod_state
from horovod.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)

from hvdkit.core.elastic import CommittedState
from hvdkit.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdkit.torch.items.reduction import ReductionItem
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

__all__ = [
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class _ModelHandler(horovod_state.ModelStateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class _OptimizerHandler(horovod_state.OptimizerStateHandler):
    """Save the state of the reduction, too, which 16-bit sums need to have the same bits again.

    `restore` and `sync` drop gradients, which differ between ranks after an interruption.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._saved_reduction = self._reduction.save()

    @property
    def _reduction(self) -> ReductionItem:
        # Not an attribute: a commit contains the attributes.
        return ReductionItem({"": self.value})

    def save(self) -> None:
        super().save()
        self._saved_reduction = self._reduction.save()

    def restore(self) -> None:
        # A copy: the optimizer keeps the tensors that it loads, and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))
        self._reduction.restore(self._saved_reduction)
        _drop_gradients(self.value)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        # A rank on a host without a commit has no state, and all states must be equal.
        self._reduction.restore(broadcast_object(self._reduction.save()))
        _drop_gradients(self.value)


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.discard_accumulated()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


class ObjectState(CommittedState, horovod_elastic.ObjectState):
    """Elastic state of picklable objects.

    Args:
        bcast_object: broadcasts an object from rank 0; default: hvdkit's `broadcast_object`.
        get_rank: returns this rank; default: `hvd.rank`.
        kwargs: the objects; they become attributes.
    """

    _interrupt = HostsUpdatedInterrupt

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = mpi_ops.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank, **kwargs)

    def write_saved(self, file: IO[bytes]) -> None:
        """Write what `save` has saved to a file."""
        torch.save({"objects": self._saved_state, "handlers": self._saved_handlers()}, file)

    def read_saved(self, path: Path) -> None:
        """Read what `write_saved` has written, for the next `restore`."""
        # The file contains arbitrary objects, and belongs to the user of this process.
        saved = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        self._saved_state = saved["objects"]
        self._load_handlers(saved["handlers"])

    def _saved_handlers(self) -> Mapping[str, Any]:
        return {}

    def _load_handlers(self, saved: Mapping[str, Any]) -> None:
        pass


class TorchState(ObjectState, horovod_state.TorchState):
    """Horovod's `TorchState`, with commits that a restarted job can restore.

    Models and optimizers are synchronised by hvdkit. Horovod's class calls `step()` of the
    optimizer on new ranks. For a wrapped optimizer, `step()` is a collective, and the other ranks
    would not call it.

    Args:
        model: a model.
        optimizer: an optimizer.
        kwargs: further models, optimizers, `ElasticSampler`s and picklable objects; they become
            attributes.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        horovod_state.TorchState.__init__(self, model=model, optimizer=optimizer, **kwargs)
        self._bcast_object = broadcast_object  # Horovod's class sets its own
        for name, handler in self._handlers.items():
            if isinstance(handler.value, torch.nn.Module):
                self._handlers[name] = _ModelHandler(handler.value)
            elif isinstance(handler.value, torch.optim.Optimizer):
                self._handlers[name] = _OptimizerHandler(handler.value)

    def _saved_handlers(self) -> Mapping[str, Any]:
        # All handlers, also those of the user, keep in attributes what their `save` has saved.
        return {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }

    def _load_handlers(self, saved: Mapping[str, Any]) -> None:
        for name, attributes in saved.items():
            vars(self._handlers[name]).update(attributes)
