"""safetensors files: written in one pass, and checked by the safetensors library when read.

Format (https://github.com/huggingface/safetensors#format): eight bytes with the length of the
header, the header in JSON, and the contents of the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.chunks import ReadInto
from hvdkit.checkpoint.dtypes import ELEMENT_BYTES, in_file
from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError

#: The content of a tensor: contiguous, uint8, `nbytes` long; or a function that returns it.
Content = np.ndarray | Callable[[], np.ndarray]

#: Larger headers are neither written nor read. A header of 100,000 tensors takes about 12 MB.
MAX_HEADER_BYTES = 50_000_000

_LENGTH_BYTES = 8
_FIRST_BYTES = 1_000_000
# The contents begin at a multiple of this.
_ALIGNMENT = 64


def nbytes(spec: TensorSpec) -> int:
    """Return the size of a tensor's content in bytes.

    Raises:
        UsageError: safetensors does not have the dtype.
    """
    if spec.dtype not in ELEMENT_BYTES:
        raise UsageError(
            f"a tensor's dtype is {spec.dtype}; expected one of {', '.join(ELEMENT_BYTES)}."
        )
    return ELEMENT_BYTES[spec.dtype] * math.prod(spec.shape)


def spans(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[int, int]]:
    """Return the offsets where each tensor's content begins and ends, from the header's end on."""
    found, end = {}, 0
    for name, spec in specs.items():
        found[name] = (end, end + nbytes(spec))
        end = found[name][1]
    return found


def serialize(tensors: Mapping[str, tuple[TensorSpec, Content]]) -> Iterator[memoryview]:
    """Return the content of a file with `tensors`, piece by piece, without copying the tensors.

    Args:
        tensors: name -> dtype and shape, and content: contiguous, uint8.

    Raises:
        UsageError: safetensors does not support a dtype or name, or a content has another size.
    """
    # Wide elements first, as the library does, so that each tensor is aligned in a mapped file.
    names = sorted(tensors, key=lambda name: -ELEMENT_BYTES.get(tensors[name][0].dtype, 0))
    yield memoryview(header({name: tensors[name][0] for name in names}))
    for name in names:
        spec, given = tensors[name]
        content = given() if callable(given) else given
        if content.dtype != np.uint8 or content.size != nbytes(spec) or not content.data.contiguous:
            raise UsageError(
                f"the content of tensor {name} is {content.size} x {content.dtype}; expected "
                f"{nbytes(spec)} contiguous bytes (uint8) for {spec.dtype} {list(spec.shape)}."
            )
        if content.size:
            yield content.reshape(-1).data


def header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the part of a file that precedes the tensors' contents.

    Args:
        specs: name -> dtype and shape, in the order of the contents.
        metadata: name -> text, stored in the header.

    Raises:
        UsageError: safetensors does not support a dtype or name, or there are too many tensors.
    """
    ends = spans(specs)
    # Some tools open only files whose header names a framework.
    entries: dict[str, Any] = {"__metadata__": {**(metadata or {}), "format": "pt"}}
    for name, spec in specs.items():
        stored = in_file(spec)
        entries[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": list(ends[name]),
        }
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a tensor's name is not Unicode text ({error}); give it another name."
        ) from error
    # Aligned, so that no element lies in two chunks.
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"the names and shapes of {len(specs)} tensors take {len(text)} bytes; expected at "
            f"most {MAX_HEADER_BYTES}. Pass several models or optimizers in a dict."
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(read_into: ReadInto, size: int, name: str) -> tuple[int, dict[str, TensorSpec]]:
    """Read the header of a file of `size` bytes.

    Args:
        read_into: reads the file.
        size: the size of the file in bytes.
        name: the name of the file, for errors.

    Returns:
        The offset where the contents begin; name -> dtype and shape, in the order of the contents.

    Raises:
        Damaged: it is not a valid safetensors file.
    """
    if size < _LENGTH_BYTES:
        raise Damaged(name, f"it has {size} bytes; a safetensors file has {_LENGTH_BYTES} or more")
    # Enough for most headers. Each read reads and checks a whole chunk.
    raw = np.empty(min(size, _FIRST_BYTES), np.uint8)
    read_into(raw, 0)
    length = int.from_bytes(raw[:_LENGTH_BYTES].tobytes(), "little")
    if length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise Damaged(
            name,
            f"its header would have {length} bytes; expected at most {MAX_HEADER_BYTES} and no "
            "more than the file has",
        )
    if _LENGTH_BYTES + length > raw.size:
        raw = np.empty(_LENGTH_BYTES + length, np.uint8)
        read_into(raw, 0)
    raw = raw[: _LENGTH_BYTES + length]
    _check_header(raw, size, name)
    entries = manifest.parse_json(name, raw[_LENGTH_BYTES:].tobytes())
    entries.pop("__metadata__", None)
    specs = {
        tensor: TensorSpec(entry["dtype"], tuple(entry["shape"]))
        for tensor, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    }
    unknown = {spec.dtype for spec in specs.values()} - ELEMENT_BYTES.keys()
    if unknown:
        raise Damaged(name, f"it has tensors of dtype {', '.join(sorted(unknown))}")
    begin = _LENGTH_BYTES + length
    if begin + sum(map(nbytes, specs.values())) != size:
        raise Damaged(name, "the sizes of its tensors do not add up to the size of the file")
    return begin, specs


def _check_header(header: np.ndarray, size: int, name: str) -> None:
    """Let the library check the header for gaps, overlaps and sizes that do not fit.

    The library opens files only. So write the header to a file in memory, with a hole for the
    tensors.
    """
    descriptor = os.memfd_create("hvdkit-header", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, header.data)
        os.ftruncate(descriptor, size)
        with safe_open(f"/proc/self/fd/{descriptor}", framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise Damaged(name, f"it is not a valid safetensors file ({error})") from error
    finally:
        os.close(descriptor)
