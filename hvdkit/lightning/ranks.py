"""The common part of the strategies for `Trainer` and `Fabric`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only

import hvdkit.torch as hvd
from hvdkit.errors import UsageError
from hvdkit.lightning import collectives
from hvdkit.lightning.environment import devices_of_host
from hvdkit.torch.options import check_options
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer


class RanksMixin:
    """The part of a strategy that is the same for `Trainer` and `Fabric`.

    Attributes:
        options: the options for `hvd.DistributedOptimizer`.
        refused: (option, value) -> the reason why the strategy does not support this value.
    """

    options: dict[str, Any]
    refused: ClassVar[Mapping[tuple[str, Any], str]] = {}
    _parallel_devices: list[torch.device] | None = None

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options after a check, and start Horovod, if it has not been started."""
        checked = check_options(options, "HvdkitStrategy", self.refused)
        if not hvd.is_initialized():
            hvd.init()
        return checked

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of the ranks on this host."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        self._parallel_devices = devices_of_host(devices) if devices else None

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices = self.parallel_devices
        return torch.device("cpu") if devices is None else devices[hvd.local_rank()]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments with which Lightning shards its samplers."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Check that no sampler is sharded twice.

        Raises:
            UsageError: Lightning has sharded a `hvd.ResumableSampler`, which is already sharded.
        """
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSamplerWrapper) and isinstance(
            sampler.dataset._sampler, hvd.ResumableSampler
        ):
            raise UsageError(
                "Lightning has sharded a hvd.ResumableSampler, which gives each rank its share "
                "already: pass use_distributed_sampler=False to the Trainer or to "
                "fabric.setup_dataloaders"
            )
        return dataloader

    def set_world_ranks(self) -> None:
        """Set the rank that Lightning's logging uses."""
        fabric_rank_zero_only.rank = rank_zero_only.rank = hvd.rank()

    # --- collectives ----------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Wait until all ranks call it."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        return hvd.broadcast_object(obj, src, name="lightning.broadcast")

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Stack the tensors of all ranks; see `hvdkit.lightning.collectives.all_gather`."""
        return collectives.all_gather(tensor, group, sync_grads)

    # --- optimizers -----------------------------------------------------------------------------

    def wrap(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    ) -> torch.optim.Optimizer:
        """Return the optimizer with the reduction of the gradients.

        Raises:
            UsageError: hvdkit does not support the optimizer.
        """
        if isinstance(optimizer, WrappedOptimizer):
            raise UsageError(
                "an optimizer is a DistributedOptimizer already: give Lightning the plain "
                "optimizer, and the options of the DistributedOptimizer to HvdkitStrategy"
            )
        return hvd.DistributedOptimizer(optimizer, named_parameters, **self.options)


def check_batch_norm(module: torch.nn.Module) -> None:
    """Check that no layer computes statistics by torch.distributed.

    Raises:
        UsageError: a layer is a `torch.nn.SyncBatchNorm`. Without torch.distributed, this layer
            would compute statistics of this rank's batch only.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"the layer {name!r} is a torch.nn.SyncBatchNorm, which needs torch.distributed: "
                f"use plain batch norm with Trainer(sync_batchnorm=True), or "
                f"hvd.SyncBatchNorm.convert_sync_batchnorm(model)"
            )


def broadcast_buffers(module: torch.nn.Module) -> None:
    """Copy rank 0's buffers, such as statistics of batch norm, to all ranks. All ranks call it."""
    hvd.broadcast_parameters(dict(module.named_buffers()), root_rank=0)


@contextmanager
def no_sync(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Context in which backward passes add to this rank's gradients without a reduction."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            if isinstance(optimizer, WrappedOptimizer):
                stack.enter_context(hvd.no_sync(optimizer))
        yield
