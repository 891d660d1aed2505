"""Compare what must be equal on all ranks: parameters, optimizer state, options.

All ranks apply the same reduced gradients, so equal parameters stay equal to the last bit, and
different ones stay different. They differ after a forgotten broadcast, a fault of memory or of a
processor, and after code that changes values on some ranks only. Nobody would notice.

`hvdkit.agreement.differences` finds out what differs. `CheckSettings.is_due` is the schedule.
`ReplicaCheck` raises, logs or repairs.

A wrong gradient before the sum cannot be found this way: all ranks apply the same wrong sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import RankMismatchError, name_ranks
from hvdkit.agreement.differences import Difference, Replicas, find_difference
from hvdkit.agreement.names import unique_names
from hvdkit.errors import UsageError
from hvdkit.system.whole_files import replacing

#: The default number of steps between two comparisons.
INTERVAL = 100
# Until the interval is over, the ranks also compare after this number of steps, twice, four times
# as many and so on: many mistakes show in the first steps, and a short job should not end without a
# comparison.
_EARLY = 10
#: What to do about a difference.
STOP, REPAIR = "stop", "repair"
#: The number of parameters that are searched for NaN, and the bytes of each.
SMALL, _SEARCHED_BYTES = 8, 1 << 20
#: The folder, in the working directory, in which each rank saves its tensors that differ.
FOLDER = "hvdkit-mismatch"

_OPTIONS_ADVICE = (
    "Ranks with different options train different models. Make the optimizer with the same options "
    "on all ranks. Change learning rates and other options on all ranks alike, or broadcast the "
    "optimizer's state of one rank (hvd.broadcast_optimizer_state of PyTorch)."
)
#: The end of an error about values.
VALUES_ADVICE = (
    "The reduced gradients were the same on all ranks. So memory or a processor of a host has "
    "failed, or code changes reduced gradients, parameters or optimizer state on some ranks only, "
    "for example in the forward pass (PyTorch: nn.Embedding(max_norm=...)). "
    "Restore a checkpoint of an earlier step. on_mismatch='repair' of hvd.DistributedOptimizer "
    "copies the values of the majority instead. If ranks should differ, pass check_interval=0."
)
_ROUNDING_ADVICE = (
    "The differences are small, as if processors round differently. The job continues, and logs "
    "this only once. on_mismatch='repair' of hvd.DistributedOptimizer keeps the ranks equal."
)
_NONFINITE_ADVICE = (
    "on_nonfinite='raise' of hvd.DistributedOptimizer or hvd.DistributedGradientTape raises in the "
    "first such step, and names the rank."
)

_log = logging.getLogger("hvdkit")


@dataclass(frozen=True)
class CheckSettings:
    """The settings of the comparison of replicas.

    Attributes:
        interval: the number of steps between two comparisons; 0 for the first one only.
        on_mismatch: `stop` or `repair`.

    Raises:
        UsageError: a value is invalid.
    """

    interval: int = INTERVAL
    on_mismatch: str = STOP

    def __post_init__(self) -> None:
        if not isinstance(self.interval, int) or isinstance(self.interval, bool):
            raise UsageError(f"check_interval is {self.interval!r}: expected a number of steps")
        if self.interval < 0:
            raise UsageError(
                f"check_interval is {self.interval}: expected a number of steps, or 0 for no "
                f"comparison after the first one"
            )
        if self.on_mismatch not in (STOP, REPAIR):
            raise UsageError(
                f"on_mismatch is {self.on_mismatch!r}: expected {STOP!r} or {REPAIR!r}"
            )

    def is_due(self, step: int, together: int = 1) -> bool:
        """Return whether to compare after `step` steps: the schedule. The same on all ranks.

        Args:
            step: the number of steps; 0 is always due.
            together: the number of the last steps that have ended together.
        """
        return any(map(self._is_due_after, range(step - together + 1, step + 1)))

    def _is_due_after(self, step: int) -> bool:
        if not self.interval or step <= 0:
            return step == 0
        multiple, rest = divmod(step, _EARLY)
        is_early = step < self.interval and not rest and multiple.bit_count() == 1
        return is_early or step % self.interval == 0


@dataclass(frozen=True)
class ReplicaCheck:
    """Compare the replicas of one optimizer or model. Every rank has one, with the same settings.

    Attributes:
        collectives: the collectives of the ranks to compare.
        settings: the settings.
        replicas: lists what this rank has.
        advice: the end of an error about values.
        first_advice: the same for a first comparison.
        has_begun: returns whether this rank has made a step. As long as no rank has, only a first
            comparison finds differences.
        unit: what the steps are.
        done: what earlier checks have done once: logged a line of a kind, or saved before a repair.
    """

    collectives: Collectives
    settings: CheckSettings
    replicas: Callable[[], Replicas]
    advice: str = VALUES_ADVICE
    first_advice: str = ""
    has_begun: Callable[[], bool] = lambda: True
    unit: str = "step"
    done: set[str] = field(default_factory=set)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that are compared."""
        return self.collectives.ranks

    def compare(
        self, step: int, first: bool = False, consequence: str = "", raises: bool = True
    ) -> None:
        """Compare the replicas. A collective.

        Args:
            step: the number of steps that were made. A first comparison after 0 steps is exact,
                because nothing can have been rounded.
            first: whether the ranks may never have been equal. Nothing is then repaired, because
                the majority may be wrong, and the versions of the ranks are not saved.
            consequence: a sentence for the error.
            raises: whether to raise; otherwise the first rank logs the first such error.

        Raises:
            RankMismatchError: on every rank, naming the tensors, the ranks and the elements.
        """
        own = self.replicas()
        when = "at the first comparison" if first else f"after {self.unit} {step}"

        def save(ranks_of: Mapping[int, Sequence[int]]) -> None:
            # Later repairs save nothing, to keep the disk free.
            if "repair" not in self.done:
                self._save(step, own, ranks_of)
            self.done.add("repair")

        repairs = self.settings.on_mismatch == REPAIR and not first
        begun = first or self.has_begun()
        found = find_difference(self.collectives, own, when, save if repairs else None, begun)
        if found is None or not found.far:
            # Ranks may have NaN with different bits.
            self._warn_of_nonfinite(when, own)
        if found is None or not (found.is_known or first):
            return  # a later comparison finds the difference
        if found.repaired:
            self._log(f"{found.text} The values of the majority were copied to these ranks.")
        elif not found.far and not (first and step == 0):
            self._log(f"{found.text} {_ROUNDING_ADVICE}", once="rounding")
        else:
            saved = ""
            if found.ranks_of and raises and not first:
                self._save(step, own, found.ranks_of)
                ranks = sorted({rank for ranks in found.ranks_of.values() for rank in ranks})
                saved = (
                    f"In their working directories, {name_ranks(ranks)} have saved their versions "
                    f"of the tensors as {FOLDER}/step-{step}-rank-N.npz."
                )
            advice = self._advice_on(found, own, first)
            text = " ".join(filter(None, [found.text, advice, saved, consequence]))
            if raises:
                raise RankMismatchError(text)
            self._log(text, once="values")

    def _advice_on(self, found: Difference, own: Replicas, first: bool) -> str:
        rates = any(own.items[index].name.endswith("learning_rate'") for index in found.ranks_of)
        if rates or (found.is_known and not found.ranks_of):
            return _OPTIONS_ADVICE
        return self.first_advice if first else self.advice

    def _warn_of_nonfinite(self, when: str, own: Replicas) -> None:
        """Log if the parameters of all ranks contain NaN or infinity. Not a collective.

        This happens after a step in which the loss was NaN on one rank. Such a loss makes all
        parameters NaN that the loss depends on, so only a few small parameters are searched, and of
        large ones only the beginning.
        """
        trained = [] if "nonfinite" in self.done else [i for i in own.items if i.trained]
        for item in sorted(trained, key=lambda item: item.trained)[:SMALL]:
            data = own.access.read(item.value)[:_SEARCHED_BYTES]
            values = own.access.elements(item.value, data)
            if not np.isfinite(values).all():
                has_nan = bool(np.isnan(values).any())
                self._log(
                    f"{when[0].upper()}{when[1:]}, {item.name} is "
                    f"{'NaN' if has_nan else 'infinite'} on all ranks: the loss or a gradient was "
                    f"NaN or infinite on one of them. Restore a checkpoint of an earlier step. "
                    f"{_NONFINITE_ADVICE}",
                    once="nonfinite",
                )
                return

    def _save(self, step: int, own: Replicas, ranks_of: Mapping[int, Sequence[int]]) -> None:
        """Save this rank's versions of the items that differ. Not a collective."""
        rank, access = self.collectives.rank, own.access
        items = [own.items[index] for index, ranks in ranks_of.items() if rank in ranks]
        if not items:
            return
        names = unique_names([item.name for item in items])
        values = [item.value for item in items]
        try:
            Path(FOLDER).mkdir(exist_ok=True)
            content: dict[str, Any] = {
                name: access.elements(value, access.read(value)).reshape(tuple(value.shape))
                for name, value in zip(names, values, strict=True)
            }
            path = Path(FOLDER) / f"step-{step}-rank-{rank}.npz"
            with replacing(path) as draft, draft.open("wb") as file:
                np.savez(file, **content)
        except Exception as error:
            # Any error, such as a full disk: the other ranks wait in the next collective.
            _log.warning("rank %d cannot save the tensors that differ: %s", rank, error)

    def _log(self, text: str, once: str = "") -> None:
        """Log on the first rank; with `once`, only the first text of this kind."""
        if once not in self.done and self.collectives.is_first:
            _log.warning("%s", text)
        if once:
            self.done.add(once)
