"""A model's weights as safetensors files, for those who have no hvdkit. Needs no framework.

One file, which `safetensors.torch.load_model` loads, or a folder as Hugging Face's transformers
reads it: several files, and an index that says which tensor is in which file. The tensors are
copied from the checkpoint a piece at a time, whatever their size.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.checkpoint import tensors, tree
from hvdkit.checkpoint.dtypes import NAMES, PAIRS
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import HvdkitError, UsageError

_log = logging.getLogger(__name__)

#: In a model's tree: names of tensors that are another one's memory -> that one's name.
TIED = "(tied)"
#: As transformers divides a model, in bytes.
SHARD_BYTES = 5_000_000_000

_COPIED_BYTES = 4_000_000


@dataclass(frozen=True)
class _Weights:
    """The tensors of a model that are exported.

    Attributes:
        part: of the checkpoint.
        names: tensor in the checkpoint -> its name, in the order of the checkpoint's file. Tensors
            that are not exported are not in it.
        tied: further names of tensors -> the name that the file has.
    """

    part: str
    names: Mapping[str, str]
    tied: Mapping[str, str]


def export_file(checkpoint: OpenCheckpoint, target: Path) -> None:
    """Write a model's weights as one safetensors file.

    A tensor with several names is in it once; the other names are in the file's metadata, as
    `safetensors.torch.save_model` has them.

    Args:
        checkpoint: of one model.
        target: the file. What is there is replaced once the new one is whole.

    Raises:
        UsageError: the checkpoint has no model or several, or a dtype that safetensors has not.
        HvdkitError: the file cannot be written.
    """
    weights = _weights(checkpoint)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    with _told(target):
        try:
            stream = _Copied(checkpoint, weights)
            stream.copy_to(beside, list(weights.names), weights.tied)
            stream.finish()
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(target.absolute().parent)


def export_folder(checkpoint: OpenCheckpoint, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model's weights as a folder that Hugging Face's transformers reads.

    `model.safetensors`, or several files and `model.safetensors.index.json`. The configuration
    (`config.json`) is not in a checkpoint.

    Args:
        checkpoint: of one model.
        target: the folder, which appears when it is whole.
        shard_bytes: the largest size of the tensors in a file; a larger tensor has its own file.

    Raises:
        UsageError: as `export_file`; or `target` exists.
        HvdkitError: the folder cannot be written.
    """
    weights = _weights(checkpoint)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists: give the name of a new folder")
    specs = checkpoint.outline.specs.get(weights.part, {})
    shards = list(
        _shards({name: tensors.nbytes(specs[name]) for name in weights.names}, shard_bytes)
    )
    beside = target.absolute().with_name(f".{target.name}.{os.getpid()}")
    with _told(target):
        try:
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
            _sync_folder(beside)
            if os.path.lexists(target):
                raise UsageError(f"{target} exists now: give the name of a new folder")
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _sync_folder(target.absolute().parent)


def _weights(checkpoint: OpenCheckpoint) -> _Weights:
    outline = checkpoint.outline
    models = [name for name in outline.trees if name == "model" or name.startswith("model-")]
    if len(models) != 1:
        raise UsageError(
            f"step {outline.manifest.step} has {len(models)} models "
            f"({', '.join(models) or 'none'}): a safetensors file holds one. Export several models "
            f"of PyTorch to a *.pt file"
        )
    (part,) = models
    specs = outline.specs.get(part, {})
    state = tree.decode(outline.trees[part], {name: _Place(name) for name in specs})
    tied: dict[str, str] = state.pop(TIED, {})
    names = {place.name: name for name, place in state.items() if isinstance(place, _Place)}
    for name, exported in names.items():
        if specs[name].dtype in PAIRS:
            raise UsageError(
                f"{exported} is of {NAMES[specs[name].dtype]}, which safetensors does not have: "
                f"export to a *.pt file"
            )
    left = [str(name) for name, value in state.items() if not isinstance(value, _Place)]
    if left:
        _log.warning("left out, because a safetensors file holds tensors only: %s", ", ".join(left))
    return _Weights(part, {name: names[name] for name in specs if name in names}, tied)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor of the checkpoint.

    Attributes:
        name: in the checkpoint's file.
    """

    name: str


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Divide tensors between files, in their order."""
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
    """Copies tensors of a checkpoint to files, in the order in which they lie there."""

    def __init__(self, checkpoint: OpenCheckpoint, weights: _Weights) -> None:
        self._specs = checkpoint.outline.specs.get(weights.part, {})
        self._names = weights.names
        self._waiting = iter(self._specs)
        self._stream = checkpoint.stream(weights.part) if self._specs else None
        self._buffer = np.empty(_COPIED_BYTES, np.uint8)

    def copy_to(self, file: Path, names: list[str], tied: Mapping[str, str]) -> None:
        """Write a file of the next tensors.

        Args:
            file: the new file.
            names: of the tensors in the checkpoint.
            tied: further names of tensors -> the name that a file has.
        """
        specs: dict[str, TensorSpec] = {self._names[name]: self._specs[name] for name in names}
        metadata = {other: name for other, name in tied.items() if name in specs}
        _write(file, self._pieces(tensors.header(specs, metadata), names))

    def finish(self) -> None:
        """Read what is left, which compares the hash of the checkpoint's file.

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


def _sync_folder(folder: Path) -> None:
    with disk.folder(folder) as descriptor:
        disk.sync_folder(descriptor, folder.name)


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Let an error of the system say what could not be written."""
    try:
        yield
    except OSError as error:
        raise HvdkitError(f"cannot write {target}: {error.strerror or error}") from error
