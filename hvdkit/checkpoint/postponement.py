"""Postpone a save while gradients wait for a step, for a limited number of steps.

A checkpoint has no gradients. So a save between a backward pass and the step that uses its
gradients would lose this step. But no step may follow: in a GAN, the pass of the generator also
gives gradients to the discriminator, and the script removes them later. Nothing shows this in
advance. So a save is postponed for some steps only, and for some calls if no step follows.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

_log = logging.getLogger("hvdkit.checkpoint")

#: Saves are not postponed if gradients have waited at each call during this number of steps, plus
#: those that optimizers may make in the longest accumulation window.
MOST_STEPS = 16
#: The same for calls, if the optimizers make no steps.
MOST_CALLS = 256
#: Seconds for which a stop of the job is postponed.
STOP_SECONDS = 20.0


class PendingGradients(Protocol):
    """The gradients of this rank that no optimizer step has used."""

    def exist(self) -> bool:
        """Return whether there are such gradients. The script may have removed them since."""

    def steps(self) -> int:
        """Return the number of steps that the optimizers have made together."""

    def window_steps(self) -> int:
        """Return the number of steps that they may make together in the longest window."""

    def note_save(self, step: int) -> None:
        """Record that a checkpoint was saved, which lacks these gradients.

        Args:
            step: the step of the checkpoint.
        """


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
        """Return the number of steps of the optimizers together."""
        return sum(each.updates for each in self._optimizers)

    def window_steps(self) -> int:
        """Return the number of steps of the optimizers together in the longest window."""
        return window_steps([each.accumulation_steps for each in self._optimizers])

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


def window_steps(windows: Sequence[int]) -> int:
    """Return the number of steps that optimizers may make together in the longest window.

    Args:
        windows: the number of passes of each optimizer's window.
    """
    return len(windows) * max(windows, default=0)


class Postponement:
    """Decide whether a save that is due must be postponed.

    Args:
        gradients: the gradients of this rank that no step has used.

    Attributes:
        since: the step of the first save that is postponed now; None for none.
    """

    def __init__(self, gradients: PendingGradients) -> None:
        self.gradients = gradients
        self.begin()

    def begin(self) -> None:
        """Begin to count, as after a restore."""
        self.since: int | None = None
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        # The calls since no rank had gradients that wait, and the optimizers' steps at that time.
        self._calls, self._free_at = 0, self.gradients.steps()

    def is_overdue(self, stops_since: float | None = None) -> bool:
        """Return whether gradients have waited for so long that a save must not wait for them.

        Other ranks may have another answer, so ask one rank.

        Args:
            stops_since: when the ranks have agreed to stop the job (`time.monotonic`); None if they
                have not.
        """
        windows = self.gradients.window_steps()
        return (
            self.gradients.steps() - self._free_at >= MOST_STEPS + windows
            or self._calls + 1 >= MOST_CALLS + windows
            or (stops_since is not None and time.monotonic() - stops_since >= STOP_SECONDS)
        )

    def note_call(self, waiting: bool) -> None:
        """Record a call.

        Args:
            waiting: whether a rank has gradients that wait.
        """
        self._calls += 1
        if not waiting:
            self._begin_to_count()

    def postpone(self, step: int) -> None:
        """Record that all ranks postpone the save of a step."""
        if self.since is None:
            self.since = step

    def record_save(self, step: int) -> None:
        """Record that a step was saved."""
        self.since = None
        self.gradients.note_save(step)
