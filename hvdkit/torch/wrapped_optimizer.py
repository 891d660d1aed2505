"""The class of wrapped optimizers.

Its gradients are final when `loss.backward()` returns: at the end of each outermost backward pass
that reached its parameters, all buckets have been reduced. `hvdkit.core.coordination` has the
protocol between the ranks, `hvdkit.core.rounds` an optimizer's part in it, `hvdkit.torch.gradients`
what is new on this rank, `hvdkit.torch.passes` when a pass ends.
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
_living: "weakref.WeakSet[WrappedOptimizer]" = weakref.WeakSet()


def _coordinator_of(process_set: mpi_ops.ProcessSet) -> Coordinator:
    """Return the coordinator of a process set, which lives as long as that."""
    found: Coordinator | None = getattr(process_set, "_hvdkit_coordinator", None)
    if found is None:
        found = Coordinator(TorchCollectives(process_set))
        process_set._hvdkit_coordinator = found
    return found


def living() -> "list[WrappedOptimizer]":
    """Return the wrapped optimizers of this process, in the order of their creation."""
    return sorted(_living, key=lambda each: each.number)


def wrapped(optimizer: torch.optim.Optimizer) -> "WrappedOptimizer":
    """Return `optimizer`, which `hvd.DistributedOptimizer` must have returned.

    Raises:
        UsageError: it did not.
    """
    if not isinstance(optimizer, WrappedOptimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected what "
            f"hvd.DistributedOptimizer returned"
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
        # Not by __init__, which would drop state that has been loaded. `step` is in there when an
        # LR scheduler counts the plain optimizer's steps; ours must not be hidden by it.
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
        # Of the model, and not of this optimizer.
        self._frozen = frozen
        self._stepped: bool | torch.Tensor = False
        #: How many steps have been made.
        self.steps = 0
        self._muted = False
        # Of the pass that is under way.
        self._task: int | None = None
        # Nothing has to be done with gradients: one rank, one pass per step.
        self._passive = False
        self._muted_pass = False
        self._held_back = False
        self._generation = 0
        # Another optimizer has wrapped parameters of this one.
        self._replaced = False
        self._collectives = TorchCollectives(process_set)
        # Not a strong reference, so that a dropped optimizer is freed at once.
        me = weakref.ref(self)
        self._gradients = OptimizerGradients(
            functools.partial(_parameters_of, me),
            functools.partial(_name_of, me),
            self._collectives,
            reduction,
            groups,
            window,
            functools.partial(_context_of, me),
            functools.partial(_report_to, me),
            keep_sparse=reduction.sparse_as_dense and isinstance(plain, torch.optim.SparseAdam),
        )
        #: What `hvdkit.torch.passes` enters when a pass ends.
        self.rounds = Rounds(
            self._collectives,
            self._gradients,
            self._gradients.synchronizers,
            window,
            functools.partial(_check_values_of, me) if check_parameters else None,
        )
        self.coordinator = _coordinator_of(process_set)
        self.coordinator.add(self)
        _living.add(self)

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
        if any(each._interrupted for each in _living):
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
                f"a backward pass began after the {window.size} of {setting}={window.size}, before "
                f"optimizer.step(). Call optimizer.step() after every {window.size} passes, or put "
                f"additional passes under hvd.no_sync(optimizer)."
            )
        self._passive = window.size == 1 and self._collectives.alone
        self._muted_pass = self._muted or (window.size > 1 and window.passes < window.size - 1)
        self._held_back = not self._muted_pass and self.rounds.moved
        self._generation = self._collectives.generation

    def end_pass(self) -> bool:
        """Record that the pass has ended; return whether its gradients are to be reduced now."""
        self._task = self.running = None
        self._gradients.watch()
        arrived = self._passive or self._gradients.end_pass()
        if not arrived or self._passive:
            return False
        if self._window.size > 1 and not self._muted:
            self._window.passes += 1
        return not self._muted_pass

    def _end_pending_pass(self) -> None:
        """Complete passes that have raised, outside of backward passes.

        Also those of other optimizers: their round may void gradients of this one.

        Raises:
            BackwardFailed: on every rank, because the pass has raised.
        """
        if self._replaced or passes.in_backward():
            return
        if any(each._interrupted for each in _living):
            self._complete_interrupted_passes()

    def _drop_pending_pass(self) -> None:
        """Complete a pass that has not reached its end, and whose gradients are not wanted."""
        try:
            self._end_pending_pass()
        except (BackwardFailed, PassesDiffer) as error:
            # On this rank loss.backward() raised, and the script has caught it.
            log.warning("%s", error)

    @property
    def _interrupted(self) -> bool:
        """Whether a backward pass has raised and has not been completed since.

        Outside of backward passes that includes a pass whose re-entrant checkpoints have ended,
        where nothing told when it ended itself: whether it has raised is not known.
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
            return False  # torch.autograd.grad, which has accumulated nothing
        if self._passive or self._muted_pass or self._collectives.alone:
            self._gradients.invalidate(
                "an earlier loss.backward() raised, so that some gradients are missing: call "
                "optimizer.zero_grad() first"
            )
            return False
        if self._generation != self._collectives.generation:
            self._gradients.discard()  # Horovod has been started again, and nobody waits
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
    def accumulating(self) -> bool:
        """Whether more backward passes must come before a step."""
        self._end_pending_pass()
        return self._window.open and self._window.mean

    def reduce(self) -> bool:
        """Make every gradient the reduced one, unless more passes must come.

        All ranks call it alike. It communicates only where a rank made no backward pass since the
        last step, or where gradients have been added to under `hvd.no_sync`.

        Returns:
            Whether the gradients are the reduced ones.
        """
        if self.accumulating:
            return False
        self._check_usable()
        self._gradients.watch()
        with one_thread():
            self.coordinator.catch_up(self.rounds)
        return True

    def synchronize(self) -> None:
        """Make every gradient the reduced one. See `reduce`; `step()` calls it."""
        self.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step()` takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step as the plain optimizer does, with gradients that are reduced.

        Inside a window of `accumulation_steps` nothing happens; the attribute `stepped` tells.

        Raises:
            UsageError: a closure, which makes the backward passes itself, with accumulation.
        """
        self._stepped = False
        if closure is not None and self._window.mean and self._window.size > 1:
            raise UsageError(
                f"step(closure) with accumulation_steps {self._window.size}: a closure makes its "
                f"passes itself; accumulate in it, or call step() without one"
            )
        if self.accumulating:
            return None
        if closure is None:
            if self._should_synchronize:
                self.reduce()
            result = super().step()
        else:
            result = super().step(self._reducing(closure) if self._should_synchronize else closure)
        # An LR scheduler that holds the plain optimizer asks whether it has stepped.
        self._plain._opt_called = True  # type: ignore[attr-defined]
        # A fused optimizer is called with gradients that are not finite, and skips them itself.
        found = getattr(self, "found_inf", None)
        self.end_step()
        self._stepped = True if found is None else found
        self.steps += 1
        return result

    # torch would wrap this method, too, to run the step hooks; the plain class's step runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.reduce()
            return loss

        return reduced

    def end_step(self) -> None:
        """Record that the gradients have been used, or are not to be: the next window begins."""
        self._stepped = self._gradients.unused = False
        self._gradients.watch()
        self.rounds.end_step()
        self._window.close()

    def flush(self, step: Callable[[], Any] | None = None) -> bool:
        """End a window of accumulation that has been cut short, for instance with the data.

        A collective, whether or not there is anything to do: every rank calls it. The gradient is
        the mean over the passes that there were.

        Args:
            step: what to call instead of `self.step`, for instance a function that also clips.

        Returns:
            Whether there was anything to step with.

        Raises:
            PassesDiffer: on every rank, when they have accumulated different numbers of passes.
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
        """Reset the gradients, at any time; nothing inside a window of `accumulation_steps`.

        Takes what the plain optimizer's `zero_grad` takes.
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
        """Change how many backward passes make a step, and begin a new one.

        Raises:
            UsageError: it is below 1, or the optimizer was made with accumulation_steps.
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
        self.begin_anew()
        super().load_state_dict(state_dict)
        # torch puts new containers in place of the shared ones.
        self._plain.__dict__.update(state=self.state, param_groups=self.param_groups)

    def begin_anew(self) -> None:
        """Begin a new step: what has been accumulated is forgotten. On every rank, or on none."""
        self._drop_pending_pass()
        self._gradients.void = ""
        self._stepped = self._gradients.unused = False
        self._window.close()
        self._gradients.discard()

    @property
    def between_steps(self) -> bool:
        """Whether no gradients wait for more passes, or to be reduced."""
        self._end_pending_pass()
        return not (self.accumulated or self._gradients.unused)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse: the copy's parameters would have no hooks.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a DistributedOptimizer cannot be copied: copy the model, make a plain optimizer for "
            "the copy, load this one's state_dict(), and wrap it"
        )

    def leave_gradients(self) -> None:
        """Record that the reduced gradients are not going to be used."""
        self._gradients.unused = False

    @property
    def accumulated(self) -> bool:
        """Whether this rank has gradients that have not been reduced."""
        return bool(self._window.passes) or self._gradients.has_new(assigned=False)

    def settle(self) -> None:
        """Wait for small collectives that only the next step needs. Every rank has started them."""
        self.rounds.settle()

    def reduction_states(self) -> list[ReductionState | None]:
        """Return the state needed for sums to round the same, for each set of parameters."""
        return [synchronizer.state for synchronizer in self._gradients.synchronizers]

    def resume_reduction(self, states: Sequence[ReductionState | None]) -> None:
        """Restore a value of `reduction_states`, the same on every rank. Not a collective."""
        self._gradients.adopt()
        for synchronizer, state in zip(self._gradients.synchronizers, states, strict=False):
            synchronizer.resume(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the plain optimizer; every rank must add the same."""
        super().add_param_group(param_group)
        self._gradients.adopt()
        self._gradients.watch()

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Horovod's attribute of this name, which scripts read."""
        return dict(self._names)


# --- what parts of an optimizer call, without keeping it alive -----------------------------------

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
    """Lines that must be the same on every rank."""
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
    """Let a parameter tell an optimizer about its gradients."""
    previous, *handles = _hooks.get(parameter, (reference,))
    other = previous()
    if other is not None and other is not reference():
        other._replaced = True
    for handle in handles:
        handle.remove()
    # A frozen parameter keeps hooks, and takes new ones only while it needs gradients.
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
