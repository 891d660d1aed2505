"""Compare the ranks during a `fit`: variables, losses of equal data, state of layers."""

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.agreement.consistency import (
    RankMismatchError,
    check_consistency,
    digest,
    group_by_text,
)
from hvdkit.agreement.differences import find_difference
from hvdkit.agreement.names import without_layer_numbers, without_model_names
from hvdkit.agreement.replicas import CheckSettings, ReplicaCheck
from hvdkit.agreement.same_data import PASSES, SameData
from hvdkit.keras import backend
from hvdkit.keras.fit.agreement import Agreement
from hvdkit.keras.fit.callback_kinds import changes_at_end, local_variables
from hvdkit.keras.fit.layer_state import compare_layers
from hvdkit.keras.fit.statistics import compared_buffers, statistics_of
from hvdkit.keras.functions import calls
from hvdkit.keras.models import has_own_step
from hvdkit.keras.replicas import keras_replicas

log = logging.getLogger("hvdkit.keras")

_FIRST_ADVICE = (
    "Mean gradients never make different values equal. Pass "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit, or call "
    "hvd.broadcast_model(model, root_rank=0) before fit. If ranks should have different values, "
    "pass check_parameters=False to hvd.DistributedOptimizer."
)
_UNREDUCED_ADVICE = (
    "Each rank trains this part of the model separately, because no hvd.DistributedOptimizer "
    "reduces its gradients. Wrap every optimizer of the model with hvd.DistributedOptimizer. If "
    "train_step itself reduces the gradients, pass "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit."
)
_CHANGED_ADVICE = (
    "A layer changes this variable in call, from the batches of its own rank, and hvdkit does not "
    "reduce it. So each rank has another model, and only that of rank 0 is saved. In training, "
    "reduce the numbers that call computes from a batch, with hvd.allreduce. If ranks should have "
    "different values, pass hvd.callbacks.BroadcastGlobalVariablesCallback(0, "
    "local_variables=[variable]) to fit."
)
_SAME_DATA_ADVICE = (
    "Give each rank its own part: data = hvd.shard(data). Random data need another seed on each "
    "rank"
)

# What is compared once in a `fit`.
_VALUES, _UNREDUCED, _DATA = "values", "unreduced", "data"

