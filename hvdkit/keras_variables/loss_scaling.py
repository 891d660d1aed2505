"""Optimizers of Keras around other optimizers, such as a `LossScaleOptimizer`."""

from collections.abc import Mapping
from typing import Any

from hvdkit.errors import UsageError


def inner_optimizers(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers in an optimizer, and those in them, by the path of attributes.

    An optimizer keeps others as attributes of any name, or in lists, tuples and dicts in these
    attributes. Examples are a `LossScaleOptimizer`, a `MultiOptimizer`, and a user's own Lookahead
    or SWA. All ranks get the same order, because it is that in which the attributes were assigned.
    """
    found: dict[str, Any] = {}
    _collect("", optimizer, found, {id(optimizer)})
    return found


def _collect(prefix: str, holder: Any, found: dict[str, Any], visited: set[int]) -> None:
    """Add the optimizers in an optimizer or a container to `found`."""
    if isinstance(holder, Mapping):
        values = list(holder.items())
    elif isinstance(holder, list | tuple):
        values = list(enumerate(holder))
    else:
        # TensorFlow's lists of what it tracks have the same objects.
        attributes = getattr(holder, "__dict__", {}).items()
        values = [(name, value) for name, value in attributes if not name.startswith("_self_")]
    for name, value in values:
        # This layer must not import Keras.
        is_optimizer = hasattr(type(value), "apply_gradients")
        if not (is_optimizer or isinstance(value, Mapping | list | tuple)) or id(value) in visited:
            continue
        visited.add(id(value))
        if is_optimizer:
            found[f"{prefix}{name}"] = value
        _collect(f"{prefix}{name}.", value, found, visited)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer without its `LossScaleOptimizer`s."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def outermost(model: Any, optimizer: Any) -> Any:
    """Return the optimizer whose variables contain the whole state of a given optimizer.

    With `mixed_float16`, `compile` puts the optimizer of the script into a `LossScaleOptimizer`,
    which has variables of its own.

    Args:
        model: a model.
        optimizer: an optimizer; None: the optimizer of `model.compile`.
    """
    compiled = getattr(model, "optimizer", None)
    is_inside = any(each is optimizer for each in inner_optimizers(compiled).values())
    return compiled if optimizer is None or is_inside else optimizer


def check_compiled(model: Any, optimizer: Any) -> None:
    """Check that an elastic state contains the state of the optimizer of `model.compile`.

    Args:
        model: the model of the state.
        optimizer: the optimizer of the state; None: the state has no optimizer.

    Raises:
        UsageError: the script has compiled the model again.
    """
    compiled = getattr(model, "optimizer", None)
    # An optimizer that has not trained has no state. `compile` always makes one.
    if compiled is not optimizer and getattr(compiled, "built", False):
        own = "no optimizer" if optimizer is None else f"another {type(optimizer).__name__}"
        raise UsageError(
            f"the model is compiled with a {type(compiled).__name__} that is not in the elastic "
            f"state, which has {own}: a restart would lose what this optimizer has learned. Call "
            f"model.compile before the state is made, and make a new state after each compile"
        )
