"""`hvd.DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.optimizer import DistributedOptimizer as HorovodDistributedOptimizer

from hvdkit.agreement.collectives import check_process_set, is_single_rank
from hvdkit.agreement.consistency import check_consistency
from hvdkit.agreement.replicas import INTERVAL, STOP, CheckSettings
from hvdkit.errors import UsageError
from hvdkit.reduction import bucketing
from hvdkit.reduction.accumulation import window_of
from hvdkit.reduction.compression import check_adasum
from hvdkit.reduction.nonfinite import IGNORE, SKIP, check_policy
from hvdkit.reduction.plan import Reduction, predivide
from hvdkit.reduction.wire_format import WireFormat
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.compression import Compression, wire_format
from hvdkit.torch.dtensors import is_dtensor, local, placements
from hvdkit.torch.elementwise import steps_with_shares
from hvdkit.torch.meshes import Replicas, mesh_of
from hvdkit.torch.plain_tensors import check_has_memory
from hvdkit.torch.reduction.backward_passes import coordinator_of
from hvdkit.torch.reduction.settings import Settings
from hvdkit.torch.shards import check_dense
from hvdkit.torch.wrapped_modules import check_not_reduced
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer, wrapped
from hvdkit.torch.wrapping import check_attributes, wrap
from hvdkit.training.trial import TrialPlan

log = logging.getLogger("hvdkit.torch")


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
    check_parameters: bool = True,
    check_interval: int = INTERVAL,
    on_mismatch: str = STOP,
    on_nonfinite: str = IGNORE,
    max_grad_norm: float | None = None,
    shard: str | None = None,
) -> torch.optim.Optimizer:
    """Wrap `optimizer` so that `loss.backward()` reduces the gradients over all ranks.

    The result is an instance of the optimizer's class. It shares state, options and hooks with
    `optimizer`, so LR schedulers may hold either. During the backward pass gradients are packed
    into buckets, and each bucket is reduced as soon as it is full. When `backward()` returns,
    `p.grad` is the reduced gradient. With `compression="none"` it may be a view of a bucket, which
    belongs to those who keep it. Another pass before `step()` adds its reduced gradients to those
    of the first pass.

    Args:
        optimizer: any optimizer of torch.optim except LBFGS.
        named_parameters: usually `model.named_parameters()`. Must contain all of the optimizer's
            parameters. The ranks compare the names; without them, they do not notice parameters of
            the same shape in another order.
        compression: the wire format: `"none"`, `"fp16"`, `"bf16"`, `"int8"`, one of
            `hvd.Compression`, a `hvdkit.reduction.wire_format.WireFormat` such as `hvd.Int8()`, or
            a class with the interface of Horovod's compressors, which gets gradients one by one.
        backward_passes_per_step: backward passes before each `step()`, whose gradients are summed.
            Those before the last one do not communicate.
        op: `Average` or `Sum` over the ranks; or `Adasum`, which returns Horovod's optimizer.
        gradient_predivide_factor: with `Average`, gradients are divided by this factor before the
            sum, and by size / factor after it. 1.0: the wire format chooses the factor.
        num_groups: an older name of an integer `groups`; 0 for none.
        groups: the number of buckets, or a list of parameters for each bucket. None: parameters
            fill buckets of `bucket_bytes`.
        sparse_as_dense: reduce sparse gradients as dense ones. Otherwise their rows are gathered.
        process_set: the ranks to reduce over; other ranks step with their own gradients. With
            parameters that are DTensors, it follows from their device mesh: the ranks with the same
            part of them.
        accumulation_steps: calls of `step()` for one step, one for each batch. The gradients of the
            batches are averaged. From the first call on, `zero_grad()` does nothing. Before the
            last batch, `hvd.clip_grad_norm_` and `hvd.GradScaler` do nothing.
            `optimizer.stepped` is whether the last `step()` changed the parameters.
            `optimizer.flush()` ends a window early.
        find_unused_parameters: leave `.grad` None for parameters that no rank has used in a step,
            as in one process. It costs a small allreduce per pass. With False, these parameters get
            zeros.
        bucket_bytes: the largest size of a bucket with several gradients, in bytes. A larger
            gradient has a bucket of its own.
        check_parameters: compare the parameters' values before the first reduction, and raise on
            every rank if they differ, for example because `hvd.broadcast_parameters` was forgotten.
            Frozen parameters in `named_parameters` are compared even if the optimizer does not have
            them.
        check_interval: compare parameters, optimizer state and options after every `check_interval`
            steps, and before after steps 10, 20, 40 and so on; 0 for never. Needs
            `check_parameters`.
        on_mismatch: what to do if this comparison finds a difference. `"stop"` raises
            `RankMismatchError` on every rank; a difference as small as rounding is only logged.
            `"repair"` copies the values of the majority of ranks. It raises if there is no
            majority, as with two ranks.
        on_nonfinite: what to do if a rank's gradients contain NaN or infinity before the reduction.
            `"ignore"` does not check them. `"raise"` raises `NonFiniteGradients` on every rank;
            the text names the ranks and the parameters. `"skip"` logs the same text, skips the step
            on every rank, and sets the gradients to 0.
            The check reads each gradient once, and waits for the device after the backward pass. Do
            not use it for float16 with a `GradScaler`, which expects infinity.
        max_grad_norm: clip the reduced gradients to this norm, before `backward()` returns. The
            norm is that of all gradients of the optimizer, and `optimizer.grad_norm` is the norm
            before clipping. Another pass before `step()` clips the sum. Not with a `GradScaler`,
            which unscales gradients later. None: do not clip.
        shard: `"optimizer"`: each of n ranks updates 1/n of each parameter, and has 1/n of the
            optimizer's state. After `backward()`, `p.grad` is divided, too: use
            `hvd.clip_grad_norm_` and `optimizer.full_gradients()`. If the optimizer needs whole
            tensors, as Muon and Adafactor do, each rank updates some of the parameters instead,
            and has whole gradients. `state_dict()` is a collective. None: each rank updates all
            parameters.

    Raises:
        UsageError: an argument is invalid; nothing has been communicated. Or, on every rank,
            parameters are DTensors, and no two ranks have the same part of them.

    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    """
    _check_arguments(optimizer, op)
    check_process_set(process_set)
    replicas = CheckSettings(check_interval, on_mismatch)
    window = window_of(accumulation_steps, backward_passes_per_step)
    if op == mpi_ops.Adasum and max_grad_norm is not None:
        raise UsageError(
            f"max_grad_norm is {max_grad_norm}, and op is hvd.Adasum, which reduces gradients in "
            f"the step. Pass op=hvd.Average, or omit max_grad_norm"
        )
    if op == mpi_ops.Adasum and accumulation_steps > 1:
        raise UsageError(
            f"accumulation_steps is {accumulation_steps}, and op is hvd.Adasum, which supports "
            f"only sums over passes: pass backward_passes_per_step={accumulation_steps}, or "
            f"op=hvd.Average"
        )
    divisor = predivide(gradient_predivide_factor, op == mpi_ops.Average)
    if not mpi_ops.is_initialized():
        raise UsageError("Horovod is not initialised: call hvd.init() before this")
    if op == mpi_ops.Adasum and mpi_ops.size() > 1 and not mpi_ops.mpi_enabled():
        raise UsageError(
            "op is hvd.Adasum, which Horovod implements over MPI only: start the job with mpirun, "
            "or use hvd.Average"
        )
    named = None if named_parameters is None else list(named_parameters)
    names = _parameter_names(optimizer, named)
    for parameter, name in names.items():
        if parameter.requires_grad:  # other parameters are not reduced
            check_has_memory(local(parameter), f"the parameter {name!r}")
    check_not_reduced((name, p) for p, name in names.items())
    mesh = mesh_of((name, p) for p, name in names.items())
    if mesh is not None:
        _check_sharded(op, on_nonfinite)
        # A rank without DTensors calls nothing here. Its next call is usually a round.
        coordinator_of(process_set).meet("hvd.DistributedOptimizer, whose parameters are DTensors")
        lines = [f"{name!r}, {list(p.shape)}{placements(p)}" for p, name in names.items()]
        check_consistency(TorchCollectives(process_set), lines, "the optimizer's parameters")
        process_set = Replicas(mesh, process_set).process_set
    if op == mpi_ops.Adasum:
        check_adasum(wire_format(compression))
        return _horovods_adasum(optimizer, names, compression, backward_passes_per_step)
    settings = Settings(
        optimizer=type(optimizer).__name__,
        reduction=Reduction(
            format=wire_format(compression),
            average=op == mpi_ops.Average,
            predivide=divisor,
            passes=backward_passes_per_step,
            bucket_bytes=bucket_bytes,
            sparse_as_dense=sparse_as_dense,
            find_unused=find_unused_parameters,
            sections=_sections(shard, optimizer, names, process_set, wire_format(compression)),
        ),
        frozen={name: p for name, p in named or () if p not in names and not p.requires_grad},
        process_set=process_set,
        check_parameters=check_parameters,
        replicas=replicas,
        on_nonfinite=check_policy(on_nonfinite),
        max_grad_norm=max_grad_norm,
        shard=shard,
        keep_sparse=sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam),
    )
    buckets = _group_lists(groups if groups is not None else num_groups, names)
    result = wrap(optimizer, settings, window, names, buckets)
    _begin_trial(result)
    return result


@contextmanager
def no_sync(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which backward passes add to this rank's gradients without a reduction.

    Use it for all but the last of several backward passes in one step, such as the passes of two
    losses. The next pass outside of the context reduces the sum of their gradients. Until then
    `p.grad` has only this rank's gradients.

    Raises:
        UsageError: `optimizer` is not a `DistributedOptimizer`.
    """
    own = wrapped(optimizer).reducer
    own.gradients.refresh()  # a conversion may have removed the hooks
    own.rounds.position = own.rounds.position.with_local_gradients()
    previous, own.no_sync = own.no_sync, True
    try:
        yield
    finally:
        own.no_sync = previous


