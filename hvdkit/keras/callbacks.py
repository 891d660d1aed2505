"""Callbacks for `model.fit` on several ranks, as in horovod.keras.callbacks, for Keras 3.

With an optimizer that `DistributedOptimizer` has wrapped, `fit` reduces metrics, agrees on when to
stop and leaves files to rank 0 without any of them (see `hvdkit.keras.training`).
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import keras

# What Keras's own callbacks print with.
from keras.src.utils import io_utils

from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.checkpoint import Checkpoint
from hvdkit.keras.functions import broadcast_model
from hvdkit.keras.metrics import additive
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras.training import LeavesVariables, ReducesMetrics

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "additive",
]

log = logging.getLogger("hvdkit.keras")


class BroadcastGlobalVariablesCallback(LeavesVariables):
    """Starts every rank from the weights and the optimizer state of one.

    At the beginning of training where the model has been built on every rank, and otherwise after
    the first batch, as Horovod always does. Counters and loss scale are part of the optimizer's
    state; the states of random seeds are not sent (see `broadcast_model`).
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",  # noqa: ARG002
        local_variables: Any = None,
    ) -> None:
        """
        Args:
            root_rank: the rank to copy from.
            device: accepted because Horovod's has it; variables stay where they are.
            local_variables: a variable, or several, that each rank keeps for itself.
        """
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        if local_variables is None:
            local_variables = []
        elif not isinstance(local_variables, Iterable) or hasattr(local_variables, "assign"):
            local_variables = [local_variables]
        self.local_variables = list(local_variables)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        self.local_variables.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if self.broadcast_done:
            return
        group = backend.collectives(self._process_set())
        ranks, built = group.sum([1, int(_is_built(self.model))], "hvdkit.keras.built")
        if built == ranks:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank, self._process_set(), self.local_variables)
        self.broadcast_done = True

    def _process_set(self) -> Any:
        distribution = distribution_of(getattr(self.model, "optimizer", None))
        return distribution.process_set if distribution else None


def _is_built(model: Any) -> bool:
    # A subclassed model calls itself built as soon as build() was called, layers or not.
    return bool(model.built and all(layer.built for layer in model._flatten_layers()))


