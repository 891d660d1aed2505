"""`hvd.DistributedSampler`: PyTorch's sampler over Horovod's ranks, with warnings of wrong use."""

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from horovod.torch import mpi_ops
from torch.utils.data import distributed as torch_distributed

from hvdkit.agreement import same_data
from hvdkit.errors import UsageError
from hvdkit.torch.unwrapped import steps_made

log = logging.getLogger("hvdkit.torch")


class DistributedSampler(torch_distributed.DistributedSampler):
    """`torch.utils.data.DistributedSampler` over Horovod's ranks.

    It takes the arguments of PyTorch's class. The defaults of `num_replicas` and `rank` are those
    of the job. PyTorch's class gets them from torch.distributed, which a Horovod job does not have.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not mpi_ops.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        size = mpi_ops.size() if num_replicas is None else num_replicas
        own = mpi_ops.rank() if rank is None else rank
        super().__init__(dataset, size, own, *args, **kwargs)
        # Only the first rank warns.
        self._warns = own == 0
        # The epochs over which an iteration has begun; a method of the script hides them.
        overridden = type(self).__iter__ is not DistributedSampler.__iter__
        self._iterated: list[int | None] = [None] if overridden else []
        # The numbers of steps that optimizers had made when `set_epoch` was called.
        self._steps_at_epochs: set[int] = set()
        # The epochs whose samples were all given while an optimizer made steps.
        self._trained: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        """Return the numbers of this rank's samples."""
        self._iterated.append(self.epoch)
        if self.shuffle and self.num_replicas == mpi_ops.size():
            sampler = f"DistributedSampler of {self.total_size} samples"
            same_data.seeds[sampler] = self.seed
        indices = super().__iter__()
        return self._watched(indices) if self._warns and self.shuffle else indices

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. Call it before each epoch, on all ranks."""
        super().set_epoch(epoch)
        made = steps_made()
        is_second = len(self._steps_at_epochs) == 1 and made not in self._steps_at_epochs
        if self._warns and is_second and not self._iterated:
            log.warning(
                "set_epoch was called for a second epoch, but nothing has iterated over this "
                "DistributedSampler, so each rank may train all data. Pass it to the loader: "
                "DataLoader(dataset, sampler=sampler, ...)"
            )
        self._steps_at_epochs.add(made)

    def _watched(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield `indices`; warn if an epoch is trained for a second time.

        Without steps in between, it is a validation, whose order does not matter.
        """
        epoch, before = self.epoch, steps_made()
        yield from indices
        if steps_made() == before:
            return
        warned = any(a == b for a, b in pairwise(self._trained))
        if not warned and self._trained[-1:] == [epoch]:
            log.warning(
                "DistributedSampler has given epoch %d twice, in the same order. Call "
                "sampler.set_epoch(epoch) before each epoch, on all ranks",
                epoch,
            )
        self._trained.append(epoch)
