"""The schedule of `Manager.maybe_save`: after a number of steps, or of minutes."""

import time

from hvdkit.checkpoint.storage import check_number
from hvdkit.errors import UsageError


class Schedule:
    """The steps at which a save is due on this rank.

    Args:
        every_steps: a save is due at the first call at or after each multiple of this number.
        every_minutes: a save is due after this many minutes, by this rank's clock.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(self, every_steps: int | None, every_minutes: float | None) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise UsageError(f"every_steps is {every_steps!r}: expected a whole number >= 1")
        if every_minutes is not None and not every_minutes > 0:
            raise UsageError(f"every_minutes is {every_minutes!r}: expected more than 0")
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else 60 * every_minutes
        self._last_step = 0
        #: The highest step that a call was given, or the restored step.
        self.seen_step = 0
        # Whether the next step may be lower.
        self._may_be_lower = False
        # Monotonic: the time of day may jump.
        self._last_time = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Whether no save is ever due."""
        return self._every_steps is None and self._every_seconds is None

    def is_due(self, step: int) -> bool:
        """Return whether a save is due by the steps."""
        every = self._every_steps
        return every is not None and step // every > self._last_step_at(step) // every

    @property
    def missed(self) -> bool:
        """Whether a save was due by the steps at the last call, and was not made."""
        return self.is_due(self.seen_step)

    def is_late(self) -> bool:
        """Return whether a save is due by the clock."""
        passed = time.monotonic() - self._last_time
        return self._every_seconds is not None and passed >= self._every_seconds

    def error_at(self, step: int) -> UsageError | None:
        """Return an error if a step is not valid, or lower than in an earlier call; else None."""
        try:
            check_number("step", step)
        except UsageError as error:
            return error
        if step >= self.seen_step or self._may_be_lower:
            return None
        return UsageError(
            f"maybe_save({step}) after step {self.seen_step}: expected the number of steps "
            f"trained since the first epoch, such as epoch * len(loader) + batch. To continue from "
            f"an earlier step, call restore()"
        )

    def see(self, step: int) -> None:
        """Record that a call was given this step."""
        self._last_step = self._last_step_at(step)
        self.seen_step = step if self._may_be_lower else max(self.seen_step, step)
        self._may_be_lower = False

    def allow_lower(self) -> None:
        """Let the next step be lower than the steps before. The schedule continues from there."""
        self._may_be_lower = True

    def _last_step_at(self, step: int) -> int:
        """Return the last step that counts as saved when a call is given `step`.

        Saved steps after `step` do not count if the training has gone back before them.
        """
        goes_back = self._may_be_lower and step < self._last_step
        return max(step - 1, 0) if goes_back else self._last_step

    def record_save(self, step: int) -> None:
        """Record that a step is saved."""
        self.see(step)
        self._last_step, self._last_time = step, time.monotonic()

    def record_restore(self, step: int | None) -> None:
        """Record that a step was restored.

        None is for a restore with `only`: a new training begins with these items, and counts its
        steps from 0.
        """
        self._last_step = self.seen_step = step or 0
        self._may_be_lower = False
        self._last_time = time.monotonic()
