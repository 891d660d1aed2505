"""Accelerate, with gradients that hvdkit reduces.

Accelerate starts torch.distributed from the variables that `hvdkit run` and `torchrun` set, and
uses it for data, metrics and checkpoints. Only DistributedDataParallel is replaced. Each call of
torch.distributed is announced by a small collective of Horovod, see
`hvdkit.torch.distributed_calls`.

Example:
    # Start: hvdkit run -np 2 python train.py
    accelerator = HvdkitAccelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

import hvdkit.torch as hvd
from hvdkit.errors import UsageError
from hvdkit.torch.distributed_calls import announce_calls
from hvdkit.torch.optimizer import sync
from hvdkit.torch.options import check_options
from hvdkit.torch.unwrapped import expect_reduction
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

_ADVICE = (
    "Use model, optimizer = accelerator.prepare(model, optimizer). Accelerate prepares only "
    "subclasses of torch.optim.Optimizer"
)
_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class HvdkitAccelerator(Accelerator):
    """`accelerate.Accelerator` without DistributedDataParallel: hvdkit averages the gradients.

    Everything else is unchanged, such as gradient accumulation, mixed precision, clipping,
    `gather_for_metrics` and `save_state`.

    Args:
        *args: arguments of `accelerate.Accelerator`.
        reduction: options of `hvd.DistributedOptimizer`, such as `{"compression": "fp16"}`.
        **kwargs: arguments of `accelerate.Accelerator`.

    Raises:
        UsageError: the processes of Accelerate are not Horovod's ranks, or an option is not
            supported.
    """

    def __init__(
        self, *args: Any, reduction: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._begin(reduction)

    def _begin(self, reduction: Mapping[str, Any] | None) -> None:
        self._reduction = check_options(reduction or {}, "HvdkitAccelerator")
        self._preparing: list[torch.nn.Module] = []
        if not hvd.is_initialized():
            hvd.init()
        if self.distributed_type not in _SUPPORTED:
            raise UsageError(
                f"Accelerate uses {self.distributed_type}: expected processes with one CPU or GPU "
                f"each, because hvdkit replaces DistributedDataParallel only"
            )
        found = (self.process_index, self.num_processes)
        if found != (hvd.rank(), hvd.size()):
            raise UsageError(
                f"Accelerate has process {found[0]} of {found[1]}, and Horovod has rank "
                f"{hvd.rank()} of {hvd.size()}: expected the same. Start the script with hvdkit "
                f"run, without --no-torch-env"
            )
        announce_calls()
        handler = self.ddp_handler
        hook = (
            "no" if handler is None else str(getattr(handler.comm_hook, "value", handler.comm_hook))
        )
        if hook != "no":
            raise UsageError(
                f"DistributedDataParallelKwargs has comm_hook={hook!r}, which hvdkit does not use: "
                f"pass reduction={{'compression': 'fp16'}} (or 'bf16')"
            )

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers, like Accelerate."""
        # An optimizer may come before its model, and needs the names of the model's parameters.
        self._preparing = [each for each in args if isinstance(each, torch.nn.Module)]
        try:
            return super().prepare(*args, **kwargs)
        finally:
            self._preparing = []

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare a model, and give all ranks the parameters and buffers of rank 0."""
        # In evaluation mode, Accelerate does everything except DistributedDataParallel.
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode:
            hvd.broadcast_parameters(model, root_rank=0)
            # DistributedDataParallel would reduce them, whatever optimizer uses them.
            expect_reduction(model.parameters(), _ADVICE)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer with the reduction, and prepare it."""
        if not isinstance(optimizer, AcceleratedOptimizer | WrappedOptimizer):
            optimizer = hvd.DistributedOptimizer(
                optimizer, self._names_for(optimizer), **self._options()
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def _names_for(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[str, torch.nn.Parameter]] | None:
        """Return names for the optimizer's parameters; None if one of them is in no known model."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = dict.fromkeys([*self._models, *self._preparing])
        named = [
            (f"{number}.{name}", p)
            for number, model in enumerate(models)
            for name, p in model.named_parameters()
            if id(p) in own
        ]
        return named if {id(p) for _, p in named} == own else None

    def _options(self) -> dict[str, Any]:
        # The user sets this for DistributedDataParallel, through a kwargs handler of Accelerate.
        handler = self.ddp_handler
        unused = handler is not None and handler.find_unused_parameters
        return {"find_unused_parameters": bool(unused)} | self._reduction

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Context in which backward passes of a model do not reduce gradients."""
        with ExitStack() as stack:
            for optimizer in self._optimizers_of(model):
                stack.enter_context(hvd.no_sync(optimizer))
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Context, within `no_sync`, in which backward passes of a model reduce gradients."""
        with ExitStack() as stack:
            for optimizer in self._optimizers_of(model):
                stack.enter_context(sync(optimizer))
            yield

    def _optimizers_of(self, model: torch.nn.Module) -> list[WrappedOptimizer]:
        """Return the wrapped optimizers that have parameters of a model."""
        own = {id(p) for p in model.parameters()}
        return [
            prepared.optimizer
            for prepared in self._optimizers
            if isinstance(prepared.optimizer, WrappedOptimizer)
            and any(
                id(p) in own for group in prepared.optimizer.param_groups for p in group["params"]
            )
        ]

    @contextmanager
    def join_uneven_inputs(self, *_: Any, **__: Any) -> Iterator[None]:
        """Raise an error, because it is a function of DistributedDataParallel.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "join_uneven_inputs() needs DistributedDataParallel: use even_batches=True, which is "
            "the default, or hvd.equal_batches(loader)"
        )
        yield


def adopt(accelerator: Accelerator, reduction: Mapping[str, Any] | None = None) -> None:
    """Convert an `Accelerator` into a `HvdkitAccelerator`, in place.

    For libraries that create the accelerator themselves. Call this function before the accelerator
    prepares anything.

    Args:
        accelerator: the accelerator.
        reduction: see `HvdkitAccelerator`.

    Raises:
        UsageError: the accelerator is of a subclass, or has prepared models or optimizers already.
    """
    if type(accelerator) is not Accelerator:
        raise UsageError(
            f"the accelerator is a {type(accelerator).__name__}: expected accelerate.Accelerator"
        )
    if accelerator._models or accelerator._optimizers:
        raise UsageError(
            "the accelerator has prepared models or optimizers: adopt it before it prepares them"
        )
    accelerator.__class__ = HvdkitAccelerator
    accelerator._begin(reduction)
