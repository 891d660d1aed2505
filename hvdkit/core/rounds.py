"""Reduction rounds of one optimizer.

In a round every rank reduces every bucket of the optimizer once. `hvdkit.core.coordination` decides
which optimizers have a round, the same ones on all ranks, and calls this module:

    begin()      leave in each gradient only the part that is not reduced
    send()       start the buckets
    complete()   wait for the buckets; afterwards every gradient is the reduced gradient

The names of collectives are the same in every round, so Horovod's response cache serves all rounds.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdkit.core.accumulation import Window
from hvdkit.core.collectives import Collectives
from hvdkit.core.nonfinite import IGNORE
from hvdkit.core.replicas import ReplicaCheck
from hvdkit.core.same_data import LAST_STEP, PASSES, SameData
from hvdkit.core.stragglers import StragglerReport
from hvdkit.core.synchronizer import Synchronizer


class LocalGradients(Protocol):
    """The gradients of one optimizer on this rank. Each adapter implements it.

    A gradient consists of a base, which earlier rounds have reduced, and of an unreduced part,
    which backward passes have added since.
    """

    @property
    def synchronizers(self) -> Sequence[Synchronizer[Any, Any]]:
        """A synchronizer for the first parameters, and one for each set that was added later."""
        ...

    def signature(self, assigned: bool) -> Sequence[object]:
        """Return values that must be equal on all ranks in a round, such as `requires_grad`.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def describe(self) -> str:
        """Describe the signature for an error."""
        ...

    def all_removed(self) -> bool:
        """Return whether the script has removed all gradients of the last round.

        False if the last round reduced no gradient.
        """
        ...

    def has_unreduced(self, assigned: bool) -> bool:
        """Return whether a gradient has an unreduced part.

        Args:
            assigned: treat a gradient that the script has assigned (`p.grad = ...`) as unreduced.
        """
        ...

    def changed_since_round(self) -> bool:
        """Return whether a reduced gradient was changed or replaced since the last round."""
        ...

    def written_before_pass(self) -> bool:
        """Return whether a base was changed since the last round, and is not 0.

        After `begin_round`. It waits for the device if a base was changed.
        """
        ...

    def plan_outdated(self) -> bool:
        """Return whether parameters have another dtype or device than the buckets."""
        ...

    def replan(self) -> None:
        """Make new synchronizers for the parameters as they are now. Not a collective."""
        ...

    def plan_new_parameters(self) -> bool:
        """Make a synchronizer for the parameters without one; return whether there are any."""
        ...

    def has_reduced(self, assigned: bool) -> bool:
        """Return whether earlier rounds have reduced a gradient or a part of one.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def are_equal(self, assigned: bool) -> bool:
        """Return whether the reduced gradients have the same bits on all ranks. A collective.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def mark_changed_unreduced(self) -> None:
        """Count all gradients as unreduced, because the script has written them in place."""
        ...

    def begin_round(self, assigned: bool) -> None:
        """Split off the bases: leave in each gradient only its unreduced part.

        Until `end_round`, zeros that packing writes for a missing gradient do not count as a
        gradient.

        Args:
            assigned: treat a gradient that the script has assigned (`p.grad = ...`) as unreduced;
                otherwise it counts as reduced.
        """
        ...

    def end_round(self) -> None:
        """Add the bases to the reduced gradients."""
        ...

    def end_step(self) -> None:
        """Mark all current gradients as reduced, because a step has used them."""
        ...

    def is_busy(self) -> bool:
        """Return whether a backward pass is adding to the gradients."""
        ...

    def needs_sparse_bucket(self) -> bool:
        """Return whether a sparse gradient has a dense bucket."""
        ...

    def make_sparse(self) -> None:
        """Make gradients that are sparse on some rank sparse on all ranks. A collective.

        The next round reduces each of them in a sparse bucket.
        """
        ...

    def scale(self, factor: float) -> None:
        """Multiply the unreduced gradients by `factor`: the reduction of a single rank."""
        ...

    def invalidate(self, reason: str) -> None:
        """Record why the gradients cannot be used, and drop the bases."""
        ...

    def check_written(self, assigned: bool) -> None:
        """Look for NaN and infinity in unreduced gradients that the script has written.

        Does nothing without `on_nonfinite`.

        Args:
            assigned: see `begin_round`.
        """
        ...

    def nonfinite(self) -> list[str]:
        """Return the names of the unreduced gradients with NaN or infinity.

        Empty without `on_nonfinite`. In the order in which the gradients were computed.
        """
        ...

    def used_parameters(self) -> Sequence[int]:
        """Return 1 for each parameter with a gradient, else 0; empty without `find_unused`."""
        ...

    def drop_unused(self, used: Sequence[int]) -> None:
        """Remove the gradients whose entry in `used` is 0.

        Args:
            used: the sum over the ranks of `used_parameters`.
        """
        ...


