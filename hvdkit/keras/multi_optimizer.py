"""The optimizers in a `keras.optimizers.MultiOptimizer`, each of which updates some variables."""

from typing import Any

import keras

from hvdkit.keras_variables.loss_scaling import innermost


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Return the optimizers in a `MultiOptimizer`; an empty list for others.

    A `MultiOptimizer` that chooses optimizers with a function has none before it is built.
    """
    found = getattr(innermost(optimizer), "optimizers", None)
    return [each for each in found or () if isinstance(each, keras.optimizers.Optimizer)]


def updating_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that update variables, and so have a learning rate and clip gradients.

    These are the optimizers in a `MultiOptimizer`, otherwise the innermost optimizer.
    """
    return optimizers_inside(optimizer) or [innermost(optimizer)]
