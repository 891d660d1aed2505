"""NumPy arrays as tensors of a checkpoint."""

import numpy as np

from hvdkit.checkpoint.dtypes import CODES, code_of, numpy_dtype
from hvdkit.checkpoint.state import TensorSpec


class ArrayTensor:
    """`hvdkit.checkpoint.state.Tensor` of an array in host memory.

    Args:
        array: of bool, integers, floats or complex numbers. Checkpoints are little-endian.
        subject: the name of the array in errors.

    Raises:
        UsageError: tensor files cannot hold this dtype.
    """

    def __init__(self, array: np.ndarray, subject: str = "an array") -> None:
        name = array.dtype.name
        code = code_of(name if name in CODES else str(array.dtype), subject)
        self.array = array
        self._spec = TensorSpec(code, array.shape)

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        return self._spec

    def read(self, out: np.ndarray) -> None:
        """Copy the content, row-major."""
        dtype = self.array.dtype.newbyteorder("<")
        out.view(dtype).reshape(self.array.shape)[...] = self.array

    def memory(self) -> np.ndarray | None:
        """Return the array's own memory; None if it is not row-major and little-endian."""
        array = self.array
        if not array.flags.c_contiguous or array.dtype != array.dtype.newbyteorder("<"):
            return None
        return array.reshape(-1).view(np.uint8)

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Copy a piece of the content into the array, which must be contiguous."""
        flat = self.array.reshape(-1).view(np.uint8)
        flat[start : start + content.size] = content


def empty(spec: TensorSpec) -> np.ndarray:
    """Return a new, uninitialized array.

    Raises:
        UsageError: ml_dtypes is needed and not installed.
        ValueError: NumPy has no arrays of this shape.
    """
    return np.empty(spec.shape, numpy_dtype(spec.dtype))
