"""The process group of `torch.distributed` that variants without Horovod use."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def connect(spec: Mapping[str, Any]) -> None:
    """Connect the ranks of a job over Gloo, on the network interface of Horovod's variants."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and "HOROVOD_GLOO_IFACE" in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["HOROVOD_GLOO_IFACE"]
    # A file works in any network namespace; on several hosts, hvdkit run sets MASTER_ADDR.
    where = "env://" if spec["store"] is None else f"file://{spec['store']}"
    dist.init_process_group("gloo", init_method=where, rank=spec["rank"], world_size=spec["size"])
