"""Headers: the step and round of the optimizers on all ranks. `Coordinator` sends them.

At the end of each backward pass that reduces gradients, a rank sends a header: one small sum of
integers for all optimizers of a process set. Usually the header shows that all ranks are at the
same point: the same optimizers have gradients, in the same step, for the same parameters.

Otherwise the ranks sum up a record of flags (`Slot`) for each optimizer. The sums are the same on
all ranks. They show which optimizers have gradients on any rank, how many ranks are late, and on
how many ranks the backward pass raised.

A rank is late in a round if it enters the round from its step (`Coordinator.reduce_at_step`) and
not from a backward pass. Either it made no backward pass, or it has gradients that no pass has
reduced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hvdkit.agreement.consistency import all_equal
from hvdkit.torch.reduction.rounds import Rounds


@dataclass(frozen=True)
class Slot:
    """The state of one optimizer: flags of this rank (0 or 1), or their sums over the ranks.

    Attributes:
        present: the rank has the optimizer.
        in_pass: the rank's backward pass has reached the optimizer and sends its buckets.
        late: the rank is at the optimizer's step, and has missed a round or has more to reduce.
        busy: a backward pass in another thread is adding to the gradients.
        unreduced: the rank is late and has gradients that are not reduced.
        changed: the script has changed gradients while `p.grad` was without its reduced part.
        failed: the backward pass raised.
        outdated: parameters have another dtype or device than the buckets.
        sparse: a sparse gradient has a dense bucket.
        unplanned: the ranks have not agreed on the buckets.
        nonfinite: unreduced gradients contain NaN or infinity, and `on_nonfinite` is not `ignore`.
        digest: a number that is equal on ranks in the same round (`Rounds.digest`).
        squares: `digest` squared.
        content: a number that is equal on ranks with the same reduced gradients, before a pass has
            added to them.
        content_squares: `content` squared.
    """

    present: int = 0
    in_pass: int = 0
    late: int = 0
    busy: int = 0
    unreduced: int = 0
    changed: int = 0
    failed: int = 0
    outdated: int = 0
    sparse: int = 0
    unplanned: int = 0
    nonfinite: int = 0
    digest: int = 0
    squares: int = 0
    content: int = 0
    content_squares: int = 0

    def same_position(self, count: int) -> bool:
        """Return whether `count` ranks are in the same round."""
        return all_equal(count, self.digest, self.squares)

    def same_content(self, count: int) -> bool:
        """Return whether `count` ranks have the same reduced gradients."""
        return all_equal(count, self.content, self.content_squares)

    def is_void(self, count: int, written: bool = False) -> bool:
        """Return whether the round cannot be used, given the sums over `count` ranks.

        Args:
            count: the number of ranks.
            written: whether the ranks may have different gradients, because nothing has reduced
                them in this step.
        """
        return (
            self.present < count
            or not self.same_position(count)
            or not (written or self.same_content(count))
            or self.changed > 0
            or self.failed > 0
            or self.busy > 0
            or 0 < self.outdated < count
            or 0 < self.unplanned < count
        )

    def needs_plan(self, count: int) -> bool:
        """Return whether the ranks must agree on the buckets, given the sums over `count` ranks."""
        return self.unplanned == count == self.present and self.failed == 0 and self.busy == 0


#: The length of a slot as a tuple.
SLOT_LENGTH = len(fields(Slot))


#: An `hvdkit.torch.wrapped_optimizer.WrappedOptimizer`, whose module imports this one.
Optimizer = Any


@dataclass(frozen=True)
class Entry:
    """The rounds that this rank has entered together.

    Attributes:
        passed: the optimizers that the backward pass has reached, in the order of creation.
        failed: those of `passed` whose backward pass raised.
        late: the optimizer at whose step the rank is; None in a backward pass.
        outdated: those of `passed` whose parameters have another dtype or device than the buckets.
        header: waits for the header and returns its sums.
        elsewhere: the call that the rank makes instead of a round; "" in a round.
    """

    passed: Sequence[Rounds] = ()
    failed: Sequence[Rounds] = ()
    late: Rounds | None = None
    outdated: Sequence[Rounds] = ()
    header: Callable[[], list[int]] = list
    elsewhere: str = ""

    @property
    def rounds(self) -> list[Rounds]:
        """The rounds that this rank has entered."""
        return [*self.passed, *([self.late] if self.late else [])]

    def describe(
        self, rounds: Rounds | None, oldest_first: Sequence[Rounds | None], numbered: bool
    ) -> str:
        """Describe the step and round of this rank for an optimizer.

        Args:
            rounds: the rounds of the optimizer; None if this rank does not have it.
            oldest_first: the rounds of all optimizers of this rank.
            numbered: whether to begin with the number of the optimizer.
        """
        if self.elsewhere:
            return f"in {self.elsewhere}"
        if rounds is None:
            return "an optimizer that this rank does not have"
        if rounds in self.passed:
            where = "in a backward pass" + (", which raised" if rounds in self.failed else "")
        elif rounds is self.late:
            where = "at its step"
        else:
            where = f"while in {'a pass' if self.passed else 'the step'} of another optimizer"
        label = f"optimizer {oldest_first.index(rounds)}: " if numbered else ""
        return label + rounds.describe(where)


def own_slot(entry: Entry, optimizer: Optimizer | None) -> Slot:
    """Return this rank's flags for an optimizer; all 0 if the rank does not have it."""
    if optimizer is None:
        return Slot()
    rounds = optimizer.reducer.rounds
    rounds.check_generation()
    gradients = rounds.gradients
    passed, late = rounds in entry.passed, rounds is entry.late
    if not passed:
        at = rounds.position  # a pass has done this
        gradients.begin_round(at.participated, at.skips_step)
    digest, content = rounds.digest(), gradients.content()
    return Slot(
        present=1,
        in_pass=int(passed),
        late=int(late),
        busy=int(not (passed or late) and optimizer.reducer.in_pass),
        unreduced=int(late and gradients.has_unreduced(rounds.position.participated)),
        changed=int(bool(gradients.mixed)),
        failed=int(rounds in entry.failed),
        outdated=int(rounds in entry.outdated or (not passed and rounds.plan_outdated)),
        sparse=int(gradients.needs_sparse_bucket()),
        unplanned=int(not rounds.planned),
        nonfinite=int(bool(gradients.nonfinite())),
        digest=digest,
        squares=digest * digest,
        content=content,
        content_squares=content * content,
    )


@dataclass(frozen=True)
class HeaderResult:
    """The sums over the ranks of a header, or of the slots that are sent after it.

    Attributes:
        count: the number of ranks that have not joined.
        slots: for each optimizer that has a backward pass or a step on any rank, in the order of
            creation: its `Rounds` object, None if this rank does not have the optimizer; and its
            summed slot.
        optimizers: the optimizers of this rank. They must exist until the rounds are complete,
            because the rounds have only weak references to them.
    """

    count: int
    slots: Sequence[tuple[Rounds | None, Slot]]
    optimizers: Sequence[Optimizer | None] = ()

    @property
    def in_pass(self) -> list[tuple[Rounds | None, Slot]]:
        """The slots of optimizers that a backward pass has reached on any rank."""
        return [(rounds, slot) for rounds, slot in self.slots if slot.in_pass]

    @property
    def same_position(self) -> bool:
        """Whether the ranks are in the same round of each optimizer."""
        return all(slot.same_position(self.count) for _, slot in self.slots)

    def rejoin(self) -> None:
        """Restore the gradients of optimizers that had no round."""
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.reducer.rounds.gradients.rejoin()
