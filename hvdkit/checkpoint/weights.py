"""Export the weights of a model as safetensors files, for tools without hvdkit.

`export_file` writes one file, for `safetensors.torch.load_model`. `export_folder` writes a folder
for Hugging Face's transformers: one file, or several files and an index that maps each tensor to
its file. The tensors are copied from the checkpoint in pieces, so memory does not grow with their
size. No framework is needed.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.checkpoint import tensors, tree
from hvdkit.checkpoint.dtypes import NAMES, PAIRS
from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.exporting import exporting
from hvdkit.checkpoint.manifest import STATE
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError

_log = logging.getLogger(__name__)

#: Key in a model's tree. Its value is: additional name of a tensor, such as that of a shared
#: weight -> the name under which the tensor is saved.
TIED = "(tied)"
#: The size of a file in bytes, as in transformers.
SHARD_BYTES = 5_000_000_000

_COPIED_BYTES = 4_000_000


@dataclass(frozen=True)
class _Weights:
    """The tensors of a model to export.

    Attributes:
        part: the name of the part in the checkpoint.
        names: name of a tensor in the checkpoint -> its exported name, in the order of the
            checkpoint's file. Only tensors to export.
        tied: additional name of a tensor -> its exported name.
    """

    part: str
    names: Mapping[str, str]
    tied: Mapping[str, str]


def export_file(checkpoint: OpenCheckpoint, target: Path) -> None:
    """Write the weights of a model as one safetensors file.

    A tensor with several names is written once; the other names are in the metadata, as
    `safetensors.torch.save_model` writes them.

    Args:
        checkpoint: of one model.
        target: the file. An existing file is replaced once the new one is complete.

    Raises:
        UsageError: the checkpoint has no model or several, or safetensors does not have a dtype.
        HvdkitError: the file cannot be written.
    """
    weights = _weights(checkpoint)
    with exporting(target) as beside:
        stream = _Copied(checkpoint, weights)
        stream.copy_to(beside, list(weights.names), weights.tied)
        stream.finish()


def export_folder(checkpoint: OpenCheckpoint, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of a model as a folder for Hugging Face's transformers.

    The folder has `model.safetensors`, or several files and `model.safetensors.index.json`. It has
    no configuration (`config.json`), because a checkpoint has none.

    Args:
        checkpoint: of one model.
        target: the folder, which is created once it is complete.
        shard_bytes: the largest size of the tensors in a file; a larger tensor gets its own file.

    Raises:
        UsageError: see `export_file`; or `target` exists.
        HvdkitError: the folder cannot be written.
    """
    weights = _weights(checkpoint)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists; expected the name of a new folder")
    specs = checkpoint.outline.specs.get(weights.part, {})
    shards = list(
        _shards({name: tensors.nbytes(specs[name]) for name in weights.names}, shard_bytes)
    )
    with exporting(target) as beside:
        beside.mkdir()
        stream = _Copied(checkpoint, weights)
        files: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            stream.copy_to(beside / file, names, weights.tied)
            files |= {weights.names[name]: file for name in names}
        stream.finish()
        if len(shards) > 1:
            total = sum(tensors.nbytes(specs[name]) for name in weights.names)
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(files.items())),
            }
            _write(
                beside / "model.safetensors.index.json",
                [json.dumps(index, indent=2).encode() + b"\n"],
            )
        if os.path.lexists(target):
            raise UsageError(f"{target} exists now; expected the name of a new folder")


def _weights(checkpoint: OpenCheckpoint) -> _Weights:
    outline = checkpoint.outline
    models = [name for name in outline.trees if name == "model" or name.startswith("model-")]
    if len(models) != 1:
        raise UsageError(
            f"step {outline.manifest.step} has {len(models)} models "
            f"({', '.join(models) or 'none'}); expected one for a safetensors file. Export several "
            f"models of PyTorch to a *.pt file"
        )
    (part,) = models
    specs = outline.specs.get(part, {})
    state = tree.decode(outline.trees[part], {name: _Place(name) for name in specs})
    tied = pop_tied(state)
    names = {place.name: name for name, place in state.items() if isinstance(place, _Place)}
    for name, exported in names.items():
        if specs[name].dtype in PAIRS:
            raise UsageError(
                f"{exported} has the dtype {NAMES[specs[name].dtype]}, which safetensors does not "
                f"have. Export to a *.pt file"
            )
    left = [str(name) for name, value in state.items() if not isinstance(value, _Place)]
    if left:
        _log.warning(
            "not exported, because a safetensors file holds tensors only: %s", ", ".join(left)
        )
    return _Weights(part, {name: names[name] for name in specs if name in names}, tied)


def pop_tied(state: Any) -> dict[str, str]:
    """Remove the additional names from the state of a model, and return them; see `TIED`.

    Raises:
        Damaged: it is not the state of a model.
    """
    tied = state.pop(TIED, {}) if isinstance(state, dict) else None
    if not isinstance(tied, dict) or not all(
        isinstance(name, str) for name in (*state, *tied, *tied.values())
    ):
        raise Damaged(STATE, "a model is not an object with a name for each tensor")
    if not state.keys() >= {*tied.values()}:
        raise Damaged(STATE, f"a model has other names ({TIED}) of missing tensors")
    return tied


@dataclass(frozen=True)
class _Place:
    """A placeholder for a tensor.

    Attributes:
        name: the name of the tensor in the checkpoint's file.
    """

    name: str


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Divide tensors among files, in their order."""
    shard: list[str] = []
    size = 0
    for name, nbytes in sizes.items():
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += nbytes
    yield shard


class _Copied:
    """Copies tensors of a checkpoint to files, in the order of the checkpoint's file."""

    def __init__(self, checkpoint: OpenCheckpoint, weights: _Weights) -> None:
        self._specs = checkpoint.outline.specs.get(weights.part, {})
        self._names = weights.names
        self._waiting = iter(self._specs)
        self._stream = checkpoint.stream(weights.part) if self._specs else None
        self._buffer = np.empty(_COPIED_BYTES, np.uint8)

    def copy_to(self, file: Path, names: list[str], tied: Mapping[str, str]) -> None:
        """Write the next tensors to a file.

        Args:
            file: the new file.
            names: the tensors' names in the checkpoint.
            tied: additional name of a tensor -> its exported name.
        """
        specs: dict[str, TensorSpec] = {self._names[name]: self._specs[name] for name in names}
        metadata = {other: name for other, name in tied.items() if name in specs}
        _write(file, self._pieces(tensors.header(specs, metadata), names))

    def finish(self) -> None:
        """Read the rest of the checkpoint's file, so that all hashes are compared.

        Raises:
            Damaged: the file has changed since it was verified.
        """
        for name in self._waiting:
            for _ in self._read(name):
                pass

    def _pieces(self, header: bytes, names: list[str]) -> Iterator[Any]:
        yield header
        for wanted in names:
            for name in self._waiting:
                for piece in self._read(name):
                    if name == wanted:
                        yield piece
                if name == wanted:
                    break

    def _read(self, name: str) -> Iterator[Any]:
        assert self._stream is not None
        left = tensors.nbytes(self._specs[name])
        while left:
            piece = self._buffer[: min(left, _COPIED_BYTES)]
            self._stream.read_into(piece)
            left -= piece.size
            yield piece.data


def _write(file: Path, pieces: Any) -> None:
    with file.open("xb") as stream:
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
