"""Accumulation windows: several backward passes for one step of the optimizer.

A window of `accumulation_steps` ends with the n-th call of the optimizer's `step()` after a pass.
So it does not depend on which parameters a pass reaches. The passes before the last call only add
to the gradients on each rank, and the others are reduced. A script may also make all n passes of a
window before it calls `step()` for the first time. This counts passes that reach the optimizer.

A window of `backward_passes_per_step` ends with each step. Its passes before the n-th one that
reaches the optimizer do not communicate.

A pass is one outermost backward pass.
"""

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import group_by_text
from hvdkit.errors import HvdkitError, UsageError


class PassesDiffer(HvdkitError):
    """Ranks are not at the same point of a step.

    They have made different numbers of backward passes, have wrapped different numbers of
    optimizers, or need different gradients.
    """


class PassCount:
    """Count the backward passes that have added to gradients of any optimizer of a process set.

    Attributes:
        passes: their number, also of those that were dropped.
        counted: the number of those that are not under `no_sync`.
        before_step: the counted passes after the last run of calls of `step()` and before this run.
            There is no pass within a run.
    """

    def __init__(self) -> None:
        self.passes = self.counted = self.before_step = 0
        self._last_run = 0
        # Whether, in this run, a window ended by its passes, and whether another counted a call.
        self._ended = self._counted_call = False

    def add(self, counted: bool) -> None:
        """Add a pass."""
        self.passes += 1
        self.counted += counted

    def begin_step(self) -> None:
        """Record a call of the `step()` of any optimizer."""
        if self.counted != self._last_run:
            self.before_step, self._last_run = self.counted - self._last_run, self.counted
            self._ended = self._counted_call = False

    def is_contradicted(self, ended: bool) -> bool:
        """Record what a call of `step()` does after as many passes as a window has.

        Args:
            ended: whether all of them have reached the optimizer, and end its window.

        Returns:
            Whether a call of another optimizer in the same run does something else.
        """
        self._ended |= ended
        self._counted_call |= not ended
        return self._ended and self._counted_call


_AMBIGUOUS = (
    "step() was called after {count} backward passes, and accumulation_steps is {size}, but not "
    "all of these passes reached each optimizer. So the calls of step() count, not the passes. "
)


class Window:
    """Count the calls and passes of one accumulation window after another.

    Args:
        size: `accumulation_steps` or `backward_passes_per_step`, at least 1.
        mean: whether it is `accumulation_steps`: the step's gradient is the mean. Otherwise it is
            the sum of the passes.

    Attributes:
        size: see above.
        mean: whether the step's gradient is the mean.
        calls: the number of calls of `step()` that were counted and made no step.
        passes: the number of passes that have reached the optimizer since the last of these calls.
            The adapter counts them.
        resumed: the number of passes that the window had in the checkpoint that was restored. Their
            gradients are lost.
        final: whether the script has asked for the reduced gradients of a whole window.
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
        self._all = PassCount()
        # Whether the script has called `step()` within a window.
        self._counts_calls = False
        self._warned = False
        self.calls = self.passes = self.resumed = self._begin = self._seen = 0
        self.final = self.dropped = self._ended_early = False

    def begin(self, all_passes: PassCount) -> None:
        """Begin the first window; `all_passes` counts those of all optimizers."""
        self._all = all_passes
        self.close()

    @property
    def made(self) -> int:
        """The number of passes, or of batches, that the window has."""
        return self.calls + self.passes

    @property
    def ends_by_passes(self) -> bool:
        """Whether the script has made all passes of the window before a call of `step()`."""
        first = self.calls == self.resumed and not self._counts_calls
        return self.size > 1 and first and self.made >= self.size

    @property
    def next_pass_reduces(self) -> bool:
        """Whether the gradients of the next pass are reduced."""
        first = self.calls == self.resumed and not self._counts_calls
        return self.calls >= self.size - 1 or (first and self.made >= self.size - 1)

    @property
    def open(self) -> bool:
        """Whether `step()` must do nothing, because the mean needs more passes."""
        whole = self.calls >= self.size - 1 or self.ends_by_passes or self._ended_early
        return self.mean and not whole

    @property
    def keeps_gradients(self) -> bool:
        """Whether `zero_grad()` must do nothing."""
        begun = self.calls if self._counts_calls else self.made
        ends = self.final or self.ends_by_passes or self._ended_early
        return self.mean and self.size > 1 and begun > 0 and not ends

    @property
    def divisor(self) -> int:
        """The divisor of the sum over the passes."""
        if not self.mean:
            return 1
        return self.made if self._ended_early else self.size

    @property
    def position(self) -> tuple[int, int]:
        """Numbers that must be equal on all ranks in a reduction."""
        if self.size == 1 or self.mean:
            return self.calls, self.made if self._ended_early else -1
        return self._all.counted - self._begin, -1

    def count_pass(self) -> None:
        """Count a pass that has reached the optimizer."""
        self.passes += 1

    def count_call(self) -> str:
        """Count a call of `step()` in an open window, unless no pass was made since the last one.

        Returns:
            A warning; "" for none.

        Raises:
            HvdkitError: another optimizer, whose `step()` was called after the same passes, makes a
                step.
        """
        warning = ""
        if self._seen != self._all.passes:
            warning = self._check(ended=False)
            self._seen = self._all.passes
            self.calls, self.passes, self._counts_calls = self.calls + 1, 0, True
        return warning

    def check_step(self) -> None:
        """Check a call of `step()` that makes a step.

        Raises:
            HvdkitError: see `count_call`.
        """
        if self.mean and self.ends_by_passes:
            self._check(ended=True)

    def _check(self, ended: bool) -> str:
        # Earlier passes, such as those of a model that is gone, are not passes of this window.
        count = min(self._all.before_step, self._all.counted - self._begin)
        if count < self.size:
            return ""
        text = _AMBIGUOUS.format(count=count, size=self.size)
        if self._all.is_contradicted(ended):
            raise HvdkitError(
                f"{text}Another optimizer makes a step after the same passes. If the passes belong "
                f"to {count} batches, call step() after each pass. If they belong to one batch, "
                f"make all but the last one under hvd.no_sync(optimizer)"
            )
        if ended or self._warned:
            return ""
        self._warned = True
        return (
            f"{text}If the script calls step() once for each batch, this is right, and nothing is "
            f"to be changed. If it calls step() once for {self.size} batches, call step() after "
            f"each pass"
        )

    def end_early(self) -> bool:
        """End the window before it is whole; return whether it has any pass."""
        self._ended_early = self.made > 0
        return self._ended_early

    def close(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self.calls = self.passes = self.resumed = 0
        self.dropped = self.final = self._ended_early = False
        self._begin, self._seen = self._all.counted, self._all.passes

    def resume(self, passes: int) -> None:
        """Continue the window of a checkpoint, which has no gradients.

        Args:
            passes: the number of passes that the window had.
        """
        self.close()
        self.calls = self.resumed = passes

    def discard(self) -> None:
        """Begin the next window. But keep the resumed one if no pass has ended in it yet."""
        self.resume(self.resumed if self.made == self.resumed else 0)

    def make_whole(self) -> None:
        """Make a resumed window a whole one, by the passes that it had in the checkpoint."""
        self.calls -= self.resumed
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
