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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.differences import Replicas
from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.agreement.same_data import PASSES, SameData
from hvdkit.checkpoint.step_boundary import LACKS_WINDOW, Place, StepBoundary
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.plan import ReductionState
from hvdkit.reduction.step_errors import BackwardFailed, PassesDiffer
from hvdkit.reduction.wire_format import WireFormat
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.digests import GradientDigest
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.backend import TorchBackend
from hvdkit.torch.reduction.coordination import Coordinator
from hvdkit.torch.reduction.gradients import Gradients, Left
from hvdkit.torch.reduction.last_stages import Clip
from hvdkit.torch.reduction.records import Record
from hvdkit.torch.reduction.rounds import Rounds
from hvdkit.torch.reduction.settings import Settings
from hvdkit.torch.replicas import ADVICE, FIRST_ADVICE, torch_replicas
from hvdkit.torch.wrapped_modules import check_not_reduced
from hvdkit.training.stragglers import BACKWARD, FORWARD

log = logging.getLogger("hvdkit.torch")

_SAME_DATA_ADVICE = (
    "Give each rank its own part: sampler = hvd.DistributedSampler(dataset), and "
    "DataLoader(dataset, sampler=sampler, ...). Random data need another seed on each rank"
)
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


def coordinator_of(process_set: mpi_ops.ProcessSet) -> Coordinator:
    """Return the coordinator of a process set: one per process set, kept as its attribute."""
    found: Coordinator | None = getattr(process_set, "_hvdkit_coordinator", None)
    if found is None:
        found = Coordinator(TorchCollectives(process_set))
        process_set._hvdkit_coordinator = found
    return found


@contextmanager
def _only_logged() -> Iterator[None]:
    """Only log the failure of a round, because the script has caught the error of its own pass."""
    try:
        yield
    except (BackwardFailed, PassesDiffer) as error:
        log.warning("%s", error)


@dataclass(frozen=True)
class _Pass:
    """The current backward pass.

    Attributes:
        local: the pass ends without a reduction.
        too_many: it must not add to the gradients of a whole window.
        ready: full buckets may be sent during the pass.
        compared: its gradients are in the digest that finds ranks with the same data.
        generation: the generation of the collectives when the pass began.
    """

    local: bool
    too_many: bool
    ready: bool
    compared: bool
    generation: int


