"""Decide whether the reduced gradients of an optimizer wait for a step, so that a save must wait.

A checkpoint has no gradients. So a save between a backward pass and the step that uses its
gradients would lose this step. But no step may follow: in a GAN, the pass of the generator also
gives gradients to the discriminator, and the script removes them later.
"""

from collections.abc import Callable

#: If the gradients have waited at this number of questions in a row, they wait no more. The script
#: always asks after a pass that no step follows.
_MOST_QUESTIONS = 8

_MOST_TEXT = (
    "a save was postponed {count} times in a row, because the gradients of a backward pass waited "
    "for a step. From now on, checkpoints are saved without these gradients. Call maybe_save() "
    "after step(). If no step uses the gradients of a pass, call optimizer.zero_grad() after it"
)
_BETWEEN_TEXT = (
    "maybe_save() or save() was called between the steps of two optimizers. A checkpoint of this "
    "moment lacks the second step: after a restart, it is not made. Call them after the steps of "
    "all optimizers"
)


class AwaitedStep:
    """The step that an optimizer makes with its reduced gradients.

    Args:
        warn: logs a warning. Called at most once for each text.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[str] = set()
        self._waits = False
        # Whether another optimizer has made a step since the reduction.
        self._other_stepped = False
        # Whether `is_awaited` was asked after that step.
        self._asked_between = False
        # The number of questions in a row at which the gradients waited.
        self._questions = 0

    def begin(self) -> None:
        """Record that gradients were reduced."""
        self._waits = True
        self._other_stepped = self._asked_between = False

    def step(self) -> None:
        """Record that the optimizer makes a step with the gradients."""
        if self._waits and self._asked_between:
            self._warn_once(_BETWEEN_TEXT)
        self.end()

    def end(self) -> None:
        """Record that no step uses the gradients any more."""
        self._waits = False

    def note_other_step(self) -> None:
        """Record that another optimizer has made a step.

        Then the gradients are probably left over from a pass that was made for the other optimizer.
        """
        self._other_stepped = True

    def is_awaited(self, exist: Callable[[], bool]) -> bool:
        """Return whether a save must wait for the step.

        Args:
            exist: returns whether the optimizer has any gradient.
        """
        # The script may have removed the gradients with `model.zero_grad()`.
        if not self._waits or not exist():
            self._questions = 0
            return False
        if self._other_stepped:
            self._asked_between = True
            return False
        self._questions += 1
        if self._questions < _MOST_QUESTIONS:
            return True
        self._warn_once(_MOST_TEXT.format(count=_MOST_QUESTIONS))
        return False

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
