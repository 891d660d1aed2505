"""Reduce one bucket in a TensorFlow graph.

While the graph is traced, the wire format's generator runs once. Each of its requests adds
operations to the graph.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.errors import HvdkitError
from hvdkit.reduction.int8 import payload_bytes
from hvdkit.reduction.scalar_ops import Scalar
from hvdkit.reduction.wire_format import (
    AbsMax,
    BlockSum,
    BucketReduction,
    Cond,
    Gather,
    GlobalMax,
    Request,
    Sum,
)
from hvdkit.runtime.host_collectives import int8_name
from hvdkit.tensorflow import runtime
from hvdkit.tensorflow.reduction.backend import GraphMemory, Wire, abs_max, multiply
from hvdkit.tensorflow.reduction.block_sums import sum_blocks


class TracedReduction:
    """The reduction of one bucket, while a graph is traced.

    Args:
        memory: the bucket's gradients.
        generator: the wire format's reduction.
        name: the prefix of the collectives' names.
        process_set: the ranks to reduce over.
    """

    def __init__(
        self,
        memory: GraphMemory,
        generator: BucketReduction,
        name: str,
        process_set: mpi_ops.ProcessSet,
    ) -> None:
        self._memory = memory
        self._generator = generator
        self._name = name
        self._process_set = process_set
        self._numbers = itertools.count(1)
        #: The bytes that this rank gives to collectives, as in `hvdkit.runtime.counters`.
        self.payload_bytes: Any = 0

    def run(self, result: Any = None) -> Scalar | None:
        """Run until the next `GlobalMax`, and return its value; None at the end.

        Args:
            result: the result of the previous `GlobalMax`; None in the first call.
        """
        try:
            request = self._generator.send(result)
            while not isinstance(request, GlobalMax):
                request = self._generator.send(self._result_of(request))
        except StopIteration:
            return None
        return request.value

    def _result_of(self, request: Request) -> Any:
        if isinstance(request, Sum | BlockSum):
            wire = request.buffer
            self._count(wire.tensor if isinstance(wire, Wire) else wire, request)
            add = self._sum if isinstance(request, Sum) else self._sum_blocks
            if not isinstance(wire, Wire):
                # A user's compressor may sum plain tensors.
                return add(Wire(wire), request.factor)
            wire.tensor, wire.factor = add(wire, request.factor), 1.0
            return wire
        if isinstance(request, Gather):
            indices, values = request.rows
            self._count(indices, request)
            self._count(values, request)
            return self._gather(indices), self._gather(values)
        if isinstance(request, AbsMax):
            return abs_max(request.buffer)
        if isinstance(request, Cond):
            return self._cond(request)
        raise HvdkitError(
            f"a wire format requested {type(request).__name__}, which TensorFlow does not support "
            f"inside a Cond: see hvdkit.reduction.wire_format.Cond"
        )

    def _cond(self, request: Cond) -> tuple[tf.Tensor, ...]:
        def branch(start: Callable[[], BucketReduction]) -> Callable[[], list[tf.Tensor]]:
            def run() -> list[tf.Tensor]:
                before, counted = self._memory.content, self.payload_bytes
                self.payload_bytes = 0
                scalars = self._run_branch(start())
                after, added = self._memory.content, tf.cast(self.payload_bytes, tf.int64)
                self._memory.content, self.payload_bytes = before, counted
                return [after, added, *map(tf.convert_to_tensor, scalars)]

            return run

        if_true, if_false = branch(request.if_true), branch(request.if_false)
        self._memory.content, added, *scalars = tf.cond(request.condition, if_true, if_false)
        self.payload_bytes = added + tf.cast(self.payload_bytes, tf.int64)
        return tuple(scalars)

    def _count(self, tensor: tf.Tensor, request: Request) -> None:
        """Add the bytes of a tensor that is sent."""
        number = tensor.shape.num_elements()
        number = tf.size(tensor, tf.int64) if number is None else number
        blocks = isinstance(request, BlockSum)
        size = payload_bytes(number) if blocks else number * tensor.dtype.size
        self.payload_bytes = self.payload_bytes + size

    def _run_branch(self, generator: BucketReduction) -> Sequence[Scalar]:
        result = None
        while True:
            try:
                request = generator.send(result)
            except StopIteration as end:
                return end.value
            result = self._result_of(request)

    def _next_name(self) -> str:
        return f"{self._name}.{next(self._numbers)}"

    def _sum(self, wire: Wire, factor: float, name: str | None = None) -> tf.Tensor:
        if wire.tensor.shape.num_elements() == 0:
            return wire.tensor
        name = name or self._next_name()
        if wire.tensor.dtype == tf.float64:
            # Horovod's factors are attributes of the op, which have only float32 precision.
            before = multiply(wire.tensor, wire.factor)
            return multiply(allreduce(before, name, self._process_set), factor)
        return allreduce(
            wire.tensor,
            name,
            self._process_set,
            prescale_factor=wire.factor,
            postscale_factor=factor,
        )

    def _sum_blocks(self, wire: Wire, factor: float) -> tf.Tensor:
        name = self._next_name()
        if engine_sends_int8(self._process_set):
            return self._sum(wire, factor, int8_name(name))
        if wire.tensor.shape.num_elements() == 0:
            return wire.tensor
        before = multiply(wire.tensor, wire.factor)
        return sum_blocks(before, name, factor, self._process_set)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        return mpi_ops.allgather(
            rows, name=self._next_name(), ignore_name_scope=True, process_set=self._process_set
        )


def engine_sends_int8(process_set: mpi_ops.ProcessSet) -> bool:
    """Return whether the engine itself sends sums as 8-bit integers, which it does on the CPU only.

    The result differs between ranks only if some ranks have GPUs and other ranks have none.
    """
    gpus = tf.config.list_logical_devices("GPU")
    in_engine = process_set.process_set_id == 0 and not gpus
    return in_engine and runtime.host_collectives.sends_int8()


def allreduce(
    tensor: tf.Tensor, name: str, process_set: mpi_ops.ProcessSet, **options: Any
) -> tf.Tensor:
    """Return the sum over the ranks. The collective's name is independent of name scopes."""
    options = {"op": mpi_ops.Sum, **options}
    return mpi_ops._allreduce(
        tensor, name=name, ignore_name_scope=True, process_set=process_set, **options
    )
