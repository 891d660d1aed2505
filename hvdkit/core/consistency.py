"""Check that all ranks agree before starting a collective that could hang.

`check_consistency` compares lines of text between ranks, such as settings and shapes. On a
difference it raises an error on every rank, which names the line and its value on each rank.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from hvdkit.core.collectives import Collectives
from hvdkit.errors import HvdkitError

_T = TypeVar("_T")


class RankMismatchError(HvdkitError):
    """Ranks of one job differ in something that must be the same on all of them."""


def digest(lines: Sequence[str]) -> bytes:
    """Return the SHA-256 of `lines`, 32 bytes."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def group_by_text(collectives: Collectives, text: str, name: str) -> list[str]:
    """Return "ranks R, S: TEXT" for each different text, for an error. A collective.

    Args:
        collectives: the collectives of the ranks.
        text: this rank's text.
        name: the name of the collective.
    """
    gathered = collectives.allgather(text.encode(), name)
    return grouped(dict(zip(collectives.ranks, map(bytes.decode, gathered), strict=True)))


def grouped(text_of_rank: Mapping[int, str]) -> list[str]:
    """Return "ranks R, S: TEXT" for each different text. Not a collective."""
    ranks_of_text: dict[str, list[int]] = {}
    for rank, text in text_of_rank.items():
        ranks_of_text.setdefault(text, []).append(rank)
    return [f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_of_text.items()]


def error_text(error: Exception | None) -> str:
    """Return the class and the text of an error, such as "ValueError: TEXT"; "" for None."""
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank R" or "ranks R, S"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def are_equal(collectives: Collectives, number: int, name: str) -> bool:
    """Return whether a number is the same on all ranks. A collective.

    Args:
        collectives: the collectives of the ranks.
        number: this rank's number, of at most 24 bits, so that the sum of squares over 30,000 ranks
            fits into 64 bits.
        name: the name of the collective.
    """
    count, total, squares = collectives.sum([1, number, number * number], name)
    return count * squares == total * total


_ADVICE = "Every rank must build the same model and use the same settings."


def check_consistency(
    collectives: Collectives, lines: Sequence[str], subject: str, advice: str = _ADVICE
) -> None:
    """Compare `lines` between all ranks. A collective: every rank of the set calls it.

    If the ranks agree, it costs one small allreduce. Ranks in `join` do not take part.

    Args:
        collectives: the collectives of the ranks to compare.
        lines: a description that must be the same on every rank, the most useful lines first.
        subject: the name of the thing described, for the error: "the optimizer's parameters".
        advice: what to do about a difference, for the error.

    Raises:
        RankMismatchError: on every rank, naming the first line that differs and its value on each
            rank.
    """
    equal, joined = compare(collectives, digest(lines), "hvdkit.agreement")
    if equal:
        return
    if joined:
        # Ranks in `join` take part in reductions only, so nothing can be gathered.
        raise RankMismatchError(
            f"ranks disagree about {subject}. The difference is unknown, because {joined} of "
            f"{len(collectives.ranks)} ranks have called join() already. {advice}"
        )
    # All ranks have the same sums, so all of them enter this collective.
    gathered = collectives.allgather("\n".join(lines).encode(), "hvdkit.agreement.lines")
    by_rank = {
        rank: data.decode().split("\n")
        for rank, data in zip(collectives.ranks, gathered, strict=True)
    }
    raise RankMismatchError(f"{first_difference(by_rank, subject)} {advice}")


def prepare_on_all_ranks(
    collectives: Collectives,
    prepare: Callable[[], tuple[_T, Sequence[str]]],
    subject: str,
    advice: str = _ADVICE,
) -> _T:
    """Prepare a collective on every rank, and compare the preparations. A collective itself.

    An invalid argument on one rank must raise on every rank. If only this rank raised, the other
    ranks would wait for it in the collective. So check arguments in `prepare`.

    Args:
        collectives: the collectives of the ranks.
        prepare: checks the arguments of this rank, and returns a value and its lines. See
            `check_consistency` for the lines.
        subject: see `check_consistency`.
        advice: see `check_consistency`.

    Returns:
        The value.

    Raises:
        RankMismatchError: on every rank whose `prepare` did not raise, if the lines differ or
            `prepare` raised on another rank. In the latter case the text contains that error.
        Exception: on every rank whose `prepare` raised: this error.
    """
    try:
        value, lines = prepare()
    except Exception as error:
        text = " ".join(error_text(error).split())
        with suppress(RankMismatchError):
            check_consistency(collectives, [text], subject, advice)
        raise
    check_consistency(collectives, lines, subject, advice)
    return value


def compare(collectives: Collectives, own: bytes, name: str) -> tuple[bool, int]:
    """Return whether `own` is the same on all ranks, and the number of ranks in `join`.

    A collective: one small allreduce. Ranks in `join` are not compared.

    Args:
        collectives: the collectives of the ranks.
        own: this rank's bytes, of the same length on all ranks, such as a digest.
        name: the name of the collective.
    """
    # n values are all equal if and only if n * sum(x^2) == sum(x)^2. A rank that has called `join`
    # adds zeros to all three sums, including n, so it does not count.
    sums = collectives.sum([1, *own, *(byte * byte for byte in own)], name)
    count, values, squares = sums[0], sums[1 : 1 + len(own)], sums[1 + len(own) :]
    pairs = zip(values, squares, strict=True)
    equal = all(count * square == value * value for value, square in pairs)
    return equal, len(collectives.ranks) - count


def first_difference(by_rank: Mapping[int, Sequence[str]], subject: str) -> str:
    """Return a sentence about the first line that differs between ranks.

    Args:
        by_rank: rank -> its lines.
        subject: the name of the thing that the lines describe.
    """
    longest = max(len(lines) for lines in by_rank.values())
    for number in range(longest):
        groups = grouped(
            {
                rank: lines[number] if number < len(lines) else "nothing more"
                for rank, lines in by_rank.items()
            }
        )
        if len(groups) > 1:
            return f"ranks disagree about {subject}. First difference: {'; '.join(groups)}."
    raise AssertionError("digests differ although all lines are equal")
