"""`HvdkitStrategy` for Lightning's `Trainer`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning import pytorch as pl
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

import hvdkit.torch as hvd
from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.lightning import collectives
from hvdkit.lightning.batch_counts import BatchCounts
from hvdkit.lightning.environment import HvdkitEnvironment
from hvdkit.lightning.ranks import (
    RanksMixin,
    broadcast_buffers,
    check_batch_norm,
    no_sync,
)
from hvdkit.lightning.stopping import CommonStop
from hvdkit.runtime.script_end import note_end_with
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer
from hvdkit.torchmetrics import compute_over_ranks


class HvdkitStrategy(RanksMixin, ParallelStrategy):
    """Train with one process per device, and average gradients with hvdkit.

    Start the script with `hvdkit run -np 4 python train.py`, or with another launcher of Horovod.
    Lightning's arguments have their usual meaning: `accumulate_grad_batches`, `gradient_clip_val`
    (which clips the reduced gradients), `precision`, `sync_batchnorm`, `use_distributed_sampler`.
    Omit `devices` and `num_nodes`, because the launcher determines them.

    Args:
        accelerator: as in Lightning's strategies.
        checkpoint_io: as in Lightning's strategies.
        precision_plugin: as in Lightning's strategies.
        **options: options of `hvd.DistributedOptimizer`, such as `compression="fp16"`.

    Raises:
        UsageError: an option does not exist, or Lightning decides it.

    Example:
        trainer = lightning.Trainer(strategy=HvdkitStrategy(compression="fp16"), max_epochs=3)
        trainer.fit(model, loader)
    """

    refused: ClassVar = {
        ("on_nonfinite", "skip"): "Lightning computes the gradients within the optimizer's step, "
        "when hvdkit can no longer skip the step. Use on_nonfinite='raise', or "
        "precision='16-mixed', whose GradScaler skips steps with such gradients"
    }

    def __init__(
        self,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        self.options = self._checked(options)
        super().__init__(
            accelerator=accelerator,
            cluster_environment=HvdkitEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @property
    def is_distributed(self) -> bool:
        """True: Lightning shards its samplers."""
        return True

    @property
    def num_nodes(self) -> int:
        """The number of hosts."""
        return int(hvd.cross_size())

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number not in (1, hvd.cross_size()):
            raise UsageError(
                f"num_nodes is {number}, but the job runs on {hvd.cross_size()} hosts: omit "
                f"num_nodes, and choose the hosts with the launcher"
            )

    # --- setup ----------------------------------------------------------------------------------

    def setup(self, trainer: "pl.Trainer") -> None:
        """Set up the model and its optimizers. In `fit`, add hvdkit's own callbacks."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.callbacks[:0] = [BatchCounts(), CommonStop()]

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._layer_sync is not None and self._trainer.state.fn == TrainerFn.FITTING:
            model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        check_batch_norm(model)
        compute_over_ranks(model)
        hvd.broadcast_parameters(model, root_rank=0)
        return model

    def model_to_device(self) -> None:
        """Move the model to the device of this rank."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        """Create the optimizers and wrap each of them.

        Raises:
            UsageError: two optimizers have the same parameter.
        """
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        named = list(self.lightning_module.named_parameters())
        plain: list[torch.optim.Optimizer] = self._optimizers
        _check_separate(plain)
        wrapped: list[torch.optim.Optimizer] = [
            each if isinstance(each, _MockOptimizer) else self.wrap(each, named) for each in plain
        ]
        self.optimizers = wrapped
        # LearningRateMonitor looks up the optimizers of the schedulers.
        for config in self.lr_scheduler_configs:
            for old, new in zip(plain, wrapped, strict=True):
                if config.scheduler.optimizer is old:
                    config.scheduler.optimizer = new

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # --- collectives ----------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait until all ranks call it; return at once while the trainer handles an exception.

        When a rank fails, a callback of this rank may save a checkpoint, and call the barrier. The
        other ranks may still wait for the failed rank in a backward pass.
        """
        if not self._is_interrupted:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`. While the trainer handles an exception, return `obj`."""
        return obj if self._is_interrupted else super().broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (or any rank) decide so; see `barrier` for exceptions."""
        return decision if self._is_interrupted else super().reduce_boolean_decision(decision, all)

    @property
    def _is_interrupted(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.interrupted

    # --- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Compare the ranks, and save a checkpoint of rank 0. All ranks call it.

        While the trainer handles an exception, the ranks are not compared; see `barrier`.

        Raises:
            RankMismatchError: ranks have different parameters or optimizer states. Also if this
                error has ended the training, so that `save_on_exception` does not save them.
        """
        if not self._is_interrupted:
            self._compare_ranks(f"{filepath} was not saved.")
        elif isinstance(error := sys.exc_info()[1], RankMismatchError):
            raise error
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _compare_ranks(self, consequence: str) -> None:
        """Compare the replicas of each optimizer."""
        for each in self.optimizers:
            if not isinstance(each, WrappedOptimizer) or each.replicas is None:
                continue
            if each.replicas.settings.interval:
                each.replicas.compare(each.hvdkit_steps, consequence=consequence)

    # --- training -------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context in which gradients are accumulated without a reduction."""
        with no_sync(self.optimizers):
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; see `hvdkit.lightning.collectives.reduce`."""
        return collectives.reduce(tensor, group, reduce_op)

    def on_train_start(self) -> None:
        """Compute metrics over all ranks, also those that the module has created since `setup`."""
        self._compute_metrics_over_ranks()

    def on_validation_start(self) -> None:
        """Copy rank 0's buffers to all ranks, so that all validate the model of the checkpoint."""
        self._compute_metrics_over_ranks()
        self._broadcast_buffers()

    def on_test_start(self) -> None:
        """Compute metrics over all ranks."""
        self._compute_metrics_over_ranks()

    def on_train_end(self) -> None:
        """Copy rank 0's buffers to all ranks, so that all have the model of the checkpoint."""
        self._broadcast_buffers()

    def on_exception(self, exception: BaseException) -> None:
        """After SIGTERM or SIGUSR1, end with the exit status of a job that can be resumed.

        Lightning's exception ends the process with status 0, like a complete training.
        """
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = RESUMABLE
            note_end_with(RESUMABLE)

    def teardown(self) -> None:
        """Remove the optimizers' hooks: later backward passes do not wait for other ranks."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, WrappedOptimizer):
                optimizer.reducer.gradients.remove_hooks()
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None:
            trainer.callbacks[:] = [
                each for each in trainer.callbacks if not isinstance(each, BatchCounts | CommonStop)
            ]
        super().teardown()

    def _compute_metrics_over_ranks(self) -> None:
        assert self.lightning_module is not None
        compute_over_ranks(self.lightning_module)

    def _broadcast_buffers(self) -> None:
        assert self.lightning_module is not None
        broadcast_buffers(self.lightning_module)


def _check_separate(optimizers: list[torch.optim.Optimizer]) -> None:
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if owners.setdefault(id(p), number) != number:
                    raise UsageError(
                        f"the optimizers {owners[id(p)]} and {number} share a parameter of shape "
                        f"{list(p.shape)}: expected separate parameters, because hvdkit reduces a "
                        f"gradient for one optimizer. Use one optimizer with several groups"
                    )
