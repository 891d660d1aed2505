"""Checkpoints of a PyTorch training: `hvd.Checkpointer`."""

import os
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.checkpoint.broadcast import Broadcast
from hvdkit.checkpoint.items import kept_in, several
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.sharding import Shard, ShardedItem
from hvdkit.checkpoint.signals import STOP_SIGNALS
from hvdkit.checkpoint.state import StatefulItem
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.weights import TIED
from hvdkit.core.collectives import check_member
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.data import data_parts
from hvdkit.torch.devices import host_memory
from hvdkit.torch.items import (
    ModelItem,
    OptimizerItem,
    Randomness,
    ReductionItem,
    StateDictItem,
    Statistics,
    TorchTensor,
    on_host,
    without_tensors,
)
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer


class Checkpointer(Manager):
    """Saves a training's state, and goes on with it. Every rank makes one, and calls it alike.

    What is kept: the model, optimizers with their learning rates, LR schedulers and loss scalers,
    how gradients are bucketed and scaled on their way, where the job is in the data, and each
    rank's random numbers (Python, NumPy, torch, its GPU). A run that is killed and goes on ends
    with the same bytes as one that was not, if the rest of its program is reproducible.

    Only the first rank reads and writes the folder. See `Manager` for the methods: `restore`,
    `maybe_save`, `save`, `save_and_stop`, `wait` and `close`.

    Args:
        folder: local, or shared between the hosts that the first rank may be on; or a URL of an
            object store that fsspec knows, such as `s3://bucket/run`.
        model: a module, or several in a dict.
        optimizer: any of torch's, wrapped by `DistributedOptimizer` or not, or several in a dict.
        lr_scheduler: anything with `state_dict` and `load_state_dict`, or several in a dict.
        scaler: a `GradScaler`, or anything else of that kind.
        data: a `ResumableSampler`; or anything with `state_dict` and `load_state_dict` that has
            this rank's position in its data, such as torchdata's `StatefulDataLoader`; or several
            in a dict. A position of each rank is restored in a job of as many ranks.
        sharded: by name, this rank's rows of tensors that are divided between the ranks, such as
            `hvd.Shard(embedding.weight, first, total)`. Any number of ranks restores them, divided
            in any way.
        metadata: a dict of your own with plain values and NumPy arrays (see
            `hvdkit.checkpoint.state`), such as counters. It is read at every save, and `restore`
            puts what was saved into it.
        generators: your own `torch.Generator`s, `numpy.random.Generator`s and `random.Random`s by
            name; each rank has its own.
        every_steps: `maybe_save` saves after so many steps.
        every_minutes: `maybe_save` saves after so many minutes.
        keep_last: how many checkpoints stay; None: all.
        keep_best: which stay besides, such as `hvd.KeepBest("loss", "min")`.
        keep_every: those whose step is a multiple of this stay, too.
        asynchronous: write while training goes on.
        overwrite: where `folder` has steps and none was restored, begin a new run beside them.
            Otherwise saving is an error there.
        storage_options: for fsspec's file system, such as `{"endpoint_url": …}`; for URLs only.
        stop_signals: signals at which `maybe_save` saves and ends the job with status 75.
        process_set: the ranks of the job.

    Raises:
        UsageError: the arguments make no sense.

    Example:
        with hvd.Checkpointer(
            folder, model=model, optimizer=optimizer, data=sampler, every_steps=1000
        ) as checkpointer:
            restored = checkpointer.restore()
            step = restored.step if restored else 0
            for epoch in range(sampler.epoch, epochs):
                for batch in sampler.batches(loader):
                    ...
                    step += 1
                    checkpointer.maybe_save(step, epoch)
            checkpointer.save(step)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        lr_scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        sharded: Mapping[str, Shard] | None = None,
        metadata: MutableMapping[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = 3,
        keep_best: KeepBest | Sequence[KeepBest] = (),
        keep_every: int | None = None,
        asynchronous: bool = True,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        stop_signals: Sequence[int] = STOP_SIGNALS,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    ) -> None:
        if not mpi_ops.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        check_member(process_set)
        self.metadata = {} if metadata is None else metadata
        optimizers = several("optimizer", optimizer)
        parts: dict[str, StatefulItem] = {}
        models = several("model", model)
        if not models:
            raise UsageError(f"model is {model!r}: expected a module, or several in a dict")
        for name, module in models.items():
            if not isinstance(module, torch.nn.Module):
                raise UsageError(f"{name} is a {type(module).__name__}: expected a module")
            parts[name] = ModelItem(module, name)
        for name, each in optimizers.items():
            if not isinstance(each, torch.optim.Optimizer):
                raise UsageError(f"{name} is a {type(each).__name__}: expected a torch optimizer")
            parts[name] = OptimizerItem(each, name)
        parts["reduction"] = ReductionItem(optimizers)
        for argument, given in (("lr_scheduler", lr_scheduler), ("scaler", scaler)):
            for name, each in several(argument, given).items():
                parts[name] = StateDictItem(each, name)
        collectives = TorchCollectives(process_set)
        shared, own = data_parts(data)
        parts |= shared
        if sharded is not None:
            parts["sharded"] = ShardedItem(sharded, TorchTensor)
        parts["metadata"] = kept_in(self.metadata)
        wrapped = [o for o in optimizers.values() if isinstance(o, WrappedOptimizer)]
        super().__init__(
            Store(
                folder,
                keep_last=keep_last,
                keep_best=keep_best,
                keep_every=keep_every,
                storage_options=storage_options,
            ),
            collectives,
            parts,
            # Creating a loader's iterator draws random numbers, so `random` comes after `data`.
            rank_parts={
                **own,
                "statistics": Statistics(models),
                "random": Randomness(generators),
            },
            alike=list(shared),
            versions={"torch": torch.__version__},
            every_steps=every_steps,
            every_minutes=every_minutes,
            asynchronous=asynchronous,
            overwrite=overwrite,
            stop_signals=stop_signals,
            window_open=lambda: not all(each.is_between_steps() for each in wrapped),
            allocate=host_memory,
        )


def export(checkpoint: OpenCheckpoint, target: str | os.PathLike[str]) -> None:
    """Write a checkpoint's weights as PyTorch does: `model.load_state_dict(torch.load(target))`.

    Of several models, a dict of their state dicts is written.

    Args:
        checkpoint: any of PyTorch's.
        target: the file, which appears when it is whole.

    Raises:
        UsageError: the checkpoint has no model of PyTorch's.
        HvdkitError: the file cannot be written.
    """
    outline = checkpoint.outline
    names = [name for name in outline.trees if name == "model" or name.startswith("model-")]
    if not names or "torch" not in outline.manifest.versions:
        raise UsageError(
            f"step {outline.manifest.step} has no PyTorch model; it has "
            f"{', '.join(outline.trees)}, written by {dict(outline.manifest.versions)}"
        )
    models = {name.removeprefix("model-"): _state_dict(checkpoint, name) for name in names}
    _save(models["model"] if names == ["model"] else models, Path(target))


def _state_dict(checkpoint: OpenCheckpoint, part: str) -> dict[str, Any]:
    prepared = on_host(checkpoint.outline.tree(part))
    Broadcast({part: prepared}, checkpoint.outline).read(checkpoint)
    state = without_tensors(prepared)
    tied = state.pop(TIED, {})
    return state | {name: state[holder] for name, holder in tied.items()}


def _save(content: Any, target: Path) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as beside:
            try:
                torch.save(content, beside)
                beside.flush()
                os.fsync(beside.fileno())
                os.replace(beside.name, target)
            except BaseException:
                os.unlink(beside.name)
                raise
    except OSError as error:
        raise HvdkitError(f"cannot write {target}: {error.strerror or error}") from error
