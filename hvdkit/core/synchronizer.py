"""The gradient synchronizer: which buckets to reduce, and when. One for all frameworks.

It works in rounds. In a round every rank reduces every bucket once:

    mark_ready(i) ...   during the backward pass; a bucket that is full is sent at the next arrival
    send()              start the buckets that have not started
    wait()              wait for all of them; afterwards every gradient is the reduced one

`hvdkit.core.rounds` decides when there is a round. No decision that a collective depends on is
taken from data that only one rank has. What the ranks reduce is compared before the first bucket.
The order in which their first backward pass went is averaged, and the buckets follow from it.
Buckets may be reduced in any order, because Horovod pairs them up by name.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic

from hvdkit.core import bucketing
from hvdkit.core.accumulation import Window
from hvdkit.core.backend import Backend, BucketMemory, Buffer, Handle
from hvdkit.core.bucketing import Bucket, BucketPlan, ParameterSpec
from hvdkit.core.collectives import Collectives
from hvdkit.core.compression import (
    Channel,
    Division,
    Gather,
    Largest,
    Peak,
    Request,
    Sum,
    Travel,
    decided,
)
from hvdkit.core.reduction import AgreedBuckets, Reduction, ReductionState, agree_on_buckets
from hvdkit.errors import HvdkitError

# Buckets that `wait` itself sends ahead of the one that it waits for.
_IN_FLIGHT = 4


@dataclass
class _BucketReduction(Generic[Handle]):
    """One bucket's pack, collectives and unpack in one round, and how far they are."""

    steps: Travel
    name: str
    request: Request | None = None
    handle: Handle | None = None
    collectives: int = 0


@dataclass
class _Round(Generic[Handle]):
    """The state of the current round.

    Attributes:
        generation: that of the collectives when the round began.
        missing: for each bucket, its parameters whose gradients have not arrived.
        arrived: the parameters whose gradients have arrived, in that order.
        full: buckets whose last gradient has arrived, with the thread in which it did.
        reductions: bucket index -> its reduction, once it has started.
    """

    generation: int
    missing: list[int]
    arrived: dict[int, None] = field(default_factory=dict)
    full: list[tuple[int, Bucket]] = field(default_factory=list)
    reductions: dict[int, _BucketReduction[Handle]] = field(default_factory=dict)


