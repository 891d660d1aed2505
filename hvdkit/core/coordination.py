"""Coordination of optimizers: keep the ranks in the same step and reduction round.

At the end of each reduced backward pass, a rank sends a header: one small sum of integers for all
optimizers of a process set. Usually the header shows that all ranks are in the same place: the same
optimizers have gradients, in the same step, and need the same gradients. Then the ranks complete
the buckets, which are already in flight.

Otherwise the ranks sum up a slot for each optimizer. From the slots all ranks learn the same facts:
which optimizers have gradients on any rank, which ranks are late, and whose backward pass raised.
Every rank then takes part in the round of each optimizer that has gradients on any rank, and
contributes zeros for gradients that it does not have.

A rank is late in a round if it enters the round from its step (`reduce_at_step`) and not from a
backward pass. Either it made no backward pass, or it has gradients that no pass has reduced.

The other ranks cannot distinguish a slow rank from a rank that never enters the round. If they wait
too long, Horovod's stall limit ends the job.
"""

import functools
import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Protocol

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import group_by_text
from hvdkit.core.nonfinite import RAISE, NonFiniteGradients, describe
from hvdkit.core.rounds import Rounds
from hvdkit.core.stragglers import UPDATE, WAIT, StepTimes, StragglerReport
from hvdkit.errors import HvdkitError

_log = logging.getLogger("hvdkit")


class BackwardFailed(HvdkitError):
    """The backward pass of a rank raised, so no rank can use the gradients of this round."""


class GradientsChanged(HvdkitError):
    """Some ranks changed reduced gradients before others had taken part in the reduction."""


@dataclass(frozen=True)
class _Slot:
    """The state of one optimizer: flags of this rank (0 or 1), or their sums over the ranks.

    Attributes:
        present: the rank has the optimizer.
        in_pass: the rank's backward pass has reached the optimizer and sends its buckets.
        late: the rank is at the optimizer's step, and has missed a round or has more to reduce.
        busy: a backward pass in another thread is adding to the gradients.
        unreduced: the rank is late and has gradients that are not reduced.
        changed: gradients were changed after a round of this step.
        written: the rank is late, was in no round of this step, and its gradients differ from those
            that the last step left.
        failed: the backward pass raised.
        outdated: parameters have another dtype or device than the buckets.
        sparse: a sparse gradient has a dense bucket.
        unplanned: the ranks have not agreed on the buckets.
        nonfinite: unreduced gradients contain NaN or infinity, and `on_nonfinite` asks for them.
        digest: a number that is equal on ranks in the same round (`Rounds.digest`).
        squares: `digest` squared.
    """

    present: int = 0
    in_pass: int = 0
    late: int = 0
    busy: int = 0
    unreduced: int = 0
    changed: int = 0
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


_FIELDS = [each.name for each in fields(_Slot)]

# Larger than the number of synchronizers of any optimizer.
_MAX_SYNCHRONIZERS = 1 << 30


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


@dataclass(frozen=True)
class _HeaderResult:
    """The sums over the ranks of a header, or of the slots that are sent after it.

    Attributes:
        count: the number of ranks that have not joined.
        slots: pairs of rounds and summed slot for each optimizer that has a backward pass or a step
            on any rank, in the order of creation. The rounds are None if this rank does not have
            the optimizer.
        optimizers: the optimizers of this rank. They must exist until the rounds are complete,
            because the rounds have only weak references to them.
    """

    count: int
    slots: Sequence[tuple[Rounds | None, _Slot]]
    optimizers: "Sequence[Optimizer | None]" = ()

    @property
    def in_pass(self) -> list[tuple[Rounds | None, _Slot]]:
        """The slots of optimizers that a backward pass has reached on any rank."""
        return [(rounds, slot) for rounds, slot in self.slots if slot.in_pass]


#: To be held while entering rounds: headers of two threads would have the same name.
entry_lock = threading.RLock()


class Optimizer(Protocol):
    """An optimizer of an adapter."""

    @property
    def rounds(self) -> Rounds:
        """The optimizer's reduction rounds."""
        ...


