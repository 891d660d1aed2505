"""`horovod.tensorflow.mpi_ops` with hvdkit's `init`, `shutdown` and `join`."""

from horovod.tensorflow.mpi_ops import *  # noqa: F403

from hvdkit.tensorflow.runtime import init, join, shutdown  # noqa: F401
