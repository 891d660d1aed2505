"""Small collectives on host data for framework-free code, over horovod.tensorflow."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import ProcessSetCollectives, alltoall_in_rounds
from hvdkit.tensorflow import runtime

#: The `GraphTimes` of this process: the time in a collective here counts as a wait.
measured: WeakSet[Any] = WeakSet()


class TensorFlowCollectives(ProcessSetCollectives):
    """`hvdkit.agreement.collectives.Collectives` for the ranks of a Horovod process set.

    Collectives run immediately, even while a graph is traced. A Horovod without hvdkit's patches
    matches eager collectives by their order and not by their names. Collectives block, so every
    rank must call them in the same order with every engine.

    A rank outside the set, or in a set of one rank, skips all collectives.
    """

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        super().__init__(process_set, runtime)

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise sum of 64-bit integers."""
        return self._reduce(values, name, mpi_ops.Sum)

    def max(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise maximum of 64-bit integers."""
        return self._reduce(values, name, mpi_ops.Max)

    def start_sum(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Compute the sum now, because eager collectives block. The function returns it."""
        result = self.sum(values, name)
        return lambda: result

    def start_max(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Compute the maximum now, because eager collectives block; see `start_sum`."""
        result = self.max(values, name)
        return lambda: result

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes."""
        if self.single_rank:
            return [data]
        with _eagerly_on_cpu():
            size = tf.constant([len(data)], tf.int64)
            sizes = mpi_ops.allgather(size, f"{name}.sizes", process_set=self.process_set)
            own = tf.constant(np.frombuffer(data, np.uint8))
            joined = mpi_ops.allgather(own, name, process_set=self.process_set).numpy()
            bounds = np.cumsum(sizes.numpy())[:-1]
        return [part.tobytes() for part in np.split(joined, bounds)]

    def alltoall(self, parts: Sequence[bytes], name: str) -> list[bytes]:
        """Send `parts[i]` to rank i and return the bytes that each rank sent to this rank."""
        if self.single_rank:
            return list(parts)

        def send(pieces: list[memoryview]) -> list[bytes]:
            with _eagerly_on_cpu():
                joined = tf.constant(np.frombuffer(b"".join(pieces), np.uint8))
                splits = tf.constant([len(piece) for piece in pieces], tf.int32)
                received, sizes = mpi_ops.alltoall(
                    joined, splits, name, process_set=self.process_set
                )
                parts = np.split(received.numpy(), np.cumsum(sizes.numpy())[:-1])
            return [part.tobytes() for part in parts]

        return alltoall_in_rounds(self, parts, name, send)

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """Copy rank `root_rank`'s `buffer` into the `buffer` of every rank."""
        if not self.single_rank:
            with _eagerly_on_cpu():
                sent = tf.constant(buffer)
                received = mpi_ops.broadcast(sent, root_rank, name, process_set=self.process_set)
                buffer[:] = received.numpy()

    def _reduce(self, values: Sequence[int], name: str, op: int) -> list[int]:
        if self.single_rank:
            return list(values)
        with _eagerly_on_cpu():
            reduced = mpi_ops._allreduce(
                tf.constant(list(values), tf.int64), name, op, process_set=self.process_set
            )
            return [int(value) for value in reduced.numpy()]


@contextmanager
def _eagerly_on_cpu() -> Iterator[None]:
    """Run the collectives of this context immediately, on the CPU, even while tracing."""
    began = time.monotonic()
    with tf.init_scope(), tf.device("/cpu:0"):
        yield
    for times in list(measured):
        times.count_wait(time.monotonic() - began)