class Coordinator:
    """Keep the optimizers of one process set in the same step on all ranks.

    Args:
        collectives: the collectives of the process set.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._optimizers: list[weakref.ref[Optimizer]] = []
        #: The time that this rank spends in each section of its steps.
        self.times = StepTimes()
        #: Compares these times between ranks.
        self.stragglers = StragglerReport(collectives, self.times)

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer, and keep a weak reference to it.

        Every rank adds the same optimizers in the same order. An optimizer is identified by its
        place from the end of that order, because a rank that started later in an elastic job does
        not have the first ones.
        """
        while self._optimizers and self._optimizers[0]() is None:
            del self._optimizers[0]
        self._optimizers.append(weakref.ref(optimizer))

    def send(self, passed: Sequence[Rounds], failed: Sequence[Rounds] = ()) -> Entry:
        """Enter the rounds of a backward pass: start the header and the buckets.

        Args:
            passed: the optimizers that the pass has reached, in the order of creation.
            failed: those of `passed` whose pass raised; their gradients are not used.

        Returns:
            The entry, for `wait`.
        """
        if self._collectives.single_rank:
            return Entry(passed)
        with _invalidating(passed):
            return self._send_header(passed, failed, None)

    def wait(self, entry: Entry) -> None:
        """Complete the rounds that `send` has entered; afterwards all gradients are reduced.

        Raises:
            PassesDiffer: on every rank, when ranks are in different steps or rounds.
            BackwardFailed: on every rank, when the backward pass of a rank raised.
            RankMismatchError: on every rank, when their parameters or settings differ.
            GradientsChanged: on every rank, when reduced gradients were changed too early.
            NonFiniteGradients: on every rank, with `on_nonfinite="raise"`.
        """
        if self._collectives.single_rank:
            for rounds in entry.passed:
                rounds.reduce_locally()
            return
        with self._waiting():
            with _invalidating(entry.passed):
                result = self._wait_for_header(entry)
            self._complete_rounds(entry, result)

    def reduce_at_step(self, rounds: Rounds) -> None:
        """Reduce all gradients of an optimizer before its step.

        A collective in three cases: this rank has taken part in no round since the last step, a
        rank was late in a round of this step, or gradients have been added since the last round.
        Otherwise the gradients are reduced already, and nothing happens.

        Raises:
            PassesDiffer, BackwardFailed, RankMismatchError, GradientsChanged: see `wait`.
        """
        if self._collectives.single_rank:
            # Without a window there is nothing to divide by.
            if rounds.has_window and rounds.gradients.has_unreduced(assigned=False):
                rounds.reduce_locally()
            return
        rounds.check_generation()
        if rounds.gradients.all_removed():
            # The script has dropped the result of the last round, so this step needs another one.
            rounds.participated = False
        reduced = rounds.participated and not rounds.has_late_ranks and not rounds.no_sync_used
        if reduced and not rounds.has_unreduced:
            return
        with self._waiting(), _invalidating([rounds]):
            self._enter_at_step(rounds)
        rounds.has_late_ranks = False
        rounds.participated = True

    def enter_rounds_of_others(self, rounds: Rounds) -> None:
        """Take part in rounds until no rank is in a backward pass.

        A collective: every rank calls it for the same optimizer.

        Raises:
            PassesDiffer, BackwardFailed, RankMismatchError, GradientsChanged: see `wait`.
        """
        if not self._collectives.single_rank:
            rounds.check_generation()
            with self._waiting(), _invalidating([rounds]):
                self._enter_at_step(rounds, only_rounds_of_others=True)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for other ranks."""
        self.times.enter(WAIT)
        try:
            yield
        finally:
            self.times.enter(UPDATE)

    # --- rounds ---------------------------------------------------------------------------------

    def _enter_at_step(self, rounds: Rounds, only_rounds_of_others: bool = False) -> None:
        """Enter rounds at a step, until all ranks are at a step.

        Args:
            rounds: the rounds of the optimizer at whose step this rank is.
            only_rounds_of_others: do not begin a round when no rank is in a backward pass.
        """
        while True:
            entry = self._send_header((), (), rounds)
            result = self._wait_for_header(entry)
            if result.in_pass:
                # Ranks in a backward pass may make another one before they reach their step.
                self._complete_rounds(entry, result)
                continue
            own, slot = result.slots[0] if len(result.slots) == 1 else (None, _Slot())
            if own is rounds and slot.unreduced and slot.needs_plan(result.count):
                # The error of `make_plan` names the first difference between ranks.
                rounds.make_plan()
            if own is not rounds or slot.is_void(result.count):
                raise self._make_error(entry, result)
            # No rank made a pass since its last step, but the script has written gradients.
            written = bool(slot.written) and not slot.unreduced and not rounds.gradients.are_equal()
            if written and slot.written < result.count:
                self._raise_changed([rounds], slot.written, result.count)
            if written:
                rounds.gradients.mark_changed_unreduced()
            if (slot.unreduced or written) and not only_rounds_of_others:
                rounds.begin()
                if not rounds.planned:
                    rounds.make_plan()
                if not slot.outdated:
                    rounds.send()
                names = rounds.gradients.nonfinite()
                rounds.complete(bool(slot.outdated), bool(slot.sparse))
                if slot.nonfinite:
                    self._report_nonfinite(rounds, names, slot, result)
            if rounds.has_late_ranks and slot.changed:
                self._raise_changed([rounds], slot.changed, result.count)
            return

    def _complete_rounds(self, entry: Entry, result: _HeaderResult) -> None:
        """Complete the rounds of all optimizers that a backward pass has reached on any rank.

        After an error in one round, complete the other rounds before raising it, because other
        ranks wait in them.
        """
        errors: dict[Rounds | None, Exception] = {}

        def attempt(rounds: Rounds, call: Callable[[], None]) -> None:
            try:
                call()
            except Exception as error:
                rounds.gradients.invalidate(str(error))
                errors[rounds] = error

        for rounds, slot in result.in_pass:
            if rounds and slot.needs_plan(result.count):
                attempt(rounds, rounds.make_plan)
        left = [(rounds, slot) for rounds, slot in result.in_pass if rounds not in errors]
        if any(slot.is_void(result.count) for _, slot in left):
            failure = self._make_error(entry, result)
            _raise_first({**errors, None: failure})
        running = [(rounds, slot) for rounds, slot in left if rounds]
        changed = 0
        # A late rank takes part without knowing whether other ranks make more passes.
        any_late = any(slot.late for _, slot in result.slots)
        for rounds, slot in running:
            if rounds not in entry.passed:
                rounds.begin()
            # Ranks that are neither in a pass nor late did not expect this round.
            unexpected = slot.in_pass + slot.late < result.count
            if slot.changed and (rounds.has_late_ranks or unexpected):
                comparable = slot.changed == result.count or not rounds.has_late_ranks
                equal = comparable and rounds.gradients.are_equal()
                changed = max(changed, 0 if equal else slot.changed)
            if not slot.outdated:
                attempt(rounds, rounds.send)
        names = {rounds: rounds.gradients.nonfinite() for rounds, _ in running}
        for rounds, slot in running:
            if rounds not in errors:
                complete = functools.partial(
                    rounds.complete, outdated=bool(slot.outdated), sparse=bool(slot.sparse)
                )
                attempt(rounds, complete)
        for rounds, slot in running:
            if slot.nonfinite and rounds not in errors:
                report = functools.partial(
                    self._report_nonfinite, rounds, names[rounds], slot, result
                )
                attempt(rounds, report)
        for rounds, _ in result.slots:
            if rounds and any_late:
                rounds.has_late_ranks = True
        if errors:
            _raise_first(errors)
        if changed:
            self._raise_changed([each for each, _ in running], changed, result.count)

    # --- headers and slots ----------------------------------------------------------------------

    def _newest_first(self) -> list[Optimizer | None]:
        """Return the optimizers, the newest first; None for an optimizer that was freed."""
        return [reference() for reference in reversed(self._optimizers)]

    def _send_header(
        self, passed: Sequence[Rounds], failed: Sequence[Rounds], late: Rounds | None
    ) -> Entry:
        """Start the header, and the buckets of the optimizers that the pass has reached."""
        for rounds in passed:
            rounds.check_generation()
        outdated = [rounds for rounds in passed if rounds.plan_outdated]
        ordinary = late is None and not failed and not outdated
        for rounds in passed:
            rounds.begin()
            ordinary = ordinary and rounds.planned and not rounds.gradients.needs_sparse_bucket()
            changed = rounds.has_late_ranks and rounds.gradients.changed_since_round()
            ordinary = ordinary and not changed and not rounds.gradients.nonfinite()
        newest_first = [each and each.rounds for each in self._newest_first()]
        digests = [(newest_first.index(rounds), rounds.digest()) for rounds in passed]
        digest = zlib.crc32(repr(digests).encode()) & 0xFFFFFF
        length = len(newest_first)
        values = [1, int(not ordinary), digest, digest * digest, length, length * length]
        header = self._collectives.start_sum(values, "hvdkit.rounds.header")
        for rounds in passed:
            if rounds.planned and rounds not in outdated:
                rounds.send()
        return Entry(passed, failed, late, outdated, header)

    def _wait_for_header(self, entry: Entry) -> _HeaderResult:
        """Wait for the header; sum up slots unless it is an ordinary pass on all ranks."""
        try:
            count, special, digest, squares, lengths, length_squares = entry.header()
        except RuntimeError as error:
            error.add_note(
                f"This rank waited for all other ranks to end a backward pass or to make a step. "
                f"It is in {self._describe_rank(entry, self._rounds_of(entry))}. Give all ranks "
                f"the same number of batches, or call hvd.join() at the end of an uneven epoch."
            )
            raise
        if not special and count * squares == digest * digest:
            everyone = _Slot(present=count, in_pass=count)
            return _HeaderResult(count, [(each, everyone) for each in entry.passed])
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
                _Slot(*summed[k * len(_FIELDS) : (k + 1) * len(_FIELDS)]),
            )
            for k, each in enumerate(newest_first)
        ]
        in_use = [(rounds, slot) for rounds, slot in slots if slot.in_pass or slot.late]
        return _HeaderResult(count, in_use[::-1], newest_first)

    def _slot(self, entry: Entry, rounds: Rounds | None) -> _Slot:
        """Return this rank's flags for an optimizer; all 0 if the rank does not have it."""
        if rounds is None:
            return _Slot()
        rounds.check_generation()
        gradients = rounds.gradients
        passed, late = rounds in entry.passed, rounds is entry.late
        digest = rounds.digest()
        return _Slot(
            present=1,
            in_pass=int(passed),
            late=int(late),
            busy=int(not (passed or late) and gradients.is_busy()),
            unreduced=int(late and rounds.has_unreduced),
            changed=int(rounds.participated and gradients.changed_since_round()),
            written=int(late and not rounds.participated and gradients.changed_since_round()),
            failed=int(rounds in entry.failed),
            outdated=int(rounds in entry.outdated or (not passed and rounds.plan_outdated)),
            sparse=int(gradients.needs_sparse_bucket()),
            unplanned=int(not rounds.planned),
            nonfinite=int((passed or late) and bool(gradients.nonfinite())),
            digest=digest,
            squares=digest * digest,
        )

    # --- errors ---------------------------------------------------------------------------------

    def _rounds_of(self, entry: Entry) -> list[Rounds | None]:
        """Return the rounds that this rank has entered."""
        return [*entry.passed, *([entry.late] if entry.late else [])]

    def _describe_rank(self, entry: Entry, optimizers: Sequence[Rounds | None]) -> str:
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

    def _make_error(self, entry: Entry, result: _HeaderResult) -> HvdkitError:
        """Return the error for rounds that cannot be used, the same on every rank. A collective."""
        # Ranks have sent buckets, which must not stay in flight.
        sent = [(r, slot) for r, slot in result.in_pass if r and slot.present == result.count]
        plans = [rounds.plans_made for rounds, _ in sent]
        if any(slot.unplanned for _, slot in sent):
            fewest = self._collectives.max(
                [_MAX_SYNCHRONIZERS - n for n in plans], "hvdkit.rounds.plans"
            )
            plans = [_MAX_SYNCHRONIZERS - n for n in fewest]
        for (rounds, slot), plan in zip(sent, plans, strict=True):
            if rounds not in entry.passed and not slot.busy:
                rounds.begin()
            rounds.abandon(plan)
        joined = len(self._collectives.ranks) - result.count
        if joined:
            # Ranks in `join` take part in sums only.
            details = f"{joined} ranks have called join(), so details of each rank are unknown"
        else:
            own = self._describe_rank(entry, [rounds for rounds, _ in result.slots])
            details = ". ".join(group_by_text(self._collectives, own, "hvdkit.rounds.who"))
        failed = max(slot.failed for _, slot in result.slots)
        if failed:
            error: HvdkitError = BackwardFailed(
                f"the backward pass raised on {failed} of {result.count} ranks, so no rank can use "
                f"its gradients. {details}. Call optimizer.zero_grad() on every rank to continue."
            )
        elif any(slot.present < result.count for _, slot in result.slots):
            error = PassesDiffer(
                f"ranks have wrapped different numbers of optimizers. {details}. Call "
                f"hvd.DistributedOptimizer equally often on all ranks, then optimizer.zero_grad() "
                f"to continue."
            )
        elif any(slot.busy for _, slot in result.slots):
            error = PassesDiffer(
                f"an optimizer has a round while a backward pass in another thread adds to its "
                f"gradients. {details}. Train in one thread of each process."
            )
        else:
            error = PassesDiffer(
                f"ranks are not in the same step, or differ in the gradients that they need. "
                f"{details}. Give all ranks the same number of batches (hvd.join() ends an uneven "
                f"epoch). Call step(), zero_grad() and requires_grad_() on all ranks alike. Then "
                f"call optimizer.zero_grad() to continue."
            )
        # Ranks that are in different steps may have different parameters.
        self._reset([rounds for rounds, _ in result.slots], bool(failed), error)
        return error

    def _report_nonfinite(
        self, rounds: Rounds, names: list[str], slot: _Slot, result: _HeaderResult
    ) -> None:
        """Raise an error for gradients that are not finite, or let all ranks skip the step.

        A collective: `slot` is the same on all ranks.

        Args:
            rounds: the rounds of the optimizer.
            names: the names of this rank's gradients that are not finite.
            slot: the sums of the optimizer's slots.
            result: the sums of the header.

        Raises:
            NonFiniteGradients: on every rank.
        """
        text = describe(self._collectives, names, slot.nonfinite, result.count)
        if rounds.on_nonfinite == RAISE:
            error = NonFiniteGradients(f"{text}. Call optimizer.zero_grad() to continue.")
            self._reset([rounds], True, error)
            raise error
        rounds.skips_step = True
        if self._collectives.rank == self._collectives.ranks[0]:
            _log.warning("%s. All ranks skip this step.", text)

    def _raise_changed(self, optimizers: Sequence[Rounds], changed: int, count: int) -> NoReturn:
        error = GradientsChanged(
            f"on {changed} of {count} ranks gradients were changed after loss.backward(), but "
            f"another rank had made no backward pass, so these gradients were not final. If a rank "
            f"may skip the backward pass, call hvd.clip_grad_norm_(optimizer, ...) or "
            f"optimizer.synchronize() on every rank before changing gradients. Call "
            f"optimizer.zero_grad() to continue."
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
    """Invalidate the gradients of these optimizers if the block raises."""
    try:
        yield
    except BaseException as error:
        for rounds in optimizers:
            rounds.gradients.invalidate(str(error))
        raise


def _raise_first(errors: dict[Any, Exception]) -> NoReturn:
    """Raise the first error, without a reference cycle that keeps this frame alive."""
    try:
        raise next(iter(errors.values()))
    finally:
        errors.clear()
