"""The state of an elastic job: save it, restore it, and broadcast it to new ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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

from hvdkit.checkpoint.state import StatefulItem
from hvdkit.checkpoint.step_boundary import StepBoundary
from hvdkit.elastic.parts import Pickled
from hvdkit.elastic.state import CommittedState, part_name
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.devices import host_memory, loads_on_own_gpu
from hvdkit.torch.functions import broadcast_object
from hvdkit.torch.items.model import ModelItem
from hvdkit.torch.items.optimizer import OptimizerItem
from hvdkit.torch.items.reduction import ReductionItem
from hvdkit.torch.step_boundary import step_boundary, watch
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


class _Held(StateHandler):
    """A model or an optimizer, which an item keeps."""

    _saved: Any = None

    def save(self) -> None:
        if not _is_item(self):
            self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)


class _Handled(Pickled):
    """The item of an object with a `StateHandler`, which may be of the user.

    All handlers keep in attributes what their `save` has saved.
    """

    def __init__(self, handler: StateHandler) -> None:
        def get() -> Any:
            handler.save()
            # Without `value`, to which a handler may refer by other names as well.
            return {k: v for k, v in vars(handler).items() if v is not handler.value}

        def take(saved: dict[str, Any]) -> None:
            vars(handler).update(saved)
            handler.restore()

        super().__init__(get, take, loads_on_own_gpu)


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
    _allocate = staticmethod(host_memory)
    _loads = staticmethod(loads_on_own_gpu)

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = mpi_ops.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank, **kwargs)

    def _collectives(self) -> TorchCollectives:
        return TorchCollectives(mpi_ops.global_process_set)

    def _advice(self, value: Any) -> str:
        return super()._advice(value) or copy_advice(value)


class TorchState(ObjectState, horovod_state.TorchState):
    """Horovod's `TorchState`, with commits that a restarted job can restore.

    Models and optimizers are the same items as in a `hvd.Checkpointer`. Horovod's class calls
    `step()` of the optimizer on new ranks. For a wrapped optimizer, `step()` is a collective, and
    the other ranks would not call it.

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
            if type(handler) in (ModelStateHandler, OptimizerStateHandler):
                self._handlers[name] = _Held(handler.value)
        for name, value in list(self._saved_state.items()):
            if _has_state_dict(value) and not isinstance(value, DataLoader):
                del self._saved_state[name]
                self._handlers[name] = SamplerStateHandler(value)
        self._check_objects()

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

    def _reduced_over(self) -> Mapping[str, Sequence[int]]:
        return reduced_over(self._optimizers())

    def _model_items(self) -> Mapping[str, StatefulItem]:
        held = {n: handler.value for n, handler in self._handlers.items() if _is_item(handler)}
        models = {n: ModelItem(v, n) for n, v in held.items() if isinstance(v, torch.nn.Module)}
        items: dict[str, StatefulItem] = {
            **models,
            **{n: OptimizerItem(held[n], n, models) for n in held if n not in models},
            # After the optimizers: a scheduler may read the learning rates.
            **{n: _Handled(handler) for n, handler in self._handlers.items() if n not in held},
        }
        named = {part_name("held", n): item for n, item in items.items()}
        return named | {"reduction": ReductionItem(self._optimizers())}

    def _make_boundary(self) -> StepBoundary:
        return step_boundary(lambda: list(self._optimizers().values()))

    def _discard_gradients(self) -> None:
        optimizers = self._optimizers().values()
        watch(optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, WrappedOptimizer):
                optimizer.discard_accumulated()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None


def _is_item(handler: StateHandler) -> bool:
    """Return whether an item of checkpoints holds the whole state of a model or an optimizer."""
    if not isinstance(handler, _Held):
        return False
    if isinstance(handler.value, torch.nn.Module):
        return True
    # An optimizer with a `state_dict` of its own may have entries, maybe only after its first step,
    # that only its `load_state_dict` knows.
    plain: Any = getattr(handler.value, "_plain", handler.value)
    return plain.state_dict.__module__.startswith(("torch.", "hvdkit."))


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
