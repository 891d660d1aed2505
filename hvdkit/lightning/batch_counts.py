"""Check that all ranks train on the same number of batches."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.utils.data import DataLoader, IterableDataset

import hvdkit.torch as hvd
from hvdkit.errors import UsageError
from hvdkit.torch.data.equal_batches import EqualBatches

# What a rank is about to do.
_BATCH, _LAST_BATCH, _END = range(3)

_ADVICE = (
    "Use hvd.equal_batches(loader), which ends the epoch on all ranks when the data of one rank end"
)


class BatchCounts(pl.Callback):
    """Compare the numbers of batches of the ranks, in the epoch and since the start.

    Compare the lengths once in an epoch. For data that may end at any batch, such as those of an
    `IterableDataset`, also compare at each batch and at the end of the epoch: Lightning does not
    know in advance that such data end before their `__len__` or `limit_train_batches`.

    Each comparison is a small collective. It comes before all other collectives of a batch, so the
    callback has to be the first one.
    """

    def __init__(self) -> None:
        # Whether the ranks compare at each batch; None before the first comparison of an epoch.
        self._compares_each_batch: bool | None = None

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: Any) -> None:  # noqa: ARG002
        """Begin an epoch."""
        self._compares_each_batch = None

    def on_train_batch_start(
        self,
        trainer: "pl.Trainer",
        pl_module: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        """Compare before a batch.

        Raises:
            UsageError: on every rank, if they have different numbers of batches, if they have
                restored different checkpoints, or if the data are a stream that `training_step`
                reads itself.
        """
        if self._compares_each_batch is not False:
            ends = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            self._compare(trainer, _LAST_BATCH if ends else _BATCH, batch_idx + 1)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: Any) -> None:  # noqa: ARG002
        """Compare at the end of an epoch.

        Raises:
            UsageError: on every rank, if another rank has more batches.
        """
        if self._compares_each_batch is not False:
            trained = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self._compare(trainer, _END, trained)

    def _compare(self, trainer: "pl.Trainer", action: int, batches: int) -> None:
        """Compare what the ranks are about to do.

        Args:
            trainer: the trainer.
            action: `_BATCH`, `_LAST_BATCH` or `_END`.
            batches: number of batches of this epoch, with the one that is about to be trained.
        """
        length = trainer.num_training_batches
        own = [
            -1 if length == float("inf") else int(length),
            action,
            batches,
            _may_end_at_any_batch(trainer),
            isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher),
            trainer.fit_loop.total_batch_idx,
        ]
        rows = hvd.allgather(torch.tensor([own], device="cpu"), name="lightning.batches").tolist()
        self._compares_each_batch = any(row[3] for row in rows)
        if any(row[3] and row[4] for row in rows):
            raise UsageError(
                "training_step takes a dataloader_iter, and the data are a stream, which may end "
                "earlier on one rank than on the others: expected data of a known length. "
                f"{_ADVICE}"
            )
        if len({(length, action) for length, action, *_ in rows}) > 1:
            raise UsageError(
                f"the ranks have different numbers of batches in this epoch: {_difference(rows)}"
            )
        if len({total for *_, total in rows}) > 1:
            shown = ", ".join(f"rank {rank} after {row[5]}" for rank, row in enumerate(rows))
            raise UsageError(
                f"the ranks begin this epoch after different numbers of batches since the start of "
                f"the training: {shown}. Expected the same number. Restore the same checkpoint on "
                f"all ranks: all hosts must see its folder"
            )


def _may_end_at_any_batch(trainer: "pl.Trainer") -> bool:
    """Return whether the number of batches of the training data is not certain."""
    combined = trainer.fit_loop._combined_loader
    return combined is None or any(_is_stream(each) for each in combined.flattened)


def _is_stream(loader: object) -> bool:
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return not isinstance(loader, EqualBatches | Sequence)


def _difference(rows: list[list[int]]) -> str:
    """Return what is different, what was expected, and what to do."""
    lengths = [length for length, *_ in rows]
    if len(set(lengths)) > 1:
        shown = ", ".join(
            f"rank {rank} has {'an unknown number' if length < 0 else length}"
            for rank, length in enumerate(lengths)
        )
        advice = "Give the ranks equal shares, for example with hvd.DistributedSampler"
        return f"{shown}. Expected the same number. {advice}"
    ended = [rank for rank, (_, action, *_) in enumerate(rows) if action != _BATCH]
    batches = min(rows[rank][2] for rank in ended)
    ranks = ", ".join(map(str, ended))
    return (
        f"the data of these ranks end after {batches} batches: {ranks}. Expected the same number. "
        f"{_ADVICE}"
    )
