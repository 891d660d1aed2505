"""The class behind `hvd.DistributedOptimizer`: it reduces gradients in the backward pass.

When `loss.backward()` returns, `p.grad` is the reduced gradient. These functions are called for a
gradient, in this order; an indented function is called by the one above it:

    _before_accumulation             hook: a gradient is about to be added to `p.grad`
      OptimizerGradients.before_accumulation   store a reduced gradient as the base
    _after_accumulation              hook: `p.grad` is complete
      OptimizerGradients.after_accumulation    record the gradient
        Synchronizer.mark_ready                pack a full bucket and start its collective
    passes.end_pass                  PyTorch calls it at the end of the outermost backward pass
      Coordinator.send                         start the header and the other buckets
      Coordinator.wait                         wait for the header, compare the ranks' rounds
        Rounds.complete                        wait for the buckets and unpack them into `p.grad`
          OptimizerGradients.end_round         add the bases
    step                             the plain optimizer's step

The base is the part of a gradient that earlier rounds have reduced. The header is a small sum that
shows whether all ranks reduce the same gradients (`hvdkit.core.headers`). A pass under
`no_sync`, or before the last one of an accumulation window, ends without `send` and `wait`.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.core.accumulation import PassesDiffer, Window
from hvdkit.core.coordination import BackwardFailed, Coordinator, entry_lock
from hvdkit.core.nonfinite import IGNORE, RAISE, SKIP, NonFiniteGradients, names_text
from hvdkit.core.reduction import Reduction, ReductionState
from hvdkit.core.replicas import VALUES_ADVICE, CheckSettings, ReplicaCheck
from hvdkit.core.rounds import Rounds
from hvdkit.core.same_data import PASSES, SameData
from hvdkit.core.stragglers import BACKWARD, FORWARD, UPDATE
from hvdkit.core.tuning import Tuner
from hvdkit.core.wire_format import WireFormat
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch import dynamo, hooks, passes
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.digests import GradientDigest, check_values
from hvdkit.torch.gradients import OptimizerGradients
from hvdkit.torch.plain_tensors import check_has_memory, is_plain
from hvdkit.torch.replicas import TorchReplicas
from hvdkit.torch.wrapped_modules import check_not_reduced

log = logging.getLogger("hvdkit.torch")

_GRADIENTS_NOT_SAVED = (
    "step {step} was saved between a backward pass and the optimizer step that used its gradients. "
    "So the checkpoint lacks these gradients. Call save() and maybe_save() after the steps of all "
    "optimizers. If no step is expected to use the gradients of a pass, call optimizer.zero_grad() "
    "before the next pass"
)

_ONE_CALL = (
    "step() was called after {passes} backward passes, and accumulation_steps is {size}. This "
    "setting counts calls of step(), so the optimizer makes one step for {size} calls. If the "
    "passes belong to several batches, call step() after each of them, or use "
    "backward_passes_per_step={size}, which takes the sum of the passes. If they belong to one "
    "batch, nothing is to be changed"
)

_STATE_ADVICE = (
    "If one rank has loaded the optimizer's state, call hvd.broadcast_optimizer_state(optimizer, "
    "root_rank=0) before the first step."
)
_SAME_DATA_ADVICE = (
    "Give each rank its own part: sampler = hvd.DistributedSampler(dataset), and "
    "DataLoader(dataset, sampler=sampler, ...). Random data need another seed on each rank"
)

_count = itertools.count()
_wrapped_optimizers: "weakref.WeakSet[WrappedOptimizer]" = weakref.WeakSet()


def coordinator_of(process_set: mpi_ops.ProcessSet) -> Coordinator:
    """Return the coordinator of a process set: one per process set, kept as its attribute."""
    found: Coordinator | None = getattr(process_set, "_hvdkit_coordinator", None)
    if found is None:
        found = Coordinator(TorchCollectives(process_set))
        process_set._hvdkit_coordinator = found
    return found


def _after_load_state_dict(
    reference: "weakref.ref[WrappedOptimizer]", loaded: torch.optim.Optimizer
) -> None:
    """Hook: a plain optimizer, or the one that wraps it, has loaded its state."""
    wrapped = reference()
    if wrapped is not None and loaded is wrapped._plain:
        wrapped.discard_accumulated()
        # torch replaces the containers that both optimizers share.
        wrapped.__dict__.update(state=loaded.state, param_groups=loaded.param_groups)


def wrapped_optimizers() -> "list[WrappedOptimizer]":
    """Return the wrapped optimizers of this process, in the order of their creation."""
    return sorted(_wrapped_optimizers, key=lambda each: each.number)


def wrapped(optimizer: torch.optim.Optimizer) -> "WrappedOptimizer":
    """Return `optimizer` if it is a wrapped optimizer.

    Raises:
        UsageError: it is not.
    """
    if isinstance(optimizer, torch.Tensor):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: expected the result of "
            f"hvd.DistributedOptimizer. Give the optimizer instead of the model's parameters"
        )
    if not isinstance(optimizer, WrappedOptimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected the result "
            f"of hvd.DistributedOptimizer"
        )
    return optimizer


@contextmanager
def _only_logged() -> Iterator[None]:
    """Only log the failure of a round, because the script has caught the error of its own pass."""
    try:
        yield
    except (BackwardFailed, PassesDiffer) as error:
        log.warning("%s", error)


def _warn_on_first_rank(collectives: TorchCollectives, text: str) -> None:
    if collectives.rank == collectives.ranks[0]:
        log.warning("%s", text)


class WrappedOptimizer(torch.optim.Optimizer):
    """The first base class of a wrapped optimizer's class; the second is the plain class.

    So the methods of this class take precedence over those of the plain class.
    """

    def _wrap(
        self,
        plain: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        reduction: Reduction,
        window: Window,
        groups: list[list[torch.nn.Parameter]],
        process_set: mpi_ops.ProcessSet,
        check_parameters: bool,
        replicas: CheckSettings,
        on_nonfinite: str,
        frozen: dict[str, torch.nn.Parameter],
    ) -> None:
        dynamo.exclude_hvdkit()
        hooks.remove(None)
        # Copy the attributes instead of calling __init__, which would drop loaded state. An LR
        # scheduler sets an attribute `step` to count steps. Its copy would hide our method.
        self.__dict__.update((k, v) for k, v in plain.__dict__.items() if k != "step")
        self.number = next(_count)
        self.graph_task: weakref.ref[Any] | None = None
        self._plain = plain
        self._names = names
        self._added_names = itertools.count(len(names))
        self.op = mpi_ops.Average if reduction.average else mpi_ops.Sum
        self.backward_passes_per_step = reduction.passes
        self.gradient_predivide_factor = reduction.predivide or 1.0
        self.process_set = process_set
        self._window = window
        self._should_synchronize = True
        self._check_parameters = check_parameters
        self._check_settings = replicas
        self._on_nonfinite = on_nonfinite
        # Frozen parameters of the model that the optimizer does not have.
        self._frozen = frozen
        # Whether the last step changed the parameters. After a fused step this is its tensor
        # `found_inf`: 0 if the step changed them.
        self._stepped: bool | torch.Tensor = False
        #: The number of steps that were made, and of those that were skipped.
        self.steps = 0
        self.skipped_steps = 0
        #: The 2-norm of the reduced gradients at the last `clip_grad_norm_`; None without one.
        self.grad_norm: torch.Tensor | None = None
        #: Chooses the settings of the buckets in the first steps; None without `hvd.autotune`.
        self.tuner: Tuner | None = None
        #: Called after each step in a trial of `hvdkit tune`; None in other jobs.
        self.trial: Callable[[], None] | None = None
        self._no_sync = False
        # Whether gradients were added under `no_sync` on one rank, where nothing is reduced.
        self._added_locally = False
        # Whether the current pass has added gradients on one rank, where nothing is reduced.
        self._arrived_locally = False
        # Whether the modules that hold the parameters were checked; see `wrapped_modules`.
        self._modules_checked = False
        # The current backward pass.
        self._task_id: int | None = None  # PyTorch's graph task
        self._nothing_to_reduce = False  # there is one rank and one pass per step
        self._pass_too_many = False  # it must not add to the gradients of a whole window
        self._local_pass = False  # it ends without a reduction
        self._plan_outdated = False  # buckets must wait for a new plan
        self._generation = 0  # the generation of the collectives when the pass began
        # Whether another optimizer has wrapped parameters of this one.
        self._wrapped_again = False
        self._collectives = TorchCollectives(process_set)
        self._warn = functools.partial(_warn_on_first_rank, self._collectives)
        # The step of a checkpoint that was saved while the current gradients waited for a step.
        self._saved_step: int | None = None
        self._warned_of_save = False
        # Not a strong reference: a cycle would keep the optimizer until a garbage collection.
        owner = weakref.proxy(self)
        self._gradients = OptimizerGradients(
            owner,
            self._collectives,
            reduction,
            groups,
            window,
            keep_sparse=reduction.sparse_as_dense and isinstance(plain, torch.optim.SparseAdam),
            finds_nonfinite=on_nonfinite != IGNORE,
        )
        self.coordinator = coordinator_of(process_set)
        #: Compares parameters, optimizer state and options between ranks; None without
        #: `check_parameters`.
        self.replicas: ReplicaCheck | None = None
        self._first_gradients = GradientDigest(PASSES)
        same_data = SameData(
            self._collectives, self._first_gradients.result, "gradients", _SAME_DATA_ADVICE
        )
        if check_parameters:
            self.replicas = ReplicaCheck(
                self._collectives,
                replicas,
                lambda: owner._replicas(),
                lambda: owner.rounds.steps_made,
                f"{VALUES_ADVICE} {_STATE_ADVICE}",
            )
        #: The reduction rounds, which `hvdkit.torch.passes` enters when a pass ends.
        self.rounds = Rounds(
            self._collectives,
            self._gradients,
            window,
            (lambda: owner._check_values()) if check_parameters else None,
            self.replicas,
            self.coordinator.stragglers,
            on_nonfinite,
            same_data,
        )
        self.coordinator.add(self)
        _wrapped_optimizers.add(self)
        # Some optimizers, such as those around another optimizer, do not call `Optimizer.__init__`.
        if hasattr(plain, "_optimizer_load_state_dict_post_hooks"):
            plain.register_load_state_dict_post_hook(
                functools.partial(_after_load_state_dict, weakref.ref(self))
            )

    # --- the backward pass ----------------------------------------------------------------------

    def _before_accumulation(self, number: int | None) -> None:
        """Hook: a gradient is about to be accumulated."""
        task = torch._C._current_graph_task_id()
        if task != self._task_id:
            self._enter_task(task)
        if not self._nothing_to_reduce and number is not None:
            try:
                self._gradients.before_accumulation(number, not self.rounds.participated)
            except HvdkitError as error:
                self._gradients.invalidate(str(error))
                raise

    def _after_accumulation(self, number: int | None, parameter: torch.nn.Parameter) -> None:
        """Hook: a gradient has been accumulated."""
        if torch.is_grad_enabled():
            raise HvdkitError(
                "loss.backward(create_graph=True) was called with a DistributedOptimizer, but "
                "reduced gradients have no graph. Use torch.autograd.grad(loss, parameters, "
                "create_graph=True) for the inner derivative, and loss.backward() for the "
                "gradients of the step."
            )
        if self._pass_too_many:
            size = self._window.size
            raise HvdkitError(
                f"backward pass {size + 1} began before optimizer.step(), but "
                f"backward_passes_per_step is {size}. Call optimizer.step() after every {size} "
                f"passes, or make additional passes inside hvd.no_sync(optimizer)."
            )
        if self._nothing_to_reduce:
            self._added_locally = self._no_sync
            self._arrived_locally = True
            # Gradients of one rank are reduced, unless a reduction on several ranks would follow.
            self.rounds.participated = not self._no_sync
            if number is not None:
                self._gradients.check_finite(number)
            return
        if number is None:
            self._gradients.after_unplanned_accumulation(parameter)
            return
        if self.steps < PASSES and self._check_settings.interval and parameter.grad is not None:
            self._first_gradients.add(number, parameter.grad)
        ready = not (self._local_pass or self._plan_outdated)
        self._gradients.after_accumulation(number, ready)

    def _enter_task(self, task: int) -> None:
        self._complete_raised_passes()
        if self.graph_task is None:
            self._begin_pass()
        passes.watch(self)
        self._task_id = task

    def _begin_pass(self) -> None:
        self.coordinator.times.enter(BACKWARD)
        self._check_usable()
        if not self._modules_checked:
            check_not_reduced((self._name_of(p), p) for p in self._all_parameters())
            self._modules_checked = True
        window = self._window
        self._note_removed_window()
        window.make_whole()
        self._pass_too_many = window.complete and not (window.mean or self._no_sync)
        self._note_removed_gradients()
        if self.rounds.skips_step and not self._gradients.any_nonzero():
            # The script has removed the gradients that are not finite, or has set them to 0.
            self.rounds.skips_step = False
        self._nothing_to_reduce = window.size == 1 and self._collectives.single_rank
        self._local_pass = self._adds_locally
        self._plan_outdated = not self._local_pass and self.rounds.plan_outdated
        self._generation = self._collectives.generation

    @property
    def _adds_locally(self) -> bool:
        """Whether the next pass only adds to the gradients of this rank."""
        return self._no_sync or not self._window.next_pass_reduces

    @property
    def pass_dropped(self) -> bool:
        """Whether an earlier pass was dropped whose gradients the next reduction would include."""
        return self._window.dropped

    def end_pass(self) -> bool:
        """Record that the pass has ended; return whether to reduce its gradients now."""
        self._task_id = self.graph_task = None
        if self._collectives.single_rank:
            # On several ranks, the next round plans parameters that were unfrozen.
            self._gradients.plan_new_parameters(with_gradients=self._window.size > 1)
        self._gradients.hook_unplanned_parameters()
        arrived = self._arrived_locally if self._nothing_to_reduce else self._gradients.end_pass()
        self._arrived_locally = False
        if self._collectives.single_rank and not self._local_pass:
            if arrived:  # torch.autograd.grad accumulates nothing
                self._report_nonfinite(assigned=True)
            self.coordinator.times.enter(UPDATE)
        if arrived and self._nothing_to_reduce and not self._no_sync:
            self._gradients.unused = True  # on several ranks, the round does
        if arrived and self._window.size > 1:
            self._window.count_pass(counted=not self._no_sync)
        if not arrived or self._nothing_to_reduce:
            return False
        if self._local_pass:
            self.coordinator.times.enter(FORWARD)
        return not self._local_pass

    def _report_nonfinite(self, assigned: bool) -> None:
        """Raise or skip the step on a single rank, as `Coordinator` does on several.

        Args:
            assigned: see `LocalGradients.begin_round`.

        Raises:
            NonFiniteGradients: with `on_nonfinite="raise"`.
        """
        self._gradients.check_written(assigned)
        names = self._gradients.nonfinite()
        if not names:
            return
        text = f"gradients contain NaN or infinity: {names_text(names)}"
        if self._on_nonfinite == RAISE:
            error = NonFiniteGradients(f"{text}. Call optimizer.zero_grad() to continue.")
            self._gradients.invalidate(str(error))
            raise error
        self._gradients.forget_nonfinite()
        self.rounds.skips_step = True
        log.warning("%s. The step is skipped.", text)

    def _complete_earlier_passes(self) -> None:
        """Complete earlier passes that raised; do nothing inside a backward pass.

        Passes of other optimizers are completed too: their rounds may invalidate these gradients.

        Raises:
            BackwardFailed: on every rank, because a pass of this optimizer raised.
        """
        if not (self._wrapped_again or passes.in_backward()):
            self._complete_raised_passes()

    def _drop_earlier_passes(self) -> None:
        """Complete earlier passes that raised, and only log that their gradients are lost."""
        with _only_logged():
            self._complete_earlier_passes()

    @property
    def _pass_raised(self) -> bool:
        """Whether a backward pass raised and has not been completed since.

        PyTorch does not report the end of a pass that raises after a re-entrant checkpoint. Outside
        of backward passes, a pass whose end was not reported counts as raised.
        """
        if self.graph_task is None:
            return False
        return self.graph_task() is None or not passes.in_backward()

    def _complete_raised_passes(self) -> None:
        """Take part in the rounds of passes that raised, because other ranks wait in them.

        Raises:
            BackwardFailed: on every rank, because a pass of this optimizer raised.
        """
        raised = [each for each in wrapped_optimizers() if each._pass_raised]
        if not raised:
            return
        passes.reduce((), [each for each in raised if each._end_raised_pass()])
        if self in raised and self._gradients.invalid_reason:
            raise BackwardFailed(self._gradients.invalid_reason)

    def _end_raised_pass(self) -> bool:
        """Record that the pass raised; return whether other ranks wait in its round."""
        self._task_id = self.graph_task = None
        if not self._gradients.end_pass():
            return False  # it was torch.autograd.grad, which accumulates nothing
        if self._nothing_to_reduce or self._local_pass or self._collectives.single_rank:
            self._gradients.invalidate(
                "an earlier loss.backward() raised, so some gradients are missing"
            )
            return False
        if self._generation != self._collectives.generation:
            self._gradients.discard()  # Horovod was initialised again, so no rank waits
            return False
        return True

    def _check_usable(self) -> None:
        if self._wrapped_again:
            raise UsageError(
                "parameters of this optimizer have been wrapped again by another "
                "hvd.DistributedOptimizer, which reduces their gradients now. Use that optimizer. "
                "If two optimizers must step the same parameters, use one optimizer with several "
                "parameter groups."
            )
        if not self._gradients.invalid_reason:
            return
        if not self._gradients.exist():
            self._gradients.invalid_reason = ""
            return
        raise HvdkitError(
            f"the gradients cannot be used: call optimizer.zero_grad() first. The cause: "
            f"{self._gradients.invalid_reason}"
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
        """Set `stepped` to False until the next step."""
        self._stepped = False

    def reduce(self) -> bool:
        """Reduce all gradients, unless the accumulation window needs more passes.

        Every rank must call this method. It communicates only if a rank made no backward pass since
        the last step, or if gradients were added under `hvd.no_sync`.

        Returns:
            Whether the gradients are reduced.
        """
        self._complete_earlier_passes()
        self._note_removed_window()
        if self._window.open:
            return False
        self._window.end()
        self._check_usable()
        self._gradients.hook_unplanned_parameters()
        self._fail_if_pass_dropped()
        if not self.rounds.participated:  # otherwise, the gradients are those of this step
            self._note_removed_gradients()
        if self._collectives.single_rank:
            self._report_nonfinite(assigned=not self.rounds.participated)
        with entry_lock:
            self.coordinator.reduce_at_step(self.rounds)
        return True

    def synchronize(self) -> None:
        """Reduce all gradients, like `reduce`. `step()` does this by itself."""
        self.reduce()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step()` does not reduce gradients."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce all gradients and make the plain optimizer's step.

        Only count the call inside a window of `accumulation_steps`; `stepped` is False then.

        Raises:
            UsageError: a closure was passed with `accumulation_steps` or `on_nonfinite="skip"`.
        """
        self._stepped = False
        if closure is not None and self._window.mean and self._window.size > 1:
            raise UsageError(
                f"step(closure) was called with accumulation_steps {self._window.size}, but the "
                f"closure makes the passes itself. Accumulate in the closure, or call step() "
                f"without a closure."
            )
        if closure is not None and self._on_nonfinite == SKIP:
            raise UsageError(
                "on_nonfinite='skip' checks gradients before the step begins, but step(closure) "
                "computes them within it. Use on_nonfinite='raise', or step() without a closure."
            )
        self._complete_earlier_passes()
        self._note_removed_window()
        if self._window.open:
            self._gradients.hook_unplanned_parameters()
            if self._window.passes >= self._window.size and not (self.steps or self._window.made):
                self._warn(_ONE_CALL.format(passes=self._window.passes, size=self._window.size))
            if not self._repeats_a_drop():
                self._window.count_call()
            return None
        if closure is None:
            if self._should_synchronize:
                self.reduce()
            if self.rounds.skips_step:
                self.skipped_steps += 1
                self.end_step()
                return None
            result = super().step()
        else:
            result = super().step(self._reducing(closure) if self._should_synchronize else closure)
        if self._saved_step is not None and not self._warned_of_save:
            self._warned_of_save = True
            self._warn(_GRADIENTS_NOT_SAVED.format(step=self._saved_step))
        # An LR scheduler checks whether its optimizer, plain or wrapped, has stepped.
        self._plain._opt_called = self._opt_called = True  # type: ignore[attr-defined]
        # A GradScaler calls a fused optimizer even if gradients are not finite. The optimizer then
        # skips the step.
        found = getattr(self, "found_inf", None)
        self.end_step()
        self._stepped = True if found is None else found
        self.steps += 1
        if self.tuner is not None:
            self.tuner.after_step()
        if self.trial is not None:
            self.trial()
        return result

    # Otherwise torch wraps this method to run step hooks. The plain class's step runs them already.
    step.hooked = True  # type: ignore[attr-defined]
    # Otherwise an LR scheduler wraps this method to set `_opt_called`.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.reduce()
            return loss

        return reduced

    def end_step(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self._stepped = self._added_locally = False
        self._forget_gradients()
        self._gradients.hook_unplanned_parameters()
        self.rounds.end_step()
        self._window.close()
        self.coordinator.times.enter(FORWARD)

    def flush(self, step: Callable[[], Any] | None = None) -> bool:
        """End an accumulation window early, for instance because the data have ended.

        A collective: every rank calls it, even without accumulated passes. With
        `accumulation_steps`, the gradient is the mean over the passes that were made.

        Args:
            step: a function to call instead of `self.step`, for instance one that also clips.

        Returns:
            Whether `step` was called: False if no rank has accumulated a pass, or if a rank has
            dropped a pass of the window.

        Raises:
            PassesDiffer: on every rank, when they have accumulated different numbers of passes.
        """
        self._complete_earlier_passes()
        if self._window.size == 1:
            self._window.passes = int(self.accumulated)
        self._window.end_early()  # the ranks compare the numbers of passes
        self._check_usable()
        try:
            self._fail_if_pass_dropped()
            with entry_lock:
                self.coordinator.enter_rounds_of_others(self.rounds)
        except BackwardFailed as error:
            log.warning("%s", error)
            self.zero_grad()
            return False
        if not self._window.end_early():
            return False
        (step or self.step)()
        self._window.close()
        return True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. Do nothing inside a window of `accumulation_steps`.

        Takes the arguments of the plain optimizer's `zero_grad`.
        """
        self._drop_earlier_passes()
        dropped = self._window.dropped
        if self._window.keeps_gradients and not (dropped or self._gradients.invalid_reason):
            return
        self._gradients.invalid_reason = ""
        super().zero_grad(*args, **kwargs)
        if dropped:
            self._gradients.discard()  # the other ranks continue this window
        else:
            self._begin_without_gradients()
        self._gradients.hook_unplanned_parameters()

    def drop_pass(self) -> bool:
        """Drop a pass that this rank could not make; no rank uses the gradients of its step.

        Call this method on each rank that catches an exception of the forward or backward pass, or
        `BackwardFailed`. The other ranks wait in `backward()` until this call. Then they raise
        `BackwardFailed`.

        Inside an accumulation window or `hvd.no_sync`, the other ranks do not wait. Then this call
        does not communicate, and the last pass of the step, or else `step()`, raises
        `BackwardFailed` on every rank.

        Returns:
            True: all ranks have dropped the step, so continue with the next batch. False: the other
            ranks continue this window, so this rank must call what they call.
        """
        window, local = self._window, self._adds_locally
        earlier = window.calls, window.passes, window.resumed
        dropped = True
        if self._pass_raised or not self._gradients.invalid_reason:
            self._drop_earlier_passes()
            if local or not self._gradients.invalid_reason:
                self._gradients.invalid_reason = ""
                window.calls, window.passes, window.resumed = earlier
                window.count_pass(counted=window.size > 1 and not self._no_sync)
                window.dropped = True
                if local:
                    dropped = False
                else:
                    with _only_logged():
                        self._fail_if_pass_dropped()
        self.zero_grad()
        window.follows_drop = window.follows_drop or dropped
        return dropped

    def _repeats_a_drop(self) -> bool:
        """Return whether this call of `step()` is that of the batch whose pass was dropped.

        A collective after a drop that has ended a window: a rank without a pass cannot know.
        """
        if not self._window.follows_drop:
            return False
        self._window.follows_drop = False
        if self._collectives.single_rank:
            return not self._window.passed
        with entry_lock:
            self.coordinator.enter_rounds_of_others(self.rounds)
            (passed,) = self._collectives.sum([int(self._window.passed)], "hvdkit.window.passed")
        return not passed

    def _fail_if_pass_dropped(self) -> None:
        """Let the round of this step fail on all ranks if this rank has dropped a pass of it.

        Raises:
            BackwardFailed: on every rank.
        """
        if self._window.dropped:
            passes.reduce((), [self])

    def _note_removed_gradients(self) -> None:
        """Note that the script has removed the gradients itself, or has set them to 0."""
        # Otherwise, do not wait for the device.
        if self._saved_step is not None and not self._gradients.any_nonzero():
            self._forget_gradients()

    def _note_removed_window(self) -> None:
        """Begin the next window if the script has removed the gradients of a complete one."""
        if self._window.complete and self._gradients.all_removed():
            self._begin_without_gradients()

    def _forget_gradients(self) -> None:
        """Record that there are no gradients that a later step may use."""
        self._gradients.unused, self._saved_step = False, None

    def _begin_without_gradients(self) -> None:
        """Begin the next window, after the script has reset the gradients."""
        self._added_locally = False
        self._forget_gradients()
        self._window.close()
        self._gradients.discard()
        self.rounds.begin_step()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, and begin a new window.

        Raises:
            UsageError: the number is below 1, or the optimizer has accumulation_steps.
        """
        Window(passes, mean=False)  # Checks the number.
        if self._window.mean and self._window.size > 1:
            raise UsageError(
                f"set_backward_passes_per_step({passes}) was called on an optimizer with "
                f"accumulation_steps {self._window.size}. They cannot be combined: pass only one "
                f"of the two"
            )
        self._window.size, self._window.mean = passes, False
        self._window.close()
        self.backward_passes_per_step = passes

    # --- state ----------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the plain optimizer's state, and drop accumulated gradients."""
        self.discard_accumulated()
        super().load_state_dict(state_dict)
        # torch replaces the containers that both optimizers share.
        self._plain.__dict__.update(state=self.state, param_groups=self.param_groups)

    def discard_accumulated(self) -> None:
        """Drop accumulated gradients and begin a new window. All ranks call it, or none."""
        self._drop_earlier_passes()
        # The script may call zero_grad() only after the next step.
        if self._added_locally:
            super().zero_grad()
        self._gradients.remove_unreduced()
        self._gradients.invalid_reason = ""
        self._stepped = self._added_locally = False
        self._forget_gradients()
        # An elastic job discards gradients once more after a restore.
        self._window.discard()
        self._gradients.discard()

    def gradients_wait(self) -> bool:
        """Return whether this rank has gradients that no step has used, reduced or not.

        The script may have removed them itself, for example with `model.zero_grad()`.
        """
        self._complete_earlier_passes()
        return self._has_unused_gradients

    @property
    def _has_unused_gradients(self) -> bool:
        return self.accumulated or self.pass_dropped or self._gradients.unused

    def note_save(self, step: int) -> None:
        """Record that a checkpoint was saved. It lacks the gradients that wait for a step."""
        if self._has_unused_gradients:
            self._saved_step = step

    @property
    def passes_per_step(self) -> int:
        """The number of passes of an accumulation window."""
        return self._window.size

    @property
    def passes(self) -> int:
        """The number of passes, or of batches, that the current accumulation window has."""
        return self._window.begun

    def resume_window(self, passes: int, size: int) -> None:
        """Continue an accumulation window whose gradients are lost, after `discard_accumulated`.

        With `backward_passes_per_step`, a script that counts its passes since the beginning of the
        training calls `step()` after the rest of the window. Another script makes a whole window
        first: see `Window.make_whole`.

        Args:
            passes: the number of passes, or of batches, that the window had.
            size: the number of those of a whole window. Without effect if it is another one now.
        """
        is_open = size == self._window.size and 0 < passes < size
        self._window.resume(passes if is_open else 0)
        if is_open:
            self._warn(
                f"the checkpoint was saved after pass {passes} of {size} of an accumulation "
                f"window, and has no gradients. The first step after the restore lacks those of "
                f"these passes"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise an error in copies and in pickle, because a copy's parameters have no hooks.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled. For a copy, copy the model, make "
            "a plain optimizer for the copy, load this optimizer's state_dict(), and wrap it. To "
            "store the optimizer, store its state_dict()."
        )

    def mark_gradients_used(self) -> None:
        """Record that no step will use the reduced gradients, and that ranks may differ."""
        self._forget_gradients()

    @property
    def accumulated(self) -> bool:
        """Whether this rank has gradients that are not reduced."""
        return (
            bool(self._window.begun)
            or self._added_locally
            or self._gradients.has_unreduced(assigned=False)
        )

    def complete_deferred(self) -> None:
        """Complete the deferred requests of the last round (`wire_format.GlobalMax.deferred`).

        Not a collective: every rank has started the requests.
        """
        self.rounds.complete_deferred()

    @property
    def bucket_bytes(self) -> int:
        """The largest size of a bucket with several gradients, in bytes."""
        return self._gradients.bucket_bytes

    @property
    def wire_format(self) -> WireFormat:
        """The wire format."""
        return self._gradients.wire_format

    def set_buckets(self, size: int, wire_format: WireFormat) -> None:
        """Change the buckets' size and format, between two steps. Every rank must call this."""
        self.complete_deferred()
        self._gradients.set_buckets(size, wire_format)

    def distinct_bucket_bytes(self, sizes: Sequence[int], wire_format: WireFormat) -> list[int]:
        """Return `sizes` without those that make the same buckets as an earlier one."""
        return self._gradients.distinct_bucket_bytes(sizes, wire_format)

    def reduction_lines(self) -> list[str]:
        """Return lines that describe the gradients and their reduction, without the bucket size."""
        return self._gradients.reduction_lines()

    def reduction_states(self) -> list[ReductionState | None]:
        """Return the state needed to resume with bit-identical sums, for each synchronizer."""
        return [synchronizer.state for synchronizer in self._gradients.synchronizers]

    def resume_reduction(self, states: Sequence[ReductionState | None]) -> None:
        """Restore a result of `reduction_states`, the same on every rank. Not a collective."""
        self._gradients.forget_removed_parameters()
        self._gradients.plan_new_parameters()
        for synchronizer, state in zip(self._gradients.synchronizers, states, strict=False):
            synchronizer.resume(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer. Every rank must add the same group.

        If its parameters have gradients already, the next reduction reduces these, too.
        """
        super().add_param_group(param_group)
        try:
            for p in self.param_groups[-1]["params"]:
                if p.requires_grad:  # other parameters are not reduced
                    check_has_memory(p, "a parameter of the new group")
        except UsageError:
            self.param_groups.pop()
            raise
        # On one rank, only accumulation windows reduce.
        reduces = not self._collectives.single_rank or self._window.size > 1
        self._gradients.plan_new_parameters(with_gradients=reduces)
        self._gradients.hook_unplanned_parameters()
        # The passes of this step may be reduced already. The step must then reduce on all ranks,
        # although only some of them may have such gradients.
        self.rounds.no_sync_used = True

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The names of the parameters: an attribute of Horovod's optimizer that scripts read."""
        return dict(self._names)

    # --- for `OptimizerGradients` and `Rounds` ---------------------------------------------------

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        name = self._names.get(parameter)
        if name is None:
            name = self._names[parameter] = f"added.parameter{next(self._added_names)}"
        return name

    def _consistency_lines(self) -> list[str]:
        parameters = self._all_parameters()
        return [
            f"optimizer: {type(self).__name__}",
            *(
                f"parameter {i} of the optimizer is {self._name_of(p)!r}, "
                f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}, "
                f"requires_grad={p.requires_grad}"
                for i, p in enumerate(parameters)
            ),
            f"the optimizer has {len(parameters)} parameters",
            f"check_parameters: {self._check_parameters}",
            f"check_interval: {self._check_settings.interval}",
            f"on_mismatch: {self._check_settings.on_mismatch}",
            f"on_nonfinite: {self._on_nonfinite}",
        ]

    def _check_values(self) -> None:
        # The content of other classes, such as of quantised frozen weights, cannot be read.
        plain = {name: p for name, p in self._compared_parameters().items() if is_plain(p)}
        check_values(self._collectives, plain)

    def _replicas(self) -> TorchReplicas:
        return TorchReplicas(self._compared_parameters(), self)

    def _compared_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {self._name_of(p): p for p in self._all_parameters()} | self._frozen

    def _register_hooks(self, parameter: torch.nn.Parameter, number: int | None) -> None:
        hooks.register(self, parameter, number)

    def _forget_parameter(self, parameter: torch.nn.Parameter) -> None:
        hooks.unregister(self, parameter)
        self._names.pop(parameter, None)


def reduced_over(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, list[int]]:
    """Return the ranks that each wrapped optimizer reduces over, by its name."""
    return {
        name: list(each.process_set.ranks)
        for name, each in optimizers.items()
        if isinstance(each, WrappedOptimizer)
    }
