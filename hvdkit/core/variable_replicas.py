"""The variables of a Keras optimizer that must be equal on all ranks, see `hvdkit.core.replicas`.

The adapters for Keras and TensorFlow use `VariableReplicas`. They read and write variables as NumPy
arrays. A slot is a variable that an optimizer keeps for one trained variable, such as a momentum.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdkit.core.bucketing import unique_names, without_model_names
from hvdkit.core.optimizer_slots import slots_of
from hvdkit.core.replicas import SMALL

# Keras numbers layers of the same class, also within the name of a slot:
# `adam/sequential_1_dense_2_kernel_momentum`.
_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


class VariableAccess(Protocol):
    """The access of an adapter to variables."""

    def name_of(self, variable: Any) -> str:
        """Return the name of a variable."""
        ...

    def dtype_of(self, variable: Any) -> np.dtype:
        """Return the dtype of a variable, for NumPy."""
        ...

    def read(self, variable: Any) -> np.ndarray:
        """Return the content of a variable as a one-dimensional uint8 array."""
        ...

    def write(self, variable: Any, content: np.ndarray) -> None:
        """Set a variable to a result of `read`."""
        ...

    def digests(self, variables: Sequence[Any]) -> list[int]:
        """Return a 64-bit digest of each variable."""
        ...


class VariableReplicas:
    """`Replicas` of trained variables, and of the variables of optimizers.

    Args:
        access: reads and writes variables.
        variables: the trained variables that must be equal.
        state: the variables of optimizers that must be equal, such as learning rates.
    """

    def __init__(
        self, access: VariableAccess, variables: Sequence[Any], state: Sequence[Any]
    ) -> None:
        # Counters and learning rates come first: if they differ, trained variables differ, too.
        scalars = [variable for variable in state if not len(variable.shape)]
        slots = [variable for variable in state if len(variable.shape)]
        self._access = access
        self._parameters = range(len(scalars), len(scalars) + len(variables))
        self._variables = [*scalars, *variables, *slots]
        paths = [access.name_of(variable) for variable in self._variables]
        #: The names of the variables. They contain numbers of layers, which differ between ranks if
        #: a rank has made other models before, and the name of a model, unless a file was loaded.
        self.names: Sequence[str] = [repr(path) for path in paths]
        plain = [_NUMBER.sub("", path) for path in paths]
        for index in self._parameters:
            plain[index] = without_model_names(plain[index])
        for index in range(self._parameters.stop, len(plain)):
            # Such as `adam/sequential_dense_kernel_momentum`; the order says of which variable.
            plain[index] = plain[index].rsplit("_", 1)[-1]
        #: The names without the parts that may differ.
        self.settings: Sequence[str] = [
            f"variable {name}, {access.dtype_of(v)} {list(v.shape)}"
            for name, v in zip(plain, self._variables, strict=True)
        ]

    def digests(self) -> Sequence[int]:
        """Return a 64-bit digest of each variable."""
        return self._access.digests(self._variables)

    def small(self) -> Sequence[int]:
        """Return the indices of a few trained variables of floats, the smallest first."""
        sizes = {
            index: math.prod(self._variables[index].shape)
            for index in self._parameters
            if self._access.dtype_of(self._variables[index]).kind not in "iubc"
        }
        filled = [index for index in sizes if sizes[index]]
        return sorted(filled, key=lambda index: sizes[index])[:SMALL]

    def read(self, index: int) -> np.ndarray:
        """Return the bytes of a variable as a one-dimensional uint8 array."""
        return self._access.read(self._variables[index])

    def write(self, index: int, data: np.ndarray) -> None:
        """Set a variable to the bytes of a result of `read`."""
        self._access.write(self._variables[index], data)

    def values(self, index: int, data: np.ndarray) -> np.ndarray:
        """Return the bytes of a variable as its elements, as float64, int64 or complex128."""
        # A copy, because `data` may be unaligned.
        elements = data.copy().view(self._access.dtype_of(self._variables[index]))
        if elements.dtype.kind == "c":
            return elements.astype(np.complex128)
        # NumPy does not know that bfloat16 and float8 are floating-point types.
        return elements.astype(np.int64 if elements.dtype.kind in "iub" else np.float64)

    def save(self, indices: Sequence[int], path: Path) -> Path:
        """Write variables to an .npz file: name -> uint8 array of the bytes. Return its path."""
        file = path.with_name(f"{path.name}.npz")
        keys = unique_names([self._access.name_of(self._variables[i]) for i in indices])
        contents: dict[str, Any] = {key: self.read(i) for key, i in zip(keys, indices, strict=True)}
        np.savez(file, **contents)
        return file


def state_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variables of a Keras optimizer, without the slots of other trained variables.

    Args:
        optimizer: the optimizer, a `LossScaleOptimizer` or a `MultiOptimizer`.
        variables: the trained variables whose slots are wanted.
    """
    own = {id(variable) for variable in variables}
    excluded = {id(slot) for variable, slot in slots_of(optimizer) if id(variable) not in own}
    return [variable for variable in optimizer.variables if id(variable) not in excluded]
