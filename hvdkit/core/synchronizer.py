"""The gradient synchronizer: what to reduce, and when. One for all frameworks.

Its life is a step, again and again:

    mark_ready(i) ...   during the backward pass; a bucket that is full is reduced at once
    synchronize()       the rest is reduced; afterwards every gradient is the reduced one

No decision that a collective depends on is taken from data that only one rank has: which buckets
exist, and what they are called, follows from the plan, which the ranks compare before their first
bucket. Buckets may be reduced in any order, Horovod pairs them up by name.
"""

from collections.abc import Sequence
from typing import Generic

from hvdkit.core.agreement import check_agreement
from hvdkit.core.backend import Backend, Buffer, Handle
from hvdkit.core.bucketing import BucketPlan
from hvdkit.core.collectives import Collectives
from hvdkit.errors import HvdkitError, UsageError

# Two models alike (a GAN's twins) have equal digests, and both may have buckets in flight. Their
# names must differ, so every synchronizer gets a number when its ranks agree.
_next_number = 0


class Synchronizer(Generic[Buffer, Handle]):
    """Reduces the gradients of a plan over the ranks of a process set.

    Args:
        plan: the same on every rank; that is checked before anything is reduced.
        backend: the framework.
        collectives: of the same process set as the backend's.
        settings: lines that say what else must be the same on every rank, such as the operation.
        passes: backward passes per step. A gradient is ready when it has arrived that often.
    """

    def __init__(
        self,
        plan: BucketPlan,
        backend: Backend[Buffer, Handle],
        collectives: Collectives,
        settings: Sequence[str] = (),
        passes: int = 1,
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._collectives = collectives
        self._settings = tuple(settings)
        self._agreed: int | None = None
        self._name = ""
        self._buffers: dict[int, Buffer] = {}
        self._in_flight: dict[int, Handle] = {}
        self._pending = False
        self._remaining: list[int] = []
        self._missing: list[int] = []
        self.set_passes(passes)

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that no `synchronize` has dealt with yet."""
        return self._pending

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step, and begin a new step.

        Raises:
            UsageError: it is below 1.
        """
        if passes < 1:
            raise UsageError(f"backward passes per step is {passes}: expected at least 1")
        self._passes = passes
        self.reset()

    def mark_ready(self, i: int) -> None:
        """Parameter `i`'s gradient has arrived (once more).

        Raises:
            HvdkitError: it has already arrived as often as passes per step.
        """
        if not self._remaining[i]:
            raise HvdkitError(
                f"the gradient of {self._plan.specs[i].name!r} arrived {self._passes + 1} times "
                f"since the last step, and backward_passes_per_step is {self._passes}. Call "
                f"step() or synchronize() after every {self._passes} backward pass(es), or set "
                f"backward_passes_per_step to the number of passes that a step has."
            )
        self._pending = True
        self._remaining[i] -= 1
        if self._remaining[i]:
            return
        bucket = self._plan.bucket_of[i]
        self._missing[bucket] -= 1
        # Before the ranks have agreed nothing is reduced: a bucket that only some of them have
        # would stay in flight for ever.
        if not self._missing[bucket] and self._agreed == self._collectives.generation:
            self._reduce(bucket)

    def synchronize(self) -> None:
        """Reduce what has not been reduced, wait for all of it, and begin a new step.

        A collective: every rank of the process set calls it. A gradient that does not exist
        counts as zeros, so ranks may use different parts of the model.

        Raises:
            RanksDisagree: before the first bucket, on every rank, when their plans differ.
        """
        try:
            if self._agreed != self._collectives.generation:
                self._agree()
            for bucket in self._plan.buckets:
                if bucket.index not in self._in_flight:
                    self._reduce(bucket.index)
            for index, handle in self._in_flight.items():
                self._backend.wait(handle)
                self._backend.unpack(self._plan.buckets[index], self._buffers[index])
        except BaseException:
            # Collectives may still write into the buffers: leave those to them.
            self._buffers = {}
            raise
        finally:
            self._begin_step()

    def reset(self) -> None:
        """Forget what has arrived since the last `synchronize`, and begin a new step.

        What is in flight still ends, in buffers that are then its own.
        """
        if self._in_flight:
            self._buffers = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._pending = False
        self._remaining = [self._passes] * len(self._plan.specs)
        self._missing = [len(bucket.parameters) for bucket in self._plan.buckets]
        self._in_flight = {}

    def _agree(self) -> None:
        global _next_number
        lines = (*self._settings, f"passes per step: {self._passes}", *self._plan.description)
        check_agreement(self._collectives, lines, "what the optimizer reduces")
        # Ranks may have made different numbers of other optimizers; the largest count is free
        # on all of them.
        (number,) = self._collectives.max([_next_number], "hvdkit.agreement.number")
        _next_number = number + 1
        self._name = f"hvdkit.{self._plan.digest[:16]}.{number}"
        self._agreed = self._collectives.generation

    def _reduce(self, index: int) -> None:
        bucket = self._plan.buckets[index]
        if index not in self._buffers:
            self._buffers[index] = self._backend.allocate(bucket)
        self._backend.pack(bucket, self._buffers[index])
        name = f"{self._name}.{index}"
        self._in_flight[index] = self._backend.reduce(self._buffers[index], name)
