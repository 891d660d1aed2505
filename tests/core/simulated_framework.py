"""A simulated framework whose gradients are NumPy arrays."""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.core.bucketing import Bucket, ParameterSpec
from tests.core.simulated_ranks import InFlight, SimulatedCollectives


@dataclass
class Rows:
    """A sparse gradient: rows and their indices. An index may occur twice."""

    indices: np.ndarray
    values: np.ndarray

    def dense(self, shape: Sequence[int]) -> np.ndarray:
        full = np.zeros(shape, self.values.dtype)
        np.add.at(full, self.indices, self.values)
        return full


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return `values` rounded to `dtype`, ties to even; bfloat16 values have dtype float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            kind = np.dtype(dtype)
            return (np.rint(values) if kind.kind == "i" else values).astype(kind)
        bits = values.astype(np.float32).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).view(np.float32)


def ring_sum(buffers: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum as in a ring: part k starts at rank k, and every hop rounds."""
    stack = np.stack(buffers)
    count, elements = stack.shape
    columns = np.arange(elements)
    start = columns * count // max(elements, 1)
    total = stack[start, columns]
    with np.errstate(over="ignore", invalid="ignore"):
        for hop in range(1, count):
            total = total + stack[(start + hop) % count, columns]
    return total


class Temporaries:
    """Count the buffers that were packed with keep=False and are still referenced."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[np.ndarray]] = []
        self.most = 0

    def add(self, buffer: np.ndarray) -> None:
        self._seen = [seen for seen in self._seen if seen() is not None]
        self._seen.append(weakref.ref(buffer))
        self.most = max(self.most, len(self._seen))


class NumpyMemory:
    """`hvdkit.core.backend.BucketMemory` of the gradients in a list.

    Attributes:
        packed: the last calls of `pack`: dtype, factor, keep.
    """

    def __init__(
        self,
        bucket: Bucket,
        specs: Sequence[ParameterSpec],
        gradients: list[Any],
        temporaries: Temporaries | None = None,
    ) -> None:
        self.bucket = bucket
        self.specs = specs
        self.gradients = gradients
        self.packed: deque[tuple[str, float, bool]] = deque(maxlen=8)
        self._temporaries = temporaries or Temporaries()
        self._kept: dict[str, np.ndarray] = {}

    @property
    def dtype(self) -> str:
        return self.bucket.dtype

    def _places(self):
        for i, offset in zip(self.bucket.parameters, self.bucket.offsets, strict=True):
            yield i, slice(offset, offset + self.specs[i].elements)

    def _buffer(self, dtype: str, keep: bool) -> np.ndarray:
        if dtype in self._kept:
            return self._kept[dtype]
        held = "float32" if dtype == "bfloat16" else dtype
        buffer = np.full(self.bucket.elements, 77, held)  # a value that no gradient has
        if keep:
            self._kept[dtype] = buffer
        else:
            self._temporaries.add(buffer)
        return buffer

    def _gradient(self, i: int) -> np.ndarray:
        gradient = self.gradients[i]
        if gradient is None:
            return np.zeros(self.specs[i].shape, self.dtype)
        return gradient.dense(self.specs[i].shape) if isinstance(gradient, Rows) else gradient

    def in_place(self, factor: float) -> np.ndarray:
        buffer = self._buffer(self.dtype, keep=True)
        for i, place in self._places():
            buffer[place] = self._gradient(i).ravel() * factor
            self.gradients[i] = buffer[place].reshape(self.specs[i].shape)
        return buffer

    @property
    def is_changed(self) -> bool:
        return False

    def end_round(self, reduced: bool) -> None:
        pass

    def pack(self, dtype: str, factor: float, keep: bool = True) -> np.ndarray:
        self.packed.append((dtype, factor, keep))
        buffer = self._buffer(dtype, keep)
        for i, place in self._places():
            buffer[place] = rounded(self._gradient(i).ravel().astype("float64") * factor, dtype)
        return buffer

    def scale(self, buffer: np.ndarray, factor: float) -> None:
        buffer *= buffer.dtype.type(factor)

    def unpack(self, buffer: np.ndarray, factor: float) -> None:
        for i, place in self._places():
            reduced = rounded(buffer[place].astype("float64") * factor, self.dtype)
            self.gradients[i] = reduced.reshape(self.specs[i].shape)

    def rows(self, factor: float) -> Rows:
        (i,) = self.bucket.parameters
        gradient = self.gradients[i]
        if gradient is None:
            shape = self.specs[i].shape[self.bucket.sparse_dims :]
            return Rows(np.zeros(0, int), np.zeros((0, *shape), self.dtype))
        if not isinstance(gradient, Rows):
            gradient = Rows(np.arange(len(gradient)), gradient)
        return Rows(gradient.indices, gradient.values * factor)

    def set_rows(self, rows: Rows) -> None:
        (i,) = self.bucket.parameters
        self.gradients[i] = rows


class NumpyBackend:
    """`hvdkit.core.backend.Backend` of one simulated rank.

    Attributes:
        gradients: one per spec: an array, `Rows` or None.
        diary: the name of every collective that was started, in order.
        sent: name -> the rank's contribution to the last collective of that name.
        memories: the number of calls of `memory`.
        fail_on_wait: let `wait` raise, as after a network failure.
    """

    def __init__(
        self,
        collectives: SimulatedCollectives,
        specs: Sequence[ParameterSpec],
        batches_abs_max: bool = False,
    ) -> None:
        self.collectives = collectives
        self.specs = specs
        self.gradients: list[Any] = [None] * len(specs)
        self.batches_abs_max = batches_abs_max
        self.diary: list[str] = []
        self.sent: dict[str, Any] = {}
        self.temporaries = Temporaries()
        self.memories = 0
        self.fail_on_wait = False

    def memory(self, bucket: Bucket) -> NumpyMemory:
        self.memories += 1
        return NumpyMemory(bucket, self.specs, self.gradients, self.temporaries)

    def _begin(self, value: Any, name: str, finish: Callable[..., Any]) -> InFlight:
        self.diary.append(name)
        return self.collectives.group.begin(self.collectives.rank, name, value, finish)

    def scale(self, factor: float) -> None:
        for i, gradient in enumerate(self.gradients):
            if isinstance(gradient, Rows):
                gradient.values *= factor
            elif gradient is not None:
                self.gradients[i] = gradient * factor

    def sum(self, buffer: np.ndarray, name: str, factor: float) -> InFlight:
        self.sent[name] = buffer.copy()
        return self._begin(buffer, name, functools.partial(_sum_in_place, factor))

    # The rounding of 8-bit blocks is not simulated: the sum is exact.
    sum_blocks = sum

    def gather(self, rows: Rows, name: str) -> InFlight:
        return self._begin(rows, name, _gather)

    def wait(self, handle: InFlight) -> Any:
        if self.fail_on_wait:
            raise RuntimeError("the network is down")
        return self.collectives.group.wait(handle)

    def abs_max(self, buffers: Sequence[np.ndarray]) -> list[float]:
        return [float(np.max(np.abs(buffer), initial=0)) for buffer in buffers]

    def sparse_dims(self, i: int) -> int:
        return int(isinstance(self.gradients[i], Rows))


def _sum_in_place(factor: float, buffers: list[np.ndarray]) -> list[np.ndarray]:
    total = (ring_sum(buffers) * factor).astype(buffers[0].dtype)
    for buffer in buffers:
        buffer[:] = total
    return buffers


def _gather(all_rows: list[Rows]) -> list[Rows]:
    indices = np.concatenate([rows.indices for rows in all_rows])
    values = np.concatenate([rows.values for rows in all_rows])
    return [Rows(indices.copy(), values.copy()) for _ in all_rows]
