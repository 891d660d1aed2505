"""The manifest: the description of a step and of each of its files.

It is JSON. Its last entry is the hash of all bytes before that entry, so a change of any bit is
detected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import xxhash

from hvdkit.checkpoint import tree
from hvdkit.checkpoint.chunks import FileRecord
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.errors import UsageError
from hvdkit.system import plain_files

NAME = "manifest.json"
STATE, RANKS = "state.json", "ranks.jsonl"
#: Older versions wrote this file instead of RANKS: one list with an entry for each rank.
RANKS_IN_A_LIST = "ranks.json"
TENSORS_SUFFIX = ".safetensors"

#: Larger JSON files are neither written nor read: a hostile file could fill the memory.
MAX_MANIFEST_BYTES = 16_000_000
MAX_JSON_BYTES = 256_000_000
#: The limit for the state of one rank, a line of RANKS.
MAX_RANK_BYTES = 64_000_000
#: The limit for RANKS, which is read into memory.
MAX_RANKS_BYTES = 1_000_000_000
#: The most values in a JSON file, as `plain_files.json_values` counts them. They take at most about
#: 0.7 GB of memory; 60 MB of JSON can take more than 4 GB. 100,000 parameter tensors with Adam are
#: 4 million values.
MAX_JSON_VALUES = 6_000_000
#: The same of a manifest, and of a record of a log. 16 MB of hashes are 460,000 values.
MAX_MANIFEST_VALUES = 500_000

#: Version 1 has one hash for each file. Version 2 has one for each chunk of a file. Its trees may
#: have arrays, and tensors of dtypes that safetensors does not have.
_FORMAT, _VERSION, _VERSIONS = "hvdkit checkpoint", 2, (1, 2)
_PART = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{32}")
_SEAL = ',\n "xxh3_128": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % ("0" * 32))
_MAX_INT = 2**63
#: Numbers below these have a place in the names of steps and of records of a log. Larger ones in a
#: file of others would leave none for the next run and the next commit.
MAX_RUN, MAX_COMMIT = 10**9, 10**18


@dataclass(frozen=True)
class Manifest:
    """The description of a step.

    Attributes:
        step: the number of steps trained.
        epoch: the epoch that the step is in, if the training counts epochs.
        world_size: the number of ranks of the job that saved the step.
        commit: the number of the commit in the folder, from 1. The step with the highest number
            is the newest, also after a rollback to a lower step.
        time: when the step was written, in seconds since 1970. For display only.
        metrics: name -> value.
        versions: package name -> version: hvdkit, Python and the framework.
        files: name -> size and hashes.
        run: the number of the training run, from 1. A resumed training continues its run. Steps
            that were saved before runs existed belong to run 1.
        sum_order: what the order of additions depended on, see `HostCollectives.sum_order`; "" if
            it was not recorded.
    """

    step: int
    epoch: int | None
    world_size: int
    commit: int
    time: float
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    run: int = 1
    sum_order: str = ""

    @property
    def size(self) -> int:
        """The sum of the sizes of all files, in bytes."""
        return sum(record.size for record in self.files.values())

    @property
    def values(self) -> int:
        """The number of values that take memory: hashes, metrics and names."""
        lists: list[Sized] = [self.metrics, self.versions, self.files]
        lists += [record.hashes for record in self.files.values()]
        return sum(map(len, lists))

    @property
    def parts_with_tensors(self) -> list[str]:
        """The names of the parts that have a file of tensors."""
        return [
            name.removesuffix(TENSORS_SUFFIX)
            for name in self.files
            if name.endswith(TENSORS_SUFFIX)
        ]

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`.

        Raises:
            UsageError: it would be too large, for example because of many metrics.
        """
        metrics, _ = tree.encode(dict(self.metrics), "metrics")
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "epoch": self.epoch,
            "world_size": self.world_size,
            "commit": self.commit,
            "run": self.run,
            "time": self.time,
            "metrics": metrics,
            "versions": dict(self.versions),
            "sum_order": self.sum_order,
            "files": {
                name: {
                    "bytes": record.size,
                    "chunk_bytes": record.chunk_bytes,
                    "xxh3_128": record.hashes,
                }
                for name, record in self.files.items()
            },
        }
        data = sealed(fields)
        values = plain_files.json_values(data, MAX_MANIFEST_VALUES)
        if len(data) > MAX_MANIFEST_BYTES or values > MAX_MANIFEST_VALUES:
            raise UsageError(
                f"step {self.step}'s manifest would have {len(data)} bytes and {values} values; "
                f"expected at most {MAX_MANIFEST_BYTES} and {MAX_MANIFEST_VALUES}. Give fewer "
                "metrics and parts."
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse and check the result of `to_bytes`.

        Raises:
            Damaged: it is not valid.
            CheckpointError: it is of a later version of hvdkit.
        """
        fields = unsealed(NAME, data, _FORMAT, _VERSIONS)
        try:
            return cls(
                step=_count(fields["step"]),
                epoch=None if fields["epoch"] is None else _count(fields["epoch"]),
                world_size=_count(fields["world_size"]),
                commit=_count(fields["commit"], MAX_COMMIT),
                run=_count(fields.get("run", 1), MAX_RUN),
                time=plain_files.seconds(_number(fields["time"])),
                metrics=_entries(tree.decode(fields["metrics"], {}), _number),
                versions=_entries(fields["versions"], _text),
                sum_order=_text(fields.get("sum_order", "")),
                files={
                    check_file_name(name): _record(record, fields["version"])
                    for name, record in fields["files"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Damaged(NAME, f"it has wrong entries ({error})") from error


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Return JSON whose last entry is the hash of all bytes before that entry."""
    body = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}").encode()
    return body + (_SEAL % xxhash.xxh3_128_hexdigest(body)).encode()