#: The warnings that were logged in this process.
logged: set[str] = set()
# The models in whose training step a collective was called, when it ran or was traced.
_calling: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Comparisons:
    """The comparisons of one `fit`.

    Args:
        model: the model.
        group: the collectives of the ranks.
        distributions: of the wrapped optimizers of the model. The first batch may add some.
        compared: those whose variables are compared every few batches.
        agreed: what the ranks have agreed on.

    Attributes:
        has_trained: whether this `fit` has trained a batch. All ranks have the same number of
            batches.
    """

    def __init__(
        self,
        model: Any,
        group: Any,
        distributions: list[Any],
        compared: Sequence[Any],
        agreed: Agreement,
    ) -> None:
        self.model = model
        self.group = group
        self.distributions = distributions
        self._compared = list(compared)
        # What is still to be compared, of that which is compared once.
        self._due = {_DATA}
        if agreed.compares_values:
            self._due.add(_VALUES)
        if agreed.compares_unreduced:
            self._due.add(_UNREDUCED)
        self.has_trained = False
        # The first losses of this `fit` on this rank.
        self._first_losses: list[float] = []
        # `calls()` before a batch.
        self._calls = 0
        self._same_data = SameData(self.group, self._digest_of_losses, "losses", _SAME_DATA_ADVICE)
        # The id of a variable without gradients -> digest of its value at the beginning.
        self._before: dict[int, int] = {}
        self.end_batches()
        for distribution in self._compared:
            distribution.times.take()
        if agreed.compares_values:
            untrained = self._untrained_variables()
            self._before = dict(zip(map(id, untrained), backend.digests(untrained), strict=True))

    def add(self, distributions: Sequence[Any]) -> None:
        """Compare further wrapped optimizers. All ranks call this in the first batch, or none."""
        self._due.add(_VALUES)
        self._compared += distributions

    def compare_layers(self) -> None:
        """Compare the state of layers that is not in variables. A collective.

        Called before the first batch, because vocabularies of different sizes may cause errors
        there. Callbacks do not broadcast such state.

        Raises:
            RankMismatchError: on every rank, see `layer_state.compare_layers`.
        """
        if _VALUES in self._due and not self.group.single_rank:
            compare_layers(
                self.group, self.model, lambda e: any(d.is_local(e) for d in self.distributions)
            )

    def begin_batch(self) -> None:
        """Begin to measure the times of a batch. Not a collective."""
        self._calls = calls()
        for distribution in self._compared:
            distribution.times.start()

    def compare_values(self, callbacks: Sequence[Any]) -> None:
        """Compare the model's variables between ranks. A collective in the first call of a `fit`.

        Later calls in the same `fit` do nothing. The first call is after the first batch, because
        a callback may broadcast there. The comparison includes the variables whose gradients are
        reduced, and other variables that the batch has not changed on any rank, for example of
        frozen layers or of an adapted `Normalization`. A variable that the batch has changed
        without a gradient, such as a counter of a layer, may differ between ranks.

        Args:
            callbacks: the callbacks of `fit`. Their local variables, on any rank, are not compared.

        Raises:
            RankMismatchError: on every rank, if variables or their values differ between ranks.
        """
        if _VALUES not in self._due:
            return
        self._due.remove(_VALUES)
        checked = [d for d in reducing_over(self.group, self.distributions) if d.check_parameters]
        shared = [v for d in checked for v in d.shared_variables]
        trained = {id(variable) for variable in shared}
        others = [v for v in self._untrained_variables() if id(v) not in trained]
        variables = [*shared, *others]
        lines = [f"{_name_of(v)}, {v.dtype} {list(v.shape)}" for v in variables]
        lines += [str(d.check_settings) for d in checked]
        check_consistency(self.group, lines, "the variables of the model")
        local = local_variables(callbacks)
        before = self._before
        now = dict(zip(map(id, others), backend.digests(others), strict=True))
        excluded = [
            backend.is_among(v, local) or (id(v) in now and now[id(v)] != before.get(id(v)))
            for v in variables
        ]
        anywhere = self.group.max([int(value) for value in excluded], "hvdkit.keras.local")
        exempt = {id(v) for v, skip in zip(variables, anywhere, strict=True) if skip}
        for distribution in checked:
            distribution.exempt = exempt
        compared = [v for v in variables if id(v) not in exempt]
        # Without later comparisons, the state of ranks may differ on purpose.
        optimizers = [d.optimizer for d in checked if d.check_settings.interval]
        ReplicaCheck(
            self.group,
            CheckSettings(),
            lambda: keras_replicas(compared, *optimizers),
            first_advice=f"{_FIRST_ADVICE}{self._unapplied()}",
        ).compare(1, first=True)

    def compare_unreduced(self, callbacks: Sequence[Any]) -> None:
        """Warn if ranks train or change variables separately. A collective in the first call.

        Later calls in the same `fit` do nothing. An optimizer in a `train_step` may be plain, so
        that nothing reduces the gradients of its variables. It is not an error, because a
        `train_step` may reduce gradients itself, or train separate variables on purpose. A layer
        may change a variable in `call`, such as an average of its inputs.

        Args:
            callbacks: as for `compare_values`.
        """
        if _UNREDUCED not in self._due:
            return
        self._due.remove(_UNREDUCED)
        local = local_variables(callbacks)
        known = {id(v) for d in self.distributions for v in d.shared_variables}
        trained = [
            variable
            for variable in self.model.trainable_weights
            if id(variable) not in known
            and not any(d.is_local(variable) for d in self.distributions)
            and not backend.is_among(variable, local)
        ]
        self._warn_of_difference("unreduced", trained, f"{_UNREDUCED_ADVICE}{self._unapplied()}")
        changed = [v for v in self._untrained_variables() if not backend.is_among(v, local)]
        self._warn_of_difference("changed", changed, _CHANGED_ADVICE)

    def _warn_of_difference(self, kind: str, variables: Sequence[Any], advice: str) -> None:
        """Log on the first rank, once, if variables differ between ranks. A collective."""
        found = find_difference(self.group, keras_replicas(variables), "after the first epoch")
        if found is None or not found.far:
            return
        if self.group.is_first and kind not in logged:
            log.warning(f"%s {advice}", found.text)
        logged.add(kind)

    def _unapplied(self) -> str:
        """Return a sentence if no wrapped optimizer has reduced anything."""
        kinds = [type(d.optimizer).__name__ for d in self.distributions]
        if not kinds or any(d.applied for d in self.distributions):
            return ""
        return (
            f" Nothing was reduced by the wrapped {', '.join(kinds)}, because neither its apply "
            f"nor its apply_gradients was called: call one of them with the gradients."
        )

    def compare_replicas(self, batches: int) -> None:
        """Count batches, and compare times and trained variables if a comparison is due.

        A collective.

        Args:
            batches: the number of batches that were trained together, the same on all ranks.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        self.has_trained = True
        for distribution in self._compared:
            distribution.batches += batches
            if distribution.check_settings.is_due(distribution.batches, batches):
                distribution.stragglers.report()
                distribution.replicas.compare(distribution.batches)
                self._compare_data()
            distribution.times.end_step()

    def note_logs(self, logs: dict[str, Any] | None) -> None:
        """Record the loss of a batch, as Keras has computed it. Not a collective."""
        if calls() != self._calls:
            _calling.add(self.model)
        # A `train_step` of the model may return losses that it has reduced.
        reads = bool(self.distributions) and not (self.model.compiled and has_own_step(self.model))
        if reads and len(self._first_losses) < PASSES:
            loss = np.asarray(keras.ops.convert_to_numpy((logs or {}).get("loss", 0.0)))
            # A model's `compute_metrics` may return a vector, which is not compared.
            self._first_losses.append(float(loss) if loss.ndim == 0 else 0.0)

    def _compare_data(self) -> None:
        """Compare the first losses, with the first comparison of a `fit`. A collective."""
        if _DATA in self._due:
            self._due.remove(_DATA)
            self._same_data.compare()

    def _digest_of_losses(self) -> int | None:
        losses = self._first_losses
        if self.model in _calling:
            return None  # the losses depend on the data of all ranks
        if len(losses) < PASSES or not all(map(math.isfinite, losses)) or not any(losses):
            return None
        return int.from_bytes(digest([repr(loss) for loss in losses])[:8], "little")

    def compare_at_end(self, callbacks: Sequence[Any] = ()) -> None:
        """Compare trained variables at the end of a `fit` that has trained. A collective.

        Args:
            callbacks: the callbacks of this rank whose `on_train_end` was called.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        for distribution in self._compared if self.has_trained else ():
            if not distribution.replicas.settings.interval:
                continue
            try:
                distribution.replicas.compare(distribution.batches)
            except RankMismatchError as error:
                mine = ", ".join(type(c).__name__ for c in callbacks if changes_at_end(c)) or "none"
                by_rank = group_by_text(distribution.collectives, mine, "hvdkit.keras.end")
                if len(by_rank) == 1:
                    raise
                raise RankMismatchError(
                    f"{error} This is the comparison at the end of fit. The callbacks with "
                    f"on_train_end differ between ranks ({'; '.join(by_rank)}): a callback that "
                    f"changes weights must be on every rank."
                ) from None

    def end_batches(self) -> None:
        """Stop measuring times until the next batch.

        Outside of training batches, for example in validation, a rank also waits for other ranks.
        These waits would count as its own time.
        """
        for distribution in self._compared:
            distribution.times.stop()

    def _untrained_variables(self) -> list[Any]:
        """Return variables without gradients, except seeds and moving statistics."""
        moving = {id(variable) for variable in statistics_of(self.model)}
        return [
            variable
            for variable in [*self.model.non_trainable_weights, *compared_buffers(self.model)]
            if id(variable) not in moving
            and not any(d.is_local(variable) for d in self.distributions)
        ]


def reducing_over(group: Any, distributions: Sequence[Any]) -> list[Any]:
    """Return those of `distributions` that reduce over the ranks of a group."""
    ranks = list(group.ranks)
    return [d for d in distributions if list(d.collectives.ranks) == ranks]


def _name_of(variable: Any) -> str:
    """Return a variable's name that is equal on ranks with equal models."""
    return without_model_names(without_layer_numbers(variable.path))
