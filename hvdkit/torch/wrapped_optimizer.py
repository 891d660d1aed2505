"""The class of wrapped optimizers. Gradients are final when `loss.backward()` returns.

The path of a gradient from `loss.backward()` to `p.grad`:

1. `_before_gradient`: PyTorch is about to accumulate a gradient. `OptimizerGradients.before` keeps
   the part that was already reduced apart.
2. `_after_gradient`: `Synchronizer.mark_ready` packs a full bucket and starts its collective.
3. `passes.end` at the end of the outermost backward pass: `Coordinator.send` starts a header, which
   compares the ranks' steps, and the remaining buckets.
4. `Coordinator.wait`: if all ranks agree, `Rounds.complete` waits for the buckets and unpacks them
   into `p.grad`. `OptimizerGradients.end_round` adds the part that was kept apart.
5. `step`: the plain optimizer's step. A rank without a backward pass takes part in the rounds of
   the others before (`Coordinator.catch_up`).
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.core.accumulation import PassesDiffer, Window
from hvdkit.core.coordination import BackwardFailed, Coordinator, one_thread
from hvdkit.core.reduction import Reduction, ReductionState
from hvdkit.core.rounds import Rounds
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch import passes
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.digests import check_values
from hvdkit.torch.gradients import OptimizerGradients

log = logging.getLogger("hvdkit.torch")

# A parameter reports to the optimizer that wrapped it last.
_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()
_count = itertools.count()
_live_optimizers: "weakref.WeakSet[WrappedOptimizer]" = weakref.WeakSet()


def _coordinator_of(process_set: mpi_ops.ProcessSet) -> Coordinator:
    """Return the coordinator of a process set; an attribute of the set holds it."""
    found: Coordinator | None = getattr(process_set, "_hvdkit_coordinator", None)
    if found is None:
        found = Coordinator(TorchCollectives(process_set))
        process_set._hvdkit_coordinator = found
    return found


def living() -> "list[WrappedOptimizer]":
    """Return the wrapped optimizers of this process, in the order of their creation."""
    return sorted(_live_optimizers, key=lambda each: each.number)


def wrapped(optimizer: torch.optim.Optimizer) -> "WrappedOptimizer":
    """Return `optimizer` if it is a result of `hvd.DistributedOptimizer`.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(optimizer, WrappedOptimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected the "
            f"result of hvd.DistributedOptimizer"
        )
    return optimizer


