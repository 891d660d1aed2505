"""`horovod.torch.mpi_ops`, with in-place collectives, `init`, `shutdown` and `join` of hvdkit."""

from horovod.torch.mpi_ops import *  # noqa: F403
from horovod.torch.mpi_ops import HorovodInternalError, ProcessSet  # noqa: F401

from hvdkit.torch.in_place import *  # noqa: F403
from hvdkit.torch.joining import join  # noqa: F401
from hvdkit.torch.runtime import init, shutdown  # noqa: F401
