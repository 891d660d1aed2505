"""Check that all ranks agree before starting a collective that could hang."""

import hashlib
from collections.abc import Sequence

from hvdkit.core.collectives import Collectives
from hvdkit.errors import HvdkitError


class RankMismatchError(HvdkitError):
    """Ranks of one job hold different descriptions of what they are about to do together."""


def digest(lines: Sequence[str]) -> bytes:
    """The SHA-256 of `lines`, 32 bytes."""
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
        number: of this rank, at most 24 bits: over 30,000 ranks the sum of squares fits into 64.
        name: of the collective.
    """
    count, total, squares = collectives.sum([1, number, number * number], name)
    return count * squares == total * total


_ADVICE = "Every rank must build the same model and use the same settings."


def check_consistency(
    collectives: Collectives, lines: Sequence[str], subject: str, advice: str = _ADVICE
) -> None:
    """Compare `lines` between all ranks. A collective: every rank of the set calls it.

    Costs one small allreduce while ranks agree, and works while other ranks sit in `join`.

    Args:
        collectives: of the process set whose ranks must agree.
        lines: a description that must be the same on every rank, most telling lines first.
        subject: what is described, for the error, e.g. "the optimizer's parameters".
        advice: what to do about a difference, for the error.

    Raises:
        RankMismatchError: on every rank, naming the first line that differs and who has what.
    """
    # Sums alone tell whether n values are all equal: n * sum(x^2) == sum(x)^2 only then. A rank
    # that has called `join` adds zeros to all three sums, n included, so it does not count.
    own = digest(lines)
    sums = collectives.sum([1, *own, *(byte * byte for byte in own)], "hvdkit.agreement")
    count, values, squares = sums[0], sums[1 : 1 + len(own)], sums[1 + len(own) :]
    if all(count * square == value * value for value, square in zip(values, squares, strict=True)):
        return
    joined = len(collectives.ranks) - count
    if joined:
        # They enter nothing but reductions.
        raise RankMismatchError(
            f"ranks disagree about {subject}. Who has what cannot be told, because {joined} of "
            f"{len(collectives.ranks)} ranks have called join() already. {advice}"
        )
    # The same verdict on every rank, so this is entered by all of them.
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
