"""Postpone a save while gradients wait for a step, for a limited number of steps.

A checkpoint has no gradients. So a save between a backward pass and the step that uses its
gradients would lose this step. But no step may follow: in a GAN, the pass of the generator also
gives gradients to the discriminator, and the script removes them later. Nothing shows this in
advance. So a save is postponed for some steps only.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

_log = logging.getLogger("hvdkit.checkpoint")

#: If gradients were waiting at each call since this number of steps, saves are not postponed.
MOST_STEPS = 16


class PendingGradients(Protocol):
    """The gradients of this rank that no optimizer step has used."""

    def exist(self) -> bool:
        """Return whether there are such gradients. The script may have removed them since."""

    def steps(self) -> int:
        """Return the number of steps that the optimizers have made: that of the most active one."""

    def note_save(self, step: int) -> None:
        """Record that a checkpoint was saved, which lacks these gradients.

        Args:
            step: the step of the checkpoint.
        """


class NoGradients:
    """`PendingGradients` for a state without optimizers."""

    def exist(self) -> bool:
        """Return False."""
        return False

    def steps(self) -> int:
        """Return 0."""
        return 0

    def note_save(self, step: int) -> None:
        """Do nothing."""


class Accumulating(Protocol):
    """An optimizer with an accumulation window.

    Attributes:
        accumulation_steps: the number of passes of a window.
        window_open: whether the window has gradients.
        updates: the number of steps.
    """

    accumulation_steps: int

    @property
    def window_open(self) -> bool: ...

    @property
    def updates(self) -> int: ...


class WindowGradients:
    """`PendingGradients` of accumulation windows, whose gradients a step will use.

    Args:
        optimizers: the optimizers.
        warns: whether this rank logs warnings.
    """

    def __init__(self, optimizers: Sequence[Accumulating], warns: bool) -> None:
        self._optimizers = optimizers
        self._warns = warns

    def exist(self) -> bool:
        """Return whether a window is open."""
        return any(each.window_open for each in self._optimizers)

    def steps(self) -> int:
        """Return the number of steps of the most active optimizer."""
        return max((each.updates for each in self._optimizers), default=0)

    def note_save(self, step: int) -> None:
        """Log a warning if a window is open."""
        if self._warns and self.exist():
            _log.warning(
                "the checkpoint of step %d lacks the gradients of an accumulation window that was "
                "open: a resumed job makes the next optimizer step without them. Save after the "
                "last pass of each window",
                step,
            )


def accumulating(optimizers: Iterable[Accumulating]) -> list[Accumulating]:
    """Return the optimizers whose windows have several passes."""
    return [each for each in optimizers if each.accumulation_steps > 1]


class Postponement:
    """Decide whether this rank postpones a save that may be due.

    Args:
        gradients: the gradients of this rank that no step has used.
    """

    def __init__(self, gradients: PendingGradients) -> None:
        self._gradients = gradients
        #: The step of the first postponed save; None if none is postponed.
        self.since: int | None = None
        self.begin()

    def begin(self) -> None:
        """Begin to count the steps, as after a restore."""
        # The number of steps when no gradients were waiting for the last time.
        self._free_at = self._gradients.steps()

    def is_needed(self) -> bool:
        """Return whether to postpone a save. Call this at each call that may save."""
        steps = self._gradients.steps()
        if not self._gradients.exist():
            self._free_at = steps
            return False
        return steps - self._free_at < MOST_STEPS

    def postpone(self, step: int) -> None:
        """Record that all ranks postpone the save of a step."""
        if self.since is None:
            self.since = step

    def record_save(self, step: int) -> None:
        """Record that a step was saved."""
        self.since = None
        self._gradients.note_save(step)
