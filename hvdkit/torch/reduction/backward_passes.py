"""The backward passes of one optimizer, and the gradients that the script has removed after them.

`hvdkit.torch.reduction.optimizer_reducer` has the table of the events.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.differences import Replicas
from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.agreement.same_data import PASSES, SameData
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.step_errors import BackwardFailed
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.digests import GradientDigest
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.backend import TorchBackend
from hvdkit.torch.reduction.coordination import Coordinator
from hvdkit.torch.reduction.gradients import Gradients
from hvdkit.torch.reduction.last_stages import Clip
from hvdkit.torch.reduction.records import Left, Record
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


def coordinator_of(process_set: mpi_ops.ProcessSet) -> Coordinator:
    """Return the coordinator of a process set: one per process set, kept as its attribute."""
    found: Coordinator | None = getattr(process_set, "_hvdkit_coordinator", None)
    if found is None:
        found = Coordinator(TorchCollectives(process_set))
        process_set._hvdkit_coordinator = found
    return found


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


class BackwardPasses:
    """The backward passes of an optimizer, whose gradients are reduced over a process set.

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
        optimizer = self.optimizer()
        if optimizer.shards is not None and optimizer.shards.replaced is not None:
            return list(optimizer.shards.replaced)
        return [p for group in optimizer.param_groups for p in group["params"]]

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

    def enter_task_late(self, task: int, record: Record) -> None:
        """Handle a graph task whose first gradient was added without a hook before it.

        FSDP2 adds a gradient itself, and then calls the hooks for complete gradients.
        """
        parameter = record.parameter
        gradient = parameter.grad
        if self.gradients.note_late(record):
            parameter.grad = None  # as if the task had been entered before
        self.enter_task(task)
        parameter.grad = gradient

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

    # --- gradients that the script has removed -------------------------------------------------

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
        return self.accumulated or self.window.counts.dropped or self.gradients.are_unused
