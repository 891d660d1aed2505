"""Callbacks for `model.fit` on several ranks, as in horovod.keras.callbacks, for Keras 3.

With a `DistributedOptimizer`, `fit` needs no callback to reduce metrics, to stop all ranks together
and to write files on rank 0 only (see `hvdkit.keras.fit.callback_list`).
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import keras

# Keras's own callbacks print with `io_utils`.
from keras.src.utils import io_utils

from hvdkit.agreement.consistency import gather
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.checkpoint import Checkpoint
from hvdkit.keras.fit.callback_kinds import HasLocalVariables
from hvdkit.keras.fit.collective_callbacks import CollectiveCallback, ReducesMetrics
from hvdkit.keras.fit.metrics import additive, flatten, numbers_of
from hvdkit.keras.functions import broadcast_model
from hvdkit.keras.models import main_optimizer
from hvdkit.keras.monitor import MonitorCallback
from hvdkit.keras.multi_optimizer import optimizers_inside
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras.profiling import ProfileCallback
from hvdkit.keras_variables.loss_scaling import inner_optimizers, innermost

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "MonitorCallback",
    "ProfileCallback",
    "additive",
]

log = logging.getLogger("hvdkit.keras")


class BroadcastGlobalVariablesCallback(CollectiveCallback, HasLocalVariables):
    """Broadcast the weights and the optimizer state of one rank to every rank.

    The broadcast is at the beginning of training if the model is built on every rank, and otherwise
    after the first batch. Horovod always broadcasts after the first batch. The docstring of
    `broadcast_model` lists what is broadcast.

    If the same callback is later passed to `fit` of a second model, the callback broadcasts the
    second model, too. Horovod's callback broadcasts only the first model.

    In `hvd.local_fit()` the callback does nothing.
    """

    omitted_in_local_fit = True

    def __init__(
        self,
        root_rank: int,
        device: str = "",  # noqa: ARG002
        local_variables: Any = None,
    ) -> None:
        """
        Args:
            root_rank: the rank to copy from.
            device: for compatibility with Horovod; ignored.
            local_variables: one or several variables that are not broadcast.
        """
        super().__init__()
        self.root_rank = root_rank
        # The model that was broadcast.
        self._done: Any = None
        if local_variables is None:
            local_variables = []
        elif not isinstance(local_variables, Iterable) or hasattr(local_variables, "assign"):
            local_variables = [local_variables]
        self.local_variables = list(local_variables)

    def register_local_var(self, var: Any) -> None:
        """Exclude the variable `var` from the broadcast."""
        self.local_variables.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if self._is_done():
            return
        group = backend.collectives(self._process_set())
        ranks, built = group.sum([1, int(_is_built(self.model))], "hvdkit.keras.built")
        if built == ranks:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if not self._is_done():
            self._broadcast()

    @property
    def broadcast_done(self) -> bool:
        """Whether a model was broadcast."""
        return self._done is not None

    def _is_done(self) -> bool:
        if self.alone:
            return True
        return self.broadcast_done and self._done is self.model

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank, self._process_set(), self.local_variables)
        self._done = self.model

    def _process_set(self) -> Any:
        distribution = distribution_of(main_optimizer(self.model))
        return distribution.process_set if distribution else None


def _is_built(model: Any) -> bool:
    # A subclassed model is `built` after build(), even if its layers are not.
    return bool(model.built and all(layer.built for layer in model._flatten_layers()))


class MetricAverageCallback(ReducesMetrics):
    """Reduce the metrics in the logs over all ranks.

    With a `DistributedOptimizer`, `fit` reduces the metrics without this callback. Pass the
    callback to `fit` if gradients are reduced in another way, or to `evaluate` on every rank.
    Metrics are reduced before any callback reads them. The position of this callback in the list
    does not matter.

    The state of a metric (totals, counts, confusion counts) is summed over the ranks, so the result
    is that of one process with all the data. The results of custom metric classes are averaged,
    unless they are marked with `additive`. Other numbers that a custom `train_step` returns are
    averaged too, but not other arrays.
    """

    def __init__(self, device: str = "") -> None:  # noqa: ARG002
        """
        Args:
            device: for compatibility with Horovod; ignored.
        """
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Average the numbers in `logs` over the ranks of the optimizer. A collective.

        Only for custom loops. Does nothing in a `fit` that reduces the metrics itself, nor in
        `hvd.local_fit()`, where other ranks may not take part.

        A number that only some ranks have, for example of a validation on one rank, is averaged
        over these ranks. All ranks get it, because callbacks must decide equally on all ranks.
        """
        if self.coordinated or self.alone:
            return
        logs = {} if logs is None else logs
        flatten(logs)
        values: dict[str, list[float]] = {}
        own = numbers_of(logs)
        for part in gather(_group_of(self.model), own, "hvdkit.keras.logs").values():
            for name, value in part.items():
                values.setdefault(name, []).append(value)
        logs.update({name: sum(each) / len(each) for name, each in values.items()})


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier` from `start_epoch` until `end_epoch`.

    Momentum correction (Goyal et al., 2017, https://arxiv.org/abs/1706.02677, section 3): SGD's
    velocity contains the learning rate as a factor. When the rate changes, this callback multiplies
    the velocities by new rate / old rate. Horovod multiplies the momentum coefficient for one step
    instead, with the same effect. In Keras 3 the coefficient is a constant of the compiled step,
    but velocities are variables.
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
            initial_lr: the rate to multiply, usually that of the optimizer.
            multiplier: a function of the epoch, or a number. A number is raised to the power of
                `epoch - start_epoch`.
            start_epoch: the first epoch, from 0 on, in which the rate is set.
            end_epoch: the first epoch in which the rate is no longer set. None: the rate is set
                until the end of the training.
            staircase: True: set the rate at the beginning of every epoch. False: set the rate
                before every batch, with a fractional epoch such as 2.5.
            momentum_correction: scale the velocities of SGD and RMSprop with momentum, and of their
                subclasses.
            steps_per_epoch: batches in an epoch. Needed without `staircase` if Keras does not know
                the number.
        """
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr is None: expected the initial learning rate, a number")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        # The velocities, and a function that scales them.
        self._scaled: tuple[list[Any], Callable[[float], None]] = [], backend.scaling_of([])
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if _trained_apart(self.model):
            raise UsageError(
                f"{type(self).__name__} sets the rate of the optimizer of compile, which is not "
                f"wrapped, but other optimizers of the model are wrapped with "
                f"hvd.DistributedOptimizer, as in a GAN: omit the callback, and make these "
                f"optimizers with a keras.optimizers.schedules.LearningRateSchedule, or set their "
                f"learning_rate in a callback of your own"
            )
        optimizer = innermost(main_optimizer(self.model))
        if optimizers_inside(optimizer):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}, and {type(self).__name__} sets "
                f"the rate of one optimizer: omit the callback, and set the learning_rate of each "
                f"of optimizer.optimizers in a callback of your own"
            )
        if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise UsageError(
                f"the optimizer's learning_rate is a {type(optimizer._learning_rate).__name__}, so "
                f"{type(self).__name__} cannot set the rate: make the optimizer with a number, or "
                f"omit the callback"
            )
        if not self.staircase and not self._steps:
            raise UsageError(
                f"the number of batches in an epoch is unknown: pass steps_per_epoch to "
                f"{type(self).__name__}"
            )

    @property
    def _steps(self) -> int:
        """The number of batches in an epoch of this `fit`; 0 if it is unknown."""
        return self.steps_per_epoch or self.params.get("steps") or 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set_rate(self.initial_lr * self.multiplier(epoch + batch / self._steps))
        elif batch == 0:
            self._set_rate(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if logs is not None:
            logs["lr"] = _rate_of(main_optimizer(self.model))

    def _set_rate(self, rate: float) -> None:
        optimizer = innermost(main_optimizer(self.model))
        old = _rate_of(optimizer)
        optimizer.learning_rate = rate
        if self.momentum_correction and old > 0 and rate != old:
            velocities = _velocities(optimizer)
            if list(map(id, velocities)) != list(map(id, self._scaled[0])):
                self._scaled = velocities, backend.scaling_of(velocities)
            self._scaled[1](rate / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate with every batch, from `initial_lr / size` to `initial_lr`.

    `initial_lr` is the rate for the global batch (Goyal et al., 2017,
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
            warmup_epochs: the length of the warm-up in epochs.
            momentum_correction: see `LearningRateScheduleCallback`.
            steps_per_epoch: see `LearningRateScheduleCallback`.
            verbose: 1: rank 0 prints a line at the end of the warm-up.
        """

        def multiplier(epoch: float) -> float:
            # An execution trains `steps_per_execution` batches with one rate. Use the fractional
            # epoch at the end of the execution, but not more than the end of the current epoch.
            ahead = getattr(self.model, "steps_per_execution", 1) / self._steps
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
                f"{_rate_of(main_optimizer(self.model)):g}."
            )


def _group_of(model: Any) -> Any:
    """Return the collectives of the optimizer's process set, or of all ranks without one."""
    # In a custom loop, a callback may have no model.
    distribution = None if model is None else distribution_of(main_optimizer(model))
    return distribution.collectives if distribution else backend.collectives()


def _trained_apart(model: Any) -> bool:
    """Return whether wrapped optimizers do not include that of `compile`, or one in it."""
    own, main = model.optimizer, main_optimizer(model)
    return all(each is not main for each in (own, *inner_optimizers(own).values()))


def _rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _velocities(optimizer: Any) -> list[Any]:
    """Return an optimizer's velocities, if they contain the learning rate as a factor."""
    if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum:
        return list(getattr(optimizer, "momentums", []))
    if isinstance(optimizer, keras.optimizers.RMSprop) and optimizer.momentum:
        return list(getattr(optimizer, "_momentums", []))
    return []


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the model with the best value of a metric.

    The attribute `filepath` may be set after the callback is made, until `fit` begins.
    """

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
            monitor: the name of the metric in the logs.
            verbose: 1: print a line for each saved model.
            mode: "min", "max" or "auto", which decides by the metric's name.
            save_freq: "epoch", or a number of batches.
            save_weights_only: save only the weights.
            filepath: the file, ending in .keras, or in .weights.h5 with `save_weights_only`. None:
                the script sets the attribute before `fit`.
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
                "BestModelCheckpoint has no filepath: pass filepath=, or set the attribute before "
                "fit"
            )
        super().on_train_begin(logs)
