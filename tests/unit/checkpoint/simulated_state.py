"""Parts of a checkpoint for framework-free tests: NumPy arrays and plain values."""

import numpy as np

from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError

CODES = {"float32": "F32", "int64": "I64", "uint8": "U8"}


class ArrayTensor:
    """`hvdkit.checkpoint.state.Tensor` of an array."""

    def __init__(self, array):
        self.array = array

    @property
    def spec(self):
        return TensorSpec(CODES[self.array.dtype.name], self.array.shape)

    def read(self, out):
        out[:] = self.array.reshape(-1).view(np.uint8)

    def memory(self):
        return self.array.reshape(-1).view(np.uint8)

    def write(self, content, start=0):
        self.array.reshape(-1).view(np.uint8)[start : start + len(content)] = content


class Arrays:
    """A `StatefulItem` of arrays by name, and of a value."""

    def __init__(self, value=0, **arrays):
        self.arrays = arrays
        self.value = value
        self.adopted = 0

    def save(self):
        return {"value": self.value} | {k: ArrayTensor(a) for k, a in self.arrays.items()}

    def plan_restore(self, tree):
        own = {k: ArrayTensor(a).spec for k, a in self.arrays.items()}
        saved = {k: v for k, v in tree.items() if isinstance(v, TensorSpec)}
        if own != saved:
            raise UsageError(f"the checkpoint has {saved}, and here is {own}")
        return tree | {k: ArrayTensor(a) for k, a in self.arrays.items()}

    def restore(self, tree):
        self.value = tree["value"]
        self.adopted += 1


class Own:
    """A `RankItem`: a value."""

    def __init__(self, value):
        self.value = value

    def save(self):
        return self.value

    def restore(self, tree):
        self.value = tree