def unsealed(file: str, data: bytes, format: str, versions: Sequence[int]) -> dict[str, Any]:
    """Parse and check the result of `sealed`.

    Args:
        file: the name of the file, for errors.
        data: its content.
        format: the expected entry "format".
        versions: the supported values of the entry "version".

    Raises:
        Damaged: it is not valid.
        CheckpointError: it is of a later version of hvdkit.
    """
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != (_SEAL % xxhash.xxh3_128_hexdigest(body)).encode():
        raise Damaged(
            file, "it does not match its own hash: it was changed, or another program wrote it"
        )
    fields = parse_json(file, data, MAX_MANIFEST_VALUES)
    if not isinstance(fields, dict) or fields.get("format") != format:
        raise Damaged(file, f"its format is not {format!r}")
    version = fields.get("version")
    if type(version) is not int or version not in versions:
        raise CheckpointError(
            f"{file} has format version {version!r:.20}; this hvdkit reads version "
            f"{' and '.join(map(str, versions))}. Update hvdkit."
        )
    return fields


def check_file_name(name: str) -> str:
    """Return `name` if a step may have a file of this name; a path is not allowed.

    Raises:
        ValueError: it is not allowed.
    """
    stem = name.removesuffix(TENSORS_SUFFIX)
    if name in (STATE, RANKS, RANKS_IN_A_LIST) or (stem != name and _PART.fullmatch(stem)):
        return name
    raise ValueError(f"{name[:80]!r} is not the name of a file of a checkpoint")


def check_part_name(name: str) -> str:
    """Return `name` if a part may have this name.

    Raises:
        UsageError: it is not allowed.
    """
    if isinstance(name, str) and _PART.fullmatch(name):
        return name
    raise UsageError(
        f"a part of the state has the name {name!r}; expected a letter and up to 63 letters, "
        f"digits, '_' or '-'."
    )


def parse_json(file: str, data: bytes, most_values: int | None = None) -> Any:
    """Parse JSON strictly: no duplicate names in an object, no NaN.

    Args:
        file: the name of the file, for errors.
        data: its content.
        most_values: the most values in it; default MAX_JSON_VALUES.

    Raises:
        Damaged: it is not valid.
    """
    most = MAX_JSON_VALUES if most_values is None else most_values
    try:
        return plain_files.parse_json(
            data, most, object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except ValueError as error:
        raise Damaged(file, f"it is not valid JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has a name twice")
    return entries


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _count(value: Any, limit: int = _MAX_INT) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r:.40} is not a whole number from 0")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")
    return value


def _record(fields: Mapping[str, Any], version: int) -> FileRecord:
    """Return the record of a file from a manifest of version `version`."""
    size, hashes = _count(fields["bytes"]), fields["xxh3_128"]
    if version == 1:
        # The file is one chunk.
        return FileRecord(size, (_hash(hashes),), max(size, 1))
    if not isinstance(hashes, list):
        raise ValueError("the hashes are not a list")
    return FileRecord(size, tuple(map(_hash, hashes)), _count(fields["chunk_bytes"]))


def _hash(value: Any) -> str:
    if not _HASH.fullmatch(_text(value)):
        raise ValueError("a hash does not have 32 digits")
    return value


def _entries(value: Any, check: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return {_text(name): check(entry) for name, entry in value.items()}
