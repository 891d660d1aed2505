"""Policies for gradients that contain NaN or infinity before they are reduced.

A NaN on one rank makes the sum NaN on all ranks. So each rank checks its gradients before the sum.
The error or the log line names the rank and the parameter that a NaN came from.
"""

import logging
from collections.abc import Sequence

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import group_by_text
from hvdkit.errors import HvdkitError, UsageError

#: Do not look at the gradients.
IGNORE = "ignore"
#: Raise `NonFiniteGradients` on every rank.
RAISE = "raise"
#: Skip the step on every rank, and log it.
SKIP = "skip"

#: The orders in which an error names gradients.
COMPUTED = "in the order in which they were computed"
LAST_FIRST = "those of the last variables first"

_log = logging.getLogger("hvdkit")

# Gradients that an error names for each rank.
_SHOWN = 3


class NonFiniteGradients(HvdkitError):
    """The gradients of a rank contain NaN or infinity, so no rank can use the reduced gradients."""


def check_policy(policy: str) -> str:
    """Return `policy`.

    Raises:
        UsageError: the policy is not `ignore`, `raise` or `skip`.
    """
    if policy not in (IGNORE, RAISE, SKIP):
        raise UsageError(f"on_nonfinite is {policy!r}: expected {IGNORE!r}, {RAISE!r} or {SKIP!r}")
    return policy


def raise_or_log(
    collectives: Collectives, policy: str, text: str, advice: str = "No rank makes this step."
) -> None:
    """Raise an error about gradients, or log on the first rank that all ranks skip the step.

    Args:
        collectives: the collectives of the ranks.
        policy: `RAISE` or `SKIP`, the same on all ranks.
        text: the result of `describe`.
        advice: the last sentence of the error.

    Raises:
        NonFiniteGradients: the policy is `RAISE`.
    """
    if policy == RAISE:
        raise NonFiniteGradients(f"{text}. {advice}")
    if collectives.is_first:
        _log.warning("%s. All ranks skip this step.", text)


def names_text(names: list[str]) -> str:
    """Return a text with the first names, such as "'a', 'b' and 2 more"."""
    if not names:
        return "none"
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def describe(
    collectives: Collectives, names: list[str], found: int, count: int, order: str = COMPUTED
) -> str:
    """Return a text about gradients that are not finite. A collective.

    Args:
        collectives: the collectives of the ranks.
        names: the names of this rank's gradients that are not finite.
        found: the number of ranks that have such gradients.
        count: the number of ranks that have not called `join`.
        order: the order of the names.
    """
    # Ranks in `join` take part in sums only.
    everyone = count == len(collectives.ranks)
    own = names_text(names)
    groups = group_by_text(collectives, own, "hvdkit.nonfinite") if everyone else ()
    return describe_groups(found, count, groups, order)


def describe_groups(found: int, count: int, groups: Sequence[str], order: str) -> str:
    """Return the text of `describe`, given the texts of the ranks. Not a collective."""
    text = f"gradients contain NaN or infinity on {found} of {count} ranks, before the reduction"
    return f"{text}. Their names, {order}: {'; '.join(groups)}" if groups else text
