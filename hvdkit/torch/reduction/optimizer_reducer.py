"""The reduction of one optimizer's gradients: its passes, its accumulation window, its rounds.

| event | gradients | window | position |
|---|---|---|---|
| a pass ends, and is not reduced | local | one more pass | - |
| a pass ends, and is reduced | `end_round` | one more pass | `after_round` |
| `step()` inside a window of `accumulation_steps` | - | one more call | - |
| `step()`, or a skipped step | `end_step` | closed | `after_step` |
| `zero_grad()`, or the script has removed a window | `reset` | closed | `after_zero_grad` |
| `zero_grad()` after a dropped pass in a window | `reset` | - | - |
| `load_state_dict()`, a restore, `join()` | local ones removed, `reset` | discarded | - |
| an error on this rank | `invalidate` | closed | - |
| an error on all ranks | `invalidate` | closed | `restarted` |
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdkit.checkpoint.step_boundary import LACKS_WINDOW, Place, StepBoundary
from hvdkit.reduction.plan import ReductionState
from hvdkit.reduction.step_errors import BackwardFailed, PassesDiffer
from hvdkit.reduction.wire_format import WireFormat
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.backward_passes import BackwardPasses
from hvdkit.torch.reduction.records import Left
from hvdkit.training.stragglers import FORWARD

log = logging.getLogger("hvdkit.torch")

_GRADIENTS_NOT_SAVED = (
    "a checkpoint was saved between a backward pass and the optimizer step that used its "
    "gradients. So the checkpoint lacks these gradients. Call save() and maybe_save() after the "
    "steps of all optimizers. If no step is expected to use the gradients of a pass, call "
    "optimizer.zero_grad() before the next pass"
)

_ONE_CALL = (
    "step() was called after {passes} backward passes, and accumulation_steps is {size}. This "
    "setting counts calls of step(), so the optimizer makes one step for {size} calls. If the "
    "passes belong to several batches, call step() after each of them, or use "
    "backward_passes_per_step={size}, which takes the sum of the passes. If they belong to one "
    "batch, nothing is to be changed"
)


@contextmanager
def _only_logged() -> Iterator[None]:
    """Only log the failure of a round, because the script has caught the error of its own pass."""
    try:
        yield
    except (BackwardFailed, PassesDiffer) as error:
        log.warning("%s", error)


class OptimizerReducer(BackwardPasses):
    """Reduce the gradients of an optimizer over the ranks of its process set.

    The arguments are those of `BackwardPasses`.
    """

    # --- a step ---------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """See `WrappedOptimizer.reduce`."""
        self.complete_earlier_passes()
        self._note_removed_window()
        if self.window.open:
            return False
        self.window.end()
        self.check_usable()
        self.gradients.refresh()
        self._fail_if_pass_dropped()
        if not self.rounds.position.participated:  # otherwise, the gradients are those of this step
            self._note_removed_gradients()
        with self.siblings.lock:
            self.coordinator.reduce_at_step(self.rounds)
        return True

    def call_in_window(self) -> bool:
        """Count a call of `step()` inside an open window; return whether the window is open."""
        self.complete_earlier_passes()
        self._note_removed_window()
        if not self.window.open:
            return False
        self.gradients.refresh()
        window = self.window
        if window.counts.passes >= window.size and not (
            self.rounds.position.steps_made or window.made
        ):
            self.warn(_ONE_CALL.format(passes=window.counts.passes, size=window.size))
        if not self._repeats_a_drop():
            window.count_call()
        return True

    def before_end_of_step(self) -> None:
        """Log a warning if a checkpoint lacks the gradients that the step has used."""
        if self.gradients.left is Left.UNSAVED and not self._warned_of_save:
            self._warned_of_save = True
            self.warn(_GRADIENTS_NOT_SAVED)

    def end_step(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self.siblings.passes = 0
        self.gradients.end_step()
        self.rounds.position = self.rounds.position.after_step()
        self.window.close()
        self.coordinator.times.enter(FORWARD)

    def flush(self, step: Callable[[], Any]) -> bool:
        """See `WrappedOptimizer.flush`."""
        window = self.window
        self.complete_earlier_passes()
        if window.size == 1:
            window.note(passes=int(self.accumulated))
        window.end_early()  # the ranks compare the numbers of passes
        self.check_usable()
        try:
            self._fail_if_pass_dropped()
            with self.siblings.lock:
                self.coordinator.enter_rounds_of_others(self.rounds)
        except BackwardFailed as error:
            log.warning("%s", error)
            self.optimizer().zero_grad()
            return False
        # A rank may have no pass of a sum.
        (made,) = self.collectives.max([int(window.end_early())], "hvdkit.window.made")
        if not made:
            return False
        self.reduce()  # the script's function may use the gradients before the step
        step()
        window.close()
        return True

    def zero_grad(self, zero: Callable[[], None]) -> None:
        """Reset the gradients, unless an open window keeps them.

        Args:
            zero: calls the plain optimizer's `zero_grad`.
        """
        self._drop_earlier_passes()
        gradients, dropped = self.gradients, self.window.counts.dropped
        if self.window.keeps_gradients and not (dropped or gradients.invalid_reason):
            return
        gradients.invalid_reason = ""
        self.siblings.passes = 0
        zero()
        if dropped:
            gradients.reset()  # the other ranks continue this window
        else:
            self._begin_without_gradients()
        gradients.refresh()

    def drop_pass(self) -> bool:
        """See `WrappedOptimizer.drop_pass`."""
        window, local = self.window, self._adds_locally
        earlier = window.counts
        dropped = True
        if self.pass_raised or not self.gradients.invalid_reason:
            self._drop_earlier_passes()
            if local or not self.gradients.invalid_reason:
                self.gradients.invalid_reason = ""
                window.counts = earlier
                window.count_pass(counted=window.size > 1 and not self.no_sync)
                window.note(dropped=True)
                if local:
                    dropped = False
                else:
                    with _only_logged():
                        self._fail_if_pass_dropped()
        self.optimizer().zero_grad()
        window.follows_drop = window.follows_drop or dropped
        return dropped

    def _repeats_a_drop(self) -> bool:
        """Return whether this call of `step()` is that of the batch whose pass was dropped.

        A collective after a drop that has ended a window: a rank without a pass cannot know.
        """
        if not self.window.follows_drop:
            return False
        self.window.follows_drop = False
        with self.siblings.lock:
            self.coordinator.enter_rounds_of_others(self.rounds)
            (passed,) = self.collectives.sum(
                [int(self.window.counts.passed)], "hvdkit.window.passed"
            )
        return not passed

    def _fail_if_pass_dropped(self) -> None:
        """Let the round of this step fail on all ranks if this rank has dropped a pass of it.

        Raises:
            BackwardFailed: on every rank.
        """
        if self.window.counts.dropped:
            passes.reduce((), [self])

    def _drop_earlier_passes(self) -> None:
        """Complete earlier passes that raised, and only log that their gradients are lost."""
        with _only_logged():
            self.complete_earlier_passes()

    def discard_accumulated(self) -> None:
        """Drop accumulated gradients and begin a new window."""
        self._drop_earlier_passes()
        # The script may call zero_grad() only after the next step.
        self.gradients.remove_unreduced()
        self.gradients.invalid_reason = ""
        # An elastic job discards gradients once more after a restore.
        self.window.discard()
        self.gradients.reset()

    def note_save(self, step: int) -> None:
        """Note that a checkpoint was saved, which lacks the gradients of this rank.

        A step uses those of an open window. Only the next step shows whether it uses others.
        """
        if self.window.begun:
            self.warn(LACKS_WINDOW % step)
        elif self.has_unused_gradients:
            self.gradients.left = Left.UNSAVED

    # --- settings and state ---------------------------------------------------------------------

    def add_parameters(self) -> None:
        """Reduce parameters that were added to the optimizer's groups. Every rank calls this."""
        self.gradients.refresh()
        for record in self.gradients.plan_new():
            record.local = record.parameter.grad is not None
        # The passes of this step may be reduced already. The step must then reduce on all ranks,
        # although only some of them may have such gradients.
        self.rounds.position = self.rounds.position.with_local_gradients()

    def resume_window(self, made: int, size: int) -> None:
        """Continue an accumulation window whose gradients are lost, after `discard_accumulated`.

        With `backward_passes_per_step`, a script that counts its passes since the beginning of the
        training calls `step()` after the rest of the window. Another script makes a whole window
        first: see `Window.make_whole`.

        Args:
            made: the number of passes, or of batches, that the window had.
            size: the number of those of a whole window. Without effect if it is another one now.
        """
        is_open = size == self.window.size and 0 < made < size
        self.window.resume(made if is_open else 0)
        if is_open:
            self.warn(
                f"the checkpoint was saved after pass {made} of {size} of an accumulation "
                f"window, and has no gradients. The first step after the restore lacks those of "
                f"these passes"
            )

    def set_buckets(self, size: int, wire_format: WireFormat) -> None:
        """Change the buckets' size and format, between two steps. Every rank must call this."""
        self.rounds.complete_deferred()
        self.gradients.set_buckets(size, wire_format)

    def reduction_states(self) -> list[ReductionState | None]:
        """Return the state needed to resume with bit-identical sums, for each synchronizer."""
        return [part.synchronizer.state for part in self.gradients.parts]

    def resume_reduction(self, states: Sequence[ReductionState | None]) -> None:
        """Restore a result of `reduction_states`, the same on every rank. Not a collective."""
        self.gradients.forget_removed()
        self.gradients.refresh()
        self.gradients.plan_new()
        for part, state in zip(self.gradients.parts, states, strict=False):
            part.synchronizer.resume(state)


def step_boundary(reducers: Callable[[], Sequence[OptimizerReducer]]) -> StepBoundary:
    """Return the places between the steps of the optimizers of reducers.

    A rank is at a boundary if no window is open, no pass runs, and no pass has followed the last
    step or `zero_grad()` of any optimizer of the process. Hooks of gradients run in a pass.
    Gradients that such a step has left to another optimizer do not count: in a GAN, those of the
    discriminator are removed before its next pass. Nor do those that the script has removed itself,
    as with `model.zero_grad()`.
    """

    def place() -> Place:
        own = reducers()
        for each in own:
            each.complete_earlier_passes()
        made = max((each.siblings.passes for each in own), default=0)
        windows = [each.window.begun for each in own]
        waiting = (
            each.has_unused_gradients and each.gradients.any_nonzero() for each in own if made
        )
        waits = own and (passes.in_backward() or any(waiting))
        return (made, *windows) if waits or any(windows) else None

    def steps() -> int:
        optimizers = [each.optimizer() for each in reducers()]
        return sum(each.hvdkit_steps + each.hvdkit_skipped_steps for each in optimizers)

    return StepBoundary(place, steps)
