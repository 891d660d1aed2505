"""Accumulation windows: several backward passes for one step of the optimizer.

A pass is one outermost backward pass. Only the last pass of a window communicates; each rank adds
up the gradients of the passes before it. The numbers of passes are equal if every rank runs the
same loop. Each reduction compares them.
"""

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import texts_by_rank
from hvdkit.errors import HvdkitError, UsageError


class PassesDiffer(HvdkitError):
    """Ranks have accumulated different numbers of backward passes."""


class Window:
    """Counts the passes of accumulation windows.

    Args:
        size: passes per step, at least 1.
        mean: whether the step's gradient is the mean over the passes; otherwise it is their sum.

    Attributes:
        size: as given.
        passes: the number of passes since the last step. The adapter counts them.

    Raises:
        UsageError: the size is not a whole number from 1 on.
    """

    def __init__(self, size: int, mean: bool = True) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            name = "accumulation_steps" if mean else "backward_passes_per_step"
            raise UsageError(f"{name} is {size!r}: expected a whole number >= 1")
        self.size = size
        self.mean = mean
        self.passes = 0
        self._cut = False

    @property
    def open(self) -> bool:
        """Whether a step needs more passes."""
        return self.size > 1 and self.passes < self.size and not self._cut

    @property
    def divisor(self) -> int:
        """The divisor of the sum of the passes' gradients."""
        if not self.mean:
            return 1
        return self.passes if self._cut else self.size

    def end_early(self) -> bool:
        """End the window before it is full; return whether it has a pass."""
        self._cut = self.passes > 0
        return self._cut

    def close(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self.passes = 0
        self._cut = False


def check_passes(collectives: Collectives, passes: int) -> None:
    """Check that all ranks have accumulated the same number of passes. A collective.

    Raises:
        PassesDiffer: on every rank, when they differ.
    """
    count, total, squares = collectives.sum([1, passes, passes * passes], "hvdkit.passes")
    if count * squares == total * total:
        return
    each = f"{len(collectives.ranks) - count} of them have called join()"
    if count == len(collectives.ranks):
        each = ", ".join(texts_by_rank(collectives, str(passes), "hvdkit.passes.all"))
    raise PassesDiffer(
        f"ranks have accumulated different numbers of backward passes ({each}). Give all ranks the "
        f"same number of batches: drop the others, or call hvd.join() at the end of the epoch."
    )
