"""Headers: compare the step and round of the optimizers on all ranks. Called by `Coordinator`.

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

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from hvdkit.core.collectives import Collectives
from hvdkit.core.rounds import Rounds


@dataclass(frozen=True)
class Slot:
    """The state of one optimizer: flags of this rank (0 or 1), or their sums over the ranks.

    Attributes:
        present: the rank has the optimizer.
        in_pass: the rank's backward pass has reached the optimizer and sends its buckets.
        late: the rank is at the optimizer's step, and has missed a round or has more to reduce.
        busy: a backward pass in another thread is adding to the gradients.
        unreduced: the rank is late and has gradients that are not reduced.
        changed: gradients were changed after a round of this step.
        reduced: the rank was in a round of this step.
        held: the rank is late and has gradients of earlier rounds, of this step or an earlier one.
        written: the rank was in no round of this step, and its gradients differ from those that the
            last step left. A write through `p.grad.data` is not recognised.
        failed: the backward pass raised.
        outdated: parameters have another dtype or device than the buckets.
        sparse: a sparse gradient has a dense bucket.
        unplanned: the ranks have not agreed on the buckets.
        nonfinite: unreduced gradients contain NaN or infinity, and `on_nonfinite` is not `ignore`.
        digest: a number that is equal on ranks in the same round (`Rounds.digest`).
        squares: `digest` squared.
    """

    present: int = 0
    in_pass: int = 0
    late: int = 0
    busy: int = 0
    unreduced: int = 0
    changed: int = 0
    reduced: int = 0
    held: int = 0
    written: int = 0
    failed: int = 0
    outdated: int = 0
    sparse: int = 0
    unplanned: int = 0
    nonfinite: int = 0
    digest: int = 0
    squares: int = 0

    def is_void(self, count: int) -> bool:
        """Return whether the round cannot be used, given the sums over `count` ranks."""
        return (
            self.present < count
            or count * self.squares != self.digest * self.digest
            or self.failed > 0
            or self.busy > 0
            or 0 < self.outdated < count
            or 0 < self.unplanned < count
        )

    def needs_plan(self, count: int) -> bool:
        """Return whether the ranks must agree on the buckets, given the sums over `count` ranks."""
        return self.unplanned == count == self.present and self.failed == 0 and self.busy == 0

    @property
    def numbers(self) -> list[int]:
        """The values of all attributes, in order."""
        return [getattr(self, name) for name in _FIELDS]


_FIELDS = [each.name for each in fields(Slot)]


class Optimizer(Protocol):
    """An optimizer of an adapter."""

    @property
    def rounds(self) -> Rounds:
        """The optimizer's reduction rounds."""
        ...


@dataclass(frozen=True)
class Entry:
    """The rounds that this rank has entered together.

    Attributes:
        passed: the optimizers that the backward pass has reached, in the order of creation.
        failed: those of `passed` whose backward pass raised.
        late: the optimizer at whose step the rank is; None in a backward pass.
        outdated: those of `passed` whose parameters have another dtype or device than the buckets.
        header: waits for the header and returns its sums.
    """

    passed: Sequence[Rounds]
    failed: Sequence[Rounds] = ()
    late: Rounds | None = None
    outdated: Sequence[Rounds] = ()
    header: Callable[[], list[int]] = list

    @property
    def rounds(self) -> list[Rounds]:
        """The rounds that this rank has entered."""
        return [*self.passed, *([self.late] if self.late else [])]


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
    optimizers: "Sequence[Optimizer | None]" = ()

    @property
    def in_pass(self) -> list[tuple[Rounds | None, Slot]]:
        """The slots of optimizers that a backward pass has reached on any rank."""
        return [(rounds, slot) for rounds, slot in self.slots if slot.in_pass]


