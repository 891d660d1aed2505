"""Give all ranks the same number of batches."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
from horovod.torch import mpi_ops

Batch = TypeVar("Batch")


def equal_batches(
    batches: Iterable[Batch],
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> "EqualBatches[Batch]":
    """Iterate over batches until the data of one rank end.

    Use it for data whose length is not known, such as an `IterableDataset`, a stream or shards of
    different sizes. All ranks iterate over it. Each batch needs a small collective. Additional
    batches of the other ranks are not used in this epoch.

    Args:
        batches: a `DataLoader`, or another iterable object. Each epoch makes a new iterator.
        process_set: the ranks that iterate.

    Example:
        loader = hvd.equal_batches(DataLoader(stream, batch_size=32))
        for batch in loader:
            train(batch)
    """
    return EqualBatches(batches, process_set)


class EqualBatches(Generic[Batch]):
    """The result of `equal_batches`."""

    def __init__(self, batches: Iterable[Batch], process_set: mpi_ops.ProcessSet) -> None:
        self.batches = batches
        self._process_set = process_set

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self.batches)
        while True:
            taken = list(itertools.islice(iterator, 1))
            exists = mpi_ops.allreduce(
                torch.tensor(len(taken)),
                op=mpi_ops.Min,
                name="hvdkit.equal_batches",
                process_set=self._process_set,
            )
            if not exists:
                return
            yield taken[0]
