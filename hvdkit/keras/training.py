"""Coordination of `model.fit` and `evaluate` between ranks, beyond the gradients.

This is the one place where hvdkit steps into `fit` and `evaluate`. Both make a
`keras.callbacks.CallbackList` in each call, and call their callbacks through it. In a job of
several ranks such a list becomes a `_Coordinated` one when it is given the model; on a single rank
only with `accumulation_steps`, to end the window. A list with a `FollowsFit`, or beside a
`ResumableSampler`, becomes a `_Followed` one, also on a single rank. Nothing else in Keras is
changed but the first step of an epoch (see `hvdkit.keras.resuming`).

Every `fit` of such a job begins with one small collective, because only one rank may know that the
ranks train together: it has a callback that asks for metrics of all ranks, for instance. Where no
rank uses anything of hvdkit, `fit` is Keras's own. `local_fit` leaves out the collective, too.

What a coordinated list does, in the order of the calls:

- Ranks whose numbers of steps or epochs are known to differ raise an error.
- After the first batch the ranks compare the values of the variables that they train together, and
  of those that nothing changes.
- Files and the progress bar are rank 0's: callbacks that write are left out on the other ranks.
  What `BackupAndRestore` restores goes from rank 0 to all of them.
- A batch's loss that is not finite on one rank is so on all, where a `TerminateOnNaN` looks at it.
- A callback that stops training on one rank stops it on all: after the same batch if it acts on
  batches, and otherwise at the end of the epoch.
- Before validation, or at the end of an epoch without it, an open accumulation window is closed,
  and moving statistics of `BatchNormalization` are averaged.
- The metrics, those of validation too, are reduced over all ranks before any callback reads them.
- A `FollowsFit`, which saves checkpoints, comes after all that; also on a single rank.
- The epochs of a `ResumableSampler` are counted, whatever the model.

`evaluate` on its own, outside of `fit`, is a rank's own affair, as with Horovod: scripts call it on
rank 0 alone. Give it a `MetricAverageCallback` on every rank to have its metrics reduced.
"""

import functools
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
from keras.callbacks import CallbackList, ProgbarLogger

from hvdkit.core.bucketing import without_layer_numbers
from hvdkit.core.consistency import check_consistency, texts_by_rank
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.data import any_samplers, forget_reads, samplers_read
from hvdkit.keras.functions import broadcast_model
from hvdkit.keras.metrics import MetricState, flatten, reduce_logs
from hvdkit.keras.models import adapt, distributions_of, has_own_step
from hvdkit.keras.statistics import average_statistics, statistics_of
from hvdkit.keras.value_check import check_values, digest_of

log = logging.getLogger("hvdkit.keras")

# Callbacks that write files, or send what they would write elsewhere.
_WRITERS: tuple[type, ...] = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "BackupAndRestore",
        "CSVLogger",
        "ModelCheckpoint",
        "OrbaxCheckpoint",
        "RemoteMonitor",
        "TensorBoard",
    )
    if hasattr(keras.callbacks, name)
)

# Seconds after which a rank that waits for the others at the start of `fit` says so.
_PATIENT_SECONDS = 10.0

_local: ContextVar[bool] = ContextVar("hvdkit_local_fit", default=False)
_said: set[str] = set()

_BATCH_HOOKS = ("on_train_batch_begin", "on_batch_begin", "on_train_batch_end", "on_batch_end")


@contextmanager
def local_fit() -> Iterator[None]:
    """Let `fit` within it train on this rank alone, without the other ranks.

    Example:
        if hvd.rank() == 0:
            with hvd.local_fit():
                teacher.fit(data)
    """
    token = _local.set(True)
    try:
        yield
    finally:
        _local.reset(token)


class ReducesMetrics(keras.callbacks.Callback):
    """A callback that asks for metrics over all ranks, whatever the optimizer."""

    #: Whether `fit` sees to it, so that the callback itself has nothing to do.
    coordinated = False


class LeavesVariables(keras.callbacks.Callback):
    """A callback that leaves some variables to each rank.

    Attributes:
        local_variables: these, each as a `keras.Variable` or as the framework's.
    """

    local_variables: list[Any]