class WrappedOptimizer(torch.optim.Optimizer):
    """The part of a wrapped optimizer's class that precedes the plain optimizer's class."""

    def _wrap(
        self,
        plain: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        reduction: Reduction,
        window: Window,
        groups: list[list[torch.nn.Parameter]],
        process_set: mpi_ops.ProcessSet,
        check_parameters: bool,
        frozen: dict[str, torch.nn.Parameter],
    ) -> None:
        # Not with __init__, which would drop loaded state. Without `step`, which an LR scheduler
        # sets on the plain optimizer, and which would hide the method of this class.
        self.__dict__.update((k, v) for k, v in plain.__dict__.items() if k != "step")
        self.number = next(_count)
        self.running: weakref.ref[Any] | None = None
        self._plain = plain
        self._names = names
        self.op = mpi_ops.Average if reduction.average else mpi_ops.Sum
        self.backward_passes_per_step = reduction.passes
        self.gradient_predivide_factor = reduction.predivide or 1.0
        self.process_set = process_set
        self._window = window
        self._should_synchronize = True
        self._check_parameters = check_parameters
        # Parameters of the model that this optimizer does not have.
        self._frozen = frozen
        self._stepped: bool | torch.Tensor = False
        #: The number of steps.
        self.steps = 0
        self._muted = False
        # State of the current backward pass.
        self._task: int | None = None
        # Gradients need no work: one rank, one pass per step.
        self._passive = False
        self._muted_pass = False
        self._held_back = False
        self._generation = 0
        # Whether another optimizer has wrapped parameters of this one.
        self._replaced = False
        self._collectives = TorchCollectives(process_set)
        # A weak reference, so that an unused optimizer is freed at once.
        reference = weakref.ref(self)
        self._gradients = OptimizerGradients(
            functools.partial(_parameters_of, reference),
            functools.partial(_name_of, reference),
            self._collectives,
            reduction,
            groups,
            window,
            functools.partial(_context_of, reference),
            functools.partial(_report_to, reference),
            keep_sparse=reduction.sparse_as_dense and isinstance(plain, torch.optim.SparseAdam),
        )
        #: The rounds that `hvdkit.torch.passes` enters when a pass ends.
        self.rounds = Rounds(
            self._collectives,
            self._gradients,
            self._gradients.synchronizers,
            window,
            functools.partial(_check_values_of, reference) if check_parameters else None,
        )
        self.coordinator = _coordinator_of(process_set)
        self.coordinator.add(self)
        _live_optimizers.add(self)

    # --- the backward pass ----------------------------------------------------------------------

    def _before_gradient(self, number: int | None) -> None:
        """Hook: a gradient is about to be accumulated."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._enter_task(task)
        if not self._passive and number is not None:
            try:
                self._gradients.before(number, assigned=not self.rounds.caught_up)
            except HvdkitError as error:
                self._gradients.invalidate(str(error))
                raise

    def _after_gradient(self, number: int | None) -> None:
        """Hook: a gradient has been accumulated."""
        if torch.is_grad_enabled():
            raise HvdkitError(
                "loss.backward(create_graph=True) with a DistributedOptimizer: reduced gradients "
                "have no graph. Use torch.autograd.grad(loss, parameters, create_graph=True) for "
                "the inner derivative, and loss.backward() for the gradients of the step."
            )
        if self._passive:
            return
        if number is None:
            self._gradients.arrived_unplanned()
            return
        self._gradients.arrived(number)
        if not (self._muted_pass or self._held_back):
            self._gradients.mark_ready(number)

    def _enter_task(self, task: int) -> None:
        if any(each._interrupted for each in _live_optimizers):
            self._complete_interrupted_passes()
        if self.running is None:
            self._begin_pass()
        passes.watch(self)
        self._task = task

    def _begin_pass(self) -> None:
        self._check_usable()
        window = self._window
        if window.size > 1 and not self._muted and window.passes >= window.size:
            setting = "accumulation_steps" if window.mean else "backward_passes_per_step"
            raise HvdkitError(
                f"a backward pass began after the {window.size} passes of {setting}={window.size}, "
                f"before optimizer.step(). Call optimizer.step() after every {window.size} passes, "
                f"or put additional passes under hvd.no_sync(optimizer)."
            )
        self._passive = window.size == 1 and self._collectives.alone
        self._muted_pass = self._muted or (window.size > 1 and window.passes < window.size - 1)
        self._held_back = not self._muted_pass and self.rounds.moved
        self._generation = self._collectives.generation

    def end_pass(self) -> bool:
        """Record the end of a pass; return whether its gradients must be reduced now."""
        self._task = self.running = None
        self._gradients.watch()
        arrived = self._passive or self._gradients.end_pass()
        if not arrived or self._passive:
            return False
        if self._window.size > 1 and not self._muted:
            self._window.passes += 1
        return not self._muted_pass

    def _end_pending_pass(self) -> None:
        """Complete passes that have raised, unless this is called in a backward pass.

        Includes passes of other optimizers, because their rounds may void gradients of this one.

        Raises:
            BackwardFailed: on every rank, because the pass has raised.
        """
        if self._replaced or passes.in_backward():
            return
        if any(each._interrupted for each in _live_optimizers):
            self._complete_interrupted_passes()

    def _drop_pending_pass(self) -> None:
        """Complete a pass that has raised, whose gradients are not needed."""
        try:
            self._end_pending_pass()
        except (BackwardFailed, PassesDiffer) as error:
            # loss.backward() raised on this rank, and the script has caught the error.
            log.warning("%s", error)

    @property
    def _interrupted(self) -> bool:
        """Whether a backward pass has raised and has not been completed since.

        Outside of backward passes this includes a pass whose re-entrant checkpoints have ended. It
        is unknown whether such a pass has raised.
        """
        if self.running is None:
            return False
        return self.running() is None or not passes.in_backward()

    def _complete_interrupted_passes(self) -> None:
        """Take part in the rounds of passes that raised, so that the other ranks do not wait.

        Raises:
            BackwardFailed: on every rank.
        """
        interrupted = self._interrupted
        passes.reduce((), [e for e in living() if e._interrupted and e._end_interrupted()])
        if interrupted and self._gradients.void:
            raise BackwardFailed(self._gradients.void)

    def _end_interrupted(self) -> bool:
        """Record that the pass has raised; return whether the other ranks wait for its round."""
        self._task = self.running = None
        if not self._gradients.end_pass():
            return False  # torch.autograd.grad has accumulated nothing.
        if self._passive or self._muted_pass or self._collectives.alone:
            self._gradients.invalidate(
                "an earlier loss.backward() raised, so some gradients are missing: call "
                "optimizer.zero_grad() first"
            )
            return False
        if self._generation != self._collectives.generation:
            self._gradients.discard()  # Horovod was initialised again, so no rank waits.
            return False
        return True

    def _check_usable(self) -> None:
        if self._replaced:
            raise UsageError(
                "parameters of this optimizer have been wrapped again, by another "
                "hvd.DistributedOptimizer, which reduces their gradients now. Use that one. "
                "Parameters that two optimizers step belong into one optimizer, in groups"
            )
        if not self._gradients.void:
            return
        if not self._gradients.exist():
            self._gradients.void = ""
            return
        raise HvdkitError(
            f"the gradients cannot be used: call optimizer.zero_grad() first. What happened: "
            f"{self._gradients.void}"
        )

    # --- steps ----------------------------------------------------------------------------------

    @property
    def stepped(self) -> bool:
        """Whether the last `step()` changed the parameters.

        False inside an accumulation window, and where a `GradScaler` skipped the step.
        """
        if not isinstance(self._stepped, bool):
            self._stepped = not self._stepped.item()
        return self._stepped

    def reset_stepped(self) -> None:
        """Let `stepped` be False until the next step."""
        self._stepped = False

    @property
    def needs_more_passes(self) -> bool:
        """Whether a step needs more backward passes."""
        return self._window.open and self._window.mean

    def reduce(self) -> bool:
        """Make all gradients final, unless a step needs more passes.

        All ranks call this alike. It communicates only if a rank made no backward pass since the
        last step, or if gradients were added in `hvd.no_sync`.

        Returns:
            Whether the gradients are final.
        """
        self._end_pending_pass()
        if self.needs_more_passes:
            return False
        self._make_final()
        return True

    def _make_final(self) -> None:
        self._check_usable()
        self._gradients.watch()
        with one_thread():
            self.coordinator.catch_up(self.rounds)

    def synchronize(self) -> None:
        """Make all gradients final, as `step()` does. See `reduce`."""
        self.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` use the gradients as they are, in the block."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the plain optimizer with reduced gradients.

        Does nothing inside a window of `accumulation_steps`; see the attribute `stepped`.

        Raises:
            UsageError: a closure, which makes the backward passes itself, with accumulation.
        """
        self._stepped = False
        if closure is not None and self._window.mean and self._window.size > 1:
            raise UsageError(
                f"step(closure) with accumulation_steps {self._window.size}: a closure makes the "
                f"passes itself. Accumulate in the closure, or call step() without one"
            )
        self._end_pending_pass()
        if self.needs_more_passes:
            return None
        if closure is None:
            if self._should_synchronize:
                self._make_final()
            result = super().step()
        else:
            result = super().step(self._reducing(closure) if self._should_synchronize else closure)
        # For an LR scheduler of the plain optimizer, which checks whether it has stepped.
        self._plain._opt_called = True  # type: ignore[attr-defined]
        # A fused optimizer skips a step with infinite gradients by itself.
        found = getattr(self, "found_inf", None)
        self.end_step()
        self._stepped = True if found is None else found
        self.steps += 1
        return result

    # Otherwise torch wraps this method to run step hooks; the plain class's `step` runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.reduce()
            return loss

        return reduced

    def end_step(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self._stepped = self._gradients.unused = False
        self._gradients.watch()
        self.rounds.end_step()
        self._window.close()

    def flush(self, step: Callable[[], Any] | None = None) -> bool:
        """Make a step with the passes of an incomplete accumulation window, if there are any.

        A collective: every rank calls this, for example at the end of the data. The gradient is the
        mean over the passes so far.

        Args:
            step: a function to call instead of `self.step`, for example one that also clips.

        Returns:
            Whether the window had a pass.

        Raises:
            PassesDiffer: on every rank, if ranks have accumulated different numbers of passes.
        """
        self._end_pending_pass()
        if self._window.size == 1:
            self._window.passes = int(self._gradients.has_new(assigned=False))
        self._check_usable()
        with one_thread():
            self.coordinator.enter_rounds_of_others(self.rounds)
        if not self._window.end_early():
            return False
        (step or self.step)()
        self._window.close()
        return True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. Does nothing inside a window of `accumulation_steps`.

        The arguments are those of the plain optimizer's `zero_grad`.
        """
        self._drop_pending_pass()
        void = self._gradients.void
        if self._window.mean and self._window.open and self._window.passes and not void:
            return
        self._gradients.void = ""
        self._gradients.unused = False
        self._window.close()
        super().zero_grad(*args, **kwargs)
        self._gradients.discard()
        self.rounds.caught_up = False
        self._gradients.watch()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, and begin a new window.

        Raises:
            UsageError: the number is below 1, or the optimizer has accumulation_steps.
        """
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            raise UsageError(f"backward_passes_per_step is {passes!r}: expected an integer >= 1")
        if self._window.mean and self._window.size > 1:
            raise UsageError(
                f"set_backward_passes_per_step({passes}) on an optimizer with accumulation_steps "
                f"{self._window.size}: use one of the two"
            )
        self._window.close()
        self._window.size, self._window.mean = passes, False
        self.backward_passes_per_step = passes

    # --- state ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the plain optimizer's state, and begin a new step."""
        self.reset_step()
        super().load_state_dict(state_dict)
        # torch has replaced the containers, which the plain optimizer shares.
        self._plain.__dict__.update(state=self.state, param_groups=self.param_groups)

    def reset_step(self) -> None:
        """Begin a new step and drop accumulated gradients. All ranks call this, or none."""
        self._drop_pending_pass()
        self._gradients.void = ""
        self._stepped = self._gradients.unused = False
        self._window.close()
        self._gradients.discard()

    @property
    def between_steps(self) -> bool:
        """Whether no gradients wait for more passes or for a reduction."""
        self._end_pending_pass()
        return not (self.accumulated or self._gradients.unused)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse to copy, because the copy's parameters would have no hooks.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a DistributedOptimizer cannot be copied: copy the model, make a plain optimizer for "
            "the copy, load this one's state_dict(), and wrap it"
        )

    def leave_gradients(self) -> None:
        """Record that the reduced gradients will not be used."""
        self._gradients.unused = False

    @property
    def accumulated(self) -> bool:
        """Whether this rank has gradients that have not been reduced."""
        return bool(self._window.passes) or self._gradients.has_new(assigned=False)

    def complete_deferred(self) -> None:
        """Complete deferred collectives of wire formats. Every rank has started them."""
        self.rounds.complete_deferred()

    def reduction_states(self) -> list[ReductionState | None]:
        """Return the state needed to resume with bit-identical sums, per synchronizer."""
        return [synchronizer.state for synchronizer in self._gradients.synchronizers]

    def resume_reduction(self, states: Sequence[ReductionState | None]) -> None:
        """Restore a value of `reduction_states`, the same on every rank. Not a collective."""
        self._gradients.add_trainable()
        for synchronizer, state in zip(self._gradients.synchronizers, states, strict=False):
            synchronizer.resume(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; every rank must add the same."""
        super().add_param_group(param_group)
        self._gradients.add_trainable()
        self._gradients.watch()

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Horovod's attribute of this name, which scripts read."""
        return dict(self._names)


# --- callbacks that hold a weak reference to the optimizer ----------------------------------------

_Reference = weakref.ref[WrappedOptimizer]


def _parameters_of(reference: _Reference) -> list[torch.nn.Parameter]:
    optimizer = reference()
    assert optimizer is not None
    return [p for group in optimizer.param_groups for p in group["params"]]


def _name_of(reference: _Reference, parameter: torch.nn.Parameter) -> str:
    optimizer = reference()
    assert optimizer is not None
    names = optimizer._names
    return names.setdefault(parameter, f"added.parameter{len(names)}")


def _context_of(reference: _Reference) -> list[str]:
    """Return lines that must be the same on every rank."""
    optimizer = reference()
    assert optimizer is not None
    everyone = _parameters_of(reference)
    return [
        f"optimizer: {type(optimizer).__name__}",
        *(
            f"parameter {i} of the optimizer is {_name_of(reference, p)!r}, "
            f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}, "
            f"requires_grad={p.requires_grad}"
            for i, p in enumerate(everyone)
        ),
        f"the optimizer has {len(everyone)} parameters",
        f"check_parameters: {optimizer._check_parameters}",
    ]


