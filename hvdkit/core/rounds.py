"""Reduction rounds: how the ranks of an optimizer stay in step with each other.

In a round every rank sends every bucket of an optimizer once. A rank enters a round at the end of
each backward pass that it is to reduce. A rank that made no such pass in a step enters the rounds
of the others when it reaches its step (`catch_up`), with zeros.

Each round carries a header: one small sum of integers beside the buckets. From it all ranks learn
the same things: whether all are in the same step and round, whether their parameters need the same
gradients, who has come late, whose backward pass has failed. Names of collectives are the same in
every round, so Horovod's cache of responses serves all of them. A rank that is still in user code
cannot be told from a slow one: for it the stall limit applies.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdkit.core.accumulation import PassesDiffer, Window
from hvdkit.core.collectives import Collectives
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.errors import HvdkitError

Synchronizers = Sequence[Synchronizer[Any, Any]]


class BackwardFailed(HvdkitError):
    """The backward pass of a rank has raised; the round that it was part of is void."""


class GradientsChanged(HvdkitError):
    """Some ranks changed reduced gradients before others had taken part in the reduction."""


class LocalGradients(Protocol):
    """This rank's gradients, as far as rounds need to know them. An adapter implements it."""

    def signature(self, assigned: bool) -> Sequence[object]:
        """Return what must be equal on all ranks in a round, such as `requires_grad`.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def explain(self) -> str:
        """Return the signature in words."""
        ...

    def has_new(self, assigned: bool) -> bool:
        """Return whether a gradient has been added to that has not been reduced since.

        Args:
            assigned: a gradient that the user has assigned counts as well.
        """
        ...

    def changed(self) -> bool:
        """Return whether a gradient differs from what the last round left."""
        ...

    def moved(self) -> bool:
        """Return whether parameters have another dtype or device than the buckets."""
        ...

    def replan(self) -> None:
        """Make new synchronizers for the parameters as they are now. Not a collective."""
        ...

    def adopt(self) -> bool:
        """Make a synchronizer for parameters that need gradients and have none; tell if so."""
        ...

    def are_equal(self) -> bool:
        """Return whether the gradients are the same bits on all ranks. A collective."""
        ...

    def count_changed_as_new(self) -> None:
        """Take gradients that the script has written in place for new ones."""
        ...

    def begin_round(self, assigned: bool) -> None:
        """Leave in each gradient only what has been added since its last reduction.

        Args:
            assigned: a gradient that the user has assigned is to be reduced; otherwise it stands
                for one that has been reduced.
        """
        ...

    def end_round(self) -> None:
        """Add the reduced gradients to those that `begin_round` kept apart."""
        ...

    def end_step(self) -> None:
        """Take the gradients as they are now, which a step has used, for reduced ones."""
        ...

    def is_sparse(self) -> bool:
        """Return whether a gradient is sparse whose bucket is dense."""
        ...

    def make_sparse(self) -> None:
        """Make those gradients sparse on every rank, and plan them so. A collective."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`: the reduction of a single rank."""
        ...

    def discard(self) -> None:
        """Forget what has been kept apart and added."""
        ...

    def used(self) -> Sequence[int]:
        """Return 1 for each parameter that has a gradient, else 0; nothing if nobody asks."""
        ...

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients whose entry is 0."""
        ...


@dataclass(frozen=True)
class _Header:
    """The sums of a round's header over the ranks.

    Attributes:
        count: ranks that have not joined.
        equal: whether all of them are in the same round and have the same signature.
        in_pass: ranks that send buckets.
        new: ranks with gradients that are not reduced.
        changed: ranks whose reduced gradients have been changed.
        failed: ranks whose backward pass has raised.
        moved: ranks whose parameters have another dtype or device than the buckets.
        sparse: ranks with a sparse gradient in a dense bucket.
        used: for each parameter, the ranks that have used it.
    """

    count: int
    equal: bool
    in_pass: int
    new: int
    changed: int
    failed: int
    moved: int
    sparse: int
    used: Sequence[int]

    @property
    def void(self) -> bool:
        """Whether the round cannot be used, on any rank."""
        return not self.equal or self.failed > 0 or 0 < self.moved < self.count


@dataclass(frozen=True)
class _Own:
    """Where this rank was when it sent the last header."""

    step: int
    number: int
    passes: int
    late: bool
    in_pass: bool
    failed: bool


class Rounds:
    """Enters one optimizer's rounds.

    Args:
        collectives: of the ranks to reduce over.
        gradients: this rank's.
        synchronizers: the optimizer's, a list that `gradients` extends.
        window: the accumulation window.
        compare: called once, when the ranks have agreed for the first time, to compare more; it
            may raise, on every rank. All ranks give it, or none.
    """

    def __init__(
        self,
        collectives: Collectives,
        gradients: LocalGradients,
        synchronizers: Synchronizers,
        window: Window,
        compare: Callable[[], None] | None = None,
    ) -> None:
        self._collectives = collectives
        self._gradients = gradients
        self._synchronizers = synchronizers
        self._window = window
        self._compare = compare
        self._compared = False
        self._generation: int | None = None
        self._step = 0
        self._number = 0
        self._caught_up = False
        self._latecomers = False
        self._header: Callable[[], list[int]] | None = None
        self._own: _Own | None = None

    @property
    def caught_up(self) -> bool:
        """Whether this rank has taken part in a round since its last step."""
        return self._caught_up

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on the buckets."""
        return all(synchronizer.agreed for synchronizer in self._synchronizers)

    @property
    def moved(self) -> bool:
        """Whether parameters have another dtype or device than the buckets agreed on."""
        return self.agreed and not self._collectives.alone and self._gradients.moved()

    def end_step(self) -> None:
        """Record that the optimizer has made a step."""
        if not self._collectives.alone:
            self._gradients.end_step()
        self._step += 1
        self._number = 0
        self._caught_up = self._latecomers = False

    def send(self, failed: bool = False) -> None:
        """Enter a round after a backward pass, and start all that it takes; `wait` completes it.

        Args:
            failed: the pass has raised, so its gradients are not to be used.

        Raises:
            RanksDisagree: on every rank, when they are to reduce different things.
        """
        if self._collectives.alone:
            return
        moved = self.moved
        self._agree()
        self._gradients.begin_round(not self._caught_up)
        self._start_header(in_pass=True, failed=failed, moved=moved)
        # Parameters that have moved do not fit the buckets: nothing was sent during the pass.
        if not moved:
            self._send_buckets()

    def wait(self) -> None:
        """Complete the round that `send` has begun; afterwards every gradient is final.

        Raises:
            PassesDiffer: on every rank, when ranks are in different rounds.
            BackwardFailed: on every rank, when the pass of a rank has raised.
        """
        if self._collectives.alone:
            self._reduce_alone()
            return
        header = self._finish_header()
        if header.void:
            self._wait_for_buckets()
            self._raise(header)
        self._complete(header)
        if self._latecomers and header.changed:
            self._raise_changed(header)
        self._latecomers |= header.in_pass < header.count

    def catch_up(self) -> None:
        """Make all gradients final before they are used, whatever passes this rank has made.

        A collective where this rank made no pass since the last step, where another rank came
        late to a round of this step, or where gradients have been added to since. Otherwise
        nothing happens.

        Raises:
            PassesDiffer, BackwardFailed: see `wait`.
            GradientsChanged: on every rank, see there.
        """
        if self._collectives.alone:
            # Without a window gradients are left as PyTorch makes them.
            if self._window.size > 1 and self._gradients.has_new(assigned=False):
                self._reduce_alone()
            return
        new = self._gradients.has_new(assigned=not self._caught_up)
        if self._caught_up and not self._latecomers and not new:
            return
        self._enter_late()
        self._latecomers = False
        self._caught_up = True

    def flush(self) -> bool:
        """End an accumulation window early; return whether it has any passes. A collective.

        Raises:
            PassesDiffer: on every rank, when they have accumulated different numbers of passes.
        """
        if not self._collectives.alone:
            self._enter_late(only_rounds_of_others=True)
        return self._window.end_early()

    def _enter_late(self, only_rounds_of_others: bool = False) -> None:
        """Enter rounds outside of a backward pass, until all ranks are here.

        Args:
            only_rounds_of_others: do not begin a round where no rank is in a backward pass.
        """
        while True:
            late = self._latecomers
            moved = self.moved
            self._agree()
            self._start_header(in_pass=False, failed=False, moved=moved)
            header = self._finish_header()
            # No rank has made a pass since its last step, and gradients are not as that left them.
            # Where the header is void, ranks may be in different places and answer differently.
            written = header.changed and not (
                header.void or header.in_pass or header.new or self._caught_up
            )
            written = written and not self._gradients.are_equal()
            if written and header.changed < header.count:
                self._raise_changed(header)
            if written:
                self._gradients.count_changed_as_new()
            own_round = header.new or written
            has_round = header.in_pass or (own_round and not only_rounds_of_others)
            if has_round:
                self._gradients.begin_round(not self._caught_up)
            if header.void:
                if header.in_pass:
                    # Others have sent their buckets, which must not stay in flight.
                    self._wait_for_buckets()
                self._raise(header)
            if has_round:
                self._complete(header)
            if late and header.changed:
                self._raise_changed(header)
            if not header.in_pass:
                return
            # The others do not wait here yet: they may make another pass.
            self._latecomers = True

    def settle(self) -> None:
        """Wait for what wire formats have deferred to the next round."""
        for synchronizer in self._synchronizers:
            synchronizer.settle()

    # --- inside a round -------------------------------------------------------------------------

    def _agree(self) -> None:
        if self.agreed:
            return
        if self._gradients.moved():
            self._gradients.replan()
        for synchronizer in self._synchronizers:
            if not synchronizer.agreed:
                synchronizer.agree()
        if self._compare is not None:
            # A rank that had joined before its first step was not there when the others compared.
            (compared,) = self._collectives.max([int(self._compared)], "hvdkit.rounds.compared")
            try:
                if not compared:
                    self._compare()
            except BaseException:
                self._compare_again()
                raise
            self._compared = True
        if self._generation != self._collectives.generation:
            # All ranks are here, whatever they counted before `init` or `join`.
            self._generation = self._collectives.generation
            self._step = self._number = 0
            self._caught_up = self._latecomers = False

    def _send_buckets(self) -> None:
        for synchronizer in self._synchronizers:
            synchronizer.send()

    def _wait_for_buckets(self) -> None:
        """Complete all buckets, those that have not been sent included."""
        for synchronizer in self._synchronizers:
            synchronizer.wait()

    def _complete(self, header: _Header) -> None:
        if header.moved:
            self._gradients.replan()
            for synchronizer in self._synchronizers:
                synchronizer.agree()
            self._send_buckets()
        self._wait_for_buckets()
        known = len(self._synchronizers)
        if self._gradients.adopt():
            for synchronizer in self._synchronizers[known:]:
                synchronizer.synchronize()
        if header.sparse:
            self._gradients.make_sparse()
        if header.used:
            self._gradients.drop_unused(header.used)
        self._gradients.end_round()
        self._caught_up = True

    def _reduce_alone(self) -> None:
        self._gradients.begin_round(not self._caught_up)
        if self._window.divisor != 1:
            self._gradients.scale(1.0 / self._window.divisor)
        self._gradients.end_round()
        self._caught_up = True

    # --- the header -----------------------------------------------------------------------------

    def _start_header(self, in_pass: bool, failed: bool, moved: bool) -> None:
        gradients = self._gradients
        new_if_assigned = not self._caught_up
        place = (self._step, self._number, self._window.passes, self._latecomers)
        self._number += 1
        # Few enough bits that the sum of squares over 30,000 ranks fits into 64.
        digest = (
            zlib.crc32(repr((*place, *gradients.signature(new_if_assigned))).encode()) & 0xFFFFFF
        )
        flags = (
            True,
            in_pass,
            not in_pass and gradients.has_new(new_if_assigned),
            # Of interest only where a rank has come late, or has made no pass since its last step.
            (self._latecomers or not (in_pass or self._caught_up)) and gradients.changed(),
            failed,
            moved,
            gradients.is_sparse(),
        )
        self._own = _Own(*place, in_pass, failed)
        values = [*map(int, flags), digest, digest * digest, *gradients.used()]
        name = f"{self._synchronizers[0].name}.header"
        self._header = self._collectives.start_sum(values, name)

    def _finish_header(self) -> _Header:
        assert self._header is not None
        header, self._header = self._header, None
        count, in_pass, new, changed, failed, moved, sparse, digest, squares, *used = header()
        equal = count * squares == digest * digest
        return _Header(count, equal, in_pass, new, changed, failed, moved, sparse, used)

    def _raise(self, header: _Header) -> None:
        """Raise the error of a header, the same on every rank. A collective."""
        own = self._own
        assert own is not None
        joined = len(self._collectives.ranks) - header.count
        told: list[str] = []
        if not joined:
            place = "in a backward pass" if own.in_pass else "at its step"
            mine = (
                f"step {own.step + 1}, reduction {own.number + 1}, {place}"
                + (", which raised" if own.failed else "")
                + (f", pass {own.passes} of its window" if own.passes else "")
                + f"; {self._gradients.explain()}"
            )
            everyone = self._collectives.allgather(mine.encode(), "hvdkit.rounds.who")
            holders: dict[str, list[int]] = {}
            for rank, said in zip(self._collectives.ranks, everyone, strict=True):
                holders.setdefault(said.decode(), []).append(rank)
            told = [
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {said}"
                for said, ranks in holders.items()
            ]
        self._reset()
        if not header.failed:
            # Ranks that are in different steps may have different parameters.
            self._compare_again()
        who = ". ".join(told) or f"{joined} ranks have called join(), so who did what is not known"
        if header.failed:
            raise BackwardFailed(
                f"the backward pass raised on {header.failed} of {header.count} ranks, so no rank "
                f"can use its gradients. {who}. Call optimizer.zero_grad() on every rank to go on."
            )
        raise PassesDiffer(
            f"ranks are not in the same step, or differ in the gradients that they need. {who}. "
            f"Give all ranks the same number of batches (hvd.join() ends an uneven epoch), call "
            f"step(), zero_grad() and requires_grad_() on all ranks alike, and then "
            f"optimizer.zero_grad() to go on."
        )

    def _compare_again(self) -> None:
        """Let the next round begin with an agreement, the parameters' values included."""
        self._compared = False
        for synchronizer in self._synchronizers:
            synchronizer.forget()

    def _raise_changed(self, header: _Header) -> None:
        self._reset()
        self._compare_again()
        raise GradientsChanged(
            f"on {header.changed} of {header.count} ranks gradients were changed after "
            f"loss.backward(), and another rank made no backward pass, so that its gradients came "
            f"too late for that change. Where a rank may skip the backward pass, call "
            f"hvd.clip_grad_norm_(optimizer, ...) or optimizer.synchronize() on every rank before "
            f"changing gradients. Call optimizer.zero_grad() to go on."
        )

    def _reset(self) -> None:
        self._gradients.discard()
        self._step = self._number = 0
        self._caught_up = self._latecomers = False
