"""Check that the collectives of a trace do not contradict its clocks."""

from collections.abc import Mapping

#: The call and the end of a collective on a rank, in nanoseconds of the first rank's clock.
Span = tuple[float, float]

# The flight recorder's times are whole microseconds.
_RESOLUTION = 1000.0


def contradictions(
    spans: Mapping[str, Mapping[int, Span]], errors: Mapping[int, float]
) -> tuple[int, int]:
    """Return the number of collectives on several ranks, and of those that contradict the clocks.

    No rank ends a collective before all ranks have called it. A collective that ended on a rank
    before another one called it, by more than the errors of both clocks, contradicts this.

    Args:
        spans: collective -> rank -> its call and its end.
        errors: rank -> the largest error of its clock, in nanoseconds.
    """
    compared = wrong = 0
    for of_rank in spans.values():
        if len(of_rank) < 2:
            continue
        compared += 1
        latest = max(called - errors[rank] for rank, (called, _) in of_rank.items())
        earliest = min(ended + errors[rank] for rank, (_, ended) in of_rank.items())
        wrong += latest > earliest + _RESOLUTION
    return compared, wrong
