"""Let all ranks fail together if one of them fails.

If only the failing rank raised, the other ranks would wait for it in their next collective. So a
rank keeps its error (`attempt`), and all ranks raise after a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import error_text, grouped
from hvdkit.errors import HvdkitError


def attempt(call: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
    """Return the result of a call and None, or None and its error."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, error


def errors_of_ranks(collectives: Collectives, error: Exception | None, name: str) -> list[str]:
    """Return "ranks R, S: ERROR" for each different error of the ranks. A collective.

    Args:
        collectives: the collectives of the ranks.
        error: the error of this rank; None for none.
        name: the name of the collective.
    """
    gathered = collectives.allgather(error_text(error).encode(errors="replace"), name)
    pairs = zip(collectives.ranks, gathered, strict=True)
    return grouped({rank: part.decode() for rank, part in pairs if part})


def raise_on_all_ranks(
    collectives: Collectives,
    error: Exception | None,
    text: str,
    name: str,
    kind: type[HvdkitError] = HvdkitError,
) -> None:
    """Raise on every rank if one of them has an error. A collective.

    Args:
        collectives: the collectives of the ranks.
        error: the error of this rank; None for none.
        text: the beginning of the error on all ranks. The ranks and their errors follow.
        name: the beginning of the names of the collectives.
        kind: the class of the error on all ranks.
    """
    (failures,) = collectives.sum([int(error is not None)], f"{name}.failures")
    if failures:
        raise_together(collectives, error, text, name, kind)


def raise_together(
    collectives: Collectives,
    error: Exception | None,
    text: str,
    name: str,
    kind: type[HvdkitError] = HvdkitError,
) -> NoReturn:
    """Raise an error that contains the errors of all ranks. A collective.

    All ranks know already that one of them has an error. The arguments are those of
    `raise_on_all_ranks`.
    """
    causes = errors_of_ranks(collectives, error, f"{name}.errors")
    raise kind(f"{text} ({'; '.join(causes)})") from error
