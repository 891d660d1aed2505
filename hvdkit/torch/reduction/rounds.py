"""Reduction rounds of one optimizer.

In a round every rank reduces every bucket of the optimizer once.
`hvdkit.torch.reduction.coordination` decides which optimizers have a round, the same ones on all
ranks, and calls this module:

    pack()       pack the first buckets, before the header is in flight
    send()       start these buckets
    complete()   wait for the buckets; afterwards every gradient is the reduced gradient

The names of collectives are the same in every round, so Horovod's response cache serves all rounds.
"""

from dataclasses import dataclass, field, replace

from hvdkit.agreement.consistency import RankMismatchError, digest24
from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.agreement.same_data import LAST_STEP, PASSES, SameData
from hvdkit.reduction.accumulation import Window
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.reduction.descriptions import describe
from hvdkit.torch.reduction.gradients import Gradients
from hvdkit.torch.reduction.position import Position
from hvdkit.training.stragglers import StragglerReport


@dataclass(eq=False)
class Rounds:
    """The rounds of one optimizer.

    Attributes:
        collectives: the collectives of the ranks to reduce over.
        gradients: this rank's gradients.
        window: the accumulation window.
        on_nonfinite: what to do about gradients with NaN or infinity, see
            `hvdkit.reduction.nonfinite`.
        replicas: compares parameters and optimizer state every few steps. All ranks pass one, with
            the same settings, or none does.
        stragglers: compares the ranks' times before each comparison of `replicas`.
        same_data: compares the gradients of the first steps, together with `replicas`.
        position: the position of this rank. Assign the next one.
        compared: the number of the newest record whose parameter the ranks have compared.
        generation: the generation of the collectives in which the position was counted.
    """

    collectives: TorchCollectives
    gradients: Gradients
    window: Window
    on_nonfinite: str
    replicas: ReplicaCheck | None = None
    stragglers: StragglerReport | None = None
    same_data: SameData | None = None
    position: Position = field(default_factory=Position)
    compared: int = -1
    generation: int | None = None

    # --- the position of this rank --------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether the ranks have agreed on the buckets."""
        return all(part.synchronizer.planned for part in self.gradients.parts)

    @property
    def plan_outdated(self) -> bool:
        """Whether parameters have another dtype or device than the planned buckets."""
        return self.planned and self.gradients.plan_outdated()

    def check_generation(self) -> None:
        """Restart if Horovod was initialised again or ranks returned from `join`."""
        if self.generation != self.collectives.generation:
            # Ranks may have counted differently, and some may be new.
            self.generation = self.collectives.generation
            self._restart()

    def _restart(self) -> None:
        self.position = self.position.restarted()
        for part in self.gradients.parts:
            part.forget_counts()

    def digest(self) -> int:
        """Return 24 bits: equal on two ranks in the same step and round with equal signatures."""
        if self.collectives.single_rank:
            return 0
        at = self.position
        position = (at.step, at.dropped, at.rounds, self.window.position, at.has_late_ranks)
        signature = self.gradients.signature()
        return digest24(repr((*position, *signature)).encode())

    def describe(self, where: str) -> str:
        """Describe the values in `digest`, for an error.

        Args:
            where: this rank's activity, such as "in a backward pass".
        """
        passes, at = self.window.begun, self.position
        return (
            f"step {at.step - at.dropped + 1}"
            + (f", after {at.dropped} reductions that no step() has used" if at.dropped else "")
            + f", reduction {at.rounds + 1}, {where}"
            + (f", pass {passes} of its window" if passes else "")
            + (", after a round with ranks that made no pass" if at.has_late_ranks else "")
            + f"; {describe(self.gradients)}"
        )

    # --- a round --------------------------------------------------------------------------------

    def make_plan(self) -> None:
        """Compare parameters and settings with the other ranks and plan buckets. A collective.

        Raises:
            RankMismatchError: on every rank, when their parameters or settings differ.
        """
        if self.gradients.plan_outdated():
            self.gradients.replan()
        for part in self.gradients.parts:
            if not part.synchronizer.planned:
                try:
                    part.synchronizer.make_plan()
                except RankMismatchError:
                    # The script may mend this. The next plan describes the parameters again.
                    part.is_stale = True
                    raise

    def forget_plan(self) -> None:
        """Drop the plan. The next round makes a new plan."""
        for part in self.gradients.parts:
            part.synchronizer.forget()

    def pack(self) -> None:
        """Pack the buckets that `send` starts. If memory is lacking, this raises. No collective."""
        for part in self.gradients.parts:
            part.pack()

    def send(self) -> None:
        """Start the buckets that have not started. `make_plan` comes first."""
        for part in self.gradients.parts:
            part.send()

    def complete(self, outdated: bool, sparse: bool) -> None:
        """Wait for all buckets; afterwards every gradient is reduced. A collective.

        Args:
            outdated: on all ranks, parameters have another dtype or device than the buckets.
            sparse: some rank has a sparse gradient whose bucket is dense.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        gradients = self.gradients
        if outdated:
            gradients.replan()
            for part in gradients.parts:
                part.synchronizer.make_plan()
            self.send()
        for part in gradients.parts:
            part.wait()
        known = len(gradients.parts)
        if gradients.plan_new(frozen=True):
            for part in gradients.parts[known:]:
                part.synchronize()
        if sparse:
            gradients.make_sparse()
        gradients.end_round()
        if self.position.rounds == 0:
            # If this raises, the next round compares again.
            self.position = replace(self.position, participated=True, no_sync_used=False)
            self._compare_replicas()
        self.position = self.position.after_round()

    def compare_without_round(self) -> None:
        """Compare the replicas in a step without a round, if it is time. A collective.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        # `digest` contains the number of rounds, so it is the same on all ranks.
        if self.position.rounds == 0:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Compare the replicas if it is time, or if the optimizer has new parameters."""
        if self.replicas is None or self.collectives.single_rank:
            return
        # The ranks are in the same step, and no rank changes parameters in a backward pass.
        step, newest = self.position.step, self.gradients.newest
        added = newest > self.compared
        if not (added or self.replicas.settings.is_due(step)):
            return
        if step and self.stragglers is not None:
            self.stragglers.report()
        # Also after `join` and `init`, which set the step to 0.
        self.replicas.compare(step, first=added or not step)
        self.compared = newest
        # Only the step, which is the same on all ranks, decides about this collective.
        if self.same_data is not None and PASSES <= step <= LAST_STEP:
            self.same_data.compare()

    @property
    def plans_made(self) -> int:
        """The number of parts before the first one that has no planned buckets."""
        planned = [part.synchronizer.planned for part in self.gradients.parts]
        return planned.index(False) if False in planned else len(planned)

    def abandon(self, plans: int) -> None:
        """Wait for the buckets of a round that cannot be used. A collective.

        Args:
            plans: the smallest `plans_made` of all ranks.
        """
        for part in self.gradients.parts[:plans]:
            part.send()
        for part in self.gradients.parts[:plans]:
            part.wait()

    def reset(self, same_parameters: bool, reason: str) -> None:
        """Return to the initial state after an error that all ranks have raised.

        Args:
            same_parameters: whether the ranks certainly have equal parameters.
            reason: why the gradients cannot be used.
        """
        self._restart()
        self.gradients.invalidate(reason)
        if not same_parameters:
            self.forget_plan()

    def complete_deferred(self) -> None:
        """Complete the deferred requests of the last round. Every rank has started them."""
        for part in self.gradients.parts:
            part.synchronizer.complete_deferred()
