"""Coordination: all ranks complete a save or a restore, or all of them raise."""

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import grouped, name_ranks
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.errors import HvdkitError, UsageError


def exchange(
    collectives: Collectives,
    message: dict[str, Any],
    problem: Exception | None = None,
    consequence: str = "",
) -> list[dict[str, Any]]:
    """Return the messages of all ranks, or raise on all ranks if one failed. A collective.

    Args:
        collectives: of the ranks.
        message: this rank's message, which JSON can encode.
        problem: the exception of this rank, instead of a message.
        consequence: added to the error.

    Raises:
        UsageError: all exceptions are `UsageError`s.
        CheckpointError: otherwise.
    """
    if problem is not None:
        text = str(problem)
        if not isinstance(problem, HvdkitError):
            text = f"{type(problem).__name__}: {text}"
        message = {"problem": text, "usage": isinstance(problem, UsageError)}
    data = collectives.allgather(json.dumps(message).encode(), "hvdkit.checkpoint.coordination")
    gathered: list[dict[str, Any]] = [json.loads(each) for each in data]
    holders: dict[str, list[int]] = {}
    for rank, each in zip(collectives.ranks, gathered, strict=True):
        if "problem" in each:
            holders.setdefault(each["problem"], []).append(rank)
    if not holders:
        return gathered
    told = "; ".join(
        text if len(who) == len(gathered) else f"{name_ranks(who)}: {text}"
        for text, who in holders.items()
    )
    kind = UsageError if all(each.get("usage", True) for each in gathered) else CheckpointError
    raise kind(f"{told} ({consequence})" if consequence else told) from problem


def compare(
    collectives: Collectives, values: Sequence[Any], subject: str, consequence: str = ""
) -> None:
    """Check that all ranks have the same value. Not a collective.

    Args:
        collectives: of the ranks.
        values: one value for each rank, in the order of the ranks. Every rank passes the same
            list.
        subject: the name of the value in the error.
        consequence: added to the error.

    Raises:
        UsageError: the values differ.
    """
    groups = grouped(dict(zip(collectives.ranks, map(str, values), strict=True)))
    if len(groups) > 1:
        who = "; ".join(groups)
        text = f"ranks disagree about {subject} ({who}): make the same call on all ranks"
        raise UsageError(f"{text} ({consequence})" if consequence else text)


def compare_lines(
    collectives: Collectives,
    digests: Sequence[str],
    lines: Sequence[str],
    subject: str,
    consequence: str = "",
) -> None:
    """Check that all ranks have the same lines. A collective if the digests differ.

    Args:
        collectives: of the ranks.
        digests: one digest of the lines for each rank. Every rank passes the same list.
        lines: of this rank.
        subject: the name of the lines in the error.
        consequence: added to the error.

    Raises:
        UsageError: the lines differ.
    """
    if len(set(digests)) == 1:
        return
    told = [each["lines"] for each in exchange(collectives, {"lines": list(lines)})]
    ranks = collectives.ranks
    rank, others = next((r, t) for r, t in zip(ranks, told, strict=True) if t != told[0])
    own, first = next((a, b) for a, b in zip_longest(others, told[0]) if a != b)
    text = (
        f"{subject} differs between ranks: rank {rank} has {own or 'nothing more'} where rank "
        f"{ranks[0]} has {first or 'nothing more'}. Build it equally on all ranks; pass a tensor "
        f"whose rows are divided among the ranks as sharded="
    )
    raise UsageError(f"{text} ({consequence})" if consequence else text)


def call_on_first(collectives: Collectives, call: Callable[[], Any]) -> Any:
    """Call on the first rank, and return the result on all ranks. A collective.

    The result is sent as JSON.

    Raises:
        UsageError, CheckpointError: on all ranks: the call raised.
    """
    message: dict[str, Any] = {}
    problem: Exception | None = None
    try:
        if collectives.is_first:
            message = {"result": call()}
    except Exception as error:
        problem = error
    return exchange(collectives, message, problem)[0]["result"]


def gather(collectives: Collectives, data: bytes, name: str) -> list[bytes]:
    """Send every rank's data to the first rank. A collective.

    Returns:
        On the first rank, the data of each rank. On the other ranks, a list of empty bytes.
    """
    parts = [data] + [b""] * (len(collectives.ranks) - 1)
    return collectives.alltoall(parts, name)


def scatter(collectives: Collectives, data: Sequence[bytes], name: str) -> bytes:
    """Send each rank its data from the first rank. A collective.

    Args:
        collectives: of the ranks.
        data: on the first rank, the data for each rank; ignored on the other ranks.
        name: of the collective.
    """
    is_first = collectives.is_first
    parts = list(data) if is_first else [b""] * len(collectives.ranks)
    return collectives.alltoall(parts, name)[0]
