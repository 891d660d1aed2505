"""The state that an elastic job keeps and sends to new ranks."""

from typing import Any

import torch
from horovod.torch.elastic import state as horovod_state
from horovod.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)

from hvdkit.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

__all__ = [
    "ModelStateHandler",
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
    """Restore the state and drop gradients, which differ between ranks after an interruption."""

    def restore(self) -> None:
        super().restore()
        _drop_gradients(self.value)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        _drop_gradients(self.value)


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.discard_accumulated()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


class TorchState(horovod_state.TorchState):
    """Horovod's `TorchState`, except that models and optimizers are synchronised by hvdkit.

    Horovod's own way of synchronising an optimizer takes a step with it, which for a wrapped one
    is a collective that only new ranks would enter.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        for name, handler in self._handlers.items():
            if isinstance(handler.value, torch.nn.Module):
                self._handlers[name] = _ModelHandler(handler.value)
            elif isinstance(handler.value, torch.optim.Optimizer):
                self._handlers[name] = _OptimizerHandler(handler.value)
