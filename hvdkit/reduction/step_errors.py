"""Errors that all ranks raise together when a step cannot be made."""

from hvdkit.errors import HvdkitError


class PassesDiffer(HvdkitError):
    """Ranks are not at the same point of a step.

    They have made different numbers of backward passes, have wrapped different numbers of
    optimizers, or need different gradients.
    """


class BackwardFailed(HvdkitError):
    """The backward pass of a rank raised, so no rank can use the gradients of this round."""


class GradientsChanged(HvdkitError):
    """Gradients that should be equal on all ranks were changed, and may differ."""
