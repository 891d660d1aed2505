"""Small collectives on host data for framework-free code, over horovod.tensorflow."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import Collectives
from hvdkit.tensorflow import runtime

#: The `GraphTimes` of this process: the time in a collective here counts as a wait.
measured: WeakSet[Any] = WeakSet()


class TensorFlowCollectives(Collectives):
    """`hvdkit.agreement.collectives.Collectives` for the ranks of a Horovod process set.

    Collectives run immediately, even while a graph is traced, also those that only start. A Horovod
    without hvdkit's patches matches eager collectives by their order and not by their names. So
    every rank must call them in the same order with every engine.
    """

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        super().__init__(process_set, runtime)

    def _start(self, values: list[int], name: str, op: int) -> Callable[[], list[int]]:
        with _eagerly_on_cpu():
            reduced = mpi_ops._allreduce(
                tf.constant(values, tf.int64), name, op, process_set=self.process_set
            )
            result = [int(value) for value in reduced.numpy()]
        return lambda: result

    def _allgather(self, data: bytes, name: str) -> list[bytes]:
        with _eagerly_on_cpu():
            size = tf.constant([len(data)], tf.int64)
            sizes = mpi_ops.allgather(size, f"{name}.sizes", process_set=self.process_set)
            own = tf.constant(np.frombuffer(data, np.uint8))
            joined = mpi_ops.allgather(own, name, process_set=self.process_set).numpy()
            bounds = np.cumsum(sizes.numpy())[:-1]
        return [part.tobytes() for part in np.split(joined, bounds)]

    def _alltoall(self, parts: Sequence[memoryview], name: str) -> list[bytes]:
        with _eagerly_on_cpu():
            joined = tf.constant(np.frombuffer(b"".join(parts), np.uint8))
            splits = tf.constant([len(part) for part in parts], tf.int32)
            received, sizes = mpi_ops.alltoall(joined, splits, name, process_set=self.process_set)
            pieces = np.split(received.numpy(), np.cumsum(sizes.numpy())[:-1])
        return [piece.tobytes() for piece in pieces]

    def _broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        with _eagerly_on_cpu():
            sent = tf.constant(buffer)
            received = mpi_ops.broadcast(sent, root_rank, name, process_set=self.process_set)
            buffer[:] = received.numpy()


@contextmanager
def _eagerly_on_cpu() -> Iterator[None]:
    """Run the collectives of this context immediately, on the CPU, even while tracing."""
    began = time.monotonic()
    with tf.init_scope(), tf.device("/cpu:0"):
        yield
    for times in list(measured):
        times.count_wait(time.monotonic() - began)
