"""Policies for gradients that contain NaN or infinity before they are reduced.

The sum over the ranks makes a gradient NaN on every rank. So the ranks look at their gradients
before the sum, to name the rank and the parameter that a NaN came from.
"""

from hvdkit.errors import HvdkitError, UsageError

#: Do not look at the gradients.
IGNORE = "ignore"
#: Raise `NonFiniteGradients` on every rank.
RAISE = "raise"
#: Skip the step on every rank, and log it.
SKIP = "skip"

# Gradients that an error names for each rank.
_SHOWN = 3


class NonFiniteGradients(HvdkitError):
    """The gradients of a rank contain NaN or infinity, so no rank can use the reduced gradients."""


def check_policy(policy: str) -> str:
    """Return `policy`.

    Raises:
        UsageError: it is not one of the three.
    """
    if policy not in (IGNORE, RAISE, SKIP):
        raise UsageError(f"on_nonfinite is {policy!r}: expected {IGNORE!r}, {RAISE!r} or {SKIP!r}")
    return policy


def names_text(names: list[str]) -> str:
    """Return a text with the first names, such as "'a', 'b' and 2 more"."""
    if not names:
        return "none"
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
