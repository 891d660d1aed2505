"""The gradient synchronizer: what to reduce, and when. One for all frameworks.

Its life is a step, again and again:

    mark_ready(i) ...   during the backward pass; a bucket that is full is reduced at once
    synchronize()       the rest is reduced; afterwards every gradient is the reduced one

No decision that a collective depends on is taken from data that only one rank has. What the ranks
mean to reduce is compared before the first bucket; the order in which their first backward pass
went is averaged, and the buckets follow from it. Buckets may be reduced in any order, Horovod
pairs them up by name.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from hvdkit.core import bucketing
from hvdkit.core.accumulation import Window, check_passes
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
from hvdkit.errors import HvdkitError, UsageError

# Buckets that `synchronize` itself sends ahead of the one that it waits for.
_IN_FLIGHT = 4


@dataclass
class _Journey(Generic[Handle]):
    """One bucket's travel in one step: where it is."""

    travel: Travel
    name: str
    request: Request | None = None
    handle: Handle | None = None
    collectives: int = 0


@dataclass
class _Step(Generic[Handle]):
    """What has happened since the last step."""

    remaining: list[int]
    missing: list[int]
    order: list[int] = field(default_factory=list)
    journeys: dict[int, _Journey[Handle]] = field(default_factory=dict)
    pending: bool = False


