"""Coordinate the optimizers of a process set: decide on all ranks alike which of them reduce.

At the end of each backward pass whose gradients are reduced, a rank sends a header: one small sum
of integers for all optimizers of the process set. In an ordinary pass, the header shows that all
ranks agree: their passes reached the same optimizers, in the same step, with the same parameters.
The buckets of these optimizers have been started before.

Otherwise the ranks sum a slot of integers for each optimizer. From the sums all ranks know which
optimizers have gradients on any rank, and whether a rank is late or its backward pass has raised.
Then every rank takes part in the round of each optimizer that has gradients on any rank, with zeros
if it has none. A rank that made no pass since its last step takes part in the rounds of the other
ranks when it reaches its step (`catch_up`).

A rank that is still in user code looks like a slow one; the stall limit applies to it.
"""

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Protocol

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.collectives import Collectives
from hvdkit.core.rounds import Rounds
from hvdkit.errors import HvdkitError


class BackwardFailed(HvdkitError):
    """The backward pass of a rank has raised, so the gradients of this round are void."""


class GradientsChanged(HvdkitError):
    """Some ranks changed reduced gradients before other ranks took part in the reduction."""


@dataclass(frozen=True)
class _Slot:
    """The state of one optimizer in integers: of this rank, or the sums over the ranks.

    Attributes:
        present: the rank has the optimizer.
        in_pass: its backward pass has reached the optimizer, whose buckets it sends.
        late: the rank is at the optimizer's step, and has missed a round or has more to reduce.
        busy: a backward pass in another thread is adding to the gradients.
        new: the rank is late and has gradients that were not reduced.
        changed: gradients have changed after a round of this step.
        written: the rank is late, was in no round of this step, and its gradients have changed
            since the last step.
        failed: the backward pass has raised.
        moved: parameters have another dtype or device than the buckets.
        sparse: there is a sparse gradient in a dense bucket.
        unagreed: the ranks have not agreed on the buckets yet.
        digest: of the step, the round and the required gradients.
        squares: of `digest`.
    """

    present: int = 0
    in_pass: int = 0
    late: int = 0
    busy: int = 0
    new: int = 0
    changed: int = 0
    written: int = 0
    failed: int = 0
    moved: int = 0
    sparse: int = 0
    unagreed: int = 0
    digest: int = 0
    squares: int = 0

    def is_void(self, count: int) -> bool:
        """Return whether the round is void, for the sums over `count` ranks."""
        return (
            self.present < count
            or count * self.squares != self.digest * self.digest
            or self.failed > 0
            or self.busy > 0
            or 0 < self.moved < count
            or 0 < self.unagreed < count
        )

    def needs_agreement(self, count: int) -> bool:
        """Return whether the ranks must agree on the buckets, for the sums over `count` ranks."""
        return self.unagreed == count == self.present and self.failed == 0 and self.busy == 0

    @property
    def numbers(self) -> list[int]:
        """The values of all attributes, in order."""
        return [getattr(self, name) for name in _FIELDS]


_FIELDS = [each.name for each in fields(_Slot)]

# More than the synchronizers of any optimizer.
_MANY = 1 << 30


@dataclass(frozen=True)
class Entry:
    """The optimizers of a round that this rank has entered.

    Attributes:
        passed: optimizers that its backward pass has reached, in order of creation.
        failed: optimizers of `passed` whose backward pass has raised.
        late: the optimizer at whose step this rank is; None in a backward pass.
        held: optimizers of `passed` whose parameters have another dtype or device than their
            buckets; the buckets were not started.
        header: waits for the header and returns it.
    """

    passed: Sequence[Rounds]
    failed: Sequence[Rounds] = ()
    late: Rounds | None = None
    held: Sequence[Rounds] = ()
    header: Callable[[], list[int]] = list


