"""Accumulation windows: several backward passes for one step of the optimizer.

A pass is one outermost backward pass. Only the last pass of a window communicates. The earlier
passes only add to the gradients on each rank. An adapter counts `Window.passes`. All ranks must
make the same number of passes. Every reduction checks this.
"""

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import group_by_text
from hvdkit.errors import HvdkitError, UsageError


class PassesDiffer(HvdkitError):
    """Ranks are not at the same point of a step.

    They have made different numbers of backward passes, have wrapped different numbers of
    optimizers, or need different gradients.
    """


class Window:
    """Count the passes of one accumulation window after another.

    Args:
        size: passes per step, at least 1.
        mean: whether the step's gradient is the mean over the passes; otherwise it is their sum.

    Attributes:
        size: passes per step.
        mean: whether the step's gradient is the mean.
        passes: the number of passes that have ended since the last step. The adapter counts them.
        resumed: the number of passes that the window had in the checkpoint that was restored. Their
            gradients are lost.
        dropped: whether this rank has dropped a pass of the window. Its reduction must then fail on
            all ranks. The adapter sets it.

    Raises:
        UsageError: the size is not a whole number >= 1.
    """

    def __init__(self, size: int, mean: bool = True) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            name = "accumulation_steps" if mean else "backward_passes_per_step"
            raise UsageError(f"{name} is {size!r}: expected a whole number >= 1")
        self.size = size
        self.mean = mean
        self.passes = self.resumed = 0
        self.dropped = False
        self._ended_early = False

    @property
    def open(self) -> bool:
        """Whether `step()` must do nothing, because the mean needs more passes."""
        return self.mean and self.passes < self.size and self.size > 1 and not self._ended_early

    @property
    def divisor(self) -> int:
        """The divisor of the sum over the passes."""
        if not self.mean:
            return 1
        return self.passes if self._ended_early else self.size

    def end_early(self) -> bool:
        """End the window before it is full; return whether any pass was made in it."""
        self._ended_early = self.passes > 0
        return self._ended_early

    def close(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self.passes = self.resumed = 0
        self.dropped = self._ended_early = False

    def resume(self, passes: int) -> None:
        """Continue the window of a checkpoint, which has no gradients.

        Args:
            passes: the number of passes that the window had.
        """
        self.close()
        self.passes = self.resumed = passes

    def discard(self) -> None:
        """Begin the next window. But keep the resumed one if no pass has ended in it yet."""
        self.resume(self.resumed if self.passes == self.resumed else 0)

    def make_whole(self) -> None:
        """Make a resumed window a whole one, by the passes that it had in the checkpoint."""
        self.passes -= self.resumed
        self.resumed = 0


def window_of(accumulation_steps: int, backward_passes_per_step: int) -> Window:
    """Return the window for the two arguments of a `DistributedOptimizer`.

    Raises:
        UsageError: an argument is not a whole number >= 1, or both are above 1.
    """
    mean, total = Window(accumulation_steps), Window(backward_passes_per_step, mean=False)
    if mean.size > 1 and total.size > 1:
        raise UsageError(
            f"accumulation_steps is {mean.size}, and backward_passes_per_step is {total.size}: the "
            f"first averages the gradients of several passes, and the second sums them. Pass only "
            f"one of the two"
        )
    return total if total.size > 1 else mean


def check_passes(collectives: Collectives, passes: int) -> None:
    """Compare the numbers of passes that the ranks have accumulated. A collective.

    Raises:
        PassesDiffer: on every rank, when the numbers differ.
    """
    count, total, squares = collectives.sum([1, passes, passes * passes], "hvdkit.passes")
    if count * squares == total * total:
        return
    each = f"{len(collectives.ranks) - count} of them have called join()"
    if count == len(collectives.ranks):
        each = "; ".join(group_by_text(collectives, str(passes), "hvdkit.passes.all"))
    raise PassesDiffer(
        f"ranks have accumulated different numbers of backward passes ({each}). Give all ranks the "
        f"same number of batches, or call hvd.join() at the end of an uneven epoch."
    )
