"""Check that all ranks agree before starting a collective that could hang.

`check_consistency` compares lines of text between ranks, such as settings and shapes. On a
difference it raises an error on every rank, which names the line and its value on each rank.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from hvdkit.agreement.collectives import Collectives
from hvdkit.errors import HvdkitError

_T = TypeVar("_T")
_Value = TypeVar("_Value", bound=Hashable)


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
    return grouped(gather(collectives, text, name))


def gather(collectives: Collectives, own: Any, name: str) -> dict[int, Any]:
    """Return each rank with its `own`, a value for JSON. A collective."""
    gathered = collectives.allgather(json.dumps(own).encode(), name)
    return dict(zip(collectives.ranks, map(json.loads, gathered), strict=True))


def grouped(text_of_rank: Mapping[int, str]) -> list[str]:
    """Return "ranks R, S: TEXT" for each different text. Not a collective."""
    return [f"{name_ranks(ranks)}: {text}" for text, ranks in ranks_by_value(text_of_rank).items()]


def ranks_by_value(value_of_rank: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return each different value with the ranks that have it."""
    ranks_of: dict[_Value, list[int]] = {}
    for rank, value in value_of_rank.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def error_text(error: Exception | None) -> str:
    """Return the class and the text of an error, such as "ValueError: TEXT"; "" for None."""
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank R" or "ranks R, S"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def digest24(content: bytes) -> int:
    """Return a digest of 24 bits: the sum of its squares over 30,000 ranks fits into 64 bits."""
    return zlib.crc32(content) & 0xFFFFFF


def all_equal(count: int, total: int, squares: int) -> bool:
    """Return whether integers are equal: exactly if n * sum(x^2) == sum(x)^2.

    Args:
        count: the number of integers.
        total: their sum.
        squares: the sum of their squares.
    """
    return count * squares == total * total


def are_equal(collectives: Collectives, number: int, name: str) -> bool:
    """Return whether a number of at most 24 bits is the same on all ranks. A collective."""
    return are_same(collectives, number.to_bytes(3, "little"), name)[0]


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
    name = "hvdkit.agreement"
    by_rank, unknown = gather_if_different(collectives, digest(lines), list(lines), name)
    if by_rank or unknown:
        found = unknown or first_difference(by_rank)
        raise RankMismatchError(f"ranks disagree about {subject}. {found} {advice}")


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
        prepare: checks the arguments of this rank, and returns a value and its lines.
        subject: see `check_consistency`, also for the lines.
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


def gather_if_different(
    collectives: Collectives, content: bytes, own: Any, name: str
) -> tuple[dict[int, Any], str]:
    """Compare `content` between the ranks; if it differs, gather `own`. A collective.

    Args:
        collectives: the collectives of the ranks.
        content: bytes of the same length on all ranks, such as a digest.
        own: this rank's description of the content, for JSON.
        name: the name of the collective.

    Returns:
        Each rank with its `own`, empty if the ranks have the same content; and a sentence if they
        differ, but ranks in `join` prevent that `own` is gathered.
    """
    equal, joined = are_same(collectives, content, name)
    if equal:
        return {}, ""
    if joined:
        # Ranks in `join` take part in reductions only.
        return {}, (
            f"The difference is unknown, because {joined} of {len(collectives.ranks)} ranks have "
            f"called hvd.join()."
        )
    # All ranks have the same sums, so all of them enter this collective.
    return gather(collectives, own, f"{name}.all"), ""


def are_same(collectives: Collectives, own: bytes, name: str) -> tuple[bool, int]:
    """Return whether `own` is the same on all ranks, and the number of ranks in `join`.

    A collective: one small allreduce. Ranks in `join` are not compared.

    Args:
        collectives: the collectives of the ranks.
        own: this rank's bytes, of the same length on all ranks, such as a digest.
        name: the name of the collective.
    """
    # A rank that has called `join` adds zeros to all three sums, so it does not count.
    sums = collectives.sum([1, *own, *(byte * byte for byte in own)], name)
    count, values, squares = sums[0], sums[1 : 1 + len(own)], sums[1 + len(own) :]
    pairs = zip(values, squares, strict=True)
    equal = all(all_equal(count, value, square) for value, square in pairs)
    return equal, len(collectives.ranks) - count


def first_difference(lines_of_rank: Mapping[int, Sequence[str]]) -> str:
    """Return a sentence about the first line that differs between ranks; "" if none differs."""
    for number in range(max(map(len, lines_of_rank.values()))):
        texts = {
            rank: lines[number] if number < len(lines) else "nothing more"
            for rank, lines in lines_of_rank.items()
        }
        if len(groups := grouped(texts)) > 1:
            return f"First difference: {'; '.join(groups)}."
    return ""
