"""The dtypes that a checkpoint holds: what safetensors, frameworks and NumPy call them."""

import numpy as np

from hvdkit.errors import UsageError

_DTYPES = (
    # of safetensors, of frameworks and NumPy, bytes of an element
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
)

#: safetensors' name -> what PyTorch, TensorFlow and NumPy call it, those that have it.
NAMES = {code: name for code, name, _ in _DTYPES}
#: What frameworks and NumPy call it -> safetensors' name.
CODES = {name: code for code, name, _ in _DTYPES}
#: safetensors' name -> bytes of one element.
ELEMENT_BYTES = {code: size for code, _, size in _DTYPES}


def numpy_dtype(code: str) -> np.dtype:
    """NumPy's dtype of what safetensors calls `code`; where NumPy has none, that of ml_dtypes."""
    name = NAMES[code]
    try:
        return np.dtype(name)
    except TypeError:
        # Not a requirement of hvdkit's: whoever has such arrays, Keras or TensorFlow, brings it.
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def code_of(name: str, what: str) -> str:
    """What safetensors calls a dtype.

    Args:
        name: what frameworks or NumPy call it.
        what: what is of this dtype, for the error.

    Raises:
        UsageError: no file of tensors has such a dtype.
    """
    if name not in CODES:
        raise UsageError(f"{what} is of {name}: expected one of {', '.join(CODES)}")
    return CODES[name]