class Synchronizer(Generic[Buffer, Handle]):
    """Reduces gradients over the ranks of a process set.

    Args:
        specs: of the parameters, in the order of the forward pass.
        backend: the framework.
        collectives: of the same process set as the backend's.
        reduction: how to reduce the gradients.
        window: the accumulation window that the rounds belong to.
        context: further lines that must be the same on every rank; errors show them first.

    Raises:
        UsageError: the specs or settings make no sense; nothing has been communicated.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        backend: Backend[Buffer, Handle],
        collectives: Collectives,
        reduction: Reduction,
        window: Window | None = None,
        context: Sequence[str] = (),
    ) -> None:
        bucketing.check(specs, reduction.bucket_bytes)
        self._specs = tuple(specs)
        self._backend = backend
        self._collectives = collectives
        self._reduction = reduction
        self._window = window or Window(1)
        self._context = tuple(context)
        # Gradients on several devices arrive in a thread each.
        self._lock = threading.RLock()
        self._agreed: int | None = None
        self._plan: BucketPlan | None = None
        self._name = ""
        self._memory: list[BucketMemory[Buffer]] = []
        self._channels: Sequence[Channel] = ()
        self._buckets: AgreedBuckets | None = None
        self._resumed: ReductionState | None = None
        # Of which generation, which reductions wait, and for what.
        self._deferred: (
            tuple[int, list[_BucketReduction[Handle]], Callable[[], list[int]]] | None
        ) = None
        self._begin_round()

    @property
    def specs(self) -> Sequence[ParameterSpec]:
        """The parameters."""
        return self._specs

    @property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on the buckets since the last `init` and `join`."""
        return self._agreed == self._collectives.generation

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets, once the ranks have agreed on them."""
        return self._plan

    @property
    def name(self) -> str:
        """The prefix of the buckets' names; empty before the ranks have agreed."""
        return self._name

    @property
    def state(self) -> ReductionState | None:
        """State needed to resume with bit-identical sums; None before the first round."""
        self.settle()
        if self._resumed is not None or self._buckets is None:
            return self._resumed
        return self._buckets.state

    def resume(self, state: ReductionState | None) -> None:
        """Restore a state: the next agreement makes the same plan and the same scales.

        A state of other gradients is ignored.

        Args:
            state: a value of the property `state`, the same on every rank.
        """
        self._resumed = state
        self.forget()

    def forget(self) -> None:
        """Void the agreement, the same way on every rank: the next round begins with a new one."""
        self._agreed = None
        self._begin_round()

    def mark_ready(self, i: int) -> None:
        """Record that the gradient of parameter `i` has arrived in this round.

        A bucket is packed when a later gradient arrives, and not with its last one: hooks of the
        user that run after ours may still change that.

        Raises:
            HvdkitError: the gradient is in a bucket that has started.
        """
        with self._lock:
            if self._round.generation != self._collectives.generation:
                # The end of Horovod has interrupted it.
                self._begin_round()
            current = self._round
            if i in current.arrived:
                plan = self._plan
                if plan is not None and plan.bucket_of[i] in current.reductions:
                    raise HvdkitError(self._arrived_late(i))
                return
            current.arrived[i] = None
            # Before the ranks have agreed nothing is reduced: a bucket that only some of them
            # have would stay in flight.
            if self._plan is None or not self.agreed:
                return
            thread = threading.get_ident()
            for entry in [entry for entry in current.full if entry[0] == thread]:
                current.full.remove(entry)
                self._start(entry[1])
            bucket = self._plan.buckets[self._plan.bucket_of[i]]
            current.missing[bucket.index] -= 1
            if not current.missing[bucket.index]:
                current.full.append((thread, bucket))

    def agree(self) -> None:
        """Compare with the other ranks what to reduce, and plan the buckets. A collective.

        Raises:
            RanksDisagree: on every rank, when their parameters or settings differ.
        """
        dense = self._reduction.sparse_as_dense
        buckets = agree_on_buckets(
            self._collectives,
            self._specs,
            self._reduction,
            self._window.size if self._window.mean else 1,
            [0 if dense else self._backend.sparse_dims(i) for i in range(len(self._specs))],
            self._agree_on_order,
            self._context,
            self._resumed,
        )
        self._resumed = None
        # It belongs to the plan before, and fails where Horovod was shut down in between.
        with suppress(Exception):
            self.settle()
        self._buckets = buckets
        self._plan, self._name, self._channels = buckets.plan, buckets.name, buckets.channels
        self._memory = [self._backend.memory(bucket) for bucket in self._plan.buckets]
        self._agreed = self._collectives.generation
        self._begin_round()

    def send(self) -> None:
        """Start the buckets that have not started, a few at most; `wait` starts the others.

        A gradient that does not exist counts as zeros, so ranks may use different parts of the
        model. The ranks have agreed before.
        """
        with self._lock:
            assert self._plan is not None
            self._round.full.clear()
            left = [b for b in self._plan.buckets if b.index not in self._round.reductions]
            for bucket in left[:_IN_FLIGHT]:
                self._start(bucket)

    def wait(self) -> None:
        """Wait for every bucket and unpack it. A collective, to which `send` belongs."""
        try:
            self._finish()
        except BaseException:
            # Collectives may still write into the buffers: they keep those, and the next
            # agreement makes new ones.
            self._agreed = None
            raise
        finally:
            self._begin_round()

    def synchronize(self) -> None:
        """Reduce every gradient: `agree` where that is due, `send`, `wait`. A collective.

        Raises:
            RanksDisagree: see `agree`.
        """
        if not self.agreed:
            self.agree()
        self.send()
        self.wait()

    def settle(self) -> None:
        """Wait for what the formats learn from the last round. Every rank has started it."""
        if self._deferred is None:
            return
        generation, waiting, result = self._deferred
        self._deferred = None
        if generation != self._collectives.generation:
            return  # Horovod has ended since, and with it the collective
        for reduction, value in zip(waiting, result(), strict=True):
            self._advance(reduction, value)

    def _begin_round(self) -> None:
        buckets = self._plan.buckets if self._plan else ()
        self._round: _Round[Handle] = _Round(
            self._collectives.generation, [len(bucket.parameters) for bucket in buckets]
        )

    def _arrived_late(self, i: int) -> str:
        return (
            f"the gradient of {self._specs[i].name!r} arrived again after its bucket was sent, in "
            f"one backward pass. A layer that runs in several re-entrant checkpoints does that: "
            f"use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )

    def _agree_on_order(self) -> list[int]:
        """The parameters by the mean place of their gradients in the ranks' backward passes."""
        # What has not arrived comes last, as if the backward pass went through it in reverse.
        count = len(self._specs)
        arrived = self._round.arrived
        places = [0] * count
        for place, i in enumerate(
            [*arrived, *(i for i in reversed(range(count)) if i not in arrived)]
        ):
            places[i] = place
        # A rank that has called `join` adds zeros, to all alike.
        summed = self._collectives.sum(places, "hvdkit.agreement.order")
        return sorted(range(count), key=lambda i: (summed[i], -i))

    def _division(self) -> Division:
        ranks = len(self._collectives.ranks)
        total = 1.0 / self._window.divisor / (ranks if self._reduction.average else 1)
        return Division(total, self._reduction.predivide, ranks)

    def _start(self, bucket: Bucket) -> None:
        self.settle()
        channel, memory = self._channels[bucket.index], self._memory[bucket.index]
        steps = decided(channel.travel(memory, self._division()))
        reduction: _BucketReduction[Handle] = _BucketReduction(
            steps, f"{self._name}.{bucket.index}"
        )
        self._advance(reduction, None)
        # Not before: where packing has raised, the bucket has not been sent.
        self._round.reductions[bucket.index] = reduction

    def _advance(self, reduction: _BucketReduction[Handle], answer: Any) -> None:
        """Give a bucket reduction its answer; start the collective that it asks for next."""
        try:
            reduction.request = reduction.steps.send(answer)
        except StopIteration:
            reduction.request = None
            return
        if isinstance(reduction.request, Sum | Gather):
            name = reduction.name
            if reduction.collectives:
                name += f".{reduction.collectives}"
            reduction.collectives += 1
            if isinstance(reduction.request, Sum):
                reduction.handle = self._backend.sum(reduction.request.buffer, name)
            else:
                reduction.handle = self._backend.gather(reduction.request.rows, name)

    def _settle_bucket(self, reduction: _BucketReduction[Handle]) -> None:
        """Wait until a bucket asks for what is answered for all buckets at once, or is done."""
        while True:
            request = reduction.request
            if isinstance(request, Sum | Gather):
                assert reduction.handle is not None
                handle, reduction.handle = reduction.handle, None
                self._advance(reduction, self._backend.wait(handle))
            elif isinstance(request, Peak) and (request.at_once or not self._backend.batches_peaks):
                (peak,) = self._backend.peaks([request.buffer])
                self._advance(reduction, peak)
            else:
                return

    def _finish(self) -> None:
        """Start what has not started, and complete every bucket reduction."""
        assert self._plan is not None
        buckets = self._plan.buckets
        reductions = self._round.reductions
        # Waited for by bucket, and not in the order of their start, in which ranks may differ. A
        # few are in flight at once, and not all, which may need more memory in the first round.
        for bucket in buckets:
            if bucket.index not in reductions:
                self._start(bucket)
            if bucket.index >= _IN_FLIGHT:
                self._settle_bucket(reductions[bucket.index - _IN_FLIGHT])
        for bucket in buckets[-_IN_FLIGHT:]:
            self._settle_bucket(reductions[bucket.index])
        while waiting := [
            reductions[b] for b in range(len(buckets)) if reductions[b].request is not None
        ]:
            peaks = [r for r in waiting if isinstance(r.request, Peak)]
            if peaks:
                buffers = [r.request.buffer for r in waiting if isinstance(r.request, Peak)]
                found = self._backend.peaks(buffers)
                del buffers
                for reduction, peak in zip(peaks, found, strict=True):
                    self._advance(reduction, peak)
                    self._settle_bucket(reduction)
                continue
            asked = [r.request for r in waiting if isinstance(r.request, Largest)]
            result = self._collectives.start_max(
                [request.value for request in asked], f"{self._name}.largest"
            )
            if all(request.deferred for request in asked):
                self._deferred = self._collectives.generation, waiting, result
                return
            for reduction, value in zip(waiting, result(), strict=True):
                self._advance(reduction, value)
                self._settle_bucket(reduction)