class Headers:
    """The headers of the optimizers of one process set.

    Args:
        collectives: the collectives of the process set.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer, and keep a weak reference to it.

        Every rank adds the same optimizers in the same order. Ranks identify an optimizer by its
        place, counted from the newest, because a rank that started later in an elastic job does not
        have the oldest optimizers.
        """
        while self._optimizers and self._optimizers[0]() is None:
            del self._optimizers[0]
        self._optimizers.append(weakref.ref(optimizer))

    def send(
        self, passed: Sequence[Rounds], failed: Sequence[Rounds], late: Rounds | None
    ) -> Entry:
        """Start the header, and the buckets of the optimizers that the pass has reached.

        The buckets are packed before. If this raises, for instance for lack of memory, no header is
        in flight, and the caller can enter the rounds as `failed`.

        Args:
            passed: see `Entry`.
            failed: see `Entry`.
            late: see `Entry`.
        """
        for rounds in passed:
            rounds.check_generation()
        outdated = [rounds for rounds in passed if rounds.plan_outdated]
        ordinary = late is None and not failed and not outdated
        used = [rounds for rounds in passed if rounds not in failed]
        for rounds in used:
            rounds.begin()
        for rounds in passed:
            ordinary = ordinary and rounds.planned and not rounds.gradients.needs_sparse_bucket()
            changed = rounds.has_late_ranks and rounds.gradients.changed_since_round()
            written = not rounds.participated and rounds.gradients.written_before_pass()
            ordinary = ordinary and not changed and not written
            ordinary = ordinary and not rounds.gradients.nonfinite()
        newest_first = [each and each.rounds for each in self._newest_first()]
        digests = [(newest_first.index(rounds), rounds.digest()) for rounds in passed]
        digest = zlib.crc32(repr(digests).encode()) & 0xFFFFFF
        length = len(newest_first)
        values = [1, int(not ordinary), digest, digest * digest, length, length * length]
        planned = [rounds for rounds in used if rounds.planned and rounds not in outdated]
        for rounds in planned:
            rounds.pack()
        header = self._collectives.start_sum(values, "hvdkit.rounds.header")
        for rounds in planned:
            rounds.send()
        return Entry(passed, failed, late, outdated, header)

    def wait(self, entry: Entry) -> HeaderResult:
        """Wait for the header. Sum up the slots, unless all ranks only reduce planned buckets."""
        try:
            count, special, digest, squares, lengths, length_squares = entry.header()
        except RuntimeError as error:
            error.add_note(
                f"This rank waited for all other ranks to end a backward pass or to make a step. "
                f"It is in {self.describe(entry, entry.rounds)}. If no rank has failed, give all "
                f"ranks the same number of batches, or call hvd.join() at the end of an uneven "
                f"epoch."
                + (
                    ""
                    if all(rounds.planned for rounds in entry.rounds)
                    else " This is the first reduction: check that each rank calls "
                    "hvd.DistributedOptimizer."
                )
            )
            raise
        if not special and count * squares == digest * digest:
            everyone = Slot(present=count, in_pass=count)
            return HeaderResult(count, [(each, everyone) for each in entry.passed])
        newest_first = self._newest_first()
        if count * length_squares != lengths * lengths:
            length = len(newest_first)
            (longest,) = self._collectives.max([length], "hvdkit.rounds.optimizers")
            newest_first += [None] * (longest - length)
        # Keep the optimizers, because rounds have only weak references to them.
        own = [self._slot(entry, each.rounds if each else None).numbers for each in newest_first]
        summed = self._collectives.sum([n for slot in own for n in slot], "hvdkit.rounds.slots")
        slots = [
            (
                each.rounds if each else None,
                Slot(*summed[k * len(_FIELDS) : (k + 1) * len(_FIELDS)]),
            )
            for k, each in enumerate(newest_first)
        ]
        in_use = [(rounds, slot) for rounds, slot in slots if slot.in_pass or slot.late]
        return HeaderResult(count, in_use[::-1], newest_first)

    def describe(self, entry: Entry, optimizers: Sequence[Rounds | None]) -> str:
        """Describe the step and round of this rank for each of the optimizers."""
        oldest_first = [each and each.rounds for each in self._newest_first()[::-1]]
        texts = []
        for rounds in optimizers:
            if rounds is None:
                texts.append("an optimizer that this rank does not have")
                continue
            if rounds in entry.passed:
                where = "in a backward pass"
                if rounds in entry.failed:
                    where += ", which raised"
            elif rounds is entry.late:
                where = "at its step"
            else:
                where = f"while in {'a pass' if entry.passed else 'the step'} of another optimizer"
            label = f"optimizer {oldest_first.index(rounds)}: " if len(optimizers) > 1 else ""
            texts.append(label + rounds.describe(where))
        return "; ".join(texts)

    def _newest_first(self) -> list[Optimizer | None]:
        """Return the optimizers, the newest first; None for an optimizer that was freed."""
        return [reference() for reference in reversed(self._optimizers)]

    def _slot(self, entry: Entry, rounds: Rounds | None) -> Slot:
        """Return this rank's flags for an optimizer; all 0 if the rank does not have it."""
        if rounds is None:
            return Slot()
        rounds.check_generation()
        gradients = rounds.gradients
        passed, late = rounds in entry.passed, rounds is entry.late
        if not passed:
            # The buckets of a pass are in flight, and `begin` has looked at the gradients.
            gradients.check_written(assigned=not rounds.participated)
        digest = rounds.digest()
        return Slot(
            present=1,
            in_pass=int(passed),
            late=int(late),
            busy=int(not (passed or late) and gradients.is_busy()),
            unreduced=int(late and rounds.has_unreduced),
            changed=int(rounds.participated and gradients.changed_since_round()),
            reduced=int(rounds.participated),
            held=int(late and gradients.has_reduced(not rounds.participated)),
            written=int(not rounds.participated and gradients.changed_since_round()),
            failed=int(rounds in entry.failed),
            outdated=int(rounds in entry.outdated or (not passed and rounds.plan_outdated)),
            sparse=int(gradients.needs_sparse_bucket()),
            unplanned=int(not rounds.planned),
            nonfinite=int(bool(gradients.nonfinite())),
            digest=digest,
            squares=digest * digest,
        )
