"""Horovod's elastic API, with this package's `init`, optimizer and broadcasts.

`hvdkit run --elastic` starts all ranks again after a failure, and when the hosts have changed: see
`hvdkit.elastic`. Under Horovod's own launcher, its elastic training runs.
"""

from collections.abc import Callable
from typing import Any

from horovod.common import elastic as horovod_elastic
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch import mpi_ops

from hvdkit.elastic.run import Adapter, elastic_function
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import ObjectState, TorchState
from hvdkit.torch.runtime import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an elastic training function, whose first argument is the state to keep.

    The function begins with the state of the last commit, equal on all ranks. In a job of
    `hvdkit run --elastic`, a failure or a change of the hosts ends all ranks, and the script is
    started again. Under Horovod's own launcher, its elastic training calls the function. In
    another job, it is called once.

    Example:
        @hvd.elastic.run
        def train(state):
            while state.epoch < 10:
                ...
                state.epoch += 1
                state.commit()

        train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))
    """
    return elastic_function(func, _adapter)


def _reset() -> None:
    shutdown()
    init()


_adapter = Adapter(
    collectives=lambda: TorchCollectives(mpi_ops.global_process_set),
    local_rank=mpi_ops.local_rank,
    size=mpi_ops.size,
    shutdown=shutdown,
    horovods_run=lambda func: horovod_elastic.run_fn(func, _reset),
    interrupt=HostsUpdatedInterrupt,
)
