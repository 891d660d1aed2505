"""Convert trees to JSON and back without loss. Decoding runs no code from the file.

A value that JSON does not have is an object with one key that begins with `$`, called a mark:
`{"$tuple": [1, 2]}`, `{"$tensor": "layer.weight"}`, or `{"$array": "history"}` for a NumPy array.
If the file stores the tensor with another dtype, the mark also has the dtype of the tensor:
`{"$tensor": ["spectrum", "C128"]}`.
"""

from __future__ import annotations

import base64
import math
import operator
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdkit.checkpoint import arrays, dtypes
from hvdkit.checkpoint.arrays import ArrayTensor
from hvdkit.checkpoint.state import SmallTensor, TensorSpec, Tree
from hvdkit.errors import UsageError

#: The most levels of a tree. A deeper tree probably contains itself, or a hostile file was made to
#: overflow the stack.
MAX_DEPTH = 50

#: The largest array or small tensor that is written as text, in bytes.
MAX_ARRAY_BYTES = 1_000_000

# The most keys of a dict that have the same hash. Whole numbers from 0 to 2**61 - 2 all differ.
_MOST_EQUAL_HASHES = 100

_ALLOWED = (
    "None, bool, int, float, complex, str, bytes, lists, tuples, dicts, Counters, NumPy scalars "
    "and arrays"
)
_NUMPY_DTYPE = re.compile(r"[<|][biufc](?:1|2|4|8|16|32)")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
#: Integers with more bits are written in hexadecimal, because other JSON readers round them and
#: Python limits the length of decimal numbers.
_JSON_INT_BITS = 53


