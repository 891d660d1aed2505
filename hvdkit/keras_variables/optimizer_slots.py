"""The variables of a Keras optimizer, and its slots.

Slots are the variables that it keeps for one trained variable each. For example, Adam keeps a
momentum and a velocity for each weight.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from hvdkit.keras_variables.loss_scaling import inner_optimizers, innermost


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the whole state of a Keras optimizer: also variables that Keras does not count.

    Keras never counts the variables of a learning rate schedule. A `LossScaleOptimizer` builds the
    optimizer in it without tracking attributes. So the variables of both lack those that the inner
    optimizer creates without `add_variable`, such as the product of momentum factors of Nadam. All
    of them follow the others.
    """
    found = {id(variable): variable for variable in optimizer.variables}
    counted = set(found)
    for each in (optimizer, *inner_optimizers(optimizer).values()):
        if not {id(variable) for variable in each.variables} <= counted:
            continue  # its state is not a part of the state of the outer optimizer
        trained = {id(variable) for variable in getattr(each, "_trainable_variables", None) or ()}
        schedule = getattr(each, "_learning_rate", None)
        of_schedule = {} if _is_variable(schedule) else getattr(schedule, "__dict__", {})
        for value in [*vars(each).values(), *of_schedule.values()]:
            if isinstance(value, Mapping):
                value = list(value.values())
            for variable in value if isinstance(value, list | tuple) else [value]:
                if _is_variable(variable) and id(variable) not in trained:
                    found.setdefault(id(variable), variable)
    return list(found.values())


def _is_variable(value: Any) -> bool:
    # This layer must not import Keras.
    return hasattr(value, "path") and hasattr(value, "assign")


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
