"""`hvd.Checkpointer`: checkpoints of a PyTorch training."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.collectives import check_member
from hvdkit.agreement.process_sets import check_one_model
from hvdkit.checkpoint.broadcast import Broadcast
from hvdkit.checkpoint.exporting import exporting
from hvdkit.checkpoint.items import kept_in, several
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.sharding import Shard, ShardedItem
from hvdkit.checkpoint.signals import STOP_SIGNALS
from hvdkit.checkpoint.state import StatefulItem
from hvdkit.checkpoint.store import Store
from hvdkit.checkpoint.weights import pop_tied
from hvdkit.errors import UsageError
from hvdkit.torch import runtime
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.data.positions import data_parts
from hvdkit.torch.devices import host_memory
from hvdkit.torch.items.model import ModelItem
from hvdkit.torch.items.optimizer import OptimizerItem
from hvdkit.torch.items.randomness import Randomness
from hvdkit.torch.items.reduction import ReductionItem
from hvdkit.torch.items.state_dict import StateDictItem
from hvdkit.torch.items.statistics import Statistics
from hvdkit.torch.items.tensors import identity, writable
from hvdkit.torch.items.trees import on_host, without_tensors
from hvdkit.torch.step_boundary import note_save, step_boundary, watch
from hvdkit.torch.unwrapped import replica_checks
from hvdkit.torch.wrapped_optimizer import reduced_over


class Checkpointer(Manager):
    """Save the state of a training, and restore it.

    Every rank creates a `Checkpointer` with the same arguments and makes the same calls.

    A checkpoint contains the model, optimizers with their learning rates, LR schedulers, loss
    scalers and the position in the data. It also contains the layout and scales of gradient
    buckets, and each rank's random state (Python, NumPy, torch, its GPU). A run that is killed and
    resumed ends with the same bytes as an uninterrupted run, if the rest of the program is
    reproducible.

    Each save compares the parameters of the models and the state of the optimizers between the
    ranks first. If they differ, nothing is saved, and all ranks raise an error (see `on_mismatch`
    of `hvd.DistributedOptimizer`). Parameters of `hvd.register_local` are not compared.

    Only the first rank reads and writes the folder. See `Manager` for the methods: `restore`,
    `maybe_save`, `save`, `save_and_stop`, `wait` and `close`.

    Args:
        folder: a folder that the first rank can access. If the first rank may run on another host
            after a restart, the folder must be on a shared file system. Or the URL of an object
            store that fsspec supports, such as `s3://bucket/run`.
        model: a module, or several in a dict.
        optimizer: a torch optimizer, wrapped by `DistributedOptimizer` or not, or several in a
            dict.
        lr_scheduler: an object with `state_dict` and `load_state_dict`, or several in a dict.
        scaler: a `GradScaler`, or another object with `state_dict` and `load_state_dict`, or
            several in a dict.
        data: a `ResumableSampler`; or an object with `state_dict` and `load_state_dict` that has
            this rank's position in its data, such as torchdata's `StatefulDataLoader`; or several
            in a dict. An object with a position for each rank can be restored only with the same
            number of ranks.
        sharded: name -> this rank's rows of a tensor that is divided between the ranks, such as
            `hvd.Shard(embedding.weight, first, total)`. Any number of ranks can restore it, with
            any division.
        metadata: a dict with plain values and NumPy arrays (see `hvdkit.checkpoint.state`), such as
            counters. It is read at every save, and `restore` updates it.
        generators: name -> `torch.Generator`, `numpy.random.Generator` or `random.Random` to save
            and restore on each rank.
        every_steps: `maybe_save` saves at the first call at or after each multiple of this step
            number; None for never.
        every_minutes: `maybe_save` saves after this many minutes, by the first rank's clock; None
            for never.
        every_steps_in_memory: `maybe_save` keeps the newest step in the memory of each host, at the
            first call at or after each multiple of this number; None for never. In a job of
            `hvdkit run --restarts N`, `restore` finds it after a failure. Not with `sharded`.
        keep_last: the number of newest checkpoints to keep; None for all.
        keep_best: additional checkpoints to keep, such as `hvd.KeepBest("loss", "min")`.
        keep_every: also keep checkpoints whose step is a multiple of this number; None for no
            others.
        asynchronous: write in the background while training continues.
        overwrite: begin a new run if `folder` has checkpoints and none of them was restored. With
            False, saving raises an error in this case.
        storage_options: options of fsspec's file system, such as `{"endpoint_url": …}`; for URLs.
        stop_signals: after one of these signals, the next `maybe_save` saves, and ends the job with
            exit status 75.
        process_set: the ranks of the job.

    Raises:
        UsageError: an argument is invalid.

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
        every_steps_in_memory: int | None = None,
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
        self._metadata = {} if metadata is None else metadata
        optimizers = several("optimizer", optimizer)
        parts: dict[str, StatefulItem] = {}
        models = several("model", model)
        if not models:
            raise UsageError(f"model is {model!r}: expected a module, or several in a dict")
        model_items: dict[str, ModelItem] = {}
        for name, module in models.items():
            if not isinstance(module, torch.nn.Module):
                raise UsageError(f"{name} is a {type(module).__name__}: expected a module")
            parts[name] = model_items[name] = ModelItem(module, name)
        for name, each in optimizers.items():
            if not isinstance(each, torch.optim.Optimizer):
                raise UsageError(f"{name} is a {type(each).__name__}: expected a torch optimizer")
            parts[name] = OptimizerItem(each, name, model_items)
        parts["reduction"] = ReductionItem(optimizers)
        for argument, given in (("lr_scheduler", lr_scheduler), ("scaler", scaler)):
            for name, each in several(argument, given).items():
                parts[name] = StateDictItem(each, name)
        collectives = TorchCollectives(process_set)
        first = collectives.is_first
        checks = replica_checks(collectives, models, optimizers)
        shared, own = data_parts(data)
        parts |= shared
        if sharded is not None:
            parts["sharded"] = ShardedItem(sharded, writable, identity)
        parts["metadata"] = kept_in(self._metadata)
        trained = list(optimizers.values())
        watch(trained)
        check_one_model(reduced_over(optimizers), process_set.ranks)
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
            # Restore `random` after `data`, because restoring a loader may draw random numbers.
            rank_parts={
                **own,
                "statistics": Statistics(
                    models,
                    warns=len(collectives.ranks) > 1 and first,
                ),
                "random": Randomness(generators),
            },
            alike=list(shared),
            versions={"torch": torch.__version__},
            # The sum order describes sums in shared memory, which only the global process set uses.
            sum_order=runtime.host_collectives.sum_order
            if process_set.process_set_id == 0
            else str,
            every_steps=every_steps,
            every_minutes=every_minutes,
            every_steps_in_memory=every_steps_in_memory,
            asynchronous=asynchronous,
            overwrite=overwrite,
            stop_signals=stop_signals,
            boundary=step_boundary(lambda: trained),
            note_save=lambda step: note_save(trained, step, first),
            replicas=lambda: checks,
            allocate=host_memory,
            subjects=[
                *optimizers.values(),
                # Not those that only contain others, such as that of `torch.compile`.
                *(
                    m
                    for each in models.values()
                    for m in each.modules()
                    if m._parameters or m._buffers
                ),
            ],
        )

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """Your own values in the checkpoint: the dict that was given. Change its items."""
        return self._metadata


