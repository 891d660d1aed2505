"""The slots of a Keras optimizer: the variables that it keeps for one trained variable each.

For example, Adam keeps a momentum and a velocity for each weight.
"""

from collections.abc import Iterator
from typing import Any

from hvdkit.keras_variables.loss_scaling import innermost


def slots_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each trained variable with each of its slots.

    Args:
        optimizer: an optimizer that is built, also a `LossScaleOptimizer` or a `MultiOptimizer`.
    """
    inner = innermost(optimizer)
    # The slots of a `MultiOptimizer` are those of its optimizers.
    for each in [inner, *(getattr(inner, "optimizers", None) or ())]:
        trained = each._trainable_variables
        for name, values in vars(each).items():
            # `_variables` has all variables of the optimizer, also those that are no slots.
            if not isinstance(values, list) or len(values) != len(trained) or name == "_variables":
                continue
            for variable, slot in zip(trained, values, strict=True):
                # An optimizer may keep no slot for some variables.
                if slot is not variable and hasattr(slot, "shape"):
                    yield variable, slot
