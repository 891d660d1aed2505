"""The dtypes of a checkpoint, with their names in safetensors, in frameworks and in NumPy."""

import numpy as np

from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError

_DTYPES = (
    # name in safetensors, name in frameworks and NumPy, bytes per element
    ("BOOL", "bool", 1),
    ("U8", "uint8", 1),
    ("I8", "int8", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E8M0", "float8_e8m0fnu", 1),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
    ("I16", "int16", 2),
    ("U16", "uint16", 2),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("I32", "int32", 4),
    ("U32", "uint32", 4),
    ("F32", "float32", 4),
    ("I64", "int64", 8),
    ("U64", "uint64", 8),
    ("F64", "float64", 8),
    ("C64", "complex64", 8),
    # Not in safetensors. A file holds pairs of real and imaginary parts instead.
    ("C32", "complex32", 4),
    ("C128", "complex128", 16),
)

#: Dtypes that safetensors lacks -> the dtype of the real and imaginary parts in a file, which are
#: its last axis.
PAIRS = {"C32": "F16", "C128": "F64"}

#: safetensors' name -> the name in PyTorch, TensorFlow and NumPy.
NAMES = {code: name for code, name, _ in _DTYPES}
#: Name in frameworks and NumPy -> safetensors' name.
CODES = {name: code for code, name, _ in _DTYPES}
#: safetensors' name -> bytes of one element.
ELEMENT_BYTES = {code: size for code, _, size in _DTYPES}


def numpy_dtype(code: str) -> np.dtype:
    """Return NumPy's dtype for the safetensors name `code`, or that of ml_dtypes.

    Raises:
        UsageError: ml_dtypes is not installed, or has no such dtype.
    """
    name = NAMES[code]
    try:
        return np.dtype(name)
    except TypeError:
        # hvdkit does not require ml_dtypes. Keras and TensorFlow install it, and make such arrays.
        try:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"an array is of {name}, which NumPy alone does not have: install ml_dtypes"
            ) from error


def code_of(name: str, what: str) -> str:
    """Return safetensors' name of a dtype.

    Args:
        name: its name in frameworks or NumPy.
        what: the object with this dtype, for the error.

    Raises:
        UsageError: tensor files cannot hold this dtype.
    """
    if name not in CODES:
        raise UsageError(f"{what} is of {name}: expected one of {', '.join(CODES)}")
    return CODES[name]


def in_file(spec: TensorSpec) -> TensorSpec:
    """Return the dtype and shape of a tensor in a safetensors file."""
    if spec.dtype not in PAIRS:
        return spec
    return TensorSpec(PAIRS[spec.dtype], (*spec.shape, 2))


def from_file(spec: TensorSpec, dtype: str) -> TensorSpec:
    """Return the dtype and shape of a tensor that a file holds as pairs.

    Args:
        spec: the dtype and shape in the file.
        dtype: the dtype of the tensor, one of `PAIRS`.

    Raises:
        ValueError: the file holds something else.
    """
    if dtype not in PAIRS:
        raise ValueError(
            f"the dtype is {dtype!r:.40}: expected {spec.dtype} as in the file, or one of "
            f"{', '.join(PAIRS)}"
        )
    found = TensorSpec(dtype, spec.shape[:-1])
    if in_file(found) != spec:
        raise ValueError(
            f"the file has {spec.dtype} {list(spec.shape)}: expected {PAIRS[dtype]} [..., 2], the "
            f"real and imaginary parts of {dtype}"
        )
    return found
