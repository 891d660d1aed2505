"""What the synchronizer asks of a framework. Each adapter implements it, and no more than it."""

from typing import Protocol, TypeVar

from hvdkit.core.bucketing import Bucket

Buffer = TypeVar("Buffer")
Handle = TypeVar("Handle")


class Backend(Protocol[Buffer, Handle]):
    """How one framework packs, reduces and unpacks the gradients of a bucket plan.

    `Buffer` is the framework's contiguous memory for one bucket, `Handle` a collective in flight.
    """

    def allocate(self, bucket: Bucket) -> Buffer:
        """Memory for the bucket. Called once per bucket; the buffer is used again every step."""
        ...

    def pack(self, bucket: Bucket, buffer: Buffer) -> None:
        """Copy the bucket's gradients into `buffer`; one that does not exist counts as zeros."""
        ...

    def reduce(self, buffer: Buffer, name: str) -> Handle:
        """Begin to reduce `buffer` in place over the ranks, under `name`, and return at once."""
        ...

    def wait(self, handle: Handle) -> None:
        """Return when the collective has ended; raise the framework's error if it failed."""
        ...

    def unpack(self, bucket: Bucket, buffer: Buffer) -> None:
        """Make the reduced values the bucket's gradients."""
        ...
