"""Check that all ranks agree before starting a collective that could hang."""

import hashlib
from collections.abc import Sequence

from hvdkit.core.collectives import Collectives
from hvdkit.errors import HvdkitError


class RankMismatchError(HvdkitError):
    """Ranks of one job have different settings, parameters or states."""


def digest(lines: Sequence[str]) -> bytes:
    """Return the SHA-256 of `lines`, 32 bytes."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def texts_by_rank(collectives: Collectives, text: str, name: str) -> list[str]:
    """Return "rank R: TEXT" for every rank, for an error. A collective.

    Args:
        collectives: of the ranks.
        text: of this rank.
        name: of the collective.
    """
    everyones = collectives.allgather(text.encode(), name)
    return [
        f"rank {rank}: {data.decode()}"
        for rank, data in zip(collectives.ranks, everyones, strict=True)
    ]


def are_equal(collectives: Collectives, number: int, name: str) -> bool:
    """Return whether a number is the same on all ranks. A collective.

    Args:
        collectives: of the ranks.
        number: of this rank, at most 24 bits, so that the sum of squares of 30,000 ranks fits into
            64 bits.
        name: of the collective.
    """
    count, total, squares = collectives.sum([1, number, number * number], name)
    return count * squares == total * total


_ADVICE = "Every rank must build the same model and use the same settings."


def check_consistency(
    collectives: Collectives, lines: Sequence[str], subject: str, advice: str = _ADVICE
) -> None:
    """Check that `lines` are the same on all ranks. A collective.

    Costs one small allreduce if ranks agree. Works while other ranks have joined.

    Args:
        collectives: of the process set whose ranks must agree.
        lines: a description that must be the same on every rank, the most important lines first.
        subject: what the lines describe, for the error, such as "the optimizer's parameters".
        advice: how to mend a difference, for the error.

    Raises:
        RankMismatchError: on every rank, with the first line that differs, for each rank.
    """
    # n values are equal if and only if n * sum(x^2) == sum(x)^2. A rank that has joined adds zeros
    # to all three sums, n included, so it does not count.
    own = digest(lines)
    sums = collectives.sum([1, *own, *(byte * byte for byte in own)], "hvdkit.agreement")
    count, values, squares = sums[0], sums[1 : 1 + len(own)], sums[1 + len(own) :]
    if all(count * square == value * value for value, square in zip(values, squares, strict=True)):
        return
    joined = len(collectives.ranks) - count
    if joined:
        # Ranks that have joined take part in reductions only.
        raise RankMismatchError(
            f"ranks disagree about {subject}. The differences are unknown, because {joined} of "
            f"{len(collectives.ranks)} ranks have called join() already. {advice}"
        )
    # All ranks come here, because the sums are the same on all of them.
    gathered = collectives.allgather("\n".join(lines).encode(), "hvdkit.agreement.lines")
    by_rank = {
        rank: data.decode().split("\n")
        for rank, data in zip(collectives.ranks, gathered, strict=True)
    }
    raise RankMismatchError(f"{_difference(by_rank, subject)} {advice}")


def _difference(by_rank: dict[int, list[str]], subject: str) -> str:
    longest = max(len(lines) for lines in by_rank.values())
    for number in range(longest):
        holders: dict[str, list[int]] = {}
        for rank, lines in by_rank.items():
            line = lines[number] if number < len(lines) else "nothing more"
            holders.setdefault(line, []).append(rank)
        if len(holders) > 1:
            who = "; ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {line}"
                for line, ranks in holders.items()
            )
            return f"ranks disagree about {subject}. First difference: {who}."
    raise AssertionError("digests differ although all lines are equal")
