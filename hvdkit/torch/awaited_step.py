"""Decide whether the reduced gradients of an optimizer wait for a step, so that a save must wait.

A checkpoint has no gradients. So a save between a backward pass and the step that uses its
gradients would lose this step. But no step may follow: in a GAN, the pass of the generator also
gives gradients to the discriminator, and the script removes them later. The script repeats its
steps, so the gradients are expected to end as they did the last times.
"""

from collections.abc import Callable

#: Gradients wait no more in a situation in which the script has removed them this number of times
#: in a row. One time proves nothing: the passes of an incomplete accumulation window at the end of
#: an epoch are removed, too.
_MOST_REMOVALS = 3
#: Gradients wait no more after this number of steps of other optimizers without a step of their
#: own. For example, a phase of the training uses only some of the optimizers.
_MOST_OTHER_STEPS = 32
#: After this number of steps without a moment for a save, a warning follows.
_MOST_STEPS = 8

_NEVER_TEXT = (
    "maybe_save() was called before step() in each of the last {count} steps, and nothing was "
    "saved: the gradients of a backward pass waited for the step. Call maybe_save() after step(), "
    "with several optimizers after the steps of all of them"
)
_BETWEEN_TEXT = (
    "maybe_save() or save() was called before the step of an optimizer whose gradients the script "
    "had not used before. A checkpoint of this moment lacks this step. Call them after the steps "
    "of all optimizers"
)


class AwaitedStep:
    """The step that an optimizer makes with its reduced gradients.

    All ranks call the methods in the same order, so the answers are equal on all ranks.

    Args:
        warn: logs a warning. Called at most once for each text.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned: set[str] = set()
        self.waits = False
        self.reset()

    def reset(self) -> None:
        """Forget how gradients ended, because ranks may have changed or made other steps."""
        # The removals in a row of gradients about which `is_awaited` was asked, and of those after
        # which another optimizer has made a step.
        self._removals_after_question = self._removals_after_other_step = 0
        # The steps in a row after questions to which the answer was always yes.
        self._steps_without_save = 0
        self.end()

    def begin(self) -> None:
        """Record that gradients were reduced."""
        self.waits = True
        self._other_stepped = False

    def step(self) -> None:
        """Record that the optimizer makes a step with the gradients."""
        if self.waits and self._permitted:
            self._warn_once(_BETWEEN_TEXT)
        if self.waits and self._asked:
            self._removals_after_question = 0
            self._steps_without_save += 1
            if self._steps_without_save >= _MOST_STEPS:
                self._warn_once(_NEVER_TEXT.format(count=_MOST_STEPS))
        if self.waits and self._other_stepped:
            self._removals_after_other_step = 0
        self.end()

    def remove(self) -> None:
        """Record that the script has removed the gradients without a step."""
        self._removals_after_question += self.waits and self._asked
        self._removals_after_other_step += self.waits and self._other_stepped
        self.end()

    def end(self) -> None:
        """Record that no step uses the gradients any more, for another reason."""
        self.waits = False
        # Whether `is_awaited` was asked, and whether the answer was once no.
        self._asked = self._permitted = False
        # Whether another optimizer has made a step since the last reduction.
        self._other_stepped = False
        # The steps of other optimizers.
        self._other_steps = 0

    @property
    def learns(self) -> bool:
        """Whether it matters if the script removes the gradients."""
        return self.waits and (self._asked or self._other_stepped)

    def note_other_step(self) -> None:
        """Record that another optimizer has made a step."""
        if self.waits:
            self._other_stepped = True
            self._other_steps += 1

    def is_awaited(self, exist: Callable[[], bool]) -> bool:
        """Return whether a save must wait for the step.

        Args:
            exist: returns whether the optimizer has any gradient other than 0.
        """
        removals = self._removals_after_other_step if self._other_stepped else 0
        is_left_over = (
            max(removals, self._removals_after_question) >= _MOST_REMOVALS
            or self._other_steps >= _MOST_OTHER_STEPS
        )
        # The last test may wait for the device.
        if self.waits and not is_left_over and not exist():
            self.remove()
        if self.waits:
            self._asked = True
            self._permitted |= is_left_over
        if self.waits and not is_left_over:
            return True
        self._steps_without_save = 0
        return False

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