@dataclass(frozen=True)
class _Known:
    """The result of a header, the same on all ranks.

    Attributes:
        count: the number of ranks that have not joined.
        slots: each optimizer for which a rank is in a pass or at a step, and the sums of its slot,
            in order of creation; None for an optimizer that this rank does not have.
    """

    count: int
    slots: Sequence[tuple[Rounds | None, _Slot]]

    @property
    def in_pass(self) -> list[tuple[Rounds | None, _Slot]]:
        """The optimizers that the backward pass of a rank has reached, and their slots."""
        return [(rounds, slot) for rounds, slot in self.slots if slot.in_pass]


_lock = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let one thread at a time enter rounds, because headers of several threads are alike."""
    with _lock:
        yield


class Optimizer(Protocol):
    """An optimizer of an adapter."""

    @property
    def rounds(self) -> Rounds:
        """Its rounds."""
        ...


class Coordinator:
    """Decides which optimizers of a process set have a round, on all ranks alike.

    Args:
        collectives: of the process set.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer. Only a weak reference is kept.

        Every rank adds the same optimizers in the same order. Ranks identify an optimizer by its
        index from the end, because a rank that has joined an elastic job later does not have the
        first ones.
        """
        while self._optimizers and self._optimizers[0]() is None:
            del self._optimizers[0]
        self._optimizers.append(weakref.ref(optimizer))

    def send(self, passed: Sequence[Rounds], failed: Sequence[Rounds] = ()) -> Entry:
        """Enter the rounds of a backward pass: start the header and the buckets.

        Args:
            passed: the optimizers that the pass has reached, in order of creation.
            failed: optimizers of `passed` whose pass has raised; their gradients are not used.

        Returns:
            The argument of `wait`.
        """
        if self._collectives.alone:
            return Entry(passed)
        with _invalidating(passed):
            return self._start(passed, failed, None)

    def wait(self, entry: Entry) -> None:
        """Complete the rounds that `send` has entered. Afterwards all gradients are final.

        Raises:
            PassesDiffer: on every rank, if ranks are in different steps or rounds.
            BackwardFailed: on every rank, if the backward pass of a rank has raised.
            RankMismatchError: on every rank, if parameters or settings differ.
            GradientsChanged: on every rank; see the class.
        """
        if self._collectives.alone:
            for rounds in entry.passed:
                rounds.reduce_alone()
            return
        with _invalidating(entry.passed):
            known = self._finish(entry)
        self._run(entry, known)

    def catch_up(self, rounds: Rounds) -> None:
        """Make all gradients of an optimizer final before its step.

        A collective if this rank has taken part in no round since the last step, or another rank
        was late in a round of this step, or gradients have been added since the last round.
        Otherwise nothing is done.

        Raises:
            PassesDiffer, BackwardFailed, RankMismatchError, GradientsChanged: see `wait`.
        """
        if self._collectives.alone:
            # Without a window, the gradients of a single rank need no change.
            if rounds.in_windows and rounds.gradients.has_new(assigned=False):
                rounds.reduce_alone()
            return
        rounds.begin_generation()
        if rounds.gradients.removed():
            # The last round was for gradients that the script has removed.
            rounds.caught_up = False
        complete = rounds.caught_up and not rounds.has_late_ranks and not rounds.may_add
        if complete and not rounds.new:
            return
        with _invalidating([rounds]):
            self._enter_late(rounds)
        rounds.has_late_ranks = False
        rounds.caught_up = True

    def enter_rounds_of_others(self, rounds: Rounds) -> None:
        """Take part in the rounds of other ranks until no rank is in a backward pass.

        A collective: every rank calls it for the same optimizer.

        Raises:
            PassesDiffer, BackwardFailed, RankMismatchError, GradientsChanged: see `wait`.
        """
        if not self._collectives.alone:
            rounds.begin_generation()
            with _invalidating([rounds]):
                self._enter_late(rounds, only_rounds_of_others=True)

    # --- rounds ---------------------------------------------------------------------------------

    def _enter_late(self, rounds: Rounds, only_rounds_of_others: bool = False) -> None:
        """Enter rounds at a step, until no rank is in a backward pass.

        Args:
            rounds: of the optimizer at whose step this rank is.
            only_rounds_of_others: do not begin a round if no rank is in a backward pass.
        """
        while True:
            entry = self._start((), (), rounds)
            known = self._finish(entry)
            if known.in_pass:
                # Other ranks may make another pass before they come here.
                self._run(entry, known)
                continue
            own, slot = known.slots[0] if len(known.slots) == 1 else (None, _Slot())
            if own is rounds and slot.new and slot.needs_agreement(known.count):
                # Raises an error that names the first difference, if there is one.
                rounds.agree()
            if own is not rounds or slot.is_void(known.count):
                raise self._failure(entry, known)
            # No rank has made a pass since its last step, but gradients have changed.
            written = bool(slot.written) and not slot.new and not rounds.gradients.are_equal()
            if written and slot.written < known.count:
                self._raise_changed([rounds], slot.written, known.count)
            if written:
                rounds.gradients.count_changed_as_new()
            if (slot.new or written) and not only_rounds_of_others:
                rounds.begin()
                if not rounds.agreed:
                    rounds.agree()
                if not slot.moved:
                    rounds.send()
                rounds.complete(bool(slot.moved), bool(slot.sparse))
            if rounds.has_late_ranks and slot.changed:
                self._raise_changed([rounds], slot.changed, known.count)
            return

    def _run(self, entry: Entry, known: _Known) -> None:
        """Complete the rounds of all optimizers that the pass of a rank has reached.

        After an error in one round, complete the others, because other ranks wait for them.
        """
        errors: dict[Rounds | None, Exception] = {}

        def attempt(rounds: Rounds, call: Callable[[], None]) -> None:
            try:
                call()
            except Exception as error:
                rounds.gradients.invalidate(str(error))
                errors[rounds] = error

        for rounds, slot in known.in_pass:
            if rounds and slot.needs_agreement(known.count):
                attempt(rounds, rounds.agree)
        left = [(rounds, slot) for rounds, slot in known.in_pass if rounds not in errors]
        if any(slot.is_void(known.count) for _, slot in left):
            failure = self._failure(entry, known)
            _raise_first({**errors, None: failure})
        running = [(rounds, slot) for rounds, slot in left if rounds]
        changed = 0
        # A rank at its step does not know whether more passes follow.
        late = any(slot.late for _, slot in known.slots)
        for rounds, slot in running:
            if rounds not in entry.passed:
                rounds.begin()
            # Ranks that are neither in a pass nor at a step did not expect this round.
            unexpected = slot.in_pass + slot.late < known.count
            if slot.changed and (rounds.has_late_ranks or unexpected):
                comparable = slot.changed == known.count or not rounds.has_late_ranks
                equal = comparable and rounds.gradients.are_equal()
                changed = max(changed, 0 if equal else slot.changed)
            if not slot.moved:
                attempt(rounds, rounds.send)
        for rounds, slot in running:
            if rounds not in errors:
                complete = functools.partial(
                    rounds.complete, moved=bool(slot.moved), sparse=bool(slot.sparse)
                )
                attempt(rounds, complete)
        for rounds, _ in known.slots:
            if rounds and late:
                rounds.has_late_ranks = True
        if errors:
            _raise_first(errors)
        if changed:
            self._raise_changed([each for each, _ in running], changed, known.count)

    # --- headers and slots ----------------------------------------------------------------------

    def _live_optimizers(self) -> list[Optimizer | None]:
        """Return the optimizers, newest first; None for one that was freed."""
        return [reference() for reference in reversed(self._optimizers)]

    def _start(
        self, passed: Sequence[Rounds], failed: Sequence[Rounds], late: Rounds | None
    ) -> Entry:
        """Start the header, and the buckets of the optimizers that the pass has reached."""
        for rounds in passed:
            rounds.begin_generation()
        held = [rounds for rounds in passed if rounds.moved]
        ordinary = late is None and not failed and not held
        for rounds in passed:
            rounds.begin()
            ordinary = ordinary and rounds.agreed and not rounds.gradients.is_sparse()
            ordinary = ordinary and not (rounds.has_late_ranks and rounds.gradients.changed())
        newest_first = [each and each.rounds for each in self._live_optimizers()]
        digests = [(newest_first.index(rounds), rounds.digest()) for rounds in passed]
        digest = zlib.crc32(repr(digests).encode()) & 0xFFFFFF
        length = len(newest_first)
        values = [1, int(not ordinary), digest, digest * digest, length, length * length]
        header = self._collectives.start_sum(values, "hvdkit.rounds.header")
        for rounds in passed:
            if rounds.agreed and rounds not in held:
                rounds.send()
        return Entry(passed, failed, late, held, header)

    def _finish(self, entry: Entry) -> _Known:
        """Wait for the header; sum the slots unless all ranks are in the same ordinary pass."""
        try:
            count, special, digest, squares, lengths, length_squares = entry.header()
        except RuntimeError as error:
            error.add_note(
                f"This rank waited for the other ranks to end a backward pass or to make a step. "
                f"It is in {self._describe_location(entry, self._entered(entry))}. If ranks have "
                f"different numbers of batches, call hvd.join() at the end of the epoch."
            )
            raise
        if not special and count * squares == digest * digest:
            everyone = _Slot(present=count, in_pass=count)
            return _Known(count, [(each, everyone) for each in entry.passed])
        newest_first = self._live_optimizers()
        if count * length_squares != lengths * lengths:
            length = len(newest_first)
            (longest,) = self._collectives.max([length], "hvdkit.rounds.optimizers")
            newest_first += [None] * (longest - length)
        own = [self._slot(entry, each.rounds if each else None).numbers for each in newest_first]
        summed = self._collectives.sum([n for slot in own for n in slot], "hvdkit.rounds.slots")
        slots = [
            (
                each.rounds if each else None,
                _Slot(*summed[k * len(_FIELDS) : (k + 1) * len(_FIELDS)]),
            )
            for k, each in enumerate(newest_first)
        ]
        in_use = [(rounds, slot) for rounds, slot in slots if slot.in_pass or slot.late]
        return _Known(count, in_use[::-1])

    def _slot(self, entry: Entry, rounds: Rounds | None) -> _Slot:
        """Return this rank's slot for an optimizer."""
        if rounds is None:
            return _Slot()
        rounds.begin_generation()
        gradients = rounds.gradients
        passed, late = rounds in entry.passed, rounds is entry.late
        digest = rounds.digest()
        return _Slot(
            present=1,
            in_pass=int(passed),
            late=int(late),
            busy=int(not (passed or late) and gradients.is_busy()),
            new=int(late and rounds.new),
            changed=int(rounds.caught_up and gradients.changed()),
            written=int(late and not rounds.caught_up and gradients.changed()),
            failed=int(rounds in entry.failed),
            moved=int(rounds in entry.held or (not passed and rounds.moved)),
            sparse=int(gradients.is_sparse()),
            unagreed=int(not rounds.agreed),
            digest=digest,
            squares=digest * digest,
        )

    # --- errors ---------------------------------------------------------------------------------

    def _entered(self, entry: Entry) -> list[Rounds | None]:
        """Return the optimizers that this rank has entered the round with."""
        return [*entry.passed, *([entry.late] if entry.late else [])]

    def _describe_location(self, entry: Entry, optimizers: Sequence[Rounds | None]) -> str:
        """Describe the position of this rank for each optimizer, for an error."""
        living = [each and each.rounds for each in self._live_optimizers()[::-1]]
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
            label = f"optimizer {living.index(rounds)}: " if len(optimizers) > 1 else ""
            texts.append(label + rounds.explain(where))
        return "; ".join(texts)

    def _failure(self, entry: Entry, known: _Known) -> HvdkitError:
        """Return the error of a void round, the same on every rank. A collective."""
        # Complete the buckets that ranks have started.
        sent = [(r, slot) for r, slot in known.in_pass if r and slot.present == known.count]
        plans = [rounds.plans_agreed for rounds, _ in sent]
        if any(slot.unagreed for _, slot in sent):
            fewest = self._collectives.max([_MANY - n for n in plans], "hvdkit.rounds.plans")
            plans = [_MANY - n for n in fewest]
        for (rounds, slot), agreed in zip(sent, plans, strict=True):
            if rounds not in entry.passed and not slot.busy:
                rounds.begin()
            rounds.abandon(agreed)
        joined = len(self._collectives.ranks) - known.count
        texts: list[str] = []
        if not joined:
            own = self._describe_location(entry, [rounds for rounds, _ in known.slots])
            everyone = self._collectives.allgather(own.encode(), "hvdkit.rounds.who")
            holders: dict[str, list[int]] = {}
            for rank, said in zip(self._collectives.ranks, everyone, strict=True):
                holders.setdefault(said.decode(), []).append(rank)
            texts = [
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {said}"
                for said, ranks in holders.items()
            ]
        who = ". ".join(texts) or f"{joined} ranks have called join(), so details are unknown"
        failed = max(slot.failed for _, slot in known.slots)
        if failed:
            error: HvdkitError = BackwardFailed(
                f"the backward pass raised on {failed} of {known.count} ranks, so no rank can use "
                f"its gradients. {who}. Call optimizer.zero_grad() on every rank to continue."
            )
        elif any(slot.present < known.count for _, slot in known.slots):
            error = PassesDiffer(
                f"ranks have wrapped different numbers of optimizers. {who}. Call "
                f"hvd.DistributedOptimizer on all ranks alike, then optimizer.zero_grad() to "
                f"continue."
            )
        elif any(slot.busy for _, slot in known.slots):
            error = PassesDiffer(
                f"an optimizer has a round while a backward pass in another thread adds to its "
                f"gradients. {who}. Train in one thread of each process."
            )
        else:
            error = PassesDiffer(
                f"ranks are not in the same step, or differ in the gradients that they need. "
                f"{who}. Give all ranks the same number of batches (or call hvd.join() at the end "
                f"of the epoch), call step(), zero_grad() and requires_grad_() on all ranks alike. "
                f"Call optimizer.zero_grad() to continue."
            )
        # Ranks that are in different steps may have different parameters.
        self._reset([rounds for rounds, _ in known.slots], bool(failed), error)
        return error

    def _raise_changed(self, optimizers: Sequence[Rounds], changed: int, count: int) -> NoReturn:
        error = GradientsChanged(
            f"on {changed} of {count} ranks gradients were changed after loss.backward(), and "
            f"another rank made no backward pass, so its gradients were added after that change. "
            f"If a rank may skip the backward pass, call "
            f"hvd.clip_grad_norm_(optimizer, ...) or optimizer.synchronize() on every rank before "
            f"changing gradients. Call optimizer.zero_grad() to continue."
        )
        self._reset(optimizers, False, error)
        raise error

    def _reset(
        self, optimizers: Iterable[Rounds | None], same_parameters: bool, error: HvdkitError
    ) -> None:
        for rounds in optimizers:
            if rounds is not None:
                rounds.reset(same_parameters, str(error))


@contextmanager
def _invalidating(optimizers: Iterable[Rounds]) -> Iterator[None]:
    """Invalidate the gradients of these optimizers if an exception ends the block."""
    try:
        yield
    except BaseException as error:
        for rounds in optimizers:
            rounds.gradients.invalidate(str(error))
        raise


def _raise_first(errors: dict[Any, Exception]) -> NoReturn:
    """Raise the first error, without a cycle that keeps this frame and its optimizers alive."""
    try:
        raise next(iter(errors.values()))
    finally:
        errors.clear()