class MetricAverageCallback(ReducesMetrics):
    """Makes the metrics in the logs those of all ranks.

    `fit` does so without this callback where its optimizer is a `DistributedOptimizer`; with it,
    also where gradients are reduced in another way. Given to `evaluate` on every rank, it does the
    same for that. Wherever it is in the list, it comes first.

    What a metric keeps (totals and counts, confusion counts) is added up over the ranks, which
    gives what one process with all the data would have found. The results of a metric class of
    your own are averaged instead, unless `additive` says that its variables can be added up, and
    so is what a custom `train_step` returns that is no metric.
    """

    def __init__(self, device: str = "") -> None:  # noqa: ARG002
        """
        Args:
            device: accepted because Horovod's has it; metrics are a few numbers on the host.
        """
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Average the numbers in `logs` over the ranks, in a loop that is not `fit`'s."""
        if self.coordinated or not logs:
            return
        names = sorted(logs)
        numbers = [keras.ops.convert_to_numpy(logs[name]) for name in names]
        group = backend.collectives()
        sums = backend.sum_arrays(numbers, "hvdkit.keras.logs", group.process_set)
        for name, total in zip(names, sums, strict=True):
            logs[name] = float(total) / len(group.ranks)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` from `start_epoch` on until `end_epoch`.

    Momentum correction (Goyal et al., 2017, https://arxiv.org/abs/1706.02677, section 3) keeps
    SGD's velocity, which has the learning rate in it, in proportion: when the rate changes, the
    velocities are multiplied by new/old. Horovod multiplied the momentum coefficient for one step
    instead, which does the same to the velocity. In Keras 3 the coefficient is a number that is
    fixed in a compiled step; the velocities are variables.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """
        Args:
            initial_lr: what to multiply, usually the rate that the optimizer was made with.
            multiplier: a function of the epoch, or a number to be raised to the power of the
                epochs since `start_epoch`.
            start_epoch: the first epoch, from 0, in which the rate is set.
            end_epoch: the first epoch in which it no longer is; by default there is none.
            staircase: set it at the beginning of every epoch, and otherwise before every batch,
                with the epoch as a fraction.
            momentum_correction: whether to scale the velocities of optimizers whose velocity has
                the learning rate in it: SGD and RMSprop with momentum, and their subclasses.
            steps_per_epoch: batches in an epoch; needed without `staircase` where Keras does not
                know it either.
        """
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr is None: expected the learning rate to start from")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._velocities: list[Any] = []
        self._scale_velocities: Callable[[float], None] = backend.scaling_of([])
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        optimizer = _innermost(self.model.optimizer)
        if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise UsageError(
                f"{type(self).__name__} was given with an optimizer whose learning_rate is a "
                f"{type(optimizer._learning_rate).__name__}, and only one of them can decide: give "
                f"the optimizer a number"
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    f"the number of batches in an epoch is not known: give {type(self).__name__} "
                    f"steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self.initial_lr * self.multiplier(epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set_rate(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if logs is not None:
            logs["lr"] = _rate_of(self.model.optimizer)

    def _set_rate(self, rate: float) -> None:
        optimizer = _innermost(self.model.optimizer)
        old = _rate_of(optimizer)
        optimizer.learning_rate = rate
        if self.momentum_correction and old > 0 and rate != old:
            velocities = _velocities(optimizer)
            if list(map(id, velocities)) != list(map(id, self._velocities)):
                self._velocities = velocities
                self._scale_velocities = backend.scaling_of(velocities)
            self._scale_velocities(rate / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate step by step from `initial_lr / size` to `initial_lr`.

    `initial_lr` is the rate that suits the batch of all ranks together (Goyal et al., 2017,
    https://arxiv.org/abs/1706.02677).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """
        Args:
            initial_lr: the rate at the end of the warm-up.
            warmup_epochs: how long it takes.
            momentum_correction: see `LearningRateScheduleCallback`.
            steps_per_epoch: batches in an epoch, where Keras does not know it.
            verbose: 1 to have rank 0 print when it ends.
        """

        def multiplier(epoch: float) -> float:
            # As far as the batches that are trained at once, so that epochs end on round numbers.
            assert self.steps_per_epoch is not None
            ahead = getattr(self.model, "steps_per_execution", 1) / self.steps_per_epoch
            epoch = min(epoch + ahead, math.floor(epoch) + 1.0)
            size = backend.hvd.size()
            return float(1.0 / size * (epoch * (size - 1) / warmup_epochs + 1))

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == (self.end_epoch or 0) - 1 and backend.hvd.rank() == 0:
            io_utils.print_msg(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "
                f"{_rate_of(self.model.optimizer):g}."
            )


def _innermost(optimizer: Any) -> Any:
    """The optimizer within any that only scale the loss."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _velocities(optimizer: Any) -> list[Any]:
    """An optimizer's velocities, if they have the learning rate in them."""
    if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum:
        return list(getattr(optimizer, "momentums", []))
    if isinstance(optimizer, keras.optimizers.RMSprop) and optimizer.momentum:
        return list(getattr(optimizer, "_momentums", []))
    return []


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the model with the best value of a metric. `filepath` may be set after making it."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        save_weights_only: bool = False,
        filepath: str | None = None,
    ) -> None:
        """
        Args:
            monitor: the log to go by.
            verbose: 1 to have it print what it does.
            mode: "min", "max" or, by the metric's name, "auto".
            save_freq: "epoch", or a number of batches.
            save_weights_only: keep the weights alone.
            filepath: where, ending in .keras, or .weights.h5 for weights alone.
        """
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath if filepath is not None else f"best{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise UsageError(
                "BestModelCheckpoint has no filepath: set it before fit, or give it one as "
                "filepath="
            )
        super().on_train_begin(logs)
