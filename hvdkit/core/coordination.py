"""Coordination of optimizers: keep the ranks in the same step and reduction round.

The adapter for PyTorch calls a `Coordinator` at the end of a backward pass and in the optimizer's
`step()`.

At the end of each backward pass that reduces gradients, the ranks exchange a header
(`hvdkit.core.headers`). Usually the header shows that all ranks are at the same point. Then the
ranks complete the buckets, which are already in flight.

Otherwise every rank takes part in the round of each optimizer that has gradients on any rank. A
missing gradient counts as zeros.

The other ranks cannot distinguish a slow rank from a rank that never enters the round. If they wait
too long, Horovod's stall limit ends the job.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import group_by_text
from hvdkit.core.headers import Entry, HeaderResult, Headers, Optimizer, Slot
from hvdkit.core.nonfinite import RAISE, NonFiniteGradients, describe
from hvdkit.core.rounds import Rounds
from hvdkit.core.stragglers import UPDATE, WAIT, StepTimes, StragglerReport
from hvdkit.errors import HvdkitError

_log = logging.getLogger("hvdkit")


class BackwardFailed(HvdkitError):
    """The backward pass of a rank raised, so no rank can use the gradients of this round."""


class GradientsChanged(HvdkitError):
    """Gradients that should be equal on all ranks were changed, and may differ."""


# Larger than `Rounds.plans_made` can be. It turns a minimum into a maximum.
_MAX_SYNCHRONIZERS = 1 << 30

#: Hold this lock while entering rounds. Otherwise two threads could send headers of the same name.
entry_lock = threading.RLock()


class Coordinator:
    """Keep the optimizers of one process set in the same step on all ranks.

    Args:
        collectives: the collectives of the process set.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._headers = Headers(collectives)
        #: The time that this rank spends in each section of its steps.
        self.times = StepTimes()
        #: Compares these times between ranks.
        self.stragglers = StragglerReport(collectives, self.times)

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer, and keep a weak reference to it.

        Every rank adds the same optimizers in the same order.
        """
        self._headers.add(optimizer)

    def send(self, passed: Sequence[Rounds], failed: Sequence[Rounds] = ()) -> Entry:
        """Enter the rounds of a backward pass: start the header and the buckets.

        Args:
            passed: the optimizers that the pass has reached, in the order of creation.
            failed: those of `passed` whose pass raised; their gradients are not used.

        Returns:
            The entry, for `wait`.

        Raises:
            Exception: a bucket cannot be packed. Other ranks wait for these rounds, so call `send`
                again with all of `passed` as `failed`.
        """
        if self._collectives.single_rank:
            return Entry(passed, failed)
        with _invalidating(passed):
            return self._headers.send(passed, failed, None)

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
            if entry.failed:
                error = BackwardFailed("a backward pass of this step was dropped")
                self._reset(entry.passed, True, error)
                raise error
            for rounds in entry.passed:
                rounds.reduce_locally()
            return
        with self._waiting():
            with _invalidating(entry.passed):
                result = self._headers.wait(entry)
            self._complete_rounds(entry, result)

    def reduce_at_step(self, rounds: Rounds) -> None:
        """Reduce all gradients of an optimizer before its step.

        This call is a collective if
        - this rank has taken part in no round since the last step, or the script has removed the
          gradients of the last round;
        - a rank was late in a round of this step (see `hvdkit.core.headers`); or
        - gradients were added since the last round, or may have been added under `no_sync`.

        Otherwise all gradients are reduced already, and the call returns at once.

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
            # The script has removed the gradients of the last round: this step needs a new round.
            rounds.participated = rounds.skips_step = False
        reduced = rounds.participated and not rounds.has_late_ranks and not rounds.no_sync_used
        if reduced and not rounds.has_unreduced:
            return
        with self._waiting(), _invalidating([rounds]):
            self._enter_at_step(rounds)
        rounds.has_late_ranks = False
        rounds.participated = True

    def enter_rounds_of_others(self, rounds: Rounds) -> None:
        """Take part in the rounds of other ranks until no rank is in a backward pass.

        A collective: every rank calls it for the same optimizer, before an accumulation window ends
        early.

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
            entry = self._headers.send((), (), rounds)
            result = self._headers.wait(entry)
            if result.in_pass:
                # Ranks in a backward pass may make further passes before they reach their step.
                self._complete_rounds(entry, result)
                continue
            own, slot = result.slots[0] if len(result.slots) == 1 else (None, Slot())
            if own is rounds and slot.unreduced and slot.needs_plan(result.count):
                # The error of `make_plan` names the first difference between ranks.
                rounds.make_plan()
            if own is not rounds or slot.is_void(result.count):
                raise self._make_error(entry, result)
            if only_rounds_of_others:
                return
            written = self._was_written(rounds, slot, result.count)
            if slot.unreduced or written:
                rounds.begin()
                if not rounds.planned:
                    rounds.make_plan()
                if not slot.outdated:
                    rounds.send()
                names = rounds.gradients.nonfinite()
                rounds.complete(bool(slot.outdated), bool(slot.sparse))
                if slot.nonfinite:
                    self._report_nonfinite(rounds, names, slot, result)
            else:
                rounds.compare_without_round()
            return

    def _was_written(self, rounds: Rounds, slot: Slot, count: int) -> bool:
        """Return whether the script has written gradients that the step must reduce. A collective.

        Mark these gradients as unreduced. Compare contents, because flags do not show a write
        through `p.grad.data`.

        Args:
            rounds: the rounds of the optimizer at whose step all ranks are.
            slot: the sums of the optimizer's slots.
            count: the number of ranks.

        Raises:
            GradientsChanged: on every rank, when only some ranks have written gradients, or when
                reduced gradients were changed before all ranks had them.
        """
        # After a round of this step without late ranks, all ranks may change their gradients.
        if slot.reduced and not rounds.has_late_ranks:
            return False
        if not slot.changed and (not slot.held or rounds.are_equal()):
            return False
        if slot.reduced or 0 < slot.written < count:
            self._raise_changed([rounds], slot.changed or slot.written, count)
        rounds.gradients.mark_changed_unreduced()
        return True

    def _complete_rounds(self, entry: Entry, result: HeaderResult) -> None:
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
        changed = written = 0
        # A late rank cannot know whether other ranks make further passes before their step.
        any_late = any(slot.late for _, slot in result.slots)
        for rounds, slot in running:
            if rounds not in entry.passed:
                rounds.begin()
            # Ranks that are neither in a pass nor late did not expect this round.
            unexpected = slot.in_pass + slot.late < result.count
            if slot.changed and (rounds.has_late_ranks or unexpected):
                comparable = slot.changed == result.count or not rounds.has_late_ranks
                equal = comparable and rounds.are_equal()
                changed = max(changed, 0 if equal else slot.changed)
            # The pass adds to what the script has written, and nothing has reduced that.
            if slot.written and not rounds.are_equal():
                written = max(written, slot.written)
            if not slot.outdated:
                attempt(rounds, rounds.send)
        # The first round allocates the buckets, so this is where memory may be lacking.
        if any(slot.unplanned for _, slot in result.in_pass):
            self._check_sent(running, errors, result.count)
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
        if written:
            error = GradientsChanged(
                f"on {written} of {result.count} ranks the gradients of the last step were changed "
                f"before loss.backward(), and now differ between ranks. To add gradients of each "
                f"rank to those of a pass, call optimizer.zero_grad() or assign them (p.grad = "
                f"...). Call optimizer.zero_grad() to continue."
            )
            self._reset([each for each, _ in running], True, error)
            raise error

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
        for (rounds, slot), plan in zip(sent, plans, strict=True):
            if rounds not in entry.passed and not slot.busy:
                rounds.begin()
            rounds.abandon(plan)
        joined = len(self._collectives.ranks) - result.count
        if joined:
            # Ranks in `join` take part in sums only.
            details = f"{joined} ranks have called join(), so details of each rank are unknown"
        else:
            own = self._headers.describe(entry, [rounds for rounds, _ in result.slots])
            details = ". ".join(group_by_text(self._collectives, own, "hvdkit.rounds.who"))
        failed = max(slot.failed for _, slot in result.slots)
        if failed:
            error: HvdkitError = BackwardFailed(
                f"the backward pass raised on {failed} of {result.count} ranks, so no rank can use "
                f"its gradients. {details}. Call optimizer.drop_pass() on every rank to continue."
            )
        elif any(slot.present < result.count for _, slot in result.slots):
            error = PassesDiffer(
                f"ranks have wrapped different numbers of optimizers. {details}. Call "
                f"hvd.DistributedOptimizer equally often on all ranks, then optimizer.zero_grad() "
                f"to continue."
            )
        elif any(slot.busy for _, slot in result.slots):
            error = PassesDiffer(
                f"the gradients of an optimizer are reduced while a backward pass in another "
                f"thread adds to them. {details}. Train in one thread of each process."
            )
        else:
            error = PassesDiffer(
                f"ranks are not in the same step, or different parameters need gradients "
                f"(requires_grad). {details}. Give all ranks the same number of batches "
                f"(hvd.join() ends an uneven epoch). Call step(), zero_grad() and "
                f"requires_grad_() on all ranks alike. Then call optimizer.zero_grad() to continue."
            )
        # Ranks that are in different steps may have different parameters.
        same_step = failed and not any(0 < each.reduced < result.count for _, each in result.slots)
        self._reset([rounds for rounds, _ in result.slots], bool(same_step), error)
        return error

    def _report_nonfinite(
        self, rounds: Rounds, names: list[str], slot: Slot, result: HeaderResult
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
        # No flag shows a write through `p.grad.data`.
        where = f"{changed} of {count}" if changed else "some"
        error = GradientsChanged(
            f"on {where} ranks gradients were changed after loss.backward(), but "
            f"another rank had made no backward pass, or only passes under hvd.no_sync, so these "
            f"gradients were not final. If a rank may do so, call hvd.clip_grad_norm_(optimizer, "
            f"...) or optimizer.synchronize() on every rank before changing gradients. Call "
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
