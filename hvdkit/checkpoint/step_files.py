"""The content of a step before it is written: `Snapshot`, and the files that it makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.checkpoint import manifest, tensors
from hvdkit.checkpoint.chunks import FileRecord
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.storage import MAX_STEP
from hvdkit.checkpoint.tensors import Content
from hvdkit.errors import UsageError
from hvdkit.system.plain_files import json_values


@dataclass(frozen=True)
class EncodedPart:
    """A part of the state, ready to be written.

    Attributes:
        tree: the result of `tree.encode`.
        tensors: name, as in `tree.encode` -> dtype, shape and content: row-major,
            `tensors.nbytes(spec)` bytes.
    """

    tree: Any
    tensors: Mapping[str, tuple[TensorSpec, Content]] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The content of one step. It must not change until `Writer.write` has returned.

    Attributes:
        step: the number of steps trained, 0 or more.
        epoch: the epoch that the step is in, if the training counts epochs.
        metrics: values by name; NaN and infinities are allowed.
        versions: package name -> version: hvdkit, Python and the framework.
        parts: name -> part. A name is a letter and up to 63 letters, digits, `_` or `-`.
        ranks: for each rank, its own state: a result of `rank_to_bytes`.
        sum_order: see `Manifest.sum_order`.
        withdrawn: when set, the step is not committed: its tensors may have changed.
    """

    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    parts: Mapping[str, EncodedPart]
    ranks: Sequence[bytes]
    sum_order: str = ""
    withdrawn: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if not 0 <= self.step < MAX_STEP:
            raise UsageError(f"step is {self.step}; expected 0 to {MAX_STEP - 1}.")
        for name in self.parts:
            manifest.check_part_name(name)
        for metric, value in self.metrics.items():
            try:
                float(value)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"the metric {metric!r} is {value!r:.40}; expected a number."
                ) from error


def of_tensors(files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Return the records of the tensor files; without tensors, the record of the JSON state."""
    found = {n: made for n, made in files.items() if n.endswith(manifest.TENSORS_SUFFIX)}
    return found or {manifest.STATE: files[manifest.STATE]}


def contents(snapshot: Snapshot) -> Iterator[tuple[str, Iterable[memoryview]]]:
    """Return all files of a step except the manifest: name and content, piece by piece."""
    for name, part in snapshot.parts.items():
        if part.tensors:
            yield name + manifest.TENSORS_SUFFIX, tensors.serialize(part.tensors)
    yield (
        manifest.STATE,
        [
            _json(
                manifest.STATE,
                {n: part.tree for n, part in snapshot.parts.items()},
                manifest.MAX_JSON_BYTES,
            )
        ],
    )
    yield manifest.RANKS, (memoryview(line) for rank in snapshot.ranks for line in (rank, b"\n"))


def until_withdrawn(pieces: Iterable[memoryview], snapshot: Snapshot) -> Iterator[memoryview]:
    """Yield the pieces; raise CheckpointError once the snapshot is withdrawn."""
    for piece in pieces:
        if snapshot.withdrawn.is_set():
            raise interrupted(snapshot.step)
        yield piece


def interrupted(step: int) -> CheckpointError:
    return CheckpointError(
        f"step {step} was not saved: save() was interrupted, and the state may have changed "
        f"since. Save again."
    )


def rank_to_bytes(encoded: Any, ranks: int) -> bytes:
    """Return the state of one rank as a line of JSON.

    Args:
        encoded: the result of `tree.encode`, without tensors.
        ranks: the number of ranks. The lines of all fit into one file.

    Raises:
        UsageError: the line would be too long.
    """
    most = min(manifest.MAX_RANK_BYTES, manifest.MAX_RANKS_BYTES // ranks - 1)
    return bytes(_json("the state of this rank alone", encoded, most))


def _json(name: str, content: Any, most: int) -> memoryview:
    data = json.dumps(content, allow_nan=False).encode()
    if len(data) > most:
        raise UsageError(
            f"{name} would have {len(data)} bytes; expected at most {most}. Keep large data in "
            "tensors."
        )
    if json_values(data, manifest.MAX_JSON_VALUES) > manifest.MAX_JSON_VALUES:
        raise UsageError(
            f"{name} would have more than {manifest.MAX_JSON_VALUES} values; expected fewer. Keep "
            "large data in tensors or NumPy arrays."
        )
    return memoryview(data)