class Synchronizer(Generic[Buffer, Handle]):
    """Reduces gradients over the ranks of a process set.

    Args:
        specs: of the parameters, in the order of the forward pass.
        backend: the framework.
        collectives: of the same process set as the backend's.
        reduction: what to do with the gradients.
        window: the accumulation window that the steps belong to.
        context: further lines that must be the same on every rank, for the errors' sake first.

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
        self._resets = 0
        self._memory: list[BucketMemory[Buffer]] = []
        self._channels: Sequence[Channel] = ()
        self._buckets: AgreedBuckets | None = None
        self._resumed: ReductionState | None = None
        self.set_passes(reduction.passes)

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that no `synchronize` has dealt with yet."""
        return self._step.pending

    @property
    def plan(self) -> BucketPlan | None:
        """The buckets, once the ranks have agreed on them."""
        return self._plan

    @property
    def state(self) -> ReductionState | None:
        """What must be the same for sums to be the same once more; None before the first step."""
        if self._resumed is not None or self._buckets is None:
            return self._resumed
        return self._buckets.state

    def resume(self, state: ReductionState | None) -> None:
        """Take up a job where another has left it: at the next agreement, plan and scale alike.

        Where the gradients are others than then, the state is of no use, and is dropped.

        Args:
            state: as `state` gave it, the same on every rank.
        """
        self._resumed = state
        self._agreed = None

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step, and begin a new step.

        Raises:
            UsageError: it is below 1.
        """
        if not isinstance(passes, int) or passes < 1:
            raise UsageError(f"backward passes per step is {passes!r}: expected an integer >= 1")
        self._passes = passes
        self.reset()

    def mark_ready(self, i: int) -> None:
        """Parameter `i`'s gradient has arrived (once more).

        Raises:
            HvdkitError: it has already arrived as often as passes per step.
        """
        with self._lock:
            step = self._step
            if not step.remaining[i]:
                raise HvdkitError(self._arrived_too_often(i))
            step.pending = True
            step.remaining[i] -= 1
            if step.remaining[i]:
                return
            plan = self._plan
            # Before the ranks have agreed nothing is reduced: a bucket that only some of them
            # have would stay in flight for ever.
            if plan is None or self._agreed != self._collectives.generation:
                step.order.append(i)
                return
            bucket = plan.bucket_of[i]
            step.missing[bucket] -= 1
            if not step.missing[bucket]:
                self._begin(plan.buckets[bucket])

    def check_local(self, i: int) -> None:
        """A gradient of parameter `i` has been added that is not to be counted as an arrival.

        Raises:
            HvdkitError: the parameter's gradient is on its way already.
        """
        if not self._step.remaining[i]:
            raise HvdkitError(self._arrived_too_often(i))

    def synchronize(self) -> None:
        """Reduce what has not been reduced, wait for all of it, and begin a new step.

        A collective: every rank of the process set calls it. A gradient that does not exist
        counts as zeros, so ranks may use different parts of the model.

        Raises:
            RanksDisagree: before the first bucket, on every rank, when they mean different things.
            PassesDiffer: on every rank, when several passes make a step and the ranks have made
                different numbers of them.
        """
        try:
            if self._agreed != self._collectives.generation:
                self._agree()
            plan = self._plan
            assert plan is not None
            if self._passes > 1:
                arrived = self._passes - min(self._step.remaining, default=0)
                check_passes(self._collectives, arrived)
            if self._reduction.find_unused:
                used = [int(self._backend.has_gradient(i)) for i in range(len(self._specs))]
            self._travel(plan)
            if self._reduction.find_unused:
                self._drop_unused(used)
        except BaseException:
            # Collectives may still write into the buffers: leave those to them.
            self._agreed = None
            raise
        finally:
            self._begin_step()

    def reset(self) -> None:
        """Forget what has arrived since the last `synchronize`, and begin a new step.

        What is in flight still ends, in buffers and under names that are then its own. On every
        rank something must have arrived, or on none.
        """
        if self._plan is not None and self._step.pending:
            self._open_memory(self._plan)
            self._resets += 1
        self._begin_step()

    def _begin_step(self) -> None:
        buckets = self._plan.buckets if self._plan else ()
        self._step: _Step[Handle] = _Step(
            remaining=[self._passes] * len(self._specs),
            missing=[len(bucket.parameters) for bucket in buckets],
        )

    def _arrived_too_often(self, i: int) -> str:
        return (
            f"the gradient of {self._specs[i].name!r} arrived {self._passes + 1} times since the "
            f"last step, and backward passes per step are {self._passes}. Call step() or "
            f"synchronize() after them; where more make a step, put all but the last under "
            f"hvd.no_sync(optimizer), or say how many there are with accumulation_steps or "
            f"backward_passes_per_step. (Re-entrant checkpointing of a layer that is used several "
            f"times does it, too: use_reentrant=False.)"
        )

    def _agree(self) -> None:
        in_flight = self._collectives.max(
            [int(bool(self._step.journeys))], "hvdkit.agreement.in_flight"
        )
        if in_flight != [0]:
            raise HvdkitError(
                "Horovod was initialised anew, or hvdkit's join() called, between a backward pass "
                "and its step: some of its gradients have been reduced already. They are "
                "dropped: call optimizer.zero_grad() now, and repeat the backward pass."
            )
        dense = self._reduction.sparse_as_dense
        buckets = agree_on_buckets(
            self._collectives,
            self._specs,
            self._reduction,
            self._window.size,
            [0 if dense else self._backend.sparse_dims(i) for i in range(len(self._specs))],
            self._agree_on_order,
            self._context,
            self._resumed,
        )
        self._resumed = None
        self._buckets = buckets
        self._plan, self._name, self._channels = buckets.plan, buckets.name, buckets.channels
        self._open_memory(self._plan)
        self._agreed = self._collectives.generation

    def _agree_on_order(self) -> list[int]:
        """The parameters by the mean place of their gradients in the ranks' backward passes."""
        # What has not arrived comes last, as if the backward pass went through it in reverse.
        count = len(self._specs)
        arrived = dict.fromkeys(self._step.order)
        places = [0] * count
        for place, i in enumerate(
            [*arrived, *(i for i in reversed(range(count)) if i not in arrived)]
        ):
            places[i] = place
        # A rank that has called `join` adds zeros, to all alike.
        summed = self._collectives.sum(places, "hvdkit.agreement.order")
        return sorted(range(count), key=lambda i: (summed[i], -i))

    def _open_memory(self, plan: BucketPlan) -> None:
        self._memory = [self._backend.memory(bucket) for bucket in plan.buckets]

    def _division(self) -> Division:
        ranks = len(self._collectives.ranks)
        total = 1.0 / self._window.divisor / (ranks if self._reduction.average else 1)
        return Division(total, self._reduction.predivide, ranks)

    def _begin(self, bucket: Bucket) -> None:
        channel, memory = self._channels[bucket.index], self._memory[bucket.index]
        travel = decided(channel.travel(memory, self._division()))
        journey: _Journey[Handle] = _Journey(travel, f"{self._name}.{self._resets}.{bucket.index}")
        self._step.journeys[bucket.index] = journey
        self._advance(journey, None)

    def _advance(self, journey: _Journey[Handle], answer: Any) -> None:
        """Give a journey its answer; start the collective that it asks for next."""
        try:
            journey.request = journey.travel.send(answer)
        except StopIteration:
            journey.request = None
            return
        if isinstance(journey.request, Sum | Gather):
            name = journey.name
            if journey.collectives:
                name += f".{journey.collectives}"
            journey.collectives += 1
            if isinstance(journey.request, Sum):
                journey.handle = self._backend.sum(journey.request.buffer, name)
            else:
                journey.handle = self._backend.gather(journey.request.rows, name)

    def _settle(self, journey: _Journey[Handle]) -> None:
        """Wait until a journey asks for what is answered for all buckets at once, or ends."""
        while True:
            request = journey.request
            if isinstance(request, Sum | Gather):
                assert journey.handle is not None
                handle, journey.handle = journey.handle, None
                self._advance(journey, self._backend.wait(handle))
            elif isinstance(request, Peak) and (request.at_once or not self._backend.batches_peaks):
                (peak,) = self._backend.peaks([request.buffer])
                self._advance(journey, peak)
            else:
                return

    def _travel(self, plan: BucketPlan) -> None:
        """Begin what has not begun, and bring all of it to its end."""
        journeys = self._step.journeys
        # Waited for by bucket, and not by time of departure, because ranks may differ in that. A
        # few are in flight at once, and not all, which may need more memory in the first step.
        for bucket in plan.buckets:
            if bucket.index not in journeys:
                self._begin(bucket)
            if bucket.index >= _IN_FLIGHT:
                self._settle(journeys[bucket.index - _IN_FLIGHT])
        for bucket in plan.buckets[-_IN_FLIGHT:]:
            self._settle(journeys[bucket.index])
        while waiting := [
            journeys[b] for b in range(len(plan.buckets)) if journeys[b].request is not None
        ]:
            peaks = [j for j in waiting if isinstance(j.request, Peak)]
            if peaks:
                buffers = [j.request.buffer for j in waiting if isinstance(j.request, Peak)]
                found = self._backend.peaks(buffers)
                del buffers
                for journey, peak in zip(peaks, found, strict=True):
                    self._advance(journey, peak)
                    self._settle(journey)
                continue
            values = [j.request.value for j in waiting if isinstance(j.request, Largest)]
            largest = self._collectives.max(values, f"{self._name}.largest")
            for journey, value in zip(waiting, largest, strict=True):
                self._advance(journey, value)
                self._settle(journey)

    def _drop_unused(self, used: Sequence[int]) -> None:
        anywhere = self._collectives.max(used, f"{self._name}.used")
        for i, is_used in enumerate(anywhere):
            if not is_used:
                self._backend.drop_gradient(i)
