"""The interface between the synchronizer and a framework. Each adapter implements it.

A wire format calls `BucketMemory` to pack and unpack the gradients of a bucket. The synchronizer
calls `Backend` to run the collectives that the wire format requests.

To add an adapter, write a package beside `hvdkit/torch/` that implements these protocols and
`hvdkit/agreement/collectives.py`. Decide when the synchronizer has a round, as
`hvdkit/torch/reduction/reducer.py` does. If the framework traces graphs, trace the wire formats
once, as `hvdkit/tensorflow/reduction/reducer.py` does. Run `tests/ranks/` with the adapter.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hvdkit.reduction.bucketing import Bucket

Buffer = TypeVar("Buffer")
Handle = TypeVar("Handle")


class BucketMemory(Protocol[Buffer]):
    """The gradients of one bucket, as a wire format reads and writes them.

    `Buffer` is the framework's contiguous memory for a whole bucket. A gradient that does not
    exist counts as zeros. Factors are Python numbers. While a graph is traced, the factors of
    `pack` and `unpack` may be scalars of the graph (`hvdkit.reduction.scalar_ops`).
    """

    @property
    def dtype(self) -> str:
        """The framework's name for the gradients' element type."""
        ...

    def in_place(self, factor: float) -> Buffer:
        """Move the gradients, times `factor`, into one buffer of their own dtype.

        The gradients are views of the buffer afterwards, so there is nothing to unpack. The buffer
        is memory that nobody else uses: the script may hold gradients of earlier rounds.
        """
        ...

    def pack(self, dtype: str, factor: float, keep: bool = True) -> Buffer:
        """Return a copy of the gradients, times `factor`, rounded to `dtype` once, in one pass.

        If `keep` is true, every step reuses the buffer. Otherwise the buffer is freed as soon as
        the wire format drops it.
        """
        ...

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply `buffer` by `factor` in place."""
        ...

    def unpack(self, buffer: Buffer, factor: float) -> None:
        """Write `buffer`, times `factor`, into the bucket's gradients."""
        ...

    def rows(self, factor: float) -> Any:
        """Return a sparse bucket's gradient, times `factor`, for `Backend.gather`."""
        ...

    def set_rows(self, rows: Any) -> None:
        """Make a result of `Backend.gather` the sparse bucket's gradient."""
        ...


class RoundMemory(BucketMemory[Buffer], Protocol[Buffer]):
    """`BucketMemory` in a framework without graphs, which a synchronizer uses in many rounds."""

    @property
    def is_changed(self) -> bool:
        """Whether anything has changed a gradient since this round has packed it."""
        ...

    def end(self) -> None:
        """Note that the wire format has ended."""
        ...

    def end_round(self, reduced: bool) -> None:
        """Give each gradient that needs memory of its own this memory, with its new value.

        Args:
            reduced: whether the buffers have the reduced gradients; otherwise the round has failed.
        """
        ...


class Backend(Protocol[Buffer, Handle]):
    """A framework's collectives on buckets. `Handle` is a collective in flight."""

    def memory(self, bucket: Bucket) -> RoundMemory[Buffer]:
        """Return access to the bucket's gradients. Called once per bucket of a plan."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor` in place: the reduction of a single rank."""
        ...

    def sum(self, buffer: Buffer, name: str, factor: float) -> Handle:
        """Start to sum `buffer` in place over the ranks, and to multiply the sum by `factor`."""
        ...

    def sum_blocks(self, buffer: Buffer, name: str, factor: float) -> Handle:
        """Start `sum` of a float32 buffer; send it as blocks of 8-bit integers, see `Int8`."""
        ...

    def scatter(self, buffer: Buffer, sections: int, name: str, factor: float) -> Handle:
        """Start `sum` of a buffer with a section for each rank: only its own one is complete."""
        ...

    def section(self, buffer: Buffer, sections: int) -> Buffer:
        """Return the section of this rank."""
        ...

    def gather(self, rows: Any, name: str) -> Handle:
        """Start to gather every rank's `rows`."""
        ...

    def is_done(self, handle: Handle) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def wait(self, handle: Handle) -> Any:
        """Wait for a collective and return its result, or raise the framework's error."""
        ...

    def abs_max(self, buffers: Sequence[Buffer]) -> list[float]:
        """Return each buffer's absolute maximum; infinity or NaN if an element is not finite."""
        ...

    @property
    def batches_abs_max(self) -> bool:
        """Whether one call of `abs_max` for all buckets is faster than a call for each.

        True on an accelerator, where each call copies its result to the host.
        """
        ...

    def sparse_dims(self, i: int) -> int:
        """Return how many sparse dimensions parameter `i`'s gradient has; 0 if dense or missing."""
        ...
