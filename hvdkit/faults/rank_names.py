"""The ranks in a text for the user."""

from collections.abc import Sequence

# The most ranks that are listed.
_SHOWN = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as `Ranks 0, 2`."""
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