class FollowsFit(keras.callbacks.Callback):
    """A callback that comes after all others, and after the ranks have agreed on what these did.

    Its hooks are its own, and no exception of what it does in them is lost in a thread of Keras's.
    """

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """The other callbacks have begun."""

    def epoch_begins(self, epoch: int) -> None:
        """The batches of an epoch are about to be asked for."""

    def batch_ends(self, batch: int) -> None:
        """The batch of this number, counted from 0 in each epoch, is trained."""

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """The epoch is done, with its validation, and `stop_training` has been agreed on."""

    def fit_ends(self) -> None:
        """The other callbacks have ended."""


class _Coordination:
    """Decisions that the ranks of one `fit` make together."""

    def __init__(self, model: Any, asked: bool) -> None:
        self.model = model
        self.distributions = distributions_of(model)
        #: Whether this rank knows that the ranks train together.
        self.in_use = asked or bool(self.distributions) or has_own_step(model)
        first = self.distributions[0] if self.distributions else None
        self.group = first.collectives if first else backend.collectives()
        # Callbacks may differ between ranks, and these must not.
        self.watches_loss = False
        self.watches_stops = False
        self._stop_held = False
        self._compares_values = False
        # The id of a variable that no gradient changes -> digest of its value at the beginning.
        self._before: dict[int, int] = {}
        self._trains_one_model = False
        self._trained: MetricState | None = None
        self._validated: set[str] = set()
        self._averaged: set[str] = set()

    @property
    def has_windows(self) -> bool:
        """Whether batches are accumulated, so that there may be something to end or to forget."""
        return any(d.accumulation_steps > 1 for d in self.distributions)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return bool(backend.hvd.rank() == self.group.ranks[0])

    def meet(self, params: Mapping[str, Any]) -> bool:
        """Return whether the ranks train together. A collective.

        Args:
            params: of the callbacks: `steps` in an epoch, None where not known, and `epochs`.

        Raises:
            UsageError: on every rank, when the numbers of steps or epochs differ.
            BackwardFailed: on every rank, when an earlier `fit` has raised on some ranks, and the
                others are still in it.
        """
        for distribution in self.distributions:
            distribution.end_interrupted()
        steps, epochs = params.get("steps"), int(params.get("epochs") or 0)
        known = steps is not None
        own = [int(steps or 0), epochs]
        values = [1, int(self.in_use), int(known), *own, *(n * n for n in own)]
        with self._saying_that_it_waits():
            count, in_use, all_known, *sums = self.group.sum(values, "hvdkit.keras.fit")
        if not in_use:
            if self.is_first and "separate" not in _said:
                log.warning(
                    "fit trains a separate model on each of %d ranks, because nothing reduces "
                    "their gradients. Compile the model with "
                    "hvd.DistributedOptimizer(optimizer). If each rank is to have its own model, "
                    "call fit within hvd.local_fit().",
                    count,
                )
            _said.add("separate")
            return False
        differ = [count * sums[k + 2] != sums[k] ** 2 for k in range(2)]
        if (differ[0] and all_known == count) or differ[1]:
            mine = f"{steps} steps in each of {epochs} epochs"
            told = "; ".join(texts_by_rank(self.group, mine, "hvdkit.keras.fit.who"))
            raise UsageError(
                f"fit has different numbers of steps or epochs on the ranks ({told}), and would "
                f"wait for ever for the batches that some do not have. Give all ranks as many "
                f"batches: hvd.shard(data), or steps_per_epoch=."
            )
        return True

    @contextmanager
    def _saying_that_it_waits(self) -> Iterator[None]:
        timer = threading.Timer(
            _PATIENT_SECONDS,
            log.warning,
            (
                "rank %d has waited for %.0f seconds in fit for other ranks: every rank calls fit. "
                "To train on this rank alone, call fit within hvd.local_fit().",
                backend.hvd.rank(),
                _PATIENT_SECONDS,
            ),
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def begin(self, callbacks: list[Any], restores: bool) -> None:
        """Agree on what to watch, and start where rank 0 does if that may have a backup.

        What a `fit` that ended with an error has left in an accumulation window is forgotten.
        """
        terminates = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks)
        acts = any(map(_acts_on_batches, callbacks))
        restores = restores and self.is_first
        restored = (self.model._initial_epoch or 0) if restores else 0
        reducing = self._distributions_of_group
        compares = any(d.check_parameters for d in reducing)
        left_open = any(d.in_fit for d in self.distributions)
        own = [terminates, acts, restores, restored, compares, bool(reducing), True, left_open]
        counts = self.group.sum([int(value) for value in own], "hvdkit.keras.begin")
        self.watches_loss, self.watches_stops = bool(counts[0]), bool(counts[1])
        self._compares_values, self._trains_one_model = (n == counts[6] for n in counts[4:6])
        for distribution in self.distributions:
            if counts[7]:
                distribution.discard()
            distribution.in_fit = True
        if counts[2]:
            broadcast_model(self.model, self.group.ranks[0], self.group.process_set)
            if counts[3]:
                # What `fit` starts from, once its callbacks have begun.
                self.model._initial_epoch = counts[3]
        if self._compares_values:
            self._before = {id(v): digest_of(v) for v in self._untrained_variables()}

    def end(self) -> None:
        """End it without an error. No collective."""
        for distribution in self.distributions:
            distribution.in_fit = False

    @property
    def _distributions_of_group(self) -> list[Any]:
        """Those that reduce over the ranks which are coordinated."""
        ranks = list(self.group.ranks)
        return [d for d in self.distributions if list(d.collectives.ranks) == ranks]

    def compare_values(self, callbacks: Sequence[Any]) -> None:
        """Compare the model's variables between ranks, once in a `fit`. A collective.

        After the first batch, because a callback may broadcast after it, as Horovod's does. Those
        that are trained together are compared, and those that the batch has not changed on any
        rank: frozen layers, or what a `Normalization` has been adapted to. What it has changed,
        such as the counter of a layer, is each rank's own.

        Args:
            callbacks: of the `fit`. Variables that one of them on any rank leaves to each rank are
                not compared.

        Raises:
            RankMismatchError: on every rank: ranks have different variables, or see `check_values`.
        """
        if self._compares_values:
            self._compares_values = False
            checked = [d for d in self._distributions_of_group if d.check_parameters]
            shared = [v for d in checked for v in d.shared_variables]
            trained = {id(variable) for variable in shared}
            others = [v for v in self._untrained_variables() if id(v) not in trained]
            variables = [*shared, *others]
            check_consistency(
                self.group,
                [f"{without_layer_numbers(v.path)}, {v.dtype} {list(v.shape)}" for v in variables],
                "the variables of the model",
            )
            leaving = [c for c in callbacks if isinstance(c, LeavesVariables)]
            local = {id(v) for c in leaving for v in c.local_variables}
            digests = [digest_of(v) for v in variables]
            left_out = [
                backend.is_among(v, local)
                or (id(v) not in trained and self._before.get(id(v)) != digest)
                for v, digest in zip(variables, digests, strict=True)
            ]
            anywhere = self.group.max([int(left) for left in left_out], "hvdkit.keras.local")
            compared = zip(variables, digests, anywhere, strict=True)
            check_values(self.group, [(v, digest) for v, digest, left in compared if not left])
            self._before = {}

    def _untrained_variables(self) -> list[Any]:
        """Return those that no gradient changes, without seeds and moving statistics."""
        moving = {id(variable) for variable in statistics_of(self.model)}
        return [
            variable
            for variable in self.model.non_trainable_weights
            if id(variable) not in moving
            and not any(d.is_local(variable) for d in self.distributions)
        ]

    def agree_on_loss(self, logs: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
        """A batch's logs, with a loss that is not finite where it is not on one rank."""
        loss = float((logs or {}).get("loss", 0.0))
        broken = not math.isfinite(loss)
        if not self.group.max([int(broken)], "hvdkit.keras.loss")[0]:
            return logs, False
        return {**(logs or {}), "loss": loss if broken else math.nan}, True

    def agree_on_stop(self) -> None:
        """Stop on every rank if one wants to."""
        wanted = bool(self.model.stop_training or self._stop_held)
        self._stop_held = False
        (stop,) = self.group.max([int(wanted)], "hvdkit.keras.stop")
        if stop and not wanted:
            log.info("training stops here, because a callback on another rank stopped it")
        self.model.stop_training = bool(stop)

    def hold_stop(self) -> None:
        """Let this rank go on until all are asked at the end of the epoch. No collective."""
        self._stop_held = self._stop_held or bool(self.model.stop_training)
        self.model.stop_training = False

    def end_training_part(self) -> None:
        """Complete what the training batches of an epoch have left open.

        Closes the accumulation window, averages moving statistics, and keeps the metrics, which
        validation resets.
        """
        for distribution in self.distributions:
            if distribution.accumulation_steps > 1:
                distribution.flush()
        if self._trains_one_model:
            average_statistics(
                self.model, self.group, lambda v: any(d.is_local(v) for d in self.distributions)
            )
        self._trained = self._metrics()

    def end_validation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of a validation in place."""
        ranks, validating = self.group.sum([1, 1], "hvdkit.keras.epoch")
        everyone = validating == ranks
        logs.update(reduce_logs(self.model, self._metrics(), logs, self.group, everyone))
        self._validated = {f"val_{name}" for name in logs}

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Reduce in place those logs of an epoch that `end_validation` has not."""
        if self._trained is None:
            self.end_training_part()
        flatten(logs)
        # Scripts may validate on some ranks alone. The others come here at once, and are told the
        # result, because what monitors `val_loss` has to decide alike.
        while self.group.sum([1, 0], "hvdkit.keras.epoch")[1]:
            theirs = reduce_logs(self.model, None, {}, self.group, everyone=False)
            logs.update({f"val_{name}": value for name, value in theirs.items()})
            self._validated = {f"val_{name}" for name in theirs}
        own = {name: value for name, value in logs.items() if name not in self._validated}
        logs.update(reduce_logs(self.model, self._trained, own, self.group, everyone=True))
        self._trained, self._validated = None, set()

    def reduce_evaluation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an `evaluate` outside of `fit`, which every rank has asked for."""
        logs.update(reduce_logs(self.model, self._metrics(), logs, self.group, everyone=True))

    def _metrics(self) -> MetricState:
        state = MetricState.of(self.model)
        for name in set(state.averaged()) - self._averaged if self.is_first else ():
            log.warning(
                "metric %r is averaged over ranks, because nothing says that what it keeps can be "
                "added up. If it can, mark its class with hvdkit.keras.callbacks.additive.",
                name,
            )
        self._averaged.update(state.averaged())
        return state


def _acts_on_batches(callback: Any) -> bool:
    """Whether a callback that is not Keras's or ours looks at batches, and so might stop there."""
    for name in _BATCH_HOOKS:
        hook = getattr(callback, name)
        # A LambdaCallback is Keras's, what it calls is not.
        owner = (getattr(hook, "__module__", None) or "").split(".")[0]
        if owner not in ("keras", "hvdkit"):
            return True
    return False


class _Coordinated:
    """Mixed into the class of a `CallbackList` whose `fit` is one of several ranks."""

    callbacks: list[Any]
    params: dict[str, Any]
    _coordination: _Coordination
    _own_class: type
    _restores = False
    _in_fit = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self._coordination.meet(self.params or {}):
            self.__class__ = self._own_class
            self.on_train_begin(logs)
            return
        self._leave_to_first_rank()
        if self._restores and not self._coordination.model.built:
            # Keras says so where the callback is, and it is on rank 0 only.
            raise UsageError(
                "BackupAndRestore needs a model that has been built before fit: give it an Input, "
                "or call it on a batch of data"
            )
        super().on_train_begin(logs)  # type: ignore[misc]
        self._coordination.begin(self.callbacks, self._restores)
        self._in_fit = True

    def _leave_to_first_rank(self) -> None:
        """Drop the callbacks of other ranks that write files or a progress bar."""
        if self._coordination.is_first:
            return
        self._progbar = None
        self.callbacks = [
            callback
            for callback in self.callbacks
            if not isinstance(callback, (*_WRITERS, ProgbarLogger))
        ]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        coordination = self._coordination
        broken = False
        if coordination.watches_loss:
            logs, broken = coordination.agree_on_loss(logs)
        super().on_train_batch_end(batch, logs)  # type: ignore[misc]
        coordination.compare_values(self.callbacks)
        if coordination.watches_stops or broken:
            if self._async_train:  # type: ignore[attr-defined]
                self._flush_futures()  # type: ignore[attr-defined]
            coordination.agree_on_stop()
        else:
            coordination.hold_stop()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._in_fit:
            self._coordination.end_training_part()
        super().on_test_begin(logs)  # type: ignore[misc]

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # In place, because `evaluate` returns them.
        logs = {} if logs is None else logs
        if self._in_fit:
            self._coordination.end_validation(logs)
        elif any(isinstance(callback, ReducesMetrics) for callback in self.callbacks):
            self._coordination.reduce_evaluation(logs)
        super().on_test_end(logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # In place, because `fit` hands them to on_train_end.
        logs = {} if logs is None else logs
        self._coordination.end_epoch(logs)
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        self._coordination.agree_on_stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._in_fit = False
        self._coordination.end()
        super().on_train_end(logs)  # type: ignore[misc]


class _Followed:
    """Mixed into the class of a `CallbackList`, for callbacks that come last."""

    callbacks: list[Any]
    _followers: list[FollowsFit]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)  # type: ignore[misc]
        for follower in self._followers:
            follower.fit_begins(self.callbacks)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)  # type: ignore[misc]
        forget_reads()
        for follower in self._followers:
            follower.epoch_begins(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_end(batch, logs)  # type: ignore[misc]
        for follower in self._followers:
            follower.batch_ends(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        for follower in self._followers:
            follower.epoch_ends(epoch, logs)
        # Of those that no callback counts, at least the epochs: each has another order.
        for sampler in samplers_read():
            sampler.end_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)  # type: ignore[misc]
        for follower in self._followers:
            follower.fit_ends()


@functools.cache
def _followed(cls: Any) -> type:
    return type(f"Followed{cls.__name__}", (_Followed, cls), {})


def _follow(callback_list: Any) -> None:
    """Let callbacks that come last do so, and the epochs of samplers be counted."""
    callback_list._followers = [c for c in callback_list.callbacks if isinstance(c, FollowsFit)]
    if not callback_list._followers and not any_samplers():
        return
    if callback_list._followers:
        # What they look at must not be done by a thread at some later time.
        callback_list._async_train = False
    kind: Any = type(callback_list)
    callback_list.__class__ = _followed(kind)


@functools.cache
def _coordinated(cls: Any) -> type:
    return type(f"Coordinated{cls.__name__}", (_Coordinated, cls), {})


def _coordinate(callback_list: Any, model: Any) -> None:
    """Turn a callback list into a coordinated one, in a job of several ranks."""
    if _local.get() or not backend.hvd.is_initialized():
        return
    asked = [c for c in callback_list.callbacks if isinstance(c, ReducesMetrics)]
    coordination = _Coordination(model, bool(asked))
    if coordination.group.single_rank and not coordination.has_windows:
        return
    for callback in asked:
        callback.coordinated = True
    if coordination.in_use:
        adapt(model)
    kind: Any = type(callback_list)
    callback_list._restores = any(
        isinstance(c, keras.callbacks.BackupAndRestore) for c in callback_list.callbacks
    )
    callback_list._coordination = coordination
    callback_list._own_class = kind
    callback_list.__class__ = _coordinated(kind)
    if coordination.in_use:
        # Before the model is put into them, because some open their files then.
        callback_list._leave_to_first_rank()


def wrap_callback_lists() -> None:
    """Step into `fit`: from now on callback lists look at the optimizer of their model."""
    original = CallbackList.set_model
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        if model is not None and not isinstance(self, _Coordinated | _Followed):
            _coordinate(self, model)
            _follow(self)
        original(self, model)

    CallbackList.set_model = set_model
