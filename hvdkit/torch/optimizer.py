"""The optimizer that steps with gradients reduced over all ranks."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.optimizer import DistributedOptimizer as HorovodDistributedOptimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.core import bucketing
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch.backend import TorchBackend, TorchBuffer, spec
from hvdkit.torch.collectives import TorchCollectives

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
    bucket_bytes: int = bucketing.BUCKET_BYTES,
) -> torch.optim.Optimizer:
    """Wrap `optimizer` so that `step()` uses the gradients of all ranks.

    The result is an instance of the optimizer's own class; it shares state, options and hooks
    with `optimizer`, so LR schedulers may hold either. During the backward pass gradients are
    packed into buckets, and each bucket is reduced as soon as it is full. A parameter that a rank
    did not use counts as zeros there. Sparse gradients are reduced as dense ones, and are sparse
    again afterwards; bfloat16 gradients travel as float32.

    Horovod's own optimizer is returned when `compression` is not `Compression.none`, when `op` is
    `Adasum`, or when `num_groups` or `groups` is given.

    Args:
        optimizer: any of torch.optim's but LBFGS.
        named_parameters: usually `model.named_parameters()`; the names appear in errors. All or
            none of the optimizer's parameters.
        compression: of the gradients on the wire.
        backward_passes_per_step: how many backward passes there are before each `step()`. Their
            gradients are summed.
        op: `Average` or `Sum` over the ranks, or `Adasum`.
        gradient_predivide_factor: with `Average`, gradients are divided by this before the sum
            and by size / this after it.
        num_groups: deprecated name of an integer `groups`.
        groups: reduce in this many groups, or in these.
        sparse_as_dense: what is done in any case; with Horovod's optimizer, what it means there.
        process_set: the ranks to reduce over; on other ranks `step()` is a local one.
        bucket_bytes: the largest bucket of several gradients.

    Raises:
        UsageError: the arguments do not fit together; nothing has been communicated.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    _check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    if op == mpi_ops.Adasum and mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
        raise UsageError(
            "op is hvd.Adasum, which Horovod implements over MPI only: start the job with mpirun, "
            "or use hvd.Average"
        )
    names = _parameter_names(optimizer, named_parameters)
    if compression is not Compression.none or op == mpi_ops.Adasum or num_groups or groups:
        if (num_groups or groups) and gradient_predivide_factor != 1.0:
            raise UsageError(
                f"gradient_predivide_factor is {gradient_predivide_factor} and groups are given: "
                f"Horovod would ignore the factor; use one of the two"
            )
        delegate: torch.optim.Optimizer = HorovodDistributedOptimizer(
            optimizer,
            [(name, p) for p, name in names.items()],
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            sparse_as_dense,
            process_set,
        )
        return delegate
    kind = type(optimizer)
    cls: type[_DistributedOptimizer] = type(
        kind.__name__, (_DistributedOptimizer, kind), {"__doc__": kind.__doc__}
    )
    wrapped = cls.__new__(cls)
    wrapped._wrap(
        optimizer,
        names,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        process_set,
        bucket_bytes,
    )
    return wrapped


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
    """What a wrapped optimizer does before its own class's methods."""

    def _wrap(
        self,
        plain: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        passes: int,
        op: int,
        predivide: float,
        process_set: mpi_ops.ProcessSet,
        bucket_bytes: int,
    ) -> None:
        # Not by __init__, which would drop state that has been loaded. `step` is in there when an
        # LR scheduler counts the plain optimizer's steps; ours must not be hidden by it.
        self.__dict__.update((k, v) for k, v in plain.__dict__.items() if k != "step")
        self._plain = plain
        self._names = names
        self.backward_passes_per_step = passes
        self.op = op
        self.gradient_predivide_factor = predivide
        self.process_set = process_set
        self._bucket_bytes = bucket_bytes
        self._synchronized = False
        self._should_synchronize = True
        # One for the parameters at the start, and one for each set of later additions.
        self._synchronizers: list[Synchronizer[TorchBuffer, int]] = []
        self._managed: set[torch.nn.Parameter] = set()
        self._active = bool(process_set.included()) and process_set.size() > 1
        self._adopt_new_parameters()

    def _adopt_new_parameters(self) -> None:
        """Plan the parameters that need gradients and are not planned yet, if there are any."""
        if not self._active:
            return
        new = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad and p not in self._managed
        ]
        if not new:
            return
        for p in new:
            self._names.setdefault(p, f"added.parameter{len(self._names)}")
        plan = bucketing.plan(
            [spec(self._names[p], p) for p in new],
            self._bucket_bytes,
            min(bucketing.FIRST_BUCKET_BYTES, self._bucket_bytes),
        )
        synchronizer = Synchronizer(
            plan,
            TorchBackend(new, self.op, self.gradient_predivide_factor, self.process_set),
            TorchCollectives(self.process_set),
            settings=[
                f"optimizer: {type(self).__name__}",
                f"op: {'average' if self.op == mpi_ops.Average else 'sum'}",
                f"gradient_predivide_factor: {self.gradient_predivide_factor}",
            ],
            passes=self.backward_passes_per_step,
        )
        self._synchronizers.append(synchronizer)
        self._managed.update(new)
        for i, p in enumerate(new):
            _report_gradient(p, synchronizer, i)

    def synchronize(self) -> None:
        """Make every gradient the reduced one. A collective; `step()` calls it.

        Call it yourself to look at or change the reduced gradients, then step with
        `with optimizer.skip_synchronize(): optimizer.step()`.
        """
        # Parameters that were unfrozen have gradients now which are nobody's yet.
        self._adopt_new_parameters()
        for synchronizer in self._synchronizers:
            synchronizer.synchronize()
        self._synchronized = True

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

        A closure's gradients are reduced after each of its calls.
        """
        if self._should_synchronize and closure is None:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() reduces again; use `with "
                    "optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self.synchronize()
        elif self._should_synchronize and closure is not None:
            closure = self._reducing(closure)
        self._synchronized = False
        result = super().step() if closure is None else super().step(closure)
        # An LR scheduler that holds the plain optimizer asks whether it has stepped.
        self._plain._opt_called = True  # type: ignore[attr-defined]
        return result

    # torch would wrap this method, too, to run the step hooks; the plain class's step runs them.
    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return reduced

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            HvdkitError: between `backward()` and `step()`, where they are about to be reduced.
        """
        if any(synchronizer.pending for synchronizer in self._synchronizers):
            raise HvdkitError(
                "optimizer.zero_grad() was called after loss.backward() and before "
                "optimizer.step() or optimizer.synchronize(): call it before backward() or after "
                "step()"
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes make a step, and begin a new one."""
        for synchronizer in self._synchronizers:
            synchronizer.set_passes(passes)
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the plain optimizer's, and begin a new step."""
        for synchronizer in self._synchronizers:
            synchronizer.reset()
        self._synchronized = False
        super().load_state_dict(state_dict)
        # torch puts new containers in place of the shared ones.
        self._plain.__dict__.update(state=self.state, param_groups=self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the plain optimizer's; every rank must add the same."""
        super().add_param_group(param_group)
        self._adopt_new_parameters()


def _report_gradient(
    parameter: torch.nn.Parameter, synchronizer: Synchronizer[TorchBuffer, int], i: int
) -> None:
    previous: RemovableHandle | None = _hooks.get(parameter)
    if previous is not None:
        previous.remove()
    # Weakly, so that the model does not keep an optimizer alive that has been dropped.
    hook = functools.partial(_mark_ready, weakref.ref(synchronizer), i)
    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def _mark_ready(
    reference: "weakref.ref[Synchronizer[TorchBuffer, int]]", i: int, _: torch.Tensor
) -> None:
    synchronizer = reference()
    if synchronizer is not None:
        synchronizer.mark_ready(i)