class Rounds:
    """The rounds of one optimizer, and this rank's position in them.

    Args:
        collectives: the collectives of the ranks to reduce over.
        gradients: this rank's gradients.
        window: the accumulation window.
        compare: an additional consistency check, called once after the ranks have agreed for the
            first time. It raises on every rank or on none. All ranks pass one, or none does.
        replicas: compares parameters and optimizer state every few steps. All ranks pass one, with
            the same settings, or none does.
        stragglers: compares the ranks' times before each comparison of `replicas`.
        on_nonfinite: what to do about gradients with NaN or infinity, see `hvdkit.core.nonfinite`.
            The same on all ranks.
        same_data: compares the gradients of the first steps, together with `replicas`.

    Attributes:
        gradients: this rank's gradients.
        participated: whether this rank has taken part in a round since its last step.
        no_sync_used: whether the script may have added gradients under `no_sync`, or parameters
            with gradients, since the last round. If so, the next step reduces. The same on all
            ranks.
        skips_step: whether all ranks skip the next step, because gradients are not finite.
        has_late_ranks: whether a rank was late in a round of this step: it entered the round from
            the `step()` of this or another optimizer, see `hvdkit.core.headers`. If so, all ranks
            send a header at this optimizer's step.
    """

    def __init__(
        self,
        collectives: Collectives,
        gradients: LocalGradients,
        window: Window,
        compare: Callable[[], None] | None = None,
        replicas: ReplicaCheck | None = None,
        stragglers: StragglerReport | None = None,
        on_nonfinite: str = IGNORE,
        same_data: SameData | None = None,
    ) -> None:
        self.gradients = gradients
        self.on_nonfinite = on_nonfinite
        self.skips_step = False
        self.participated = False
        self.has_late_ranks = False
        self.no_sync_used = False
        self._collectives = collectives
        self._window = window
        self._compare = compare
        self._replicas = replicas
        self._stragglers = stragglers
        self._same_data = same_data
        self._compared = False
        self._generation: int | None = None
        self._is_later_generation = False
        # The steps in this generation, those of them that `begin_step` has counted, and all steps.
        self._step = self._dropped = self._steps_made = 0
        self._number = 0
        # For each started synchronizer: waits for the number of ranks that use each parameter.
        self._used: list[Callable[[], list[int]]] = []
        # The parameters that this rank uses, between `pack` and `send`.
        self._used_here: Sequence[int] | None = None

    # --- the position of this rank --------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether the ranks have agreed on the buckets."""
        return all(synchronizer.planned for synchronizer in self.gradients.synchronizers)

    @property
    def plan_outdated(self) -> bool:
        """Whether parameters have another dtype or device than the planned buckets."""
        return self.planned and not self._collectives.single_rank and self.gradients.plan_outdated()

    @property
    def has_window(self) -> bool:
        """Whether gradients are divided by the passes of a window."""
        return self._window.size > 1

    @property
    def has_unreduced(self) -> bool:
        """Whether a gradient has an unreduced part."""
        return self.gradients.has_unreduced(assigned=not self.participated)

    def are_equal(self) -> bool:
        """Return whether the reduced gradients have the same bits on all ranks. A collective."""
        return self.gradients.are_equal(not self.participated)

    def check_generation(self) -> None:
        """Reset the counters if Horovod was initialised again or ranks returned from `join`."""
        if self._generation != self._collectives.generation:
            # Ranks may have counted differently, and some may be new.
            self._is_later_generation = self._generation is not None
            self._generation = self._collectives.generation
            self._compared = False
            self._reset_counters()

    def digest(self) -> int:
        """Return 24 bits: equal on two ranks in the same step and round with equal signatures."""
        # With 24 bits the sum of squares over 30,000 ranks fits into 64 bits.
        steps = self._step, self._dropped
        position = (*steps, self._number, self._window.position, self.has_late_ranks)
        signature = self.gradients.signature(not self.participated)
        return zlib.crc32(repr((*position, *signature)).encode()) & 0xFFFFFF

    def describe(self, where: str) -> str:
        """Describe the values in `digest`, for an error.

        Args:
            where: this rank's activity, such as "in a backward pass".
        """
        passes = self._window.begun
        return (
            f"step {self._step + 1}, reduction {self._number + 1}, {where}"
            + (f", pass {passes} of its window" if passes else "")
            + (", after a round with ranks that made no pass" if self.has_late_ranks else "")
            + f"; {self.gradients.describe()}"
        )

    def end_step(self) -> None:
        """Record that the optimizer has made a step."""
        if not self._collectives.single_rank:
            self.gradients.end_step()
        self._step += 1
        self._steps_made += 1
        self._number = 0
        self.participated = self.has_late_ranks = self.no_sync_used = self.skips_step = False

    def begin_step(self) -> None:
        """Begin the next step: the script has removed the gradients of the last one.

        If they were reduced, they may have been used by a method of the optimizer other than its
        step, such as `first_step` of sharpness-aware minimization. Count this as a step, because
        ranks are compared every few steps.
        """
        if self.participated and self._number:
            self._step += 1
            self._dropped += 1
            self._steps_made += 1
            self._number = 0
        self.participated = self.skips_step = False

    @property
    def steps_made(self) -> int:
        """The number of steps."""
        return self._steps_made

    def _reset_counters(self) -> None:
        self._used = []
        self._used_here = None
        self._step = self._dropped = self._number = 0
        self.participated = self.has_late_ranks = self.no_sync_used = self.skips_step = False

    # --- a round --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Leave in each gradient only its unreduced part."""
        self.gradients.begin_round(not self.participated)

    def make_plan(self) -> None:
        """Compare parameters and settings with the other ranks and plan buckets. A collective.

        Raises:
            RankMismatchError: on every rank, when their parameters or settings differ.
        """
        if self.gradients.plan_outdated():
            self.gradients.replan()
        for synchronizer in self.gradients.synchronizers:
            if not synchronizer.planned:
                synchronizer.make_plan()
        if self._compare is None:
            return
        # A rank that called `join` before its first step did not take part in the comparison. For
        # a rank that started later in an elastic job, this is the first generation.
        compared, is_later, steps = self._collectives.max(
            [int(self._compared), int(self._is_later_generation), self._steps_made],
            "hvdkit.rounds.compared",
        )
        try:
            if not compared:
                self._compare()
                replicas = self._replicas
                if is_later and replicas is not None and replicas.settings.interval:
                    # `join` may end each epoch before a comparison is due.
                    replicas.compare(steps)
        except BaseException:
            self.forget_plan()
            raise
        self._compared = True

    def forget_plan(self) -> None:
        """Drop the plan. The next round makes a new plan, and repeats the check `compare`."""
        self._compared = False
        for synchronizer in self.gradients.synchronizers:
            synchronizer.forget()

    def pack(self) -> None:
        """Pack the buckets that `send` starts. If memory is lacking, this raises. No collective."""
        # Packing gives each parameter a gradient.
        self._used_here = self.gradients.used_parameters()
        for synchronizer in self.gradients.synchronizers:
            synchronizer.pack()

    def send(self) -> None:
        """Start the buckets that have not started. `make_plan` comes first."""
        self._send(len(self.gradients.synchronizers))

    def complete(self, outdated: bool, sparse: bool) -> None:
        """Wait for all buckets; afterwards every gradient is reduced. A collective.

        Args:
            outdated: on all ranks, parameters have another dtype or device than the buckets.
            sparse: some rank has a sparse gradient whose bucket is dense.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        if outdated:
            self.gradients.replan()
            for synchronizer in self.gradients.synchronizers:
                synchronizer.make_plan()
            self.send()
        used = self._wait(len(self.gradients.synchronizers))
        known = len(self.gradients.synchronizers)
        if self.gradients.plan_new_parameters():
            for synchronizer in self.gradients.synchronizers[known:]:
                synchronizer.synchronize()
        if sparse:
            self.gradients.make_sparse()
        if used:
            self.gradients.drop_unused(used)
        self.gradients.end_round()
        self._number += 1
        self.participated = True
        self.no_sync_used = False
        if self._number == 1:
            self._compare_replicas()

    def compare_without_round(self) -> None:
        """Compare the replicas in a step without a round, if it is time. A collective.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        # `digest` contains the number of rounds, so it is the same on all ranks.
        if self._number == 0:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        # The ranks are in the same step, and no rank changes parameters in a backward pass.
        replicas = self._replicas
        if replicas is None or not replicas.is_due(self._step):
            return
        if self._stragglers is not None:
            self._stragglers.report()
        replicas.compare(self._step)
        # Only the step, which is the same on all ranks, decides about this collective.
        if self._same_data is not None and PASSES <= self._step <= LAST_STEP:
            self._same_data.compare()

    @property
    def plans_made(self) -> int:
        """The number of synchronizers before the first one that has no planned buckets."""
        planned = [synchronizer.planned for synchronizer in self.gradients.synchronizers]
        return planned.index(False) if False in planned else len(planned)

    def abandon(self, plans: int) -> None:
        """Wait for the buckets of a round that cannot be used. A collective.

        Args:
            plans: the smallest `plans_made` of all ranks.
        """
        self._send(plans)
        self._wait(plans)

    def reset(self, same_parameters: bool, reason: str) -> None:
        """Return to the initial state after an error that all ranks have raised.

        Args:
            same_parameters: whether the ranks certainly have equal parameters.
            reason: why the gradients cannot be used.
        """
        self._reset_counters()
        self.gradients.invalidate(reason)
        if not same_parameters:
            self.forget_plan()

    def reduce_locally(self) -> None:
        """Reduce the gradients of a single rank: divide them by the passes of the window."""
        self.begin()
        if self._window.divisor != 1:
            self.gradients.scale(1.0 / self._window.divisor)
        self.gradients.end_round()
        self.participated = True

    def complete_deferred(self) -> None:
        """Complete the deferred requests of the last round. Every rank has started them."""
        for synchronizer in self.gradients.synchronizers:
            synchronizer.complete_deferred()

    def _send(self, plans: int) -> None:
        """Start the buckets of the first `plans` synchronizers."""
        used = self.gradients.used_parameters() if self._used_here is None else self._used_here
        self._used_here = None
        start = 0
        for k, synchronizer in enumerate(self.gradients.synchronizers[:plans]):
            end = start + len(synchronizer.specs)
            if used and k == len(self._used):
                name = f"{synchronizer.name}.used"
                self._used.append(self._collectives.start_sum(used[start:end], name))
            synchronizer.send()
            start = end

    def _wait(self, plans: int) -> list[int]:
        """Wait for the buckets of the first `plans` synchronizers.

        Returns:
            The number of ranks that use each parameter; empty without `find_unused`.
        """
        used, self._used = self._used, []
        for synchronizer in self.gradients.synchronizers[:plans]:
            synchronizer.wait()
        return [count for result in used[:plans] for count in result()]
