"""The optimizer that steps with gradients reduced over all ranks."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.optimizer import DistributedOptimizer as HorovodDistributedOptimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.core import bucketing
from hvdkit.core.accumulation import Window
from hvdkit.core.reduction import Reduction, ReductionState
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch.backend import TorchBackend, spec
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.compression import Compression, wire_format

# A parameter reports to the optimizer that wrapped it last. Two that both counted its gradients,
# one of them long forgotten, would each find too many.
_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = mpi_ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    *,
    accumulation_steps: int = 1,
    find_unused_parameters: bool = False,
    bucket_bytes: int = bucketing.BUCKET_BYTES,
) -> torch.optim.Optimizer:
    """Wrap `optimizer` so that `step()` uses the gradients of all ranks.

    The result is an instance of the optimizer's own class; it shares state, options and hooks
    with `optimizer`, so LR schedulers may hold either. During the backward pass gradients are
    packed into buckets, and each bucket is reduced as soon as it is full. With
    `compression="none"` gradients live in the buckets: `p.grad` is a view of one after `step()`.

    Args:
        optimizer: any of torch.optim's but LBFGS.
        named_parameters: usually `model.named_parameters()`; the names appear in errors. All or
            none of the optimizer's parameters.
        compression: what gradients travel as: `"none"`, `"fp16"`, `"bf16"`, the same of
            `hvd.Compression`, a `hvdkit.core.compression.WireFormat`, or a class like Horovod's
            compressors, which sees gradients one by one.
        backward_passes_per_step: how many backward passes there are before each `step()`. Their
            gradients are summed.
        op: `Average` or `Sum` over the ranks, or `Adasum`, for which Horovod's own optimizer is
            returned.
        gradient_predivide_factor: with `Average`, gradients are divided by this before the sum
            and by size / this after it. Default: as suits the wire format.
        num_groups: older name of an integer `groups`.
        groups: reduce parameters in this many buckets, or in these lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones. Otherwise their rows are gathered.
        process_set: the ranks to reduce over; on other ranks `step()` is a local one.
        accumulation_steps: backward passes per step, whose gradients are averaged. `step()`,
            `zero_grad()`, `hvd.clip_grad_norm_` and `hvd.GradScaler` may be called after every
            pass: they do nothing until the last. `optimizer.stepped` tells, and
            `optimizer.flush()` ends a window that has been cut short.
        find_unused_parameters: leave `.grad` None for parameters that no rank has used in a
            step, as one process would, at the price of a small collective. Otherwise they get
            zeros.
        bucket_bytes: the largest bucket of several gradients.

    Raises:
        UsageError: the arguments do not fit together; nothing has been communicated.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    _check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    window = Window(accumulation_steps)
    if accumulation_steps > 1 and (backward_passes_per_step > 1 or op == mpi_ops.Adasum):
        raise UsageError(
            f"accumulation_steps is {accumulation_steps}, with backward_passes_per_step "
            f"{backward_passes_per_step} and op {_op_name(op)}: the one averages over passes, the "
            f"other sums, and Adasum knows only the latter; use one of the two"
        )
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    if op == mpi_ops.Adasum and mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
        raise UsageError(
            "op is hvd.Adasum, which Horovod implements over MPI only: start the job with mpirun, "
            "or use hvd.Average"
        )
    names = _parameter_names(optimizer, named_parameters)
    if op == mpi_ops.Adasum:
        return _horovods_adasum(optimizer, names, compression, backward_passes_per_step)
    reduction = Reduction(
        format=wire_format(compression),
        average=op == mpi_ops.Average,
        predivide=None if gradient_predivide_factor == 1.0 else gradient_predivide_factor,
        passes=backward_passes_per_step,
        bucket_bytes=bucket_bytes,
        sparse_as_dense=sparse_as_dense,
        find_unused=find_unused_parameters,
    )
    kind = type(optimizer)
    cls: type[_DistributedOptimizer] = type(
        kind.__name__, (_DistributedOptimizer, kind), {"__doc__": kind.__doc__}
    )
    wrapped = cls.__new__(cls)
    wrapped._wrap(
        optimizer, names, reduction, window, _group_lists(groups or num_groups, names), process_set
    )
    return wrapped


