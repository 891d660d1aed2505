"""Decide whether the reduced gradients of an optimizer wait for a step, so that a save must wait.

A checkpoint has no gradients. So a save between a backward pass and the step that uses its
gradients would lose this step. But no step may follow: in a GAN, the pass of the generator also
gives gradients to the discriminator, and the script removes them later. The script repeats its
steps, so the gradients are expected to end as they did the last time.
"""

from collections.abc import Callable

#: After this number of steps without a moment for a save, a warning follows.
_MOST_STEPS = 8

_NEVER_TEXT = (
    "maybe_save() was called before step() in each of the last {count} steps, and nothing was "
    "saved: the gradients of a backward pass waited for the step. Call maybe_save() after step(), "
    "with several optimizers after the steps of all of them"
)
_BETWEEN_TEXT = (
    "maybe_save() or save() was called before the step of an optimizer whose gradients the script "
    "had removed the last time. A checkpoint of this moment lacks this step. Call them after the "
    "steps of all optimizers"
)


class AwaitedStep:
    """The step that an optimizer makes with its reduced gradients.

    Args:
        warn: logs a warning. Called at most once for each text.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[str] = set()
        self.waits = False
        # Since the last step or removal of gradients: whether `is_awaited` was asked, and whether
        # the answer was no.
        self._asked = self._permitted = False
        # Whether another optimizer has made a step since the last reduction.
        self._other_stepped = False
        # Whether the script removed the gradients the last time after such a question, and after
        # such a step of another optimizer.
        self._removed_after_question = self._removed_after_other_step = False
        # The steps in a row after questions to which the answer was always yes.
        self._steps_without_save = 0

    def begin(self) -> None:
        """Record that gradients were reduced."""
        self.waits = True
        self._other_stepped = False

    def step(self) -> None:
        """Record that the optimizer makes a step with the gradients."""
        if self.waits and self._permitted:
            self._warn_once(_BETWEEN_TEXT)
        elif self.waits and self._asked:
            self._steps_without_save += 1
            if self._steps_without_save >= _MOST_STEPS:
                self._warn_once(_NEVER_TEXT.format(count=_MOST_STEPS))
        self._learn(removed=False)
        self.end()

    def remove(self) -> None:
        """Record that the script has removed the gradients without a step."""
        self._learn(removed=True)
        self.end()

    def end(self) -> None:
        """Record that no step uses the gradients any more, for another reason."""
        self.waits = self._asked = self._permitted = self._other_stepped = False

    def note_other_step(self) -> None:
        """Record that another optimizer has made a step."""
        self._other_stepped = self.waits

    def is_awaited(self, exist: Callable[[], bool]) -> bool:
        """Return whether a save must wait for the step.

        Args:
            exist: returns whether the optimizer has any gradient other than 0.
        """
        if self.waits and not exist():
            self.remove()
        awaited = self.waits and not (
            self._removed_after_question or (self._other_stepped and self._removed_after_other_step)
        )
        self._asked = self.waits
        self._permitted = self.waits and not awaited
        if not awaited:
            self._steps_without_save = 0
        return awaited

    def _learn(self, removed: bool) -> None:
        if self.waits and self._asked:
            self._removed_after_question = removed
        if self.waits and self._other_stepped:
            self._removed_after_other_step = removed

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
