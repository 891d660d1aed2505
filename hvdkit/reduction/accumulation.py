"""Accumulation windows: several backward passes for one step of the optimizer.

A window of `accumulation_steps` ends with the n-th call of the optimizer's `step()`. It does not
depend on passes, so it is the same on a rank that has no pass for a batch. The passes before the
call n-1 only add to the gradients on each rank, and the later ones are reduced.

A window of `backward_passes_per_step` ends with each step. Its passes before the n-th one that
reaches the optimizer do not communicate.

A pass is one outermost backward pass.
"""

from dataclasses import dataclass, replace
from typing import Any

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import all_equal, group_by_text
from hvdkit.errors import UsageError
from hvdkit.reduction.step_errors import PassesDiffer


@dataclass(frozen=True)
class Counts:
    """The calls and passes of one window.

    Attributes:
        whole: the number of calls or passes that end this window.
        calls: the number of counted calls of `step()`. The script's request for the reduced
            gradients of the last batch counts as the call that follows.
        passes: the number of passes that have reached the optimizer since the last counted call.
        resumed: the number of calls or passes that the window had in the checkpoint that was
            restored. Their gradients are lost.
        dropped: whether this rank has dropped a pass of the window. Its reduction must then fail on
            all ranks.
        passed: whether a pass has reached the optimizer on this rank since the last window.
    """

    whole: int
    calls: int = 0
    passes: int = 0
    resumed: int = 0
    dropped: bool = False
    passed: bool = False


class Window:
    """Count the calls of `step()`, or the passes, of one accumulation window after another.

    Args:
        size: `accumulation_steps` or `backward_passes_per_step`, at least 1.
        mean: whether it is `accumulation_steps`: calls of `step()` count, and the step's gradient
            is the mean. Otherwise passes count, and it is the sum.

    Attributes:
        size: see above.
        mean: see above.
        counts: what this window has had.
        follows_drop: whether a dropped pass has ended the last window, and no call of `step()` has
            followed. The drop stands for a call of `step()`, so a call before the next pass of any
            rank does not count. The adapter sets it, on all ranks alike.

    Raises:
        UsageError: the size is not a whole number >= 1.
    """

    def __init__(self, size: int, mean: bool = True) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            name = "accumulation_steps" if mean else "backward_passes_per_step"
            raise UsageError(f"{name} is {size!r}: expected a whole number >= 1")
        self.size = size
        self.mean = mean
        self.counts = Counts(size)
        self.follows_drop = False

    def note(self, **changes: Any) -> None:
        """Change attributes of `counts`."""
        self.counts = replace(self.counts, **changes)

    @property
    def made(self) -> int:
        """The number of calls or passes that the window has."""
        counts = self.counts
        return counts.resumed + (counts.calls if self.mean else counts.passes)

    @property
    def begun(self) -> int:
        """The number of batches or passes that the window has; of a batch, the call may lack."""
        return min(self.made + bool(self.mean and self.counts.passes), self.counts.whole)

    @property
    def complete(self) -> bool:
        """Whether the window has all its calls or passes."""
        return self.size > 1 and self.made >= self.counts.whole

    @property
    def next_pass_reduces(self) -> bool:
        """Whether the gradients of the next pass are reduced."""
        return self.made >= self.counts.whole - 1

    @property
    def open(self) -> bool:
        """Whether `step()` must do nothing, because the mean needs more calls."""
        return self.mean and self.made < self.counts.whole - 1

    @property
    def keeps_gradients(self) -> bool:
        """Whether `zero_grad()` must do nothing."""
        return self.mean and 0 < self.made < self.counts.whole

    @property
    def divisor(self) -> int:
        """The divisor of the sum over the passes."""
        return self.counts.whole if self.mean else 1

    @property
    def position(self) -> tuple[int, int]:
        """Numbers that must be equal on all ranks in a reduction.

        No passes, because those of a rank may be missing, or reach other optimizers only.
        """
        whole = self.counts.whole
        return (min(self.made, whole - 1), whole) if self.mean else (0, self.size)

    def count_pass(self, counted: bool = True) -> None:
        """Record a pass that has reached the optimizer; `counted`: it was not under `no_sync`."""
        self.note(passes=self.counts.passes + counted, passed=True)

    def count_call(self) -> None:
        """Count a call of `step()` in an open window."""
        self.note(calls=self.counts.calls + 1, passes=0)

    def end(self) -> None:
        """End the window: the script needs the reduced gradients of its last batch."""
        if self.mean and self.size > 1:
            self.note(calls=self.counts.whole - self.counts.resumed)

    def end_early(self) -> bool:
        """End the window before it is whole; return whether it has any batch or pass."""
        if self.mean and self.counts.passes and self.made < self.counts.whole:
            self.count_call()
        self.note(whole=self.made or self.size)
        return self.made > 0

    def close(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self.counts = Counts(self.size)

    def resume(self, made: int) -> None:
        """Continue the window of a checkpoint, which has no gradients.

        Args:
            made: the number of calls or passes that the window had.
        """
        self.counts = Counts(self.size, resumed=made)
        self.follows_drop = False

    def discard(self) -> None:
        """Begin the next window. But keep the resumed one if it has no pass or call yet."""
        counts = self.counts
        self.resume(0 if counts.calls or counts.passes else counts.resumed)

    def removed_text(self, name: str) -> str:
        """Return a text for an error: the gradient `name` was removed during the window."""
        advice = (
            "Inside a window, call optimizer.zero_grad(), which does nothing there, instead of "
            "model.zero_grad()"
            if self.mean
            else "With backward_passes_per_step, remove gradients only after optimizer.step()"
        )
        return (
            f"the gradient of {name!r} was removed after {self.begun} of {self.size} batches of an "
            f"accumulation window. {advice}."
        )

    def make_whole(self) -> None:
        """Make a resumed window of a sum a whole one if the script makes all its passes again."""
        if not self.mean and self.complete:
            self.note(resumed=0)


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
    if all_equal(count, total, squares):
        return
    each = f"{len(collectives.ranks) - count} of them have called join()"
    if count == len(collectives.ranks):
        each = "; ".join(group_by_text(collectives, str(passes), "hvdkit.passes.all"))
    raise PassesDiffer(
        f"ranks have accumulated different numbers of backward passes ({each}). Give all ranks the "
        f"same number of batches, or call hvd.join() at the end of an uneven epoch."
    )
