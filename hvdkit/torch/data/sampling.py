"""Resumable samplers: the samples of this rank, and the position of all ranks."""

import itertools
import random
import threading
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from horovod.torch import mpi_ops
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from hvdkit.errors import UsageError
from hvdkit.torch.data.workers import shield_workers
from hvdkit.training.sampling import Batches, Epochs, Order


class ResumableSampler(Epochs, Sampler[int]):
    """Give each rank its share of every epoch; resumable at any batch.

    In an epoch every sample goes to one rank (exceptions: see below). The seed and the epoch
    determine which one.

    All ranks get the same number of batches. Without `drop_last` the last batches may be smaller,
    and a rank that would have no last batch gets one sample from the beginning of the epoch.

    Args:
        data: the data set, or its number of samples.
        batch_size: samples per batch on each rank, the same as in the `DataLoader` or in its
            `BatchSampler`.
        shuffle: draw a new order for every epoch.
        seed: the seed of the orders, the same on every rank.
        drop_last: leave out the samples that do not fill a batch on every rank.
        process_set: the ranks that share the data.
        order: reorders the samples of an epoch, for example by length. It gets their numbers in the
            drawn order (int64) and the epoch, and returns the same numbers. The result must be the
            same on all ranks and after a resume. For each batch, all ranks together take the next
            samples of this order.

    Raises:
        UsageError: an argument is invalid, or Horovod is not initialised.

    Example:
        sampler = hvd.ResumableSampler(data, batch_size=32)
        loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=4)
        checkpointer = hvd.Checkpointer(folder, model=model, optimizer=optimizer, data=sampler)
        checkpointer.restore()
        for epoch in range(sampler.epoch, epochs):
            for batch in sampler.batches(loader):
                ...
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        order: Order | None = None,
    ) -> None:
        if not mpi_ops.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        included = process_set.included()
        self._all_ranks = process_set is mpi_ops.global_process_set
        super().__init__(
            _count_of(data),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=process_set.rank() if included else 0,
            ranks=process_set.size() if included else 1,
            how_to_count="iterate its DataLoader with `for batch in sampler.batches(loader)`",
            order=order,
        )
        self._seeded = False
        # While a loop over `batches(loader)` begins.
        self._beginning: _Beginning | None = None

    def _current_place(self) -> tuple[int, int]:
        if self._all_ranks and mpi_ops.is_initialized():
            return mpi_ops.rank(), mpi_ops.size()
        return super()._current_place()

    def __len__(self) -> int:
        """Return the number of remaining samples of this epoch on this rank.

        `len(loader)` of a `DataLoader` is computed from it. Both decrease during a loop over
        `batches`, and begin lower after a resume. `batches_per_epoch` and `len(batches(loader))`
        do not change during the loop.
        """
        now = self._now
        return max(len(now.share.places()) - now.batches * self.batch_size, 0)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of the remaining samples."""
        beginning = self._beginning
        # Without `batches` the samples that the loop has used are not counted.
        self.uncounted = self.uncounted or beginning is None
        epoch, mine = self.left()
        numbers = mine.tolist()
        indices = (_Index.of(i, epoch) for i in numbers) if self._seeded else iter(numbers)
        return indices if beginning is None else beginning.before(indices)

    def batches(self, loader: Any = None) -> Batches:
        """Yield the remaining batches of this epoch, and count them.

        Batches that worker processes have read ahead, but the loop has not used, are read again
        after a resume.

        Args:
            loader: a `DataLoader` with this sampler, or an object that iterates one and yields its
                batches in order. If that DataLoader has a `generator`, the object must have the
                same attribute: a new iterator draws from the generator, and this method reverts the
                draw. None: yield the numbers of the samples, an int64 tensor for each batch.

        Returns:
            An iterator with a length: the number of batches of this loop, which does not change
            during the loop, for a progress bar. At its end, `epoch` is the next epoch. If a loop
            ends early by `break`, the next call begins the next epoch. Call `end_epoch()` before
            such a `break` if a checkpoint is saved between the two loops.

        Raises:
            UsageError: the loader has another sampler or batch size, or fewer batches; in the loop:
                another loop has begun, or the sampler was restored.
        """
        check_loader(loader, self)
        shield_workers(loader)
        return Batches(self, self._numbers if loader is None else partial(self._begin, loader))

    def _numbers(self) -> Iterator[torch.Tensor]:
        _, mine = self.left()
        return iter(torch.from_numpy(mine).split(self.batch_size))

    def _begin(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over `loader` that does not change the random state."""
        numbers = [self._seed, self.epoch, self.position.consumed, self._now.share.rank]
        beginning = _Beginning(
            getattr(loader, "generator", None) or torch.default_generator, _seed_from(numbers)
        )
        self._beginning = beginning
        try:
            with beginning.without_draws():
                batches = iter(loader)
            if beginning.reads.is_set():
                return batches
            # A generator that wraps a DataLoader creates the DataLoader's iterator only now.
            with beginning.without_draws():
                first = list(itertools.islice(batches, 1))
            return _followed(first, batches)
        finally:
            self._beginning = None

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue the current one where a loop has left it.

        Do nothing if the loader of `batches` calls this when a loop begins. Loaders of Fabric and
        Accelerate do so, and count the epochs from 0 in each process, also after a resume.
        """
        if self._beginning is None:
            super().set_epoch(epoch)

    def seeded(self, dataset: Any) -> "SeededDataset":
        """Return `dataset` with random numbers that depend only on seed, epoch and sample.

        For random augmentation in worker processes. A checkpoint cannot contain their random state,
        because workers read ahead. The generators of Python, NumPy and torch are seeded for each
        sample. In a worker process they keep that state after the sample, for a `collate_fn` that
        draws random numbers.

        Args:
            dataset: a data set with `__getitem__`.
        """
        self._seeded = True
        return SeededDataset(dataset, self._seed)


class _Beginning:
    """The beginning of a loop over a loader, until the loader reads its first sample.

    A new iterator of a `DataLoader` draws the seed of its workers. In a job resumed in the middle
    of an epoch this would be one draw more than in an uninterrupted job.

    Args:
        generator: the generator that the loader draws from.
        seed: the seed for its draws, which depend only on the position.

    Attributes:
        reads: set when the loader reads its first sample.
    """

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        self.reads = threading.Event()
        self._generator = generator
        self._seed = seed
        self._draws = ExitStack()

    @contextmanager
    def without_draws(self) -> Iterator[None]:
        """Restore the random state at the end, or before the first sample is read."""
        with self._draws:
            self._draws.callback(self._generator.set_state, self._generator.get_state())
            self._generator.manual_seed(self._seed)
            yield

    def before(self, indices: Iterator[int]) -> Iterator[int]:
        """Yield `indices`; before the first one, restore the random state for the samples."""
        self.reads.set()
        self._draws.close()
        yield from indices


def _count_of(data: Any) -> Any:
    if isinstance(data, int | np.integer):
        return data
    try:
        return len(data)
    except TypeError:
        raise UsageError(
            f"data is {data!r:.80} of type {type(data).__name__}, which has no length: expected a "
            f"data set with a length, or the number of samples"
        ) from None


class SeededDataset(Dataset[Any]):
    """A data set with a random state for each sample; see `ResumableSampler.seeded`."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, _Index):
            raise UsageError(
                "a seeded data set got a plain number as index: create its DataLoader with "
                "sampler=S, where S is the ResumableSampler whose S.seeded(dataset) returned it"
            )
        # The 2 makes these sequences different from that of the epoch's order.
        with _random_numbers([self._seed, index.epoch, 2, int(index)]):
            return self._dataset[int(index)]


class _Index(int):
    """The number of a sample, with its epoch, for workers that persist over epochs."""

    epoch: int

    @classmethod
    def of(cls, number: int, epoch: int) -> "_Index":
        index = cls(number)
        index.epoch = epoch
        return index

    def __reduce__(self) -> Any:
        return _Index.of, (int(self), self.epoch)


@contextmanager
def _random_numbers(seed: list[int]) -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.default_generator.get_state()
    number = _seed_from(seed)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        # Not in a worker: a `collate_fn` there must draw numbers that do not depend on the batches
        # that the worker has read before.
        if get_worker_info() is None:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.default_generator.set_state(torch_state)


def _followed(first: list[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of `first`, removing each from the list, and then those of `batches`."""
    while first:
        yield first.pop()
    yield from batches


def _seed_from(numbers: list[int]) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader or of its `batch_sampler`; None if the latter has none."""
    if _has_own_batches(loader):
        return getattr(loader.batch_sampler, "sampler", None)
    return loader.sampler


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    """Return whether the loader was made with `batch_sampler=`."""
    return loader.batch_size is None and loader.batch_sampler is not None


def _check_count(dataset: Any, sampler: ResumableSampler) -> None:
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return
    if count != sampler.samples:
        raise UsageError(
            f"the DataLoader's data set has {count} samples, but its ResumableSampler has "
            f"{sampler.samples}: expected the same. To train on a part of the data, use "
            f"torch.utils.data.Subset for both"
        )


def check_loader(loader: Any, sampler: ResumableSampler) -> None:
    """Check that a `DataLoader` gives the batches that its sampler counts, in their order.

    Raises:
        UsageError: it gives other batches, or another order.
    """
    if not isinstance(loader, DataLoader):
        return
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the DataLoader has an IterableDataset, whose samples have no numbers: use "
            "torchdata.stateful_dataloader.StatefulDataLoader, and pass data=loader to "
            "hvd.Checkpointer"
        )
    by: Any = loader
    if _has_own_batches(loader):
        by = loader.batch_sampler
        # Another class may change the order of samples, so their number does not tell which samples
        # were used.
        if type(by) is not BatchSampler:
            raise UsageError(
                f"the DataLoader has a batch_sampler of type {type(by).__name__}: expected "
                f"torch.utils.data.BatchSampler(sampler, batch_size, drop_last). To batch samples "
                f"of similar lengths, pass order= to the ResumableSampler"
            )
    if sampler_of(loader) is not sampler:
        raise UsageError(
            f"the DataLoader has another sampler (a {type(sampler_of(loader)).__name__}): create "
            f"it with sampler=S, where S is the ResumableSampler whose S.batches(loader) was called"
        )
    _check_count(loader.dataset, sampler)
    # Without in_order, batches come in the order of their completion, so their number does not tell
    # which samples were used. PyTorch before 2.6 does not have this option.
    if not getattr(loader, "in_order", True) and loader.num_workers > 0:
        raise UsageError(
            f"the DataLoader has in_order=False and {loader.num_workers} workers: expected "
            f"in_order=True. A ResumableSampler counts batches in order, and would lose and repeat "
            f"samples after a resume"
        )
    # With batch_size=None every sample is a batch made by the data set.
    made_by_dataset = by is loader and loader.batch_size is None and sampler.batch_size == 1
    if by.batch_size != sampler.batch_size and not made_by_dataset:
        raise UsageError(
            f"the DataLoader has batch_size {by.batch_size}, but its ResumableSampler has "
            f"{sampler.batch_size}: expected the same"
        )
    if by.drop_last and not sampler.drop_last:
        raise UsageError(
            "the DataLoader has drop_last=True, but its ResumableSampler has drop_last=False: pass "
            "drop_last=True to the sampler, which drops the same samples on all ranks"
        )
