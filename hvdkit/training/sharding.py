"""Divide the elements of a dataset so that all ranks get the same number, for `hvd.shard`."""

import logging
from dataclasses import dataclass

_log = logging.getLogger("hvdkit.data")


@dataclass(frozen=True)
class Division:
    """The number of elements of each rank.

    Attributes:
        count: number of all elements.
        size: number of ranks.
        padded: use all elements. Ranks that have fewer elements then repeat one. Otherwise up to
            `size` - 1 elements are left out.
    """

    count: int
    size: int
    padded: bool

    @property
    def per_rank(self) -> int:
        """Number of elements of every rank, including repeated ones."""
        return -(-self.count // self.size) if self.padded else self.count // self.size

    @property
    def used(self) -> int:
        """Number of elements that are not left out."""
        return self.count if self.padded else self.per_rank * self.size

    def of_rank(self, rank: int) -> int:
        """Return the number of elements of `rank` without repeated ones."""
        return self.used // self.size + (rank < self.used % self.size)

    def before_rank(self, rank: int) -> int:
        """Return the number of elements of all ranks before `rank`."""
        return self.used // self.size * rank + min(rank, self.used % self.size)

    def log_tail(self, elements: str = "elements") -> None:
        """Log the number of elements that are left out or repeated.

        Args:
            elements: the word for the elements.
        """
        if self.used < self.count:
            _log.warning(
                "hvd.shard leaves out %d of %d %s, because %d ranks cannot share them evenly; "
                "pass tail='pad' to use them",
                self.count - self.used,
                self.count,
                elements,
                self.size,
            )
        elif self.per_rank * self.size > self.count:
            _log.info(
                "hvd.shard repeats %d of %d %s with sample weight 0, so that each of %d ranks has "
                "the same number",
                self.per_rank * self.size - self.count,
                self.count,
                elements,
                self.size,
            )
