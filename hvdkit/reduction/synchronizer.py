"""The gradient synchronizer: decide which buckets to reduce, and when, for all frameworks.

The `Synchronizer` works in rounds. In a round every rank reduces every bucket once:

    mark_ready(i) ...   record a gradient during the backward pass; start the full buckets
    send()              start a few of the buckets that have not started
    wait()              start the other buckets, wait for all, and unpack the reduced gradients

The adapter decides when there is a round. No decision about a collective depends on
data of one rank alone. Before the first bucket the ranks compare their parameters and settings.
Buckets follow the order in which gradients arrived in the first backward pass, averaged over the
ranks. Ranks may send buckets in different orders, because Horovod matches them by name.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np

from hvdkit.agreement.collectives import Collectives
from hvdkit.errors import HvdkitError
from hvdkit.reduction import bucketing
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.backend import Backend, Buffer, Handle, RoundMemory
from hvdkit.reduction.bucketing import Bucket, BucketPlan, ParameterSpec
from hvdkit.reduction.int8 import payload_bytes
from hvdkit.reduction.plan import PlannedBuckets, Reduction, ReductionState, plan_buckets
from hvdkit.reduction.wire_format import (
    AbsMax,
    BlockSum,
    BucketReduction,
    Gather,
    GlobalMax,
    Request,
    Scaling,
    Sum,
    run_conditions,
)
from hvdkit.runtime.counters import counters

# Buckets that `wait` starts ahead of the bucket that it waits for.
_IN_FLIGHT = 4

# Requests of a single bucket that are collectives.
_COLLECTIVES = (Sum, BlockSum, Gather)


@dataclass
class _RunningReduction(Generic[Buffer, Handle]):
    """The bucket reduction of one round, from pack to unpack.

    Attributes:
        steps: the wire format's generator.
        name: the name of the bucket's collectives.
        request: the request that the generator waits for; None when the reduction is done.
        handle: the collective in flight.
        collectives: the number of collectives started.
        memory: the bucket's gradients.
        sections: see `Bucket.sections`. If there are several, a sum is complete in the section of
            this rank only.
    """

    steps: BucketReduction
    name: str
    memory: RoundMemory[Buffer]
    sections: int
    request: Request | None = None
    handle: Handle | None = None
    collectives: int = 0


@dataclass
class _Round(Generic[Buffer, Handle]):
    """The state of the current round.

    Attributes:
        generation: the generation of the collectives when the round began.
        missing: for each bucket, the number of gradients that have not arrived.
        arrived: the parameters whose gradients have arrived, in the order of arrival.
        full: buckets whose gradients have all arrived, each with the thread of its last gradient.
        packed: bucket index -> its reduction, whose first collective has not started.
        reductions: bucket index -> its running reduction.
    """

    generation: int
    missing: list[int]
    arrived: dict[int, None] = field(default_factory=dict)
    full: list[tuple[int, Bucket]] = field(default_factory=list)
    packed: dict[int, _RunningReduction[Buffer, Handle]] = field(default_factory=dict)
    reductions: dict[int, _RunningReduction[Buffer, Handle]] = field(default_factory=dict)


@dataclass(eq=False)
class Synchronizer(Generic[Buffer, Handle]):
    """Reduce gradients over the ranks of a process set.

    Attributes:
        specs: the parameters, in the order of the forward pass.
        backend: the framework.
        collectives: the collectives of the backend's process set.
        reduction: how to reduce the gradients.
        window: the accumulation window of the rounds; by default, every pass is reduced.
        context: further lines of text that must be equal on all ranks. If they differ, the error
            shows them first.

    Raises:
        UsageError: the specs or settings are invalid; nothing has been communicated.
    """

    specs: Sequence[ParameterSpec]
    backend: Backend[Buffer, Handle]
    collectives: Collectives
    reduction: Reduction
    window: Window = field(default_factory=lambda: Window(1))
    context: Sequence[str] = ()

    def __post_init__(self) -> None:
        bucketing.check(self.specs, self.reduction.bucket_bytes)
        # Gradients of different devices arrive in different threads.
        self._lock = threading.RLock()
        self._planned_generation: int | None = None
        self._buckets: PlannedBuckets | None = None
        self._memory: list[RoundMemory[Buffer]] = []
        self._resumed: ReductionState | None = None
        # The generation, the reductions that wait for a deferred request, and a function that
        # returns the results of the request.
        self._deferred: (
            tuple[int, list[_RunningReduction[Buffer, Handle]], Callable[[], list[int]]] | None
        ) = None
        self._begin_round()

    @property
    def planned(self) -> bool:
        """Whether the ranks have agreed on the buckets since the last `init` and `join`."""
        return self._planned_generation == self.collectives.generation

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets, once the ranks have agreed on them."""
        return self._buckets.plan if self._buckets else None

    @property
    def is_changed(self) -> bool:
        """Whether anything has changed a gradient since this round has packed it."""
        return any(memory.is_changed for memory in self._memory)

    @property
    def name(self) -> str:
        """The prefix of the buckets' names; empty before `make_plan`."""
        return self._buckets.name if self._buckets else ""

    @property
    def state(self) -> ReductionState | None:
        """State needed to resume with bit-identical sums; None before the first round."""
        self.complete_deferred()
        if self._resumed is not None or self._buckets is None:
            return self._resumed
        return self._buckets.state

    def resume(self, state: ReductionState | None) -> None:
        """Restore a state: the next `make_plan` makes the same plan and the same scales.

        A state of other gradients is ignored.

        Args:
            state: a value of the property `state`, the same on every rank; None for a new plan.
        """
        self._resumed = state
        self.forget()

    def forget(self) -> None:
        """Drop the plan: the next round begins with `make_plan`. Every rank must call this."""
        self._planned_generation = None
        self._begin_round()

    def mark_ready(self, i: int) -> None:
        """Record that the gradient of parameter `i` has arrived in this round.

        A full bucket is packed when the next gradient arrives. Until then, the user's hooks that
        run after ours may change the last gradient of the bucket.

        Raises:
            HvdkitError: the gradient is in a bucket that has started.
        """
        with self._lock:
            if self._round.generation != self.collectives.generation:
                # Horovod was shut down during the round.
                self._begin_round()
            current, plan = self._round, self.plan
            if i in current.arrived:
                if plan is not None and plan.bucket_of[i] in current.reductions:
                    raise HvdkitError(self._arrived_late(i))
                return
            current.arrived[i] = None
            # Start nothing before the ranks have a plan: a bucket that only some ranks have would
            # stay in flight.
            if plan is None or self._planned_generation != current.generation:
                return
            if not plan.buckets:
                return  # there is one rank
            thread = threading.get_ident()
            for entry in [entry for entry in current.full if entry[0] == thread]:
                current.full.remove(entry)
                self._start(entry[1])
            bucket = plan.buckets[plan.bucket_of[i]]
            current.missing[bucket.index] -= 1
            if not current.missing[bucket.index]:
                current.full.append((thread, bucket))

    def make_plan(self) -> None:
        """Compare parameters and settings with the other ranks and plan the buckets. A collective.

        Raises:
            RankMismatchError: on every rank, when their parameters or settings differ.
        """
        dense = self.reduction.sparse_as_dense
        buckets = plan_buckets(
            self.collectives,
            self.specs,
            self.reduction,
            self.window.size if self.window.mean else 1,
            [0 if dense else self.backend.sparse_dims(i) for i in range(len(self.specs))],
            self._common_order,
            self.context,
            self._resumed,
        )
        self._resumed = None
        # Requests of the previous plan may be left. They fail if Horovod was shut down since then.
        with suppress(Exception):
            self.complete_deferred()
        self._buckets = buckets
        self._memory = [self.backend.memory(bucket) for bucket in buckets.plan.buckets]
        self._planned_generation = self.collectives.generation
        self._begin_round()

    def pack(self) -> None:
        """Pack the buckets that `send` starts. If memory is lacking, this raises. No collective."""
        with self._lock:
            for bucket in self._next_buckets():
                self._pack(bucket)

    def send(self) -> None:
        """Start a few of the buckets that have not started; `wait` starts the others.

        A gradient that does not exist counts as zeros, so ranks may use different parts of the
        model. The ranks must have agreed on the buckets (`make_plan`).
        """
        with self._lock:
            self._round.full.clear()
            for bucket in self._next_buckets():
                self._start(bucket)

    def _next_buckets(self) -> Sequence[Bucket]:
        assert self.plan is not None
        left = [b for b in self.plan.buckets if b.index not in self._round.reductions]
        return left[:_IN_FLIGHT]

    def wait(self) -> None:
        """Start the buckets that `send` has not started. Wait for all buckets and unpack them."""
        reduced = False
        try:
            self._finish()
            reduced = True
        except BaseException:
            # Collectives may still write into the buffers. `make_plan` makes new ones.
            self._planned_generation = None
            raise
        finally:
            for memory in self._memory:
                memory.end_round(reduced)
            self._begin_round()

    def synchronize(self) -> None:
        """Reduce every gradient: `make_plan` if needed, `send`, `wait`. A collective.

        Raises:
            RankMismatchError: see `make_plan`.
        """
        if not self.planned:
            self.make_plan()
        self.send()
        self.wait()

    def complete_deferred(self) -> None:
        """Complete the requests of the last round whose results only this round needs.

        Every rank has started them.
        """
        if self._deferred is None:
            return
        generation, waiting, result = self._deferred
        self._deferred = None
        if generation != self.collectives.generation:
            return  # Horovod was shut down, which ended the collective.
        for reduction, value in zip(waiting, result(), strict=True):
            self._advance(reduction, value)

    def _begin_round(self) -> None:
        buckets = self.plan.buckets if self.plan else ()
        self._round: _Round[Buffer, Handle] = _Round(
            self.collectives.generation, [len(bucket.parameters) for bucket in buckets]
        )

    def _arrived_late(self, i: int) -> str:
        return (
            f"the gradient of {self.specs[i].name!r} arrived again after its bucket was sent, in "
            f"one backward pass. This happens if a function computes gradients in its own backward "
            f"pass, such as a re-entrant activation checkpoint or a reversible block, and the "
            f"first pass used the layer only once. Later passes send all buckets at their end: to "
            f"continue, call optimizer.zero_grad() on all ranks. Or use checkpoints that are not "
            f"re-entrant (PyTorch: use_reentrant=False)."
        )

    def _common_order(self) -> list[int]:
        """Return the parameters, sorted by the mean position of their gradients on all ranks."""
        # Gradients that have not arrived come last, in the reverse order of the forward pass.
        count = len(self.specs)
        arrived = self._round.arrived
        places = [0] * count
        for place, i in enumerate(
            [*arrived, *(i for i in reversed(range(count)) if i not in arrived)]
        ):
            places[i] = place
        # A rank that has called `join` adds zero to every position.
        summed = self.collectives.sum(places, "hvdkit.agreement.order")
        return sorted(range(count), key=lambda i: (summed[i], -i))

    def _scaling(self) -> Scaling:
        ranks = len(self.collectives.ranks)
        total = 1.0 / self.window.divisor / (ranks if self.reduction.average else 1)
        return Scaling(total, self.reduction.predivide, ranks)

    def _pack(self, bucket: Bucket) -> None:
        if bucket.index in self._round.packed:
            return
        self.complete_deferred()
        assert self._buckets is not None
        codec, memory = self._buckets.codecs[bucket.index], self._memory[bucket.index]
        steps = run_conditions(codec.reduce(memory, self._scaling()))
        reduction: _RunningReduction[Buffer, Handle] = _RunningReduction(
            steps, f"{self.name}.{bucket.index}", memory, bucket.sections
        )
        self._resume(reduction, None)
        # Record the bucket after packing: if packing raises, the bucket is not packed.
        self._round.packed[bucket.index] = reduction

    def _start(self, bucket: Bucket) -> None:
        self._pack(bucket)
        reduction = self._round.packed.pop(bucket.index)
        self._start_request(reduction)
        self._round.reductions[bucket.index] = reduction
        if bucket.sections > 1:
            self._free_memory()

    def _free_memory(self) -> None:
        """Unpack the buckets whose sums are complete, so that others can use their memory."""
        for each in self._round.reductions.values():
            if each.handle is not None and self.backend.is_done(each.handle):
                handle, each.handle = each.handle, None
                self._advance(each, self.backend.wait(handle))

    def _advance(self, reduction: _RunningReduction[Buffer, Handle], result: Any) -> None:
        """Send a result to a bucket reduction; start the collective that it requests next."""
        self._resume(reduction, result)
        self._start_request(reduction)

    def _resume(self, reduction: _RunningReduction[Buffer, Handle], result: Any) -> None:
        """Send a result to a bucket reduction, which makes its next request."""
        try:
            reduction.request = reduction.steps.send(result)
        except StopIteration:
            reduction.request = None
            reduction.memory.end()

    def _start_request(self, reduction: _RunningReduction[Buffer, Handle]) -> None:
        """Start the collective that a bucket reduction requests."""
        if isinstance(reduction.request, _COLLECTIVES):
            name = reduction.name
            if reduction.collectives:
                name += f".{reduction.collectives}"
            reduction.collectives += 1
            counters.payload_bytes += _payload_bytes(reduction.request)
            if isinstance(reduction.request, Gather):
                reduction.handle = self.backend.gather(reduction.request.rows, name)
                return
            buffer, factor = reduction.request.buffer, reduction.request.factor
            if isinstance(reduction.request, BlockSum):
                reduction.handle = self.backend.sum_blocks(buffer, name, factor)
            elif reduction.sections > 1:
                reduction.handle = self.backend.scatter(buffer, reduction.sections, name, factor)
            else:
                reduction.handle = self.backend.sum(buffer, name, factor)

    def _advance_bucket(self, reduction: _RunningReduction[Buffer, Handle]) -> None:
        """Advance a bucket until it is done or makes a request that all buckets make together."""
        while True:
            request = reduction.request
            if isinstance(request, _COLLECTIVES):
                assert reduction.handle is not None
                handle, reduction.handle = reduction.handle, None
                self._advance(reduction, self.backend.wait(handle))
            elif isinstance(request, AbsMax) and (
                request.immediate or (reduction.sections == 1 and not self.backend.batches_abs_max)
            ):
                (value,) = self._abs_max([reduction], reduction.name)
                self._advance(reduction, value)
            else:
                return

    def _finish(self) -> None:
        """Start the buckets that have not started, and complete every bucket reduction."""
        assert self.plan is not None
        buckets = self.plan.buckets
        if not buckets and self.collectives.single_rank:
            self.backend.scale(self._scaling().total)
            return
        reductions = self._round.reductions
        # Wait in the order of the buckets, which is the same on all ranks. Buckets may have started
        # in another order. Only a few are in flight, to limit the memory in the first round.
        for bucket in buckets:
            if bucket.index not in reductions:
                self._start(bucket)
            if bucket.index >= _IN_FLIGHT:
                self._advance_bucket(reductions[bucket.index - _IN_FLIGHT])
        for bucket in buckets[-_IN_FLIGHT:]:
            self._advance_bucket(reductions[bucket.index])
        while waiting := [
            reductions[b] for b in range(len(buckets)) if reductions[b].request is not None
        ]:
            asking = [r for r in waiting if isinstance(r.request, AbsMax)]
            if asking:
                values = self._abs_max(asking, self.name)
                for reduction, value in zip(asking, values, strict=True):
                    self._advance(reduction, value)
                    self._advance_bucket(reduction)
                continue
            requests = [r.request for r in waiting if isinstance(r.request, GlobalMax)]
            result = self.collectives.start_max(
                [request.value for request in requests], f"{self.name}.largest"
            )
            if all(request.deferred for request in requests):
                self._deferred = self.collectives.generation, waiting, result
                return
            for reduction, value in zip(waiting, result(), strict=True):
                self._advance(reduction, value)
                self._advance_bucket(reduction)

    def _abs_max(
        self, reductions: Sequence[_RunningReduction[Buffer, Handle]], name: str
    ) -> Sequence[float]:
        """Return the results of `AbsMax`. A collective for buckets that are divided."""
        buffers = []
        for each in reductions:
            assert isinstance(each.request, AbsMax)
            buffer = each.request.buffer
            buffers.append(
                buffer if each.sections == 1 else self.backend.section(buffer, each.sections)
            )
        values = self.backend.abs_max(buffers)
        if reductions[0].sections == 1:
            return values
        # The bits of floats from 0 on are in the order of their values; NaN is the largest.
        bits = np.abs(np.array(values, np.float64)).view(np.int64)
        largest = self.collectives.max(bits.tolist(), f"{name}.abs_max")
        return [float(each) for each in np.array(largest, np.int64).view(np.float64)]


def _payload_bytes(request: Sum | BlockSum | Gather) -> int:
    """Return the bytes of a collective of this rank, as they are encoded."""
    if isinstance(request, Gather):
        rows = request.rows if isinstance(request.rows, tuple) else (request.rows,)
        return sum(map(_bytes_of, rows))
    size = _bytes_of(request.buffer)
    return int(payload_bytes(size // 4)) if isinstance(request, BlockSum) else size


def _bytes_of(buffer: object) -> int:
    # A compressor of the user may send an object without this attribute.
    return int(getattr(buffer, "nbytes", 0))
