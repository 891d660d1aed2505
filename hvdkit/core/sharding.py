"""Division of the elements of a dataset, so that every rank has as many."""

import logging
from dataclasses import dataclass

_log = logging.getLogger("hvdkit.data")


@dataclass(frozen=True)
class Division:
    """Numbers of elements, of `count`, that `size` ranks get.

    Attributes:
        count: of all elements.
        size: number of ranks.
        padded: all elements are used, and some ranks repeat one; otherwise up to `size` - 1 are
            left out.
    """

    count: int
    size: int
    padded: bool

    @property
    def per_rank(self) -> int:
        """Number of elements that every rank has, repeated ones too."""
        return -(-self.count // self.size) if self.padded else self.count // self.size

    @property
    def used(self) -> int:
        """Number of elements that are not left out."""
        return self.count if self.padded else self.per_rank * self.size

    def of_rank(self, rank: int) -> int:
        """Return the number of elements of `rank` without repeated ones."""
        return self.used // self.size + (rank < self.used % self.size)

    def before_rank(self, rank: int) -> int:
        """Return the number of elements that the ranks before `rank` have."""
        return self.used // self.size * rank + min(rank, self.used % self.size)

    def log_tail(self, elements: str = "elements") -> None:
        """Log what becomes of the elements that cannot be divided.

        Args:
            elements: what they are called.
        """
        if self.used < self.count:
            _log.warning(
                "hvd.shard leaves out %d of %d %s, which %d ranks cannot share evenly; "
                "tail='pad' keeps them",
                self.count - self.used,
                self.count,
                elements,
                self.size,
            )
        elif self.per_rank * self.size > self.count:
            _log.info(
                "hvd.shard repeats %d of %d %s, with sample weight 0, so that each of %d ranks has "
                "as many",
                self.per_rank * self.size - self.count,
                self.count,
                elements,
                self.size,
            )
