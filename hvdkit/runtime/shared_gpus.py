"""Let ranks of one host share GPUs over NCCL, to try a job of several ranks on one GPU.

NCCL refuses two ranks that use the same GPU of a host. It compares hosts by a hash, which
NCCL_HOSTID replaces. With a value of its own, each rank counts as a host, and NCCL connects the
ranks through host memory and sockets.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping

#: If this environment variable is 1, the ranks of a host may use the same GPU.
VARIABLE = "HVDKIT_SHARE_GPUS"
# Containers of one host may have the same name and the same numbers of processes.
_PROCESS = secrets.token_hex(8)


def gpu_of(local_rank: int, count: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of a rank's GPU; None if there is no GPU for the rank.

    Args:
        local_rank: the number of the rank on its host.
        count: the number of GPUs that the rank sees.
        environ: the environment of the rank.
    """
    if count and environ.get(VARIABLE) == "1":
        return local_rank % count
    return local_rank if local_rank < count else None


def separate_for_nccl(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL take this process for a host of its own, if HVDKIT_SHARE_GPUS is 1.

    NCCL reads the variables when it makes the first communicator of the process. The identifier
    does not contain the rank, because a rank gets another number in an elastic job.

    Args:
        environ: the environment of the rank, which is changed.
    """
    if environ.get(VARIABLE) != "1":
        return
    environ["NCCL_HOSTID"] = f"{os.getpid()}-{_PROCESS}"
    environ.setdefault("NCCL_NET", "Socket")
