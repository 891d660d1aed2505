"""Give all ranks the same number of batches."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from horovod.torch import mpi_ops

from hvdkit.errors import HvdkitError

Batch = TypeVar("Batch")

# Sent instead of a number of batches.
_FAILED = -1


def equal_batches(
    batches: Iterable[Batch],
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> "EqualBatches[Batch]":
    """Iterate over batches until the data of one rank end.

    Use it for data whose length is not known, such as an `IterableDataset`, a stream or shards of
    different sizes. All ranks iterate over it. Each batch needs a small collective. Additional
    batches of the other ranks are not used in this epoch. If the data of a rank raise an error, all
    ranks raise: this rank its own error, and the other ranks HvdkitError.

    Args:
        batches: a `DataLoader`, or another iterable object. Each epoch makes a new iterator.
        process_set: the ranks that iterate.

    Example:
        loader = hvd.equal_batches(DataLoader(stream, batch_size=32))
        for batch in loader:
            train(batch)
    """
    return EqualBatches(batches, process_set)


@dataclass(frozen=True, eq=False)
class EqualBatches(Generic[Batch]):
    """The result of `equal_batches`."""

    batches: Iterable[Batch]
    process_set: mpi_ops.ProcessSet

    def __iter__(self) -> Iterator[Batch]:
        iterator: Iterator[Batch] | None = None
        taken: list[Batch] = []
        while True:
            error: Exception | None = None
            try:
                iterator = iter(self.batches) if iterator is None else iterator
                taken = list(itertools.islice(iterator, 1))
            except Exception as raised:
                error = raised
            fewest = mpi_ops.allreduce(
                torch.tensor(len(taken) if error is None else _FAILED, device="cpu"),
                op=mpi_ops.Min,
                name="hvdkit.equal_batches",
                process_set=self.process_set,
            )
            if error is not None:
                raise error
            if fewest == _FAILED:
                raise HvdkitError(
                    "hvd.equal_batches: reading a batch has raised on another rank, whose error "
                    "says why. All ranks stop, because they need the same number of batches."
                )
            if not fewest:
                return
            yield taken[0]
