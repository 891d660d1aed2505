"""The state of an elastic job: save it, restore it, and broadcast it to new ranks."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torch.utils.data import DataLoader, Sampler

from hvdkit.core.elastic.state import CommittedState
from hvdkit.core.step_boundary import StepBoundary
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.devices import on_own_gpu
from hvdkit.torch.digests import digests
from hvdkit.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdkit.torch.items.reduction import ReductionItem
from hvdkit.torch.optimizer_reducer import step_boundary
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer, reduced_over

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
    def restore(self) -> None:
        # A copy: the optimizer keeps the tensors that it loads, and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class _StateDictHandler(horovod_state.SamplerStateHandler):
    """Keep an object with `state_dict` and `load_state_dict`, such as a scheduler or a GradScaler.

    The script's object gets the state. A copy of the object would be useless: the script may hold
    the original, and a scheduler's copy has a copy of the optimizer.
    """

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved_sampler_state))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ObjectState(CommittedState, horovod_elastic.ObjectState):
    """Elastic state of picklable objects.

    Args:
        bcast_object: broadcasts an object from rank 0; default: hvdkit's `broadcast_object`.
        get_rank: returns this rank; default: `hvd.rank`.
        kwargs: picklable objects, and `hvd.ResumableSampler`s; they become attributes. Picklable
            objects are replaced by copies at a start, samplers get the position.

    Raises:
        UsageError: an object must not be replaced by a copy, such as a model or a `DataLoader`.
    """

    _interrupt = HostsUpdatedInterrupt

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = mpi_ops.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank, **kwargs)

    def _content(self) -> Mapping[str, Any]:
        """Return what `save` has saved, and the positions of checkpointers."""
        small = self._values_to_write()
        return {
            "objects": small["objects"],
            "handlers": {**self._saved_handlers(), **small.get("handlers", {})},
            "items": self._saved_items,
            "positions": small["positions"],
        }

    def _dump(self, content: Any, file: IO[bytes]) -> None:
        torch.save(content, file)

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return str(value.dtype), tuple(value.shape), digests([value])

    def read_saved(self, path: Path) -> None:
        """Read what `write_saved` has written, for the next `restore`."""
        # The file contains arbitrary objects, and belongs to the user of this process.
        saved = torch.load(str(path), map_location=on_own_gpu, weights_only=False, mmap=True)
        self._load_handlers(saved["handlers"])
        self._set_saved(saved["objects"], saved.get("items", {}), saved.get("positions", {}))

    def _saved_handlers(self) -> Mapping[str, Any]:
        return {}

    def _load_handlers(self, saved: Mapping[str, Any]) -> None:
        pass

    def _advice(self, value: Any) -> str:
        return super()._advice(value) or copy_advice(value)


class TorchState(ObjectState, horovod_state.TorchState):
    """Horovod's `TorchState`, with commits that a restarted job can restore.

    Models and optimizers are synchronised by hvdkit. Horovod's class calls `step()` of the
    optimizer on new ranks. For a wrapped optimizer, `step()` is a collective, and the other ranks
    would not call it.

    Args:
        model: a model.
        optimizer: an optimizer.
        kwargs: further models, optimizers, samplers (`hvd.ResumableSampler`, `ElasticSampler`),
            objects with `state_dict` and `load_state_dict` (such as schedulers), and picklable
            objects; they become attributes. Picklable objects are replaced by copies at a start,
            the others get the state.

    Raises:
        UsageError: an object must not be replaced by a copy, such as a `DataLoader`, a list of
            schedulers, or an object that refers to the model.
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
        # After the optimizers: a scheduler may read the learning rates.
        for name, value in list(self._saved_state.items()):
            if _has_state_dict(value) and not isinstance(value, DataLoader):
                del self._saved_state[name]
                self._handlers[name] = _StateDictHandler(value)
        self._sort_objects()

    def sync(self) -> None:
        """Broadcast everything from rank 0, and discard accumulated gradients. A collective.

        Raises:
            UsageError: on every rank, if the process set of an optimizer is not all ranks.
        """
        super().sync()
        # Horovod's method saves the objects, but not the models, optimizers and samplers. A
        # `restore` before the first commit would join values of two points in time.
        for handler in self._handlers.values():
            handler.save()

    def _originals(self) -> Iterable[Any]:
        yield from super()._originals()
        kept = [handler.value for handler in self._handlers.values()]
        yield from kept
        for module in kept:
            if isinstance(module, torch.nn.Module):
                yield from module.modules()
                yield from module.parameters()
                yield from module.buffers()
        for optimizer in self._optimizers().values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        values = {name: handler.value for name, handler in self._handlers.items()}
        return {k: value for k, value in values.items() if isinstance(value, torch.optim.Optimizer)}

    def _wrapped_optimizers(self) -> list[WrappedOptimizer]:
        return [each for each in self._optimizers().values() if isinstance(each, WrappedOptimizer)]

    def _collectives(self) -> TorchCollectives:
        return TorchCollectives(mpi_ops.global_process_set)

    def _reduced_over(self) -> Mapping[str, Sequence[int]]:
        return reduced_over(self._optimizers())

    def _reduction_items(self) -> Mapping[str, ReductionItem]:
        return {"optimizers": ReductionItem(self._optimizers())}

    def _make_boundary(self) -> StepBoundary:
        return step_boundary(lambda: [each.reducer for each in self._wrapped_optimizers()])

    def _discard_gradients(self) -> None:
        for wrapped in self._wrapped_optimizers():
            wrapped.discard_accumulated()
        for optimizer in self._optimizers().values():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def _values(self) -> Mapping[str, Any]:
        large = (torch.nn.Module, torch.optim.Optimizer)
        handlers = {
            name: attributes
            for name, attributes in self._saved_handlers().items()
            if not isinstance(self._handlers[name].value, large)
        }
        return {**super()._values(), "handlers": handlers}

    def _saved_handlers(self) -> Mapping[str, Any]:
        # All handlers, also those of the user, keep in attributes what their `save` has saved.
        return {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in self._handlers.items()
        }

    def _load_handlers(self, saved: Mapping[str, Any]) -> None:
        for name, attributes in saved.items():
            vars(self._handlers[name]).update(attributes)


def copy_advice(value: Any) -> str:
    """Return what to do with a value that must not be copied; "" if it may be copied."""
    if isinstance(value, DataLoader):
        return (
            "pass the sampler of the DataLoader, a hvd.ResumableSampler or a "
            "hvd.elastic.ElasticSampler. For a StatefulDataLoader, use hvd.Checkpointer"
        )
    if isinstance(value, Sampler) and not _has_state_dict(value):
        return (
            "use a hvd.ResumableSampler or a hvd.elastic.ElasticSampler, whose position the state "
            "keeps"
        )
    if isinstance(value, torch.nn.Module):
        # A metric of torchmetrics has neither, and may belong to the state alone.
        has_variables = any(True for each in (value.parameters(), value.buffers()) for _ in each)
        return _OWN_ARGUMENT if has_variables else ""
    if isinstance(value, torch.optim.Optimizer) or _has_state_dict(value):
        return _OWN_ARGUMENT
    return ""


_OWN_ARGUMENT = (
    "pass it to hvd.elastic.TorchState(...), as a keyword argument of its own. The state then "
    "changes the object itself"
)


def _has_state_dict(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
