"""Save only at a step boundary: never between a backward pass and the step that uses its gradients.

Neither checkpoints nor commits contain gradients. So a call that comes between two boundaries does
not save, and a later call does. If a loop always calls at the same places between boundaries, it
would never save. This shows when a call comes to a place again, steps later, and no call in between
was at a boundary.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from hvdkit.errors import UsageError

#: How far a rank is since the last boundary, such as numbers of passes; None at a boundary.
Place = tuple[int, ...] | None

#: A warning about a call that saves in any case; with the step.
LACKS_WINDOW = (
    "the checkpoint of step %d lacks the gradients of an accumulation window that was open: a "
    "resumed job makes the next optimizer step without them. Save after the last pass of each "
    "window"
)


class StepBoundary:
    """The places at which a script asks to save.

    Args:
        place: returns the place of this rank.
        steps: returns the number of steps that the optimizers of this rank have made.

    Attributes:
        place: see above.
        steps: see above.
    """

    def __init__(
        self, place: Callable[[], Place] = lambda: None, steps: Callable[[], int] = int
    ) -> None:
        self.place, self.steps = place, steps
        # The places of calls since a call found all ranks at a boundary -> the steps at that time.
        self._asked: dict[tuple[int, ...], int] = {}

    def ask(self) -> tuple[bool, bool]:
        """Record a call.

        Returns:
            Whether this rank is between two boundaries; and whether it comes to this place again,
            so that the calls of this loop are never at a boundary.
        """
        place = self.place()
        if place is None:
            return False, False
        steps = self.steps()
        return True, self._asked.setdefault(place, steps) != steps

    @property
    def waits(self) -> bool:
        """Whether this rank was not at a boundary in a call, and all ranks were in none since."""
        return bool(self._asked)

    def reach(self) -> None:
        """Record that all ranks are at a boundary, or begin again after a restore."""
        self._asked.clear()


class Accumulating(Protocol):
    """An optimizer with an accumulation window.

    Attributes:
        window_passes: the number of batches that the window has.
        updates: the number of steps.
    """

    @property
    def window_passes(self) -> int: ...

    @property
    def updates(self) -> int: ...


def window_boundary(optimizers: Callable[[], Iterable[Accumulating]]) -> StepBoundary:
    """Return the places between the steps of optimizers, of which only windows keep gradients.

    Args:
        optimizers: returns the optimizers.
    """

    def place() -> Place:
        windows = tuple(each.window_passes for each in optimizers())
        return windows if any(windows) else None

    return StepBoundary(place, lambda: sum(each.updates for each in optimizers()))


def misplaced(step: int) -> UsageError:
    """Return the error of a loop whose calls of `maybe_save` never are at a boundary."""
    return UsageError(
        f"maybe_save({step}) was called between a backward pass and the step that uses its "
        f"gradients, as all calls since an earlier step were. A checkpoint has no gradients, so "
        f"none of them could save. Call it after the steps of the optimizers. If no step uses the "
        f"gradients of a pass, call optimizer.zero_grad() before it"
    )
