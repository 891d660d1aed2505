"""Describe Horovod's job to Lightning: ranks, sizes and devices."""

import os
from collections.abc import Sequence

import torch
from lightning.fabric.plugins import ClusterEnvironment

import hvdkit.torch as hvd
from hvdkit.errors import UsageError


class HvdkitEnvironment(ClusterEnvironment):
    """The ranks that `hvdkit run`, `mpirun`, `srun` or another launcher has started."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning must not start processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of rank 0's host, if the launcher has set it. hvdkit does not use it."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """A port on rank 0's host, if the launcher has set it. hvdkit does not use it."""
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """Return whether Horovod is initialised."""
        return bool(hvd.is_initialized())

    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(hvd.size())

    def set_world_size(self, size: int) -> None:
        """Ignore the size: the launcher has set it."""

    def global_rank(self) -> int:
        """Return the rank."""
        return int(hvd.rank())

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank: the launcher has set it."""

    def local_rank(self) -> int:
        """Return the number of the rank on its host."""
        return int(hvd.local_rank())

    def node_rank(self) -> int:
        """Return the number of the host."""
        return int(hvd.cross_rank())


def devices_of_host(devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the device of each rank on this host.

    Args:
        devices: the devices that Lightning has derived from its arguments `accelerator` and
            `devices`.

    Raises:
        UsageError: the devices do not match the ranks on this host.
    """
    ranks = int(hvd.local_size())
    kinds = {device.type for device in devices}
    if kinds == {"cpu"} and len(devices) in (1, ranks):
        return [torch.device("cpu")] * ranks
    if kinds == {"cuda"} and len(devices) >= ranks:
        return list(devices[:ranks])
    # The launcher has given each rank one visible GPU.
    if kinds == {"cuda"} and len(devices) == 1 == torch.cuda.device_count():
        return list(devices) * ranks
    raise UsageError(
        f"Lightning has {len(devices)} devices ({', '.join(str(each) for each in devices)}), but "
        f"{ranks} ranks run on this host: expected one CPU or GPU for each rank. Omit devices=, "
        f"and choose the number of ranks with the launcher (hvdkit run -np)"
    )
