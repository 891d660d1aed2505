"""The `LossScaleOptimizer` around an optimizer of Keras."""

from typing import Any


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers in a `LossScaleOptimizer`; an empty list for others."""
    found = []
    while (optimizer := getattr(optimizer, "inner_optimizer", None)) is not None:
        found.append(optimizer)
    return found


def innermost(optimizer: Any) -> Any:
    """Return the optimizer without its `LossScaleOptimizer`s."""
    return next(reversed(inner_optimizers(optimizer)), optimizer)


def outermost(model: Any, optimizer: Any) -> Any:
    """Return the optimizer whose variables contain the whole state of a given optimizer.

    With `mixed_float16`, `compile` puts the optimizer of the script into a `LossScaleOptimizer`,
    which has variables of its own.

    Args:
        model: a model.
        optimizer: an optimizer; None: the optimizer of `model.compile`.
    """
    compiled = getattr(model, "optimizer", None)
    is_inside = any(each is optimizer for each in inner_optimizers(compiled))
    return compiled if optimizer is None or is_inside else optimizer
