"""The variables of an optimizer that must be equal on all ranks, see `hvdkit.core.replicas`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hvdkit.core.bucketing import unique_names
from hvdkit.keras import backend

# Keras numbers layers of the same class, also within the name of a slot:
# `adam/sequential_1_dense_2_kernel_momentum`.
_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


class KerasReplicas:
    """The trained variables, and the optimizer's variables such as its learning rate.

    Args:
        variables: the variables whose gradients are reduced.
        optimizer: the optimizer.
    """

    def __init__(self, variables: Sequence[Any], optimizer: Any) -> None:
        others = _slots_of_others(optimizer, variables)
        state = [variable for variable in optimizer.variables if id(variable) not in others]
        # Counters and learning rates come first: a difference there explains all others.
        scalars = [variable for variable in state if not len(variable.shape)]
        slots = [variable for variable in state if len(variable.shape)]
        self._variables = [*scalars, *variables, *slots]
        #: The names of the variables. The numbers in these names may differ between ranks.
        self.names: Sequence[str] = [repr(variable.path) for variable in self._variables]
        #: Names without numbers, dtypes and shapes, as text.
        self.settings: Sequence[str] = [
            f"variable {_NUMBER.sub('', variable.path)}, {variable.dtype} {list(variable.shape)}"
            for variable in self._variables
        ]

    def digests(self) -> Sequence[int]:
        """Return a 64-bit digest of each variable."""
        return [xxhash.xxh64_intdigest(backend.read(v).data) for v in self._variables]

    def read(self, index: int) -> np.ndarray:
        """Return the bytes of a variable as a one-dimensional uint8 array."""
        return backend.read(self._variables[index])

    def write(self, index: int, data: np.ndarray) -> None:
        """Set a variable to the bytes of a result of `read`."""
        backend.write(self._variables[index], data)

    def values(self, index: int, data: np.ndarray) -> np.ndarray:
        """Return the bytes of a variable as its elements, as float64, int64 or complex128."""
        elements = data.view(backend.dtype_of(self._variables[index]))
        if elements.dtype.kind == "c":
            return elements.astype(np.complex128)
        # NumPy does not know that bfloat16 and float8 are floating-point types.
        return elements.astype(np.int64 if elements.dtype.kind in "iub" else np.float64)

    def save(self, indices: Sequence[int], path: Path) -> Path:
        """Write variables to a file for `numpy.load`, as bytes by their names. Return its path."""
        file = path.with_name(f"{path.name}.npz")
        keys = unique_names([self._variables[i].path for i in indices])
        contents: dict[str, Any] = {key: self.read(i) for key, i in zip(keys, indices, strict=True)}
        np.savez(file, **contents)
        return file


def _slots_of_others(optimizer: Any, variables: Sequence[Any]) -> set[int]:
    """Return the ids of the optimizer's slots of variables that are not among `variables`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = {id(variable) for variable in variables}
    others = [k for k, v in enumerate(inner._trainable_variables) if id(v) not in own]
    count = len(inner._trainable_variables)
    # `_variables` has all variables of the optimizer, also those that are no slots.
    lists = [
        each
        for name, each in vars(inner).items()
        if isinstance(each, list) and len(each) == count and name != "_variables"
    ]
    return {id(each[k]) for each in lists for k in others}