def export(checkpoint: OpenCheckpoint, target: str | os.PathLike[str]) -> None:
    """Write a checkpoint's weights with `torch.save`, for `load_state_dict(torch.load(target))`.

    For several models, write a dict of their state dicts.

    Args:
        checkpoint: a checkpoint of a PyTorch training.
        target: the file to write, which is visible only once it is complete.

    Raises:
        UsageError: the checkpoint has no PyTorch model.
        HvdkitError: the file cannot be written.
    """
    outline = checkpoint.outline
    names = [name for name in outline.trees if name == "model" or name.startswith("model-")]
    if not names or "torch" not in outline.manifest.versions:
        raise UsageError(
            f"step {outline.manifest.step} has no PyTorch model. It has the parts "
            f"{', '.join(outline.trees)}, written with {dict(outline.manifest.versions)}: expected "
            f"a checkpoint of hvdkit.torch"
        )
    models = {name.removeprefix("model-"): _state_dict(checkpoint, name) for name in names}
    with exporting(Path(target)) as beside, beside.open("xb") as stream:
        torch.save(models["model"] if names == ["model"] else models, stream)


def _state_dict(checkpoint: OpenCheckpoint, part: str) -> dict[str, Any]:
    prepared = on_host(checkpoint.outline.tree(part))
    Broadcast({part: prepared}, checkpoint.outline).read(checkpoint)
    state = without_tensors(prepared)
    tied = pop_tied(state)
    return state | {name: state[holder] for name, holder in tied.items()}
