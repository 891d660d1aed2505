"""`HvdkitStrategy` for Lightning's `Fabric`."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl

import hvdkit.torch as hvd
from hvdkit.lightning import collectives
from hvdkit.lightning.environment import HvdkitEnvironment
from hvdkit.lightning.ranks import RanksMixin, check_batch_norm, no_sync
from hvdkit.torch.unwrapped import expect_reduction
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer
from hvdkit.torchmetrics import compute_over_ranks

_ADVICE = (
    "Use model, optimizer = fabric.setup(model, optimizer), or fabric.setup_optimizers(optimizer)"
)


class HvdkitStrategy(RanksMixin, ParallelStrategy):
    """Train with one process per device, and average gradients with hvdkit.

    Args:
        accelerator: as in Fabric's strategies.
        checkpoint_io: as in Fabric's strategies.
        precision: as in Fabric's strategies.
        **options: options of `hvd.DistributedOptimizer`, such as `compression="fp16"`.

    Raises:
        UsageError: an option does not exist, or Fabric decides it.

    Example:
        # Start: hvdkit run -np 4 python train.py
        fabric = lightning.Fabric(strategy=HvdkitStrategy())
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(
        self,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        self.options = self._checked(options)
        super().__init__(
            accelerator=accelerator,
            cluster_environment=HvdkitEnvironment(),
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._backward_sync_control = _NoSync(self)

    def _configure_launcher(self) -> None:
        self.set_world_ranks()

    # --- setup ----------------------------------------------------------------------------------

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a module to the device of this rank."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give all ranks the parameters and buffers of rank 0.

        Raises:
            UsageError: a layer needs torch.distributed.
        """
        check_batch_norm(module)
        compute_over_ranks(module)
        hvd.broadcast_parameters(module, root_rank=0)
        expect_reduction(module.parameters(), _ADVICE)
        return module

    def setup_module_and_optimizers(
        self,
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scheduler: Any = None,
    ) -> Any:
        """Set up a module, and wrap its optimizers."""
        module = self.setup_module(module)
        named = list(module.named_parameters())
        wrapped = [self._wrapped(optimizer, named) for optimizer in optimizers]
        return module, wrapped, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap an optimizer."""
        return self._wrapped(optimizer, None)

    def _wrapped(self, optimizer: torch.optim.Optimizer, named: Any) -> torch.optim.Optimizer:
        wrapped = self.wrap(optimizer, named)
        self._optimizers.add(wrapped)
        return wrapped

    # --- training -------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; see `hvdkit.lightning.collectives.reduce`."""
        return collectives.reduce(tensor, group, reduce_op)

    def clip_gradients_norm(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Clip the reduced gradients by their norm. All ranks call it."""
        _reduce(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)

    def clip_gradients_value(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        """Clip the reduced gradients by their values. All ranks call it."""
        _reduce(optimizer)
        super().clip_gradients_value(module, optimizer, *args, **kwargs)


def _reduce(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, WrappedOptimizer):
        optimizer.reduce()


class _NoSync(_BackwardSyncControl):
    def __init__(self, strategy: HvdkitStrategy) -> None:
        self._strategy = weakref.proxy(strategy)

    @contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Context in which passes of the module do not reduce gradients."""
        own = {id(p) for p in module.parameters()}
        optimizers = [
            optimizer
            for optimizer in self._strategy._optimizers
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        ]
        with no_sync(optimizers if enabled else []):
            yield
