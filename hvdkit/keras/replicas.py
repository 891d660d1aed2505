"""The variables of a model and its optimizer that must be equal on all ranks.

`hvdkit.keras.distribution` passes them to the comparisons of `hvdkit.core.replicas`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.core.variable_replicas import VariableReplicas, state_of
from hvdkit.keras import backend


class _Access:
    """Implements `VariableAccess` for `keras.Variable`s."""

    def name_of(self, variable: Any) -> str:
        return str(variable.path)

    def dtype_of(self, variable: Any) -> np.dtype:
        return backend.dtype_of(variable)

    def read(self, variable: Any) -> np.ndarray:
        return backend.read(variable)

    def write(self, variable: Any, content: np.ndarray) -> None:
        backend.write(variable, content)

    def digests(self, variables: Sequence[Any]) -> list[int]:
        return backend.digests(variables)


def keras_replicas(variables: Sequence[Any], optimizer: Any) -> VariableReplicas:
    """Return the trained variables, and the optimizer's variables such as its learning rate.

    Args:
        variables: the variables whose gradients are reduced.
        optimizer: the optimizer.
    """
    return VariableReplicas(_Access(), variables, state_of(optimizer, variables))


def steps_of(optimizer: Any) -> int:
    """Return the number of steps that a Keras optimizer has made."""
    return int(optimizer.iterations) if optimizer.built else 0
