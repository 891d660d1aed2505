"""What the synchronizer asks of a framework. Each adapter implements it, and no more than it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hvdkit.core.bucketing import Bucket

Buffer = TypeVar("Buffer")
Handle = TypeVar("Handle")


class BucketMemory(Protocol[Buffer]):
    """The gradients of one bucket, and how a wire format gets at them.

    `Buffer` is the framework's contiguous memory for a whole bucket. A gradient that does not
    exist counts as zeros. Factors are plain numbers.
    """

    @property
    def dtype(self) -> str:
        """The framework's name for the gradients' element type."""
        ...

    def home(self, factor: float) -> Buffer:
        """Memory in the gradients' own dtype which the gradients now live in, times `factor`.

        What happens to it happens to the gradients: there is nothing to unpack.
        """
        ...

    def pack(self, dtype: str, factor: float, keep: bool = True) -> Buffer:
        """A copy of the gradients, times `factor`, rounded to `dtype` once, in one pass.

        With `keep` the memory is used again every step, otherwise given back after it.
        """
        ...

    def scale(self, buffer: Buffer, factor: float) -> None:
        """Multiply `buffer` by `factor` in place."""
        ...

    def unpack(self, buffer: Buffer, factor: float) -> None:
        """Make `buffer`, times `factor`, the bucket's gradients."""
        ...

    def rows(self, factor: float) -> Any:
        """A sparse bucket's gradient, times `factor`, as `Backend.gather` takes it."""
        ...

    def put_rows(self, rows: Any) -> None:
        """Make `rows`, which `Backend.gather` gave, the sparse bucket's gradient."""
        ...


class Backend(Protocol[Buffer, Handle]):
    """How one framework reduces the gradients of a bucket plan.

    `Handle` is a collective in flight.
    """

    def memory(self, bucket: Bucket) -> BucketMemory[Buffer]:
        """Access to the bucket's gradients. Called once per bucket of a plan."""
        ...

    def sum(self, buffer: Buffer, name: str) -> Handle:
        """Begin to add up `buffer` in place over the ranks, under `name`, and return at once."""
        ...

    def gather(self, rows: Any, name: str) -> Handle:
        """Begin to collect every rank's `rows`, and return at once."""
        ...

    def wait(self, handle: Handle) -> Any:
        """The result, once the collective has ended; raise the framework's error if it failed."""
        ...

    def peaks(self, buffers: Sequence[Buffer]) -> list[float]:
        """The largest magnitude in each buffer; infinity or NaN where something is not finite."""
        ...

    @property
    def batches_peaks(self) -> bool:
        """Whether `peaks` is better called once for all buckets, because its answer comes from an
        accelerator, than for each bucket as soon as it has arrived."""
        ...

    def sparse_dims(self, i: int) -> int:
        """The sparse dimensions of parameter `i`'s gradient; 0 where it is dense or missing."""
        ...
