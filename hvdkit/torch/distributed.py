"""hvdkit's collectives as the backend `hvd` of torch.distributed, for DDP, FSDP2 and DTensor.

The import registers the backend for tensors on the CPU. `hvd.init()` is not needed. Ranks of one
host reduce and gather in each other's memory. Between hosts, each host sends its share once. Other
calls, such as `send`, `recv` and `gather`, go to PyTorch's Gloo.

Example:
    import hvdkit.torch.distributed
    torch.distributed.init_process_group("hvd")  # beside NCCL: "cpu:hvd,cuda:nccl"
    model = torch.nn.parallel.DistributedDataParallel(model)
"""

import functools
import os
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from hvdkit.errors import HvdkitError
from hvdkit.runtime.environment import stall_limit
from hvdkit.runtime.recorder import FOLDER_VARIABLE
from hvdkit.torch import runtime


class _Rendezvous(Protocol):
    """torch's options for a new backend."""

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]


def _create(options: _Rendezvous, _backend_options: object) -> Any:
    """Return the backend of a new group. A collective of its ranks."""
    create = getattr(runtime.mpi_ops.mpi_lib, "hvdkit_c10d_backend", None)
    if create is None:
        raise HvdkitError(
            "the backend hvd of torch.distributed needs hvdkit's engine, and the installed Horovod "
            f"is {runtime.engine.version}. Run `hvdkit build`."
        )
    rank, size = options.group_rank, options.group_size
    ranks = list(options.global_ranks_in_group) or list(range(size))
    _watch()
    # Process sets have ids below 2**24.
    record_group = 1 << 24 | zlib.crc32(options.group_id.encode()) & 0xFFFFFF
    timeout = options.timeout
    # The store may have the keys of an earlier group. All ranks have made as many groups with it.
    number = options.store.add(f"hvdkit/{rank}", 1)
    store = dist.PrefixStore(str(number), options.store)
    gloo = _gloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return create(store, rank, size, timeout, ranks, record_group, gloo)


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return Gloo's backend. It connects two ranks when the first message between them is sent."""
    backend: Any = dist.ProcessGroupGloo
    try:
        device = backend.create_default_device(lazy_init=True)
    except TypeError:  # before PyTorch 2.6: it connects all ranks at once
        return backend(store, rank, size, timeout=timeout)
    options = backend._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [device]
    return backend(store, rank, size, options)


@functools.cache
def _watch() -> None:
    """Write records of collectives for the launcher, as after `hvd.init`."""
    if os.environ.get(FOLDER_VARIABLE) and not runtime.mpi_ops.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        runtime.recorder.watch(rank, size, stall_limit(os.environ))


dist.Backend.register_backend("hvd", _create, extended_api=True, devices=["cpu"])
