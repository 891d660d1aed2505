"""The position of an optimizer in its steps and rounds. Each event returns the next position.

| event | the next position |
|---|---|
| a round is complete | one more round; this rank has participated |
| a rank is late in a round | late ranks, until the step |
| a pass under `no_sync`, parameters are added or have lost hooks | the next step reduces |
| gradients are not finite, with `on_nonfinite="skip"` | the step is skipped |
| the script has removed the gradients of the last round | not participated, not skipped |
| `zero_grad()` | the same; reduced gradients count as those of a dropped step |
| a step | the next step |
| an error on all ranks, `init`, `join` | the first step |
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Position:
    """The position of one optimizer on this rank.

    Attributes:
        step: the number of steps since the last `init`, `join` or error of all ranks.
        dropped: the number of those whose gradients a method other than `step()` may have used.
        rounds: the number of rounds of this step.
        steps_made: the number of all steps.
        participated: whether this rank has taken part in a round of this step.
        has_late_ranks: whether a rank was late in a round of this step: it entered the round from
            the `step()` of this or another optimizer. Then all ranks send a header at this step.
        no_sync_used: whether the script may have added gradients under `no_sync`, or parameters
            with gradients, since the last round. If so, the step reduces. The same on all ranks.
        skips_step: whether all ranks skip the step, because gradients are not finite.
    """

    step: int = 0
    dropped: int = 0
    rounds: int = 0
    steps_made: int = 0
    participated: bool = False
    has_late_ranks: bool = False
    no_sync_used: bool = False
    skips_step: bool = False

    def after_round(self) -> "Position":
        """Return the position after a round."""
        return replace(self, rounds=self.rounds + 1, participated=True, no_sync_used=False)

    def after_late_rank(self) -> "Position":
        """Return the position after a round with a late rank."""
        return replace(self, has_late_ranks=True)

    def at_step(self) -> "Position":
        """Return the position when all ranks are at the step, and gradients are reduced."""
        return replace(self, participated=True, has_late_ranks=False)

    def with_local_gradients(self) -> "Position":
        """Return the position after the script may have added gradients of single ranks."""
        return replace(self, no_sync_used=True)

    def with_step_skipped(self, skips: bool) -> "Position":
        """Return the position with or without a skipped step."""
        return replace(self, skips_step=skips)

    def without_gradients(self) -> "Position":
        """Return the position after the script has removed the gradients of the last round."""
        return replace(self, participated=False, skips_step=False)

    def after_zero_grad(self) -> "Position":
        """Return the position after `zero_grad()`.

        Reduced gradients may have been used by a method of the optimizer other than its step, such
        as `first_step` of sharpness-aware minimization. Count this as a step, because ranks are
        compared every few steps.
        """
        if not (self.participated and self.rounds):
            return self.without_gradients()
        return replace(
            self.without_gradients(),
            step=self.step + 1,
            dropped=self.dropped + 1,
            steps_made=self.steps_made + 1,
            rounds=0,
        )

    def after_step(self) -> "Position":
        """Return the position after a step, made or skipped."""
        return Position(self.step + 1, self.dropped, steps_made=self.steps_made + 1)

    def restarted(self) -> "Position":
        """Return the position of the first step: ranks may have counted differently."""
        return Position(steps_made=self.steps_made)
