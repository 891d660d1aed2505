"""Coordination of optimizers: keep the ranks in the same step and reduction round.

A `Coordinator` is called at the end of a backward pass and in the optimizer's `step()`.

At the end of each backward pass that reduces gradients, the ranks exchange a header
(`hvdkit.torch.reduction.headers`). Usually the header shows that all ranks are at the same point.
Then the ranks complete the buckets, which are already in flight.

Otherwise every rank takes part in the round of each optimizer that has gradients on any rank. A
missing gradient counts as zeros.

The other ranks cannot distinguish a slow rank from a rank that never enters the round. If they wait
too long, Horovod's stall limit ends the job.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, NoReturn

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import all_equal, digest24, group_by_text
from hvdkit.errors import HvdkitError
from hvdkit.reduction.nonfinite import NonFiniteGradients, describe, raise_or_log
from hvdkit.reduction.step_errors import BackwardFailed
from hvdkit.torch.reduction.headers import (
    SLOT_LENGTH,
    Entry,
    HeaderResult,
    Optimizer,
    Slot,
    own_slot,
)
from hvdkit.torch.reduction.round_errors import error_of
from hvdkit.torch.reduction.rounds import Rounds
from hvdkit.training.stragglers import UPDATE, WAIT, StepTimes, StragglerReport

# Larger than `Rounds.plans_made` can be. It turns a minimum into a maximum.
_MAX_SYNCHRONIZERS = 1 << 30
_HEADER = "hvdkit.rounds.header"


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

        Every rank adds the same optimizers in the same order. Ranks identify an optimizer by its
        place, counted from the newest, because a rank that started later in an elastic job does not
        have the oldest optimizers.
        """
        while self._optimizers and self._optimizers[0]() is None:
            del self._optimizers[0]
        self._optimizers.append(weakref.ref(optimizer))

    def send(
        self,
        passed: Sequence[Rounds],
        failed: Sequence[Rounds] = (),
        late: Rounds | None = None,
    ) -> Entry:
        """Enter rounds: start the header, and the buckets of the optimizers in `passed`.

        The buckets are packed before. If this raises, for instance for lack of memory, no header is
        in flight.

        Args:
            passed: see `Entry`.
            failed: see `Entry`.
            late: see `Entry`.

        Returns:
            The entry, for `wait`.

        Raises:
            Exception: a bucket cannot be packed. Other ranks wait for these rounds, so call `send`
                again with all of `passed` as `failed`.
        """
        with _invalidating(passed):
            for rounds in passed:
                rounds.check_generation()
            outdated = [rounds for rounds in passed if rounds.plan_outdated]
            ordinary = late is None and not failed and not outdated
            used = [rounds for rounds in passed if rounds not in failed]
            for rounds in passed:
                gradients, at = rounds.gradients, rounds.position
                gradients.check_finite(at.skips_step)
                ordinary = ordinary and rounds.planned and not gradients.needs_sparse_bucket()
                # The ranks compare reduced gradients that the script may have changed too early.
                ordinary = ordinary and not (at.has_late_ranks or gradients.mixed)
                ordinary = ordinary and (at.participated or not gradients.any_changed())
                ordinary = ordinary and not (at.skips_step or gradients.nonfinite())
            newest_first = [each and each.reducer.rounds for each in self._newest_first()]
            digests = [(newest_first.index(rounds), rounds.digest()) for rounds in passed]
            digest = digest24(repr(digests).encode())
            length = len(newest_first)
            values = [1, int(not ordinary), digest, digest * digest, length, length * length]
            planned = [rounds for rounds in used if rounds.planned and rounds not in outdated]
            for rounds in planned:
                rounds.pack()
            header = self._collectives.start_sum(values, _HEADER)
            for rounds in planned:
                rounds.send()
            return Entry(passed, failed, late, outdated, header)

    def wait(self, entry: Entry) -> None:
        """Complete the rounds that `send` has entered; afterwards all gradients are reduced.

        Raises:
            PassesDiffer: on every rank, when ranks are in different steps or rounds.
            BackwardFailed: on every rank, when the backward pass of a rank raised.
            RankMismatchError: on every rank, when their parameters or settings differ.
            GradientsChanged: on every rank, when reduced gradients were changed too early.
            NonFiniteGradients: on every rank, with `on_nonfinite="raise"`.
        """
        with self._waiting():
            with _invalidating(entry.passed):
                result = self._wait(entry)
            try:
                self._complete_rounds(entry, result)
            finally:
                result.rejoin()

    def meet(self, call: str) -> None:
        """Check that all ranks make the same call, and none is in a round. A collective.

        Args:
            call: the call, for the error.

        Raises:
            PassesDiffer: on every rank, when a rank is in a backward pass or at a step.
        """
        digest, length = digest24(call.encode()), len(self._newest_first())
        values = [1, 0, digest, digest * digest, length, length * length]
        entry = Entry(header=self._collectives.start_sum(values, _HEADER), elsewhere=call)
        result = self._wait(entry)
        if result.slots:
            raise self._make_error(entry, result)

    def reduce_at_step(self, rounds: Rounds) -> None:
        """Reduce all gradients of an optimizer before its step.

        This call is a collective if
        - this rank has taken part in no round since the last step, or the script has removed the
          gradients of the last round;
        - a rank was late in a round of this step (see `hvdkit.torch.reduction.headers`); or
        - gradients were added since the last round, or may have been added under `no_sync`.

        Otherwise all gradients are reduced already, and the call returns at once.

        Raises:
            PassesDiffer, BackwardFailed, RankMismatchError, GradientsChanged: see `wait`.
        """
        rounds.check_generation()
        if rounds.gradients.all_removed():
            # The script has removed the gradients of the last round: this step needs a new round.
            rounds.position = rounds.position.without_gradients()
        at = rounds.position
        reduced = at.participated and not at.has_late_ranks and not at.no_sync_used
        if reduced and not rounds.gradients.has_new():
            return
        with self._waiting(), _invalidating([rounds]):
            self._enter_at_step(rounds)
        rounds.position = rounds.position.at_step()

    def enter_rounds_of_others(self, rounds: Rounds) -> None:
        """Take part in the rounds of other ranks until no rank is in a backward pass.

        A collective: every rank calls it for the same optimizer, before an accumulation window ends
        early.

        Raises:
            PassesDiffer, BackwardFailed, RankMismatchError, GradientsChanged: see `wait`.
        """
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

    # --- headers --------------------------------------------------------------------------------

    def _wait(self, entry: Entry) -> HeaderResult:
        """Wait for the header. Sum up the slots, unless all ranks only reduce planned buckets."""
        try:
            count, special, digest, squares, lengths, length_squares = entry.header()
        except RuntimeError as error:
            error.add_note(
                f"This rank waited for all other ranks to end a backward pass or to make a step. "
                f"It is in {self._text(entry, entry.rounds)}. If no rank has failed, give all "
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
        if not special and all_equal(count, digest, squares):
            everyone = Slot(present=count, in_pass=count)
            return HeaderResult(count, [(each, everyone) for each in entry.passed])
        newest_first = self._newest_first()
        if not all_equal(count, lengths, length_squares):
            length = len(newest_first)
            (longest,) = self._collectives.max([length], "hvdkit.rounds.optimizers")
            newest_first += [None] * (longest - length)
        # Keep the optimizers, because rounds have only weak references to them.
        own = [astuple(own_slot(entry, each)) for each in newest_first]
        summed = self._collectives.sum([n for slot in own for n in slot], "hvdkit.rounds.slots")
        slots = [
            (each and each.reducer.rounds, Slot(*summed[k : k + SLOT_LENGTH]))
            for k, each in zip(range(0, len(summed), SLOT_LENGTH), newest_first, strict=True)
        ]
        in_use = [(rounds, slot) for rounds, slot in slots if slot.in_pass or slot.late]
        return HeaderResult(count, in_use[::-1], newest_first)

    def _newest_first(self) -> list[Optimizer | None]:
        """Return the optimizers, the newest first; None for an optimizer that was freed."""
        return [reference() for reference in reversed(self._optimizers)]

    # --- rounds ---------------------------------------------------------------------------------

    def _enter_at_step(self, rounds: Rounds, only_rounds_of_others: bool = False) -> None:
        """Enter rounds at a step, until all ranks are at a step.

        Args:
            rounds: the rounds of the optimizer at whose step this rank is.
            only_rounds_of_others: do not begin a round when no rank is in a backward pass.
        """
        while True:
            entry = self.send((), late=rounds)
            result = self._wait(entry)
            try:
                if not result.in_pass:
                    self._complete_at_step(rounds, entry, result, only_rounds_of_others)
                    return
                # Ranks in a backward pass may make further passes before they reach their step.
                self._complete_rounds(entry, result)
            finally:
                result.rejoin()

    def _complete_at_step(
        self, rounds: Rounds, entry: Entry, result: HeaderResult, without_round: bool
    ) -> None:
        """Reduce what no pass has reduced, when all ranks are at a step."""
        own, slot = result.slots[0] if len(result.slots) == 1 else (None, Slot())
        if own is rounds and slot.unreduced and slot.needs_plan(result.count):
            # The error of `make_plan` names the first difference between ranks.
            rounds.make_plan()
        # Without a round in this step, gradients differ only if the script has written them.
        first = rounds.position.rounds == 0
        if own is not rounds or slot.is_void(result.count, written=first):
            raise self._make_error(entry, result)
        if without_round:
            return
        written = not slot.same_content(result.count)
        if written:
            rounds.gradients.make_written_local(result.count)
        names = rounds.gradients.nonfinite()
        if slot.unreduced or written:
            if not rounds.planned:
                rounds.make_plan()
            if not slot.outdated:
                rounds.send()
            rounds.complete(bool(slot.outdated), bool(slot.sparse))
        else:
            rounds.compare_without_round()
        self._judge_nonfinite(rounds, names, slot, result)

    def _complete_rounds(self, entry: Entry, result: HeaderResult) -> None:
        """Complete the rounds of all optimizers that a backward pass has reached on any rank.

        After an error in one round, complete the other rounds before raising it, because other
        ranks wait in them.
        """
        errors: dict[Rounds | None, Exception] = {}

        def attempt(rounds: Rounds, call: Callable[..., None], *arguments: Any) -> None:
            try:
                call(*arguments)
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
        # A late rank cannot know whether other ranks make further passes before their step.
        any_late = any(slot.late for _, slot in result.slots)
        for rounds, slot in running:
            if not slot.outdated:
                attempt(rounds, rounds.send)
        # The first round allocates the buckets, so this is where memory may be lacking.
        if any(slot.unplanned for _, slot in result.in_pass):
            self._check_sent(running, errors, result.count)
        names = {rounds: rounds.gradients.nonfinite() for rounds, _ in running}
        for rounds, slot in running:
            if rounds not in errors:
                attempt(rounds, rounds.complete, bool(slot.outdated), bool(slot.sparse))
        for rounds, slot in running:
            if rounds not in errors:
                attempt(rounds, self._judge_nonfinite, rounds, names[rounds], slot, result)
        for rounds, _ in result.slots:
            if rounds and any_late:
                rounds.position = rounds.position.after_late_rank()
        if errors:
            _raise_first(errors)

    def _check_sent(
        self,
        running: Sequence[tuple[Rounds, Slot]],
        errors: dict[Rounds | None, Exception],
        count: int,
    ) -> None:
        """Check that all ranks have packed the first buckets of a new plan. A collective.

        Args:
            running: the optimizers whose rounds have begun, and their slots.
            errors: this rank's errors in them.
            count: the number of ranks.

        Raises:
            BackwardFailed: on every rank but those that could not pack a bucket, which raise their
                own error.
        """
        broken = [rounds for rounds, _ in running if rounds in errors]
        (failed,) = self._collectives.sum([int(bool(broken))], "hvdkit.rounds.sent")
        if not failed:
            return
        for rounds, slot in running:
            if not slot.outdated:
                rounds.abandon(rounds.plans_made)
        error = BackwardFailed(
            f"{failed} of {count} ranks could not pack gradients into buckets, for instance for "
            f"lack of memory, so no rank can use the gradients. Call optimizer.drop_pass() on "
            f"every rank to continue."
        )
        self._reset([rounds for rounds, _ in running], True, error)
        _raise_first({rounds: errors[rounds] for rounds in broken} or {None: error})

    # --- errors ---------------------------------------------------------------------------------

    def _make_error(self, entry: Entry, result: HeaderResult) -> HvdkitError:
        """Return the error for rounds that cannot be used, the same on every rank. A collective."""
        # Ranks have sent buckets, which must not stay in flight.
        sent = [(r, slot) for r, slot in result.in_pass if r and slot.present == result.count]
        plans = [rounds.plans_made for rounds, _ in sent]
        if any(slot.unplanned for _, slot in sent):
            fewest = self._collectives.max(
                [_MAX_SYNCHRONIZERS - n for n in plans], "hvdkit.rounds.plans"
            )
            plans = [_MAX_SYNCHRONIZERS - n for n in fewest]
        for (rounds, _), plan in zip(sent, plans, strict=True):
            rounds.abandon(plan)
        joined = len(self._collectives.ranks) - result.count
        if joined:
            # Ranks in `join` take part in sums only.
            details = f"{joined} ranks have called join(), so details of each rank are unknown"
        else:
            own = self._text(entry, [rounds for rounds, _ in result.slots])
            details = ". ".join(group_by_text(self._collectives, own, "hvdkit.rounds.who"))
        error = error_of(result, details)
        # Ranks that are in different steps may have different parameters.
        same_step = any(slot.failed for _, slot in result.slots) and result.same_position
        self._reset([rounds for rounds, _ in result.slots], same_step, error)
        return error

    def _text(self, entry: Entry, optimizers: Sequence[Rounds | None]) -> str:
        """Return a text about the step and round of this rank for each of the optimizers."""
        oldest_first = [each and each.reducer.rounds for each in self._newest_first()[::-1]]
        return "; ".join(
            entry.describe(rounds, oldest_first, len(optimizers) > 1) for rounds in optimizers
        )

    def _judge_nonfinite(
        self, rounds: Rounds, names: list[str], slot: Slot, result: HeaderResult
    ) -> None:
        """Raise an error for gradients that are not finite, or decide whether to skip the step.

        A collective if there are some: `slot` is the same on all ranks.

        Args:
            rounds: the rounds of the optimizer.
            names: the names of this rank's gradients that are not finite.
            slot: the sums of the optimizer's slots.
            result: the sums of the header.

        Raises:
            NonFiniteGradients: on every rank.
        """
        skipped, skips = rounds.position.skips_step, bool(slot.nonfinite)
        if skips and not skipped:
            text = describe(self._collectives, names, slot.nonfinite, result.count)
            advice = "Call optimizer.zero_grad() to continue."
            try:
                raise_or_log(self._collectives, rounds.on_nonfinite, text, advice)
            except NonFiniteGradients as error:
                self._reset([rounds], True, error)
                raise
        if skips != skipped:
            rounds.position = rounds.position.with_step_skipped(skips)

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
