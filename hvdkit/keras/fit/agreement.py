"""The settings on which the ranks agree at the beginning of a `fit`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Equal on all ranks, even if their callbacks differ.

    Attributes:
        checks_loss: a callback on a rank reacts to a loss that is not finite.
        stops_at_batches: a callback on a rank may stop training after a batch.
        changes_at_end: `on_train_end` of a callback on a rank may change weights.
        compares_values: each rank has a wrapped optimizer that checks parameters.
        compares_unreduced: all wrapped optimizers of all ranks do so.
        reduces: each rank has a wrapped optimizer over these ranks, so they train one model.
        asks_step: each rank has a `train_step` of its own, which may reduce gradients itself.
    """

    checks_loss: bool
    stops_at_batches: bool
    changes_at_end: bool
    compares_values: bool
    compares_unreduced: bool
    reduces: bool
    asks_step: bool