class OptimizerReducer:
    """Reduce the gradients of an optimizer over the ranks of its process set.

    Args:
        optimizer: the optimizer, to which the reducer has only a weak reference.
        settings: its settings.
        window: its accumulation window.
        names: the names of its parameters.
        groups: parameters that share a bucket.
        collectives: the collectives; None for those of the process set.
        coordinator: coordinates the optimizers of the ranks; None for that of the process set.
        siblings: the reducers of this process.
        make_backend: see `hvdkit.torch.reduction.parts.Part`.

    Attributes:
        number: the place in the order of creation, the same on every rank.
        task: PyTorch's number of the current graph task; None between passes.
        graph_task: refers to an object that is freed when the pass ends or raises; None between
            passes.
        no_sync: whether passes only add to the gradients of this rank.
        wrapped_again: whether another optimizer has wrapped parameters of this one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        window: Window,
        names: dict[torch.nn.Parameter, str],
        groups: Sequence[Sequence[torch.nn.Parameter]] = (),
        collectives: TorchCollectives | None = None,
        coordinator: Coordinator | None = None,
        siblings: passes.Reducers = passes.reducers,
        make_backend: Callable[..., TorchBackend] = TorchBackend,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lock = RLock()
        self.settings = settings
        self.window = window
        self.siblings = siblings
        self.collectives = collectives or TorchCollectives(settings.process_set)
        self.coordinator = coordinator or coordinator_of(settings.process_set)
        self.task: int | None = None
        self.graph_task: weakref.ref[Any] | None = None
        self.no_sync = self.wrapped_again = False
        self._pass: _Pass | None = None
        self._warned_of_save = False
        self._first_gradients = GradientDigest(PASSES)
        self.number = siblings.add(self)
        self.gradients = Gradients(
            weakref.ref(self), self.collectives, settings, window, names, groups, make_backend
        )
        if settings.max_grad_norm is not None:
            own = weakref.proxy(optimizer)
            self.gradients.stages.append(
                Clip(settings.max_grad_norm, lambda norm: setattr(own, "grad_norm", norm))
            )
        self.rounds = self._make_rounds()

    def _make_rounds(self) -> Rounds:
        # Not a strong reference: a cycle would keep the optimizer until a garbage collection.
        own = weakref.proxy(self)
        checks = self.settings.check_parameters
        return Rounds(
            self.collectives,
            self.gradients,
            self.window,
            self.settings.on_nonfinite,
            ReplicaCheck(
                self.collectives,
                self.settings.replicas,
                lambda: own._replicas(),
                ADVICE,
                FIRST_ADVICE,
                lambda: own.rounds.position.steps_made > 0,
            )
            if checks
            else None,
            self.coordinator.stragglers,
            SameData(
                self.collectives, self._first_gradients.result, "gradients", _SAME_DATA_ADVICE
            ),
        )

    def optimizer(self) -> Any:
        """Return the `WrappedOptimizer`."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the optimizer's parameters, in order."""
        return [p for group in self.optimizer().param_groups for p in group["params"]]

    @property
    def process_set(self) -> mpi_ops.ProcessSet:
        """The ranks to reduce over."""
        return self.settings.process_set

    @property
    def replicas(self) -> ReplicaCheck | None:
        """The comparison of parameters and optimizer state; None without `check_parameters`."""
        return self.rounds.replicas

    def compared_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that the ranks compare, by name."""
        self.gradients.refresh()
        own = {each.name: each.parameter for each in self.gradients.records.values()}
        return {**own, **self.settings.frozen}

    def _replicas(self) -> Replicas:
        # Without later comparisons, the state of ranks may differ on purpose.
        state = self.optimizer() if self.settings.replicas.interval else None
        return torch_replicas(self.compared_parameters(), state)

    def warn(self, text: str) -> None:
        """Log a warning on the first rank."""
        if self.collectives.is_first:
            log.warning("%s", text)

    # --- the backward pass ----------------------------------------------------------------------

    def enter_task(self, task: int) -> None:
        """Handle that a graph task is about to add its first gradient."""
        with self._lock:  # gradients of different devices arrive in different threads
            if task == self.task:
                return
            self._complete_raised_passes()
            if self.graph_task is None:
                self._begin_pass()
            passes.watch(self)
            self.task = task

    def _begin_pass(self) -> None:
        self.coordinator.times.enter(BACKWARD)
        self.check_usable()
        window, gradients, position = self.window, self.gradients, self.rounds.position
        if not (position.steps_made or position.rounds):
            check_not_reduced((each.name, each.parameter) for each in gradients.records.values())
        self._note_removed_window()
        window.make_whole()
        self._note_removed_gradients()
        local = self._adds_locally
        try:
            gradients.begin_pass(self.rounds.position.participated)
        except HvdkitError as error:
            gradients.invalidate(str(error))
            raise
        self._pass = _Pass(
            local,
            too_many=window.complete and not (window.mean or self.no_sync),
            ready=not local and self.gradients.has_buckets and not self.rounds.plan_outdated,
            compared=bool(position.steps_made < PASSES and self.settings.replicas.interval),
            generation=self.collectives.generation,
        )

    @property
    def _adds_locally(self) -> bool:
        """Whether the next pass only adds to the gradients of this rank."""
        return self.no_sync or not self.window.next_pass_reduces

    def after_accumulation(self, record: Record) -> None:
        """Hook: a gradient has been accumulated."""
        if torch.is_grad_enabled():
            raise HvdkitError(
                "loss.backward(create_graph=True) was called with a DistributedOptimizer, but "
                "reduced gradients have no graph. Use torch.autograd.grad(loss, parameters, "
                "create_graph=True) for the inner derivative, and loss.backward() for the "
                "gradients of the step."
            )
        now = self._pass
        if now is None:
            raise HvdkitError(
                "a backward pass has ended in one thread while another one adds to gradients of "
                "the same optimizer. Train in one thread of each process."
            )
        if now.too_many:
            size = self.window.size
            raise HvdkitError(
                f"backward pass {size + 1} began before optimizer.step(), but "
                f"backward_passes_per_step is {size}. Call optimizer.step() after every {size} "
                f"passes, or make additional passes inside hvd.no_sync(optimizer)."
            )
        if now.compared and record.parameter.grad is not None:
            self._first_gradients.add(record.number, record.parameter.grad)
        self.gradients.accumulated(record, now.ready)

    def after_conversion(self) -> None:
        """Handle that a parameter had lost its hooks: a pass may not have been noticed."""
        self.rounds.position = self.rounds.position.with_local_gradients()

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is adding to the gradients."""
        return self._pass is not None

    def _close_pass(self) -> _Pass | None:
        """End the pass; return it, or None if it was `torch.autograd.grad`: nothing was added."""
        now = self._pass
        self.task = self.graph_task = self._pass = None
        return now if self.gradients.end_pass(now is not None and now.local) else None

    def end_pass(self) -> bool:
        """Record that the pass has ended; return whether to reduce its gradients now."""
        self.gradients.refresh()
        now = self._close_pass()
        if now is None:
            return False
        self.siblings.passes += 1
        if self.window.size > 1:
            self.window.count_pass(counted=not self.no_sync)
        if now.local:
            self.coordinator.times.enter(FORWARD)
        return not now.local

    @property
    def pass_raised(self) -> bool:
        """Whether a backward pass raised and has not been completed since.

        PyTorch does not report the end of a pass that raises after a re-entrant checkpoint. Outside
        of backward passes, a pass whose end was not reported counts as raised.
        """
        if self.graph_task is None:
            return False
        return self.graph_task() is None or not passes.in_backward()

    def end_raised_pass(self) -> bool:
        """Record that the pass raised; return whether other ranks wait in its round."""
        now = self._close_pass()
        if now is None:
            return False
        if now.local:
            self.gradients.invalidate(
                "an earlier loss.backward() raised, so some gradients are missing"
            )
            return False
        if now.generation != self.collectives.generation:
            self.gradients.reset()  # Horovod was initialised again, so no rank waits
            return False
        return True

    def _complete_raised_passes(self) -> None:
        """Take part in the rounds of passes that raised, because other ranks wait in them.

        Raises:
            BackwardFailed: on every rank, because a pass of this optimizer raised.
        """
        raised = [each for each in self.siblings if each.pass_raised]
        if not raised:
            return
        passes.reduce((), [each for each in raised if each.end_raised_pass()])
        if self in raised and self.gradients.invalid_reason:
            raise BackwardFailed(self.gradients.invalid_reason)

    def complete_earlier_passes(self) -> None:
        """Complete earlier passes that raised; do nothing inside a backward pass.

        Passes of other optimizers are completed too: their rounds may invalidate these gradients.

        Raises:
            BackwardFailed: on every rank, because a pass of this optimizer raised.
        """
        if not (self.wrapped_again or passes.in_backward()):
            self._complete_raised_passes()

    def _drop_earlier_passes(self) -> None:
        """Complete earlier passes that raised, and only log that their gradients are lost."""
        with _only_logged():
            self.complete_earlier_passes()

    def check_usable(self) -> None:
        """Check that a pass or a step may use the gradients.

        Raises:
            UsageError: another optimizer has wrapped the parameters.
            HvdkitError: an earlier error has made the gradients useless.
        """
        if self.wrapped_again:
            raise UsageError(
                "parameters of this optimizer have been wrapped again by another "
                "hvd.DistributedOptimizer, which reduces their gradients now. Use that optimizer. "
                "If two optimizers must step the same parameters, use one optimizer with several "
                "parameter groups."
            )
        gradients = self.gradients
        if not gradients.invalid_reason:
            return
        if not gradients.exist():
            gradients.invalid_reason = ""
            return
        raise HvdkitError(
            f"the gradients cannot be used: call optimizer.zero_grad() first. The cause: "
            f"{gradients.invalid_reason}"
        )

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
        if window.passes >= window.size and not (self.rounds.position.steps_made or window.made):
            self.warn(_ONE_CALL.format(passes=window.passes, size=window.size))
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
            window.passes = int(self.accumulated)
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
        gradients, dropped = self.gradients, self.window.dropped
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
        earlier = window.calls, window.passes, window.resumed
        dropped = True
        if self.pass_raised or not self.gradients.invalid_reason:
            self._drop_earlier_passes()
            if local or not self.gradients.invalid_reason:
                self.gradients.invalid_reason = ""
                window.calls, window.passes, window.resumed = earlier
                window.count_pass(counted=window.size > 1 and not self.no_sync)
                window.dropped = True
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
            (passed,) = self.collectives.sum([int(self.window.passed)], "hvdkit.window.passed")
        return not passed

    def _fail_if_pass_dropped(self) -> None:
        """Let the round of this step fail on all ranks if this rank has dropped a pass of it.

        Raises:
            BackwardFailed: on every rank.
        """
        if self.window.dropped:
            passes.reduce((), [self])

    # --- gradients that the script, or a restore, has removed -----------------------------------

    def _note_removed_gradients(self) -> None:
        """Note that the script has removed the gradients itself, or has set them to 0."""
        # Otherwise, do not wait for the device.
        if self.gradients.left is Left.UNSAVED and not self.gradients.any_nonzero():
            self.mark_gradients_used()

    def _note_removed_window(self) -> None:
        """Begin the next window if the script has removed the gradients of a complete one."""
        window = self.window
        # The number of passes of a sum may differ between ranks.
        ended = window.complete if window.mean else window.size > 1 and self.rounds.position.rounds
        if ended and self.gradients.all_removed():
            self._begin_without_gradients()

    def _begin_without_gradients(self) -> None:
        """Begin the next window, after the script has reset the gradients."""
        self.window.close()
        self.gradients.reset()
        self.rounds.position = self.rounds.position.after_zero_grad()

    def discard_accumulated(self) -> None:
        """Drop accumulated gradients and begin a new window."""
        self._drop_earlier_passes()
        # The script may call zero_grad() only after the next step.
        self.gradients.remove_unreduced()
        self.gradients.invalid_reason = ""
        # An elastic job discards gradients once more after a restore.
        self.window.discard()
        self.gradients.reset()

    def mark_gradients_used(self) -> None:
        """Record that no step will use the reduced gradients."""
        if self.gradients.are_unused:
            self.gradients.left = Left.USED if self.gradients.exist() else Left.NOTHING

    @property
    def accumulated(self) -> bool:
        """Whether this rank has gradients that are not reduced."""
        return bool(self.window.begun) or self.gradients.has_local()

    @property
    def has_unused_gradients(self) -> bool:
        """Whether this rank has gradients that no step has used, reduced or not.

        The script may have removed them itself, for example with `model.zero_grad()`.
        """
        return self.accumulated or self.window.dropped or self.gradients.are_unused

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
