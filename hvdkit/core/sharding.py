"""Divide the elements of a dataset equally among the ranks."""

import logging
from dataclasses import dataclass

_log = logging.getLogger("hvdkit.data")


@dataclass(frozen=True)
class Division:
    """The division of `count` elements among `size` ranks.

    Attributes:
        count: of all elements.
        size: number of ranks.
        padded: use all elements, and repeat one on some ranks; otherwise leave out up to `size` - 1
            elements.
    """

    count: int
    size: int
    padded: bool

    @property
    def per_rank(self) -> int:
        """The number of elements of every rank, repeated ones included."""
        return -(-self.count // self.size) if self.padded else self.count // self.size

    @property
    def used(self) -> int:
        """The number of elements that are not left out."""
        return self.count if self.padded else self.per_rank * self.size

    def of_rank(self, rank: int) -> int:
        """Return the number of elements of `rank` without repeated ones."""
        return self.used // self.size + (rank < self.used % self.size)

    def before_rank(self, rank: int) -> int:
        """Return the number of elements that the ranks before `rank` have."""
        return self.used // self.size * rank + min(rank, self.used % self.size)

    def log_tail(self, elements: str = "elements") -> None:
        """Log how many elements are left out or repeated.

        Args:
            elements: the noun for elements, in the message.
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
                "hvd.shard repeats %d of %d %s, with sample weight 0, so that all %d ranks have "
                "the same number",
                self.per_rank * self.size - self.count,
                self.count,
                elements,
                self.size,
            )