@contextmanager
def sync(optimizer: WrappedOptimizer) -> Iterator[None]:
    """Context, within `no_sync`, in which backward passes reduce the gradients nevertheless."""
    own = optimizer.reducer
    previous, own.no_sync = own.no_sync, False
    try:
        yield
    finally:
        own.no_sync = previous


_trial_begun = False


def _begin_trial(optimizer: WrappedOptimizer) -> None:
    """Begin a trial of `hvdkit tune` with the first optimizer of the script."""
    global _trial_begun
    if _trial_begun or (requested := TrialPlan.requested()) is None:
        return
    _trial_begun = True
    from hvdkit.torch.trial import Trial  # imported on use, because most jobs are no trials

    optimizer.hvdkit_trial = Trial(optimizer, requested).after_step


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
    """Return the parameters of each group.

    Raises:
        UsageError: `groups` is not a number or a list of lists of the optimizer's parameters.
    """
    bucketing.check_groups(groups, "parameters", name=lambda p: names.get(p, "a tensor"))
    if isinstance(groups, int):
        parameters = [p for p in names if p.requires_grad]
        runs = bucketing.even_groups(len(parameters), groups)
        return [[parameters[i] for i in run] for run in runs]
    own = {id(p) for p in names}
    for number, group in enumerate(groups):
        for p in group:
            if id(p) not in own:
                raise UsageError(
                    f"groups[{number}] contains an object that is not one of the optimizer's "
                    f"parameters"
                )
    return [list(group) for group in groups]  # type: ignore[arg-type]