def encode(tree: Tree, subject: str, *, inline: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the JSON form of `tree` and the tensors in it.

    The name of a tensor (a `Tensor` or a `TensorSpec`) is the path to it: `layer.weight` for
    `{"layer.weight": T}`, `state.0.exp_avg` for `{"state": {0: {"exp_avg": T}}}`. If two paths give
    the same name, `~2` is appended to the second. Equal structures give equal names.

    `decode` returns a dict for an `OrderedDict`, and every other value with its type.

    Args:
        tree: see `hvdkit.checkpoint.state`.
        subject: the name of the tree in errors: `metadata` gives `metadata['x'] is a Foo`.
        inline: write the content of NumPy arrays into the JSON form. The arrays must be small.

    Returns:
        The JSON form, for `json.dumps`; name -> tensor, in the order of the tree, with an
        `ArrayTensor` for each array.

    Raises:
        UsageError: a value cannot be saved; the message has the path to it.
    """
    encoder = _Encoder(subject, inline)
    return encoder.encode(tree, ()), encoder.tensors


def decode(encoded: Any, tensors: Mapping[str, Any]) -> Tree:
    """Return the tree of a JSON form, with `tensors[name]` in place of each tensor.

    Args:
        encoded: the JSON form.
        tensors: name -> tensor, or name -> the `TensorSpec` in the file. For a `TensorSpec`, the
            tree gets a `TensorSpec` with the tensor's own dtype, or a new array for a NumPy array.

    Raises:
        ValueError: `encoded` is not a result of `encode`, or has a tensor that is not in `tensors`.
        UsageError: an array has a dtype of ml_dtypes, which is not installed.
    """
    # The most levels that `encode` writes: a mark, its list and a pair for each level of the tree.
    return _decode(encoded, tensors, 3 * MAX_DEPTH + 1)


class _Encoder:
    def __init__(self, subject: str, inline: bool) -> None:
        self.tensors: dict[str, Any] = {}
        # The last number of each name. In a hostile file, all tensors may have the same name.
        self._numbers: dict[str, int] = {}
        self._inline = inline
        self._subject = subject

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > MAX_DEPTH:
            raise UsageError(
                f"{self._subject} has more than {MAX_DEPTH} nested levels, or contains itself; "
                "reduce the nesting."
            )
        # Exact types: a subclass, such as an enum, would be restored as its base class.
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= _JSON_INT_BITS else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if kind is list:
            return [self.encode(v, (*path, i)) for i, v in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(v, (*path, i)) for i, v in enumerate(value)]}
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}
        if kind is dict or kind is OrderedDict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(v, (*path, key)) for key, v in value.items()}
            return {"$dict": self._pairs(value, path)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": [self.encode(part, path) for part in (value.real, value.imag)]}
        if isinstance(value, np.generic):
            return self._numpy(value, path)
        if kind is SmallTensor:
            self._check_size("a tensor", len(value.content), path)
            content = base64.b64encode(value.content).decode()
            return {"$small": [value.spec.dtype, list(value.spec.shape), content]}
        if isinstance(value, TensorSpec) or isinstance(getattr(value, "spec", None), TensorSpec):
            return self._tensor(value, path)
        if kind is np.ndarray and self._inline:
            return self._array(value, path)
        if kind is np.ndarray:
            return self._tensor(ArrayTensor(value, f"the array {self._where(path)}"), path)
        raise UsageError(
            f"{self._where(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            f"cannot hold; expected {_ALLOWED}.{_advice(value, path)}"
        )

    def _tensor(self, tensor: Any, path: tuple[Any, ...]) -> Any:
        name, dtype = self._name(tensor, path), spec_of(tensor).dtype
        mark = "$array" if isinstance(tensor, ArrayTensor) else "$tensor"
        return {mark: [name, dtype] if dtype in dtypes.PAIRS else name}

    def _pairs(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> list[list[Any]]:
        pairs = []
        for key, content in value.items():
            if isinstance(key, np.generic) or not _is_plain(key):
                raise UsageError(
                    f"{self._where(path)} has a key {key!r} of type {type(key).__name__}; expected "
                    "str, int, float, bool, None or tuples of them."
                )
            pairs.append([self.encode(key, (*path, key)), self.encode(content, (*path, key))])
        return pairs

    def _numpy(self, value: np.generic, path: tuple[Any, ...]) -> Any:
        dtype = self._little_endian(value.dtype, "scalar", path)
        content = np.asarray(value).astype(dtype).tobytes()
        return {"$numpy": [dtype.str, base64.b64encode(content).decode()]}

    def _little_endian(self, dtype: np.dtype, kind: str, path: tuple[Any, ...]) -> np.dtype:
        stored = dtype.newbyteorder("<")
        if not _NUMPY_DTYPE.fullmatch(stored.str):
            raise UsageError(
                f"{self._where(path)} is a NumPy {kind} of dtype {dtype}; expected a bool, "
                "integer, float or complex one."
            )
        return stored

    def _array(self, value: np.ndarray, path: tuple[Any, ...]) -> Any:
        dtype = self._little_endian(value.dtype, "array", path)
        self._check_size("an array", value.nbytes, path)
        content = base64.b64encode(value.astype(dtype).tobytes()).decode()
        return {"$inline": [dtype.str, list(value.shape), content]}

    def _check_size(self, kind: str, size: int, path: tuple[Any, ...]) -> None:
        if size > MAX_ARRAY_BYTES:
            raise UsageError(
                f"{self._where(path)} is {kind} of {size} bytes; expected at most "
                f"{MAX_ARRAY_BYTES} bytes here."
            )

    def _name(self, tensor: Any, path: tuple[Any, ...]) -> str:
        plain = ".".join(map(str, path)) or "tensor"
        # safetensors reserves this name.
        number = self._numbers.get(plain, 1)
        name = plain if number == 1 else f"{plain}~{number}"
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{plain}~{number}"
        self._numbers[plain] = number
        self.tensors[name] = tensor
        return name

    def _where(self, path: tuple[Any, ...]) -> str:
        return self._subject + "".join(f"[{key!r}]" for key in path)


def spec_of(tensor: Any) -> TensorSpec:
    """Return the dtype and shape of a tensor that `encode` returned."""
    spec: TensorSpec = tensor if isinstance(tensor, TensorSpec) else tensor.spec
    return spec


def _advice(value: Any, path: tuple[Any, ...]) -> str:
    """Return advice on how to save a value of an unsupported type; "" if there is no way."""
    if isinstance(value, np.random.Generator):
        return " Give it to the checkpointer as generators={...}, or its bit_generator.state here."
    if callable(getattr(value, "numpy", None)):
        return f" Give a NumPy array instead, such as {path[-1] if path else 'tensor'}.numpy()."
    return ""


def _is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_plain(item) for item in key)
    return key is None or type(key) in (bool, int, float, str)


def _decode(value: Any, tensors: Mapping[str, Any], levels: int) -> Tree:
    if levels < 0:
        raise ValueError(f"more than {MAX_DEPTH} nested levels")
    if isinstance(value, list):
        return [_decode(item, tensors, levels - 1) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, tensors, levels - 1) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"a mark with other keys: {_shortened(list(value))}")
    ((mark, content),) = value.items()
    try:
        if mark == "$tensor":
            return _found(content, tensors)
        if mark == "$array":
            found = _found(content, tensors)
            return arrays.empty(found) if isinstance(found, TensorSpec) else found
        if mark in ("$tuple", "$dict", "$counter"):
            items = _decode(_list(content), tensors, levels - 1)
            if mark == "$tuple":
                return tuple(items)
            return _dict(items) if mark == "$dict" else Counter(_dict(items))
        return _SCALARS[mark](content)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"wrong content of {mark}: {_shortened(content)} ({error})") from error


def _found(content: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tensor of a mark, with the dtype in the mark."""
    if isinstance(content, str):
        return tensors[content]
    name, dtype = content
    found = tensors[name]
    if not isinstance(found, TensorSpec) or found.dtype == dtype:
        return found
    return dtypes.from_file(found, dtype)


def _dict(pairs: list[Any]) -> dict[Any, Any]:
    """Return a dict. Its keys may be numbers, so a hostile file can choose their hashes.

    Python's dicts take quadratic time for many keys of equal hash.
    """
    hashes = sorted(hash(key) for key, _ in pairs)
    if any(map(operator.eq, hashes, hashes[_MOST_EQUAL_HASHES:])):
        raise ValueError(f"more than {_MOST_EQUAL_HASHES} keys have the same hash")
    return dict(pairs)


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("expected a list")
    return content


def _bytes(content: Any) -> bytes:
    return base64.b64decode(content, validate=True)


def _complex(content: Any) -> complex:
    real, imaginary = (_decode(part, {}, 1) for part in _list(content))
    return complex(real, imaginary)


def _numpy_scalar(content: Any) -> np.generic:
    dtype, data = content
    # Refuse dtypes that NumPy reads as Python objects.
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype {dtype!r}")
    (scalar,) = np.frombuffer(_bytes(data), dtype)
    return scalar


def _array(content: Any) -> np.ndarray:
    dtype, shape, data = content
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype {dtype!r}")
    return np.frombuffer(bytearray(_bytes(data)), dtype).reshape(_shape(shape))


def _small_tensor(content: Any) -> SmallTensor:
    dtype, shape, data = content
    found = SmallTensor(TensorSpec(dtype, _shape(shape)), _bytes(data))
    if dtypes.ELEMENT_BYTES[dtype] * math.prod(found.spec.shape) != len(found.content):
        raise ValueError(f"a tensor {dtype}{shape} has {len(found.content)} bytes")
    return found


def _shape(content: Any) -> tuple[int, ...]:
    if not all(type(length) is int and length >= 0 for length in _list(content)):
        raise ValueError(f"shape {content!r}")
    return tuple(content)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": lambda content: _NOT_FINITE[content],
    "$bytes": _bytes,
    "$complex": _complex,
    "$numpy": _numpy_scalar,
    "$inline": _array,
    "$small": _small_tensor,
}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
