"""The class behind `hvd.DistributedOptimizer`: it reduces gradients in the backward pass.

When `loss.backward()` returns, `p.grad` is the reduced gradient. These functions are called for a
gradient, in this order; an indented function is called by the one above it:

    records._before                     hook: a gradient is about to be added to `p.grad`
      BackwardPasses.enter_task         the first gradient of a pass: begin the pass
        Gradients.begin_pass            set the reduced gradients aside, as bases
    records._after                      hook: `p.grad` is complete
      BackwardPasses.after_accumulation
        Gradients.accumulated           record the gradient
          Synchronizer.mark_ready       pack a full bucket and start its collective
    passes.end_pass                     PyTorch calls it at the end of the outermost backward pass
      BackwardPasses.end_pass           decide whether the pass is reduced
      Coordinator.send                  start the header and the other buckets
      Coordinator.wait                  wait for the header, compare the ranks' rounds
        Rounds.complete                 wait for the buckets and unpack them into `p.grad`
          Gradients.end_round           add the bases, call the last stages
    WrappedOptimizer.step
      OptimizerReducer.reduce           reduce what no pass has reduced: usually nothing
      Position.skips_step               `on_nonfinite="skip"`: no rank makes the step
      step of the plain optimizer

The base is the part of a gradient that earlier rounds have reduced. The header is a small sum that
shows whether all ranks reduce the same gradients (`hvdkit.torch.reduction.headers`). A pass under
`no_sync`, or before the last one of an accumulation window, ends without `send` and `wait`. On one
rank, all collectives return their arguments, and there are no buckets.

`hvdkit.torch.reduction.gradients` has the table of the states of a gradient, and
`hvdkit.torch.reduction.optimizer_reducer` that of the events.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.errors import UsageError
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.nonfinite import SKIP
from hvdkit.torch import dynamo
from hvdkit.torch.dtensors import is_dtensor, local
from hvdkit.torch.elementwise import steps_with_shares
from hvdkit.torch.plain_tensors import check_has_memory
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.optimizer_reducer import OptimizerReducer
from hvdkit.torch.shards import Shards
from hvdkit.training.tuning import Tuner


def _after_load_state_dict(
    reference: "weakref.ref[WrappedOptimizer]", loaded: torch.optim.Optimizer
) -> None:
    """Hook: a plain optimizer, or the one that wraps it, has loaded its state."""
    wrapped = reference()
    if wrapped is not None and loaded is wrapped._plain:
        wrapped.discard_accumulated()


#: Attributes of the plain optimizer that a wrapped one does not have itself: torch and scripts
#: replace their values in either of the two.
SHARED = ("param_groups", "state", "defaults")


def _shared(name: str) -> Any:
    return property(
        lambda self: getattr(self._plain, name),
        lambda self, value: setattr(self._plain, name, value),
        doc=f"The plain optimizer's `{name}`.",
    )


def wrapped_optimizers() -> "list[WrappedOptimizer]":
    """Return the wrapped optimizers of this process, in the order of their creation."""
    found = (reducer._optimizer() for reducer in passes.reducers)
    return [optimizer for optimizer in found if optimizer is not None]


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


class WrappedOptimizer(torch.optim.Optimizer):
    """The first base class of a wrapped optimizer's class; the second is the plain class.

    So the methods of this class take precedence over those of the plain class. Attributes that both
    have would get two meanings: `check_attributes` raises then.

    Attributes:
        reducer: reduces the gradients.
        hvdkit_steps: the number of steps that were made.
        hvdkit_skipped_steps: the number of steps that were skipped.
        grad_norm: the 2-norm of the reduced gradients, as `max_grad_norm` or the last
            `clip_grad_norm_` has found it; None without one, and after `hvd.Monitor` has read it.
        hvdkit_tuner: chooses the settings of the buckets in the first steps; None without
            `hvd.autotune`.
        shards: the shares of the parameters that this rank updates; None without `shard`.
        hvdkit_trial: called after each step in a trial of `hvdkit tune`; None in other jobs.
    """

    reducer: OptimizerReducer
    hvdkit_steps = 0
    hvdkit_skipped_steps = 0
    grad_norm: torch.Tensor | None = None
    shards: Shards | None = None
    hvdkit_tuner: Tuner | None = None
    hvdkit_trial: Callable[[], None] | None = None
    _plain: torch.optim.Optimizer
    _should_synchronize = True
    # Whether the last step changed the parameters. After a fused step this is its tensor
    # `found_inf`: 0 if the step changed them.
    _stepped: bool | torch.Tensor = False
    param_groups = _shared("param_groups")
    state = _shared("state")
    defaults = _shared("defaults")

    def _wrap(self, plain: torch.optim.Optimizer) -> None:
        """Take the state of the plain optimizer. The caller then sets `reducer`."""
        dynamo.exclude_hvdkit()
        # Copy the attributes instead of calling __init__, which would drop loaded state. An LR
        # scheduler sets an attribute `step` to count steps. Its copy would hide our method.
        left_out = {"step", *SHARED}
        self.__dict__.update((k, v) for k, v in plain.__dict__.items() if k not in left_out)
        self._plain = plain
        # Some optimizers, such as those around another optimizer, do not call `Optimizer.__init__`.
        if hasattr(plain, "_optimizer_load_state_dict_post_hooks"):
            plain.register_load_state_dict_post_hook(
                functools.partial(_after_load_state_dict, weakref.ref(self))
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
        return self.reducer.reduce()

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

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Reduce all gradients and make the plain optimizer's step.

        Only count the call inside a window of `accumulation_steps`; `stepped` is False then.

        Args:
            closure: see `torch.optim.Optimizer.step`.
            options: further arguments that the plain optimizer's method has.

        Raises:
            UsageError: a closure was passed with `accumulation_steps` or `on_nonfinite="skip"`.
        """
        self._stepped = False
        self._check_closure(closure)
        if self.reducer.call_in_window():
            return None
        loss = None
        if closure is not None and self.shards is not None:
            # It needs the whole parameters. Optimizers that step shares call it once, at first.
            with torch.enable_grad():
                loss, closure = closure(), None
        if closure is None:
            if self._should_synchronize:
                self.reduce()
            if self.reducer.rounds.position.skips_step:
                self.hvdkit_skipped_steps += 1
                self.end_step()
                self.zero_grad(set_to_none=False)  # a later pass must not add to them
                return None
            result = self.step_shares(functools.partial(super().step, **options))
            result = loss if result is None else result
        else:
            reducing = self._reducing(closure) if self._should_synchronize else closure
            result = super().step(reducing, **options)
        self.reducer.before_end_of_step()
        # An LR scheduler checks whether its optimizer, plain or wrapped, has stepped.
        self._plain._opt_called = self._opt_called = True  # type: ignore[attr-defined]
        # A GradScaler calls a fused optimizer even if gradients are not finite. The optimizer then
        # skips the step.
        found = getattr(self, "found_inf", None)
        self.end_step()
        self._stepped = True if found is None else found
        self.hvdkit_steps += 1
        if self.hvdkit_tuner is not None:
            self.hvdkit_tuner.after_step()
        if self.hvdkit_trial is not None:
            self.hvdkit_trial()
        return result

    def step_shares(self, call: Callable[[], Any]) -> Any:
        """Call a function that changes parameters, on the shares if there are any. A collective."""
        if self.shards is None or self.shards.replaced is not None:
            return call()
        with self.shards.in_place_of_parameters():
            result = call()
        self.shards.send()
        return result

    # Otherwise torch wraps this method to run step hooks. The plain class's step runs them already.
    step.hooked = True  # type: ignore[attr-defined]
    # Otherwise an LR scheduler wraps this method to set `_opt_called`.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _check_closure(self, closure: Callable[[], Any] | None) -> None:
        window = self.reducer.window
        if closure is not None and window.mean and window.size > 1:
            raise UsageError(
                f"step(closure) was called with accumulation_steps {window.size}, but the closure "
                f"makes the passes itself. Accumulate in the closure, or call step() without a "
                f"closure."
            )
        if closure is not None and self.reducer.settings.on_nonfinite == SKIP:
            raise UsageError(
                "on_nonfinite='skip' checks gradients before the step begins, but step(closure) "
                "computes them within it. Use on_nonfinite='raise', or step() without a closure."
            )

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.reduce()
            return loss

        return reduced

    def end_step(self) -> None:
        """Begin the next window, after a step or a skipped step."""
        self._stepped = False
        self.reducer.end_step()

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
            PassesDiffer: on every rank, when they have different numbers of batches of a window of
                `accumulation_steps`. In a sum of passes, a missing pass counts as zeros.
        """
        return self.reducer.flush(step or self.step)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients. Do nothing inside a window of `accumulation_steps`.

        Takes the arguments of the plain optimizer's `zero_grad`.
        """
        zero = super().zero_grad
        self.reducer.zero_grad(lambda: zero(*args, **kwargs))

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
        return self.reducer.drop_pass()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, and begin a new window.

        Raises:
            UsageError: the number is below 1, or the optimizer has accumulation_steps.
        """
        Window(passes, mean=False)  # Checks the number.
        window = self.reducer.window
        if window.mean and window.size > 1:
            raise UsageError(
                f"set_backward_passes_per_step({passes}) was called on an optimizer with "
                f"accumulation_steps {window.size}. They cannot be combined: pass only one of the "
                f"two"
            )
        window.size, window.mean = passes, False
        window.close()

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's state. With `shard`, a collective: every rank calls it."""
        plain = super().state_dict
        found: dict[str, Any] = plain() if self.shards is None else self.shards.state_dict(plain)
        return found

    def own_state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: with `shard`, that of this rank's shares."""
        plain = super().state_dict
        return plain() if self.shards is None else self.shards.own_state_dict(plain)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the plain optimizer's state, and drop accumulated gradients."""
        self.discard_accumulated()
        super().load_state_dict(state_dict)
        if self.shards is not None:
            self.shards.take_state()

    def full_gradients(self) -> list[torch.Tensor | None]:
        """Reduce the gradients, and return the whole gradient of each parameter. A collective.

        Returns:
            For each parameter, in the order of `param_groups`, a tensor of its shape, or None.

        Raises:
            UsageError: inside an accumulation window.
        """
        if not self.reduce():
            raise UsageError(
                "full_gradients() was called inside an accumulation window, whose gradients are "
                "not reduced yet: call it after the last pass of the window"
            )
        if self.shards is None:
            return [p.grad for p in self.reducer.parameters()]
        return self.shards.full_gradients()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set attributes, as `load_state_dict` and scripts do."""
        self._plain.__dict__.update((k, v) for k, v in state.items() if k in SHARED)
        super().__setstate__({k: v for k, v in state.items() if k not in SHARED})

    def discard_accumulated(self) -> None:
        """Drop accumulated gradients and begin a new window. All ranks call it, or none."""
        self._stepped = False
        self.reducer.discard_accumulated()

    def gradients_wait(self) -> bool:
        """Return whether this rank has gradients that no step has used, reduced or not.

        The script may have removed them itself, for example with `model.zero_grad()`.
        """
        self.reducer.complete_earlier_passes()
        return self.reducer.has_unused_gradients

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer. Every rank must add the same group.

        If its parameters have gradients already, the next reduction reduces these, too.
        """
        # A mesh of its own could need another process set.
        own: list[Any] = self.reducer.parameters()
        meshes = [p.device_mesh for p in own if is_dtensor(p)]
        super().add_param_group(param_group)
        try:
            if type(self.shards) is Shards and not steps_with_shares(
                self._plain, self.param_groups[-1]
            ):
                raise UsageError(
                    "the options of the new group of a sharded optimizer need whole tensors, and "
                    "those of its groups do not: expected this group when the optimizer is wrapped"
                )
            for p in self.param_groups[-1]["params"]:
                if p.requires_grad:  # other parameters are not reduced
                    known = is_dtensor(p) and p.device_mesh in meshes
                    check_has_memory(local(p) if known else p, "a parameter of the new group")
        except UsageError:
            self.param_groups.pop()
            raise
        self.reducer.add_parameters()

    # --- settings -------------------------------------------------------------------------------

    @property
    def process_set(self) -> mpi_ops.ProcessSet:
        """The ranks to reduce over."""
        return self.reducer.settings.process_set

    @property
    def op(self) -> int:
        """`Average` or `Sum`."""
        reduction = self.reducer.settings.reduction
        return int(mpi_ops.Average if reduction.average else mpi_ops.Sum)

    @property
    def backward_passes_per_step(self) -> int:
        """The backward passes whose gradients are summed for a step."""
        window = self.reducer.window
        return 1 if window.mean else window.size

    @property
    def gradient_predivide_factor(self) -> float:
        """The factor that gradients are divided by before the sum."""
        return self.reducer.settings.reduction.predivide or 1.0

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The names of the parameters: an attribute of Horovod's optimizer that scripts read."""
        records = self.reducer.gradients.records.values()
        return {record.parameter: record.name for record in records}

    @property
    def replicas(self) -> ReplicaCheck | None:
        """The comparison of parameters and optimizer state; None without `check_parameters`."""
        return self.reducer.rounds.replicas


def reduced_over(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, list[int]]:
    """Return the ranks that each wrapped optimizer reduces over, by its name.

    Not those of DTensors: all ranks of their mesh train one model.
    """
    return {
        name: list(each.process_set.ranks)
        for name, each in optimizers.items()
        if isinstance(each, WrappedOptimizer)
        and not any(is_dtensor(p) for group in each.param_groups for p in group["params"])
    }