def _check_arguments(optimizer: torch.optim.Optimizer, op: int) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: expected a torch optimizer")
    if isinstance(optimizer, WrappedOptimizer) or hasattr(optimizer, "_allreduce_delay"):
        raise UsageError(
            "the optimizer is a DistributedOptimizer already: wrap a plain optimizer, once"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls its closure as often as the loss requires. Each rank has its own loss, so "
            "ranks would make different numbers of passes: use another optimizer"
        )
    check_attributes(optimizer)
    if op not in (mpi_ops.Average, mpi_ops.Sum, mpi_ops.Adasum):
        raise UsageError(f"op is {op!r}: expected hvd.Average, hvd.Sum or hvd.Adasum")


def _sections(
    shard: str | None,
    optimizer: torch.optim.Optimizer,
    names: dict[torch.nn.Parameter, str],
    process_set: mpi_ops.ProcessSet,
    wire: WireFormat,
) -> int:
    """Return the number of ranks that divide gradients and state; see `Reduction.sections`.

    Raises:
        UsageError: the optimizer, a parameter or the wire format cannot be divided.
    """
    if shard is None:
        return 1
    if wire.tensor_by_tensor:
        raise UsageError(
            f"shard is {shard!r}, and compression is {wire.name}, which gets whole gradients one "
            f"by one: expected 'none', 'fp16', 'bf16' or 'int8'"
        )
    if any(map(is_dtensor, names)):
        raise UsageError(
            f"shard is {shard!r}, and parameters are DTensors, which are divided already: expected "
            f"shard=None"
        )
    check_dense(names)
    if is_single_rank(process_set):
        return 1
    trials = [steps_with_shares(optimizer, group) for group in optimizer.param_groups]
    if not all(trials):
        if mpi_ops.rank() == process_set.ranks[0]:
            log.info(
                "%s needs whole tensors: each rank updates some of the parameters, and gradients "
                "are reduced as without shard",
                type(optimizer).__name__,
            )
        return 1
    return len(process_set.ranks)


def _check_sharded(op: int, on_nonfinite: str) -> None:
    """Check arguments for an optimizer of DTensors, before any collective."""
    for given, name in (
        (op == mpi_ops.Adasum, "op=hvd.Adasum"),
        (on_nonfinite == SKIP, "on_nonfinite='skip'"),
    ):
        if given:
            raise UsageError(
                f"{name} was passed, and parameters are DTensors. It would decide for each part of "
                f"a parameter alone: expected op=hvd.Average or hvd.Sum, and on_nonfinite='ignore' "
                f"or 'raise'"
            )


def _parameter_names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.nn.Parameter, str]:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {
            p: f"group{g}.parameter{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
        }
    for pair in named_parameters:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise UsageError(
                f"named_parameters contains a {type(pair).__name__}: expected pairs (name, "
                f"parameter), such as model.named_parameters()"
            )
    holders: dict[str, torch.nn.Parameter] = {}
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in named_parameters:
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
            f"of every model that the optimizer trains, or omit named_parameters"
        )
    return {p: names[p] for p in own}
