"""The variables of a model and its optimizers that must be equal on all ranks."""

from collections.abc import Sequence
from typing import Any

from hvdkit.agreement.differences import Replicas
from hvdkit.keras import backend
from hvdkit.keras_variables.variable_replicas import state_of, variable_replicas


def keras_replicas(variables: Sequence[Any], *optimizers: Any) -> Replicas:
    """Return variables, and the variables of optimizers, such as learning rates.

    Args:
        variables: the variables.
        optimizers: the optimizers. Slots of other trained variables are omitted.
    """
    state = [each for optimizer in optimizers for each in state_of(optimizer, variables)]
    named = ([(str(v.path), v.value) for v in given] for given in (variables, state))
    return variable_replicas(backend.access, *named)


def has_begun(optimizer: Any) -> bool:
    """Return whether a Keras optimizer has made a step."""
    return bool(optimizer.built) and int(optimizer.iterations) > 0
