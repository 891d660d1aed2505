"""Broadcast parameters, optimizer state and Python objects."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement import objects
from hvdkit.agreement.collectives import check_root
from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.agreement.rank_errors import raise_on_all_ranks
from hvdkit.checkpoint.state import Tree
from hvdkit.errors import UsageError
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.devices import loads_on_own_gpu
from hvdkit.torch.digests import bytes_of
from hvdkit.torch.dtensors import is_dtensor, local, placements
from hvdkit.torch.in_place import note_written
from hvdkit.torch.items.optimizer import OptimizerItem
from hvdkit.torch.items.trees import mapped, tensors_of, with_specs
from hvdkit.torch.keras_variables import is_seed
from hvdkit.torch.meshes import Replicas, mesh_of
from hvdkit.torch.plain_tensors import check_has_memory, check_plain
from hvdkit.torch.shards import Shards
from hvdkit.torch.unwrapped import note_shared
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

# Tensors are sent as bytes, and MPI counts elements in 32 bits: 1 GiB at a time is safe.
_CHUNK_BYTES = 1 << 30


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> None:
    """Copy rank `root_rank`'s tensors into those of every other rank, in place.

    Args:
        params: a model: all parameters and buffers, as DistributedDataParallel sends them. Or
            `model.state_dict()`, which lacks buffers with `persistent=False`, or
            `model.named_parameters()` or `model.parameters()`; any dtype and strides. Values that
            are not tensors are ignored, and so are the states of Keras's random generators. A part
            of a DTensor comes from the rank with the same part in the mesh of `root_rank`.
        root_rank: the rank to copy from.
        process_set: the ranks that take part.

    Raises:
        UsageError: `params` is a tensor, or has a value that contains tensors, or a tensor without
            memory of its own; DTensors have several meshes, or no two ranks have the same part of
            them; or `root_rank` does not exist.
        RankMismatchError: on every rank, when names, shapes or dtypes differ between ranks, or
            an argument is invalid on one of them. (The latter rank raises its `UsageError`.)
    """
    collectives = TorchCollectives(process_set)

    def prepare() -> tuple[tuple[list[torch.Tensor], Any], list[str]]:
        check_root(root_rank, process_set.ranks)
        tensors = _named_tensors(params)
        return ([value for _, value in tensors], mesh_of(tensors)), [
            f"broadcast_parameters from rank {root_rank}",
            *(
                f"{name!r}, {value.dtype} {list(value.shape)}{placements(value)}"
                for name, value in tensors
            ),
        ]

    own, mesh = prepare_on_all_ranks(collectives, prepare, "the parameters to broadcast")
    replicas = None if mesh is None else Replicas(mesh, process_set)
    plain = [tensor for tensor in own if not is_dtensor(tensor)]
    note_shared(plain)
    _broadcast_tensors(plain, root_rank, process_set)
    if replicas is not None:
        parts = [local(tensor) for tensor in own if is_dtensor(tensor)]
        _broadcast_tensors(parts, replicas.root(root_rank), replicas.process_set)


def _named_tensors(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[Any],
) -> list[tuple[str, torch.Tensor]]:
    """Return the names and tensors to broadcast, in the same order on every rank.

    Raises:
        UsageError: see `broadcast_parameters`.
    """
    if isinstance(params, torch.Tensor):
        raise UsageError(
            "params is a tensor: expected a model, model.named_parameters() or a list of "
            "tensors; for one tensor use broadcast_()"
        )
    if isinstance(params, torch.nn.Module):
        params = dict([*params.named_parameters(), *params.named_buffers()])
    items = params.items() if isinstance(params, Mapping) else params
    pairs = (item if isinstance(item, tuple) else ("", item) for item in items)
    named = [(name, value) for name, value in pairs if not is_seed(str(name))]
    for name, value in named:
        if not isinstance(value, torch.Tensor) and tensors_of(value):
            raise UsageError(
                f"params[{name!r}] is a {type(value).__name__} that contains tensors: expected "
                f"tensors, as in model.state_dict(). Call broadcast_parameters for each state "
                f"dict, and broadcast_optimizer_state for an optimizer"
            )
        if isinstance(value, torch.Tensor):
            part = local(value)
            check_plain(part, f"params[{name!r}]")
            strides = zip(part.shape, part.stride(), strict=True)
            if part.numel() and any(size > 1 and not stride for size, stride in strides):
                raise UsageError(
                    f"params[{name!r}] is an expanded tensor of shape {list(value.shape)}: several "
                    f"of its elements share memory, so it cannot be written. Expected a tensor of "
                    f"its own memory, such as tensor.expand(...).clone()"
                )
    # Sorted, because ranks may have filled a dict in different orders.
    return sorted(
        ((str(name), value) for name, value in named if isinstance(value, torch.Tensor)),
        key=lambda pair: pair[0],
    )


@torch.no_grad()
def _broadcast_tensors(
    tensors: Iterable[torch.Tensor], root_rank: int, process_set: mpi_ops.ProcessSet
) -> None:
    copies = []
    handles = []
    for i, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if contiguous.data_ptr() != tensor.data_ptr():
            copies.append((tensor, contiguous))
        # As bytes, because Horovod lacks some dtypes, such as bfloat16.
        note_written([contiguous])
        content = bytes_of(contiguous)
        for k, chunk in enumerate(content.split(_CHUNK_BYTES)):
            name = f"hvdkit.broadcast.{i}.{k}"
            handles.append(mpi_ops.broadcast_async_(chunk, root_rank, name, process_set))
    for handle in handles:
        mpi_ops.synchronize(handle)
    for tensor, contiguous in copies:
        tensor.detach().copy_(contiguous)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001
) -> None:
    """Broadcast the optimizer state and options of rank `root_rank`.

    The other ranks drop their own state, which may be empty or have other dtypes. The optimizer of
    rank `root_rank` and all parameters stay unchanged. A part of a DTensor comes from the rank with
    the same part in the mesh of `root_rank`.

    Args:
        optimizer: the optimizer, of the same class and with equal parameters on every rank.
        root_rank: the rank to copy from.
        model: for compatibility with Horovod; ignored.

    Raises:
        UsageError: the optimizer is LBFGS, whose state belongs to no single parameter, or its
            `state_dict()` lacks `state` or `param_groups`; or `root_rank` does not exist; or
            parameters are DTensors, and no two ranks have the same part of them, or ranks of the
            mesh of `root_rank` have other state.
        RankMismatchError: on every rank, when their optimizers have different parameters, or
            different values of other entries of `state_dict()`, which are not sent; or an argument
            is invalid on one of them. (The latter rank raises its `UsageError`.)
    """
    if isinstance(optimizer, WrappedOptimizer) and optimizer.shards is not None:
        _broadcast_options(optimizer, optimizer.shards, root_rank)
        return
    process_set = mpi_ops.global_process_set
    collectives = TorchCollectives(process_set)
    item = OptimizerItem(optimizer)

    def prepare() -> tuple[tuple[Tree, Any], list[str]]:
        check_root(root_rank, process_set.ranks)
        own = _state_dict_of(optimizer)
        mesh = mesh_of((f"parameter {i}", p) for i, p in enumerate(_parameters_of(optimizer)))
        tree = None
        if mpi_ops.rank() == root_rank or mesh is not None:
            for tensor in tensors_of([own[key] for key in _SENT]):
                shape = list(tensor.shape)
                check_plain(local(tensor), f"a tensor of shape {shape} in the optimizer's state")
            tree = item.tree(own)
        return (tree, mesh), [
            f"optimizer {type(optimizer).__name__}, state from rank {root_rank}",
            *(
                f"group {g}, parameter {i}, {p.dtype} {list(p.shape)}{placements(p)}"
                for g, group in enumerate(optimizer.param_groups)
                for i, p in enumerate(group["params"])
            ),
            *(
                f"state_dict()[{key!r}], which this function does not send: {_text_of(own[key])}"
                for key in sorted(own.keys() - _SENT)
            ),
        ]

    subject = "the optimizer whose state to broadcast"
    tree, mesh = prepare_on_all_ranks(collectives, prepare, subject, _STATE_ADVICE)
    replicas = None if mesh is None else Replicas(mesh, process_set)
    rank = mpi_ops.rank()
    sends = rank == root_rank or (replicas is not None and replicas.root(root_rank) == rank)
    outline = broadcast_object(tree and with_specs(tree), root_rank)
    if replicas is not None:
        error = None
        if sends and with_specs(tree) != outline:
            error = UsageError(f"the state of rank {rank} differs from that of rank {root_rank}")
        text = f"broadcast_optimizer_state: the ranks of the mesh of rank {root_rank} differ"
        raise_on_all_ranks(collectives, error, text, "hvdkit.optimizer_state", UsageError)
    # Not by `load_state_dict`, which casts state to the dtype of its parameter.
    own = tree if sends else item.plan_restore(outline)
    tensors = tensors_of(own)
    _broadcast_tensors([t for t in tensors if not is_dtensor(t)], root_rank, process_set)
    if replicas is not None:
        parts = [local(tensor) for tensor in tensors if is_dtensor(tensor)]
        _broadcast_tensors(parts, replicas.root(root_rank), replicas.process_set)
    if not sends:
        item.load(own)


def _broadcast_options(optimizer: WrappedOptimizer, shards: Shards, root_rank: int) -> None:
    """Broadcast the options of a sharded optimizer, whose state each rank has a share of."""
    check_root(root_rank, mpi_ops.global_process_set.ranks)
    shards.check_state()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    sent = broadcast_object(groups, root_rank)
    for group, options in zip(optimizer.param_groups, sent, strict=True):
        group.update(options)


# The entries of a `state_dict()` that are sent.
_SENT = frozenset(["state", "param_groups"])
_LOADING = "optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank))"
_STATE_ADVICE = (
    f"Every rank must build the same model and use the same settings. If a library keeps state of "
    f"its own, use {_LOADING} instead."
)


def _state_dict_of(optimizer: Any) -> dict[str, Any]:
    """Return the `state_dict()` of an optimizer.

    Raises:
        UsageError: see `broadcast_optimizer_state`.
    """
    # Some libraries have optimizers that are no subclass of torch's.
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state_dict")):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: expected a torch optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS keeps one history for all parameters, which cannot be broadcast tensor by "
            "tensor; use broadcast_object(optimizer.state_dict(), root_rank)"
        )
    for i, parameter in enumerate(_parameters_of(optimizer)):
        check_has_memory(local(parameter), f"parameter {i}")
    state: dict[str, Any] = optimizer.state_dict()
    if not state.keys() >= _SENT:
        raise UsageError(
            f"the state_dict() of a {type(optimizer).__name__} has the entries "
            f"{', '.join(map(repr, state))}: expected 'state' and 'param_groups'. Use {_LOADING}"
        )
    return state


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _text_of(value: Any) -> str:
    """Return a short text that differs if values or tensors within `value` differ."""
    text = repr(
        mapped(value, lambda leaf, _: _hash_of(leaf) if isinstance(leaf, torch.Tensor) else leaf)
    )
    return text if len(text) <= 100 else f"a value with the hash {_hash(text.encode())}"


def _hash_of(tensor: torch.Tensor) -> str:
    content = bytes_of(tensor.cpu()).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} with the hash {_hash(content)}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Broadcast an object of rank `root_rank`, pickled.

    Unlike with Horovod's function, ranks may pass objects of different types, such as None on all
    but the root. Horovod names the collective after the type, so ranks with different types hang.
    Tensors on a GPU arrive on the receiver's current GPU.

    Args:
        obj: the object to send; ignored on the other ranks.
        root_rank: the rank whose object is sent.
        name: the prefix of the collectives' names; None for a default.
        process_set: the ranks that take part.

    Returns:
        The object itself on `root_rank`, a copy of it on other ranks.

    Raises:
        HvdkitError: on every rank, if the object cannot be pickled, or if another rank cannot
            receive or unpickle it.
    """
    # Horovod's function converts the bytes one by one: 400 MB take a minute.
    name = name or "hvdkit.broadcast_object"
    collectives = TorchCollectives(process_set)
    return objects.broadcast_object(collectives, obj, root_rank, name, loads_on_own_gpu)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gather an object, pickled, from every rank.

    Tensors on a GPU arrive on the receiver's current GPU.

    Returns:
        One object per rank, in the order of the ranks.

    Raises:
        HvdkitError: on every rank, if a rank cannot pickle its object, or unpickle another's.
    """
    collectives = TorchCollectives(mpi_ops.global_process_set)
    name = name or "hvdkit.allgather_object"
    return objects.allgather_object(collectives, obj, name, loads_on_own_gpu)