def _check_values_of(reference: _Reference) -> None:
    optimizer = reference()
    assert optimizer is not None
    parameters = _parameters_of(reference)
    named = {_name_of(reference, p): p for p in parameters} | optimizer._frozen
    check_values(optimizer._collectives, named)


def _report_to(reference: _Reference, parameter: torch.nn.Parameter, number: int | None) -> None:
    """Register hooks that report a parameter's gradients to an optimizer."""
    previous, *handles = _hooks.get(parameter, (reference,))
    other = previous()
    if other is not None and other is not reference():
        other._replaced = True
    for handle in handles:
        handle.remove()
    # Hooks can be registered only while the parameter requires gradients.
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    _hooks[parameter] = (
        reference,
        parameter.register_hook(functools.partial(_before, reference, number)),
        parameter.register_post_accumulate_grad_hook(functools.partial(_after, reference, number)),
    )
    if frozen:
        parameter.requires_grad_(False)


def _before(reference: _Reference, number: int | None, _: torch.Tensor) -> None:
    optimizer = reference()
    if optimizer is not None:
        optimizer._before_gradient(number)


def _after(reference: _Reference, number: int | None, _: torch.Tensor) -> None:
    optimizer = reference()
    if optimizer is not None:
        optimizer._after_gradient(number)