@contextmanager
def no_sync(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, backward passes add to the gradients on this rank and count for nothing.

    For all but the last of several backward passes that belong together, such as two losses.

    Raises:
        UsageError: `optimizer` is not a `DistributedOptimizer`.
    """
    wrapped = distributed(optimizer)
    previous, wrapped._muted = wrapped._muted, True
    try:
        yield
    finally:
        wrapped._muted = previous


def distributed(optimizer: torch.optim.Optimizer) -> "_DistributedOptimizer":
    """`optimizer`, which must be one that `DistributedOptimizer` made.

    Raises:
        UsageError: it is another.
    """
    if not isinstance(optimizer, _DistributedOptimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected what "
            f"hvd.DistributedOptimizer returned"
        )
    return optimizer


def _op_name(op: int) -> str:
    names = {mpi_ops.Average: "Average", mpi_ops.Sum: "Sum", mpi_ops.Adasum: "Adasum"}
    return names.get(op, repr(op))


def _horovods_adasum(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.nn.Parameter, str],
    compression: Any,
    passes: int,
) -> torch.optim.Optimizer:
    by_name = {name: getattr(Compression, name) for name in ("none", "fp16", "bf16")}
    delegate: torch.optim.Optimizer = HorovodDistributedOptimizer(
        optimizer,
        [(name, p) for p, name in names.items()],
        by_name.get(compression, compression) if isinstance(compression, str) else compression,
        passes,
        mpi_ops.Adasum,
    )
    return delegate


def _group_lists(
    groups: int | Sequence[Sequence[torch.Tensor]], names: dict[torch.nn.Parameter, str]
) -> list[list[torch.nn.Parameter]]:
    """The parameters of each group.

    Raises:
        UsageError: they are no groups of the optimizer's parameters.
    """
    if isinstance(groups, int):
        parameters = [p for p in names if p.requires_grad]
        runs = bucketing.even_groups(len(parameters), groups)
        return [[parameters[i] for i in run] for run in runs]
    if not all(isinstance(group, list | tuple) for group in groups):
        raise UsageError(f"groups is {groups!r}: expected a number, or a list of lists of tensors")
    seen: set[int] = set()
    own = {id(p) for p in names}
    for number, group in enumerate(groups):
        for p in group:
            if id(p) not in own:
                raise UsageError(
                    f"groups[{number}] holds something that is not one of the optimizer's "
                    f"parameters"
                )
            if id(p) in seen:
                raise UsageError(f"groups has parameter {names[p]!r} twice")  # type: ignore[index]
            seen.add(id(p))
    return [list(group) for group in groups]  # type: ignore[arg-type]


def _check_arguments(
    optimizer: torch.optim.Optimizer, passes: int, op: int, predivide: float
) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: expected a torch optimizer")
    if isinstance(optimizer, _DistributedOptimizer) or hasattr(optimizer, "_allreduce_delay"):
        raise UsageError(
            "the optimizer is a DistributedOptimizer already: wrap the plain one, once"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS decides by the loss how often to call its closure, and each rank has a loss of "
            "its own: use another optimizer"
        )
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step is {passes!r}: expected an integer >= 1")
    if op not in (mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum):
        raise UsageError(f"op is {op!r}: expected hvd.Average, hvd.Sum or hvd.Adasum")
    if predivide <= 0:
        raise UsageError(f"gradient_predivide_factor is {predivide}: expected more than 0")
    if predivide != 1.0 and op != mpi_ops.Average:
        raise UsageError(
            f"gradient_predivide_factor is {predivide}, which splits the division of an average: "
            f"expected op=hvd.Average with it"
        )


def _parameter_names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.nn.Parameter, str]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {
            p: f"group{g}.parameter{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UsageError(
                f"named_parameters has a {type(pair).__name__} in it: expected pairs (name, "
                f"parameter), such as model.named_parameters() gives"
            )
    holders: dict[str, torch.nn.Parameter] = {}
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in pairs:
        if name in holders:
            raise UsageError(f"named_parameters has the name {name!r} twice: names must be unique")
        holders[name] = parameter
        names.setdefault(parameter, name)  # tied weights: one parameter, several names
    unnamed = [p for p in own if p not in names]
    if unnamed:
        shapes = ", ".join(str(list(p.shape)) for p in unnamed[:5])
        raise UsageError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(own)} parameters, of "
            f"shapes {shapes}{', ...' if len(unnamed) > 5 else ''}: pass the named_parameters() "
            f"of every model that the optimizer trains, or none"
        )
    return {p: names[p] for p in own}


class _DistributedOptimizer(torch.optim.Optimizer):
    """What a wrapped optimizer does before its own class's methods.

    Attributes:
        stepped: whether the last `step()` changed the parameters; False inside a window of
            accumulation, and where a `GradScaler` skipped the step.
    """

    def _wrap(
        self,
        plain: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        reduction: Reduction,
        window: Window,
        groups: list[list[torch.nn.Parameter]],
        process_set: mpi_ops.ProcessSet,
    ) -> None:
        # Not by __init__, which would drop state that has been loaded. `step` is in there when an
        # LR scheduler counts the plain optimizer's steps; ours must not be hidden by it.
        self.__dict__.update((k, v) for k, v in plain.__dict__.items() if k != "step")
        self._plain = plain
        self._names = names
        self.op = mpi_ops.Average if reduction.average else mpi_ops.Sum
        self.backward_passes_per_step = reduction.passes
        self.gradient_predivide_factor = reduction.predivide or 1.0
        self.process_set = process_set
        self.stepped = False
        self._reduction = reduction
        self._window = window
        self._groups = groups
        self._collectives = TorchCollectives(process_set)
        self._should_synchronize = True
        self._reduced = False
        self._muted = False
        # The graph tasks of the backward pass that is under way.
        self._tasks: set[int] = set()
        # One for the parameters at the start, and one for each set of later additions.
        self._synchronizers: list[Synchronizer[torch.Tensor, Any]] = []
        self._managed: set[torch.nn.Parameter] = set()
        self._adopt_new_parameters()

    def _adopt_new_parameters(self) -> None:
        """Plan the parameters that need gradients and are not planned yet, if there are any."""
        everyone = [p for group in self.param_groups for p in group["params"]]
        new = [p for p in everyone if p.requires_grad and p not in self._managed]
        if not new:
            return
        for p in everyone:
            self._names.setdefault(p, f"added.parameter{len(self._names)}")
        index = {p: i for i, p in enumerate(new)}
        groups = [[index[p] for p in group if p in index] for group in self._groups]
        synchronizer = Synchronizer(
            [spec(self._names[p], p) for p in new],
            TorchBackend(new, self._collectives),
            self._collectives,
            replace(self._reduction, groups=[group for group in groups if group]),
            self._window,
            context=[
                f"optimizer: {type(self).__name__}",
                *(
                    f"parameter {i} of the optimizer is {self._names[p]!r}, "
                    f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}, "
                    f"requires_grad={p.requires_grad}"
                    for i, p in enumerate(everyone)
                ),
                f"the optimizer has {len(everyone)} parameters",
            ],
        )
        self._synchronizers.append(synchronizer)
        self._managed.update(new)
        for i, p in enumerate(new):
            _report_gradient(p, self, synchronizer, i)

    def _arrived(self, synchronizer: Synchronizer[torch.Tensor, Any], i: int) -> None:
        window = self._window
        if self._muted:
            synchronizer.check_local(i)
            return
        if window.size > 1:
            task = torch._C._current_graph_task_id()
            if task not in self._tasks:
                self._tasks.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(self._end_task)
            window.arrival()
            if not window.in_last_pass:
                return
        synchronizer.mark_ready(i)

    def _end_task(self) -> None:
        # A re-entrant backward pass (checkpointing) ends inside a node of the one around it.
        if torch._C._current_autograd_node() is None:
            self._end_pass()

    def _end_pass(self) -> None:
        # Called between passes, too: a pass may have had re-entrant parts only.
        self._tasks.clear()
        self._window.end_pass()

    @property
    def pending(self) -> bool:
        """Whether gradients of this rank wait to be reduced."""
        return any(synchronizer.pending for synchronizer in self._synchronizers)

    @property
    def accumulating(self) -> bool:
        """Whether more backward passes must come before a step."""
        self._end_pass()
        return self._window.open

    def reduce(self) -> bool:
        """Reduce the gradients, unless that has been done or more passes must come. A collective.

        Returns:
            Whether the gradients are the reduced ones.
        """
        if self.accumulating:
            return False
        if self.pending or not self._reduced:
            self.synchronize()
        return True

    def synchronize(self) -> None:
        """Make every gradient the reduced one. A collective; `step()` calls it.

        Call it yourself to look at or change the reduced gradients before `step()`, which does
        not reduce them again.
        """
        if self.accumulating:
            return
        # Parameters that were unfrozen have gradients now which are nobody's yet.
        self._adopt_new_parameters()
        for synchronizer in self._synchronizers:
            synchronizer.synchronize()
        self._reduced = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step()` takes the gradients as they are."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, then step as the plain optimizer does.

        A closure's gradients are reduced after each of its calls. Inside a window of accumulation
        nothing happens; the attribute `stepped` tells.

        Raises:
            UsageError: a closure, which makes the backward passes itself, with accumulation.
        """
        self.stepped = False
        if closure is not None and self._window.size > 1:
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
        self.end_step()
        self.stepped = True
        return result

    # torch would wrap this method, too, to run the step hooks; the plain class's step runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def end_step(self) -> None:
        """The gradients have been used, or are not to be: the next window begins."""
        self.stepped = False
        self._reduced = False
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
        self._end_pass()
        if self._window.size == 1 and self.pending:
            self._window.passes = 1
        if not self._window.cut(self._collectives):
            return False
        (step or self.step)()
        self._window.close()
        return True

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return reduced

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; nothing inside a window of accumulation.

        Raises:
            HvdkitError: between `backward()` and `step()`, where they are about to be reduced.
        """
        if self.accumulating and self._window.passes:
            return
        if self.pending:
            raise HvdkitError(
                "optimizer.zero_grad() was called after loss.backward() and before "
                "optimizer.step() or optimizer.synchronize(): call it before backward() or after "
                "step()"
            )
        self._reduced = False
        self._window.close()
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes make a step, and begin a new one.

        Raises:
            UsageError: it is below 1, or the optimizer was made with accumulation_steps.
        """
        if self._window.size > 1:
            raise UsageError(
                f"set_backward_passes_per_step({passes}) on an optimizer with accumulation_steps "
                f"{self._window.size}: use one of the two"
            )
        for synchronizer in self._synchronizers:
            synchronizer.set_passes(passes)
        self._reduction = replace(self._reduction, passes=passes)
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the plain optimizer's, and begin a new step."""
        self.begin_anew()
        super().load_state_dict(state_dict)
        # torch puts new containers in place of the shared ones.
        self._plain.__dict__.update(state=self.state, param_groups=self.param_groups)

    def begin_anew(self) -> None:
        """Begin a new step: what has arrived is forgotten. On every rank, or on none."""
        for synchronizer in self._synchronizers:
            synchronizer.reset()
        self.end_step()

    @property
    def between_steps(self) -> bool:
        """Whether no gradients wait for more, or for `step()`."""
        self._end_pass()
        return not self._window.passes and not self.pending

    def reduction_states(self) -> list[ReductionState | None]:
        """What must be the same for sums to round the same, for each set of parameters."""
        return [synchronizer.state for synchronizer in self._synchronizers]

    def resume_reduction(self, states: Sequence[ReductionState | None]) -> None:
        """Go on with what `reduction_states` gave, on every rank the same."""
        self._adopt_new_parameters()
        for synchronizer, state in zip(self._synchronizers, states, strict=False):
            synchronizer.resume(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the plain optimizer's; every rank must add the same."""
        super().add_param_group(param_group)
        self._adopt_new_parameters()


def _report_gradient(
    parameter: torch.nn.Parameter,
    optimizer: _DistributedOptimizer,
    synchronizer: Synchronizer[torch.Tensor, Any],
    i: int,
) -> None:
    previous: RemovableHandle | None = _hooks.get(parameter)
    if previous is not None:
        previous.remove()
    # Weakly, so that the model does not keep an optimizer alive that has been dropped.
    hook = functools.partial(_on_gradient, weakref.ref(optimizer), weakref.ref(synchronizer), i)
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def _on_gradient(
    optimizer_reference: "weakref.ref[_DistributedOptimizer]",
    reference: "weakref.ref[Synchronizer[torch.Tensor, Any]]",
    i: int,
    _: torch.Tensor,
) -> None:
    optimizer, synchronizer = optimizer_reference(), reference()
    if optimizer is not None and synchronizer is not None:
        optimizer._arrived(synchronizer, i)
