"""Read the records that the engine's flight recorder writes (`engine/sources/recorder.h`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.plain_files import parse_json, rank_number, read_text, seconds, whole
from hvdkit.record_files import RECORD

#: The version of the format.
VERSION = 1

_FILE = re.compile(RECORD.format(r"(\d+)"))
# Horovod's numbers of requests and data types (`common/message.h`).
_OPERATIONS = (
    *("allreduce", "allgather", "broadcast", "join", "adasum", "alltoall", "barrier"),
    "reducescatter",
)
_DTYPES = (
    *("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("bool", "bfloat16"),
)


@dataclass(frozen=True)
class Call:
    """One call of a collective on one rank.

    Attributes:
        name: the name, the same on all ranks.
        number: 1 for the first call with this name in the process set, 2 for the second; 0 if the
            call was not counted.
        operation: such as `allreduce`.
        group: the id of the process set.
        dtype: such as `float32`.
        bytes: the size of the rank's tensor.
        enqueued: the time of the call, in seconds since 1970.
        ended: the time of the end; None while it waits.
        line: the file and line of the call, such as `train.py:21`; empty if it is not known. Only
            calls of PyTorch without a name have it.
    """

    name: str
    number: int
    operation: str
    group: int
    dtype: str
    bytes: int
    enqueued: float
    ended: float | None
    line: str = ""

    @property
    def collective(self) -> tuple[int, str]:
        """The process set and the name. Process sets may use the same names."""
        return self.group, self.name

    @property
    def key(self) -> tuple[int, str, int]:
        """The process set, the name and the number: equal on all ranks."""
        return self.group, self.name, self.number


@dataclass(frozen=True)
class Record:
    """The record of one rank.

    Attributes:
        rank: the rank.
        size: the number of ranks of the job.
        host: the rank's hostname.
        pid: its process id.
        reason: why the record was written: `stall`, `request`, `signal` or `error`.
        time: when the record was written, in seconds since 1970.
        offset: the time of day minus the monotonic clock, in seconds, when the record was written.
            All times of the record have this offset. None in the record of an earlier engine,
            whose times are those of the system's clock.
        machine: the id of the running kernel, whose monotonic clock the rank reads. Empty if it is
            not known.
        limit: the seconds that a collective may wait before the job ends; 0 for no limit.
        error: the error of the first collective that failed; empty if none did.
        failed: the name of that collective.
        groups: id of a process set -> its ranks; an empty sequence stands for all ranks.
        labels: part of a collective's name -> what it reduces.
        calls: process set and name of a collective -> number of calls.
        open: the collectives that wait, oldest first.
        done: the last collectives that ended, oldest first.
        stacks: the stacks of the process's threads, as faulthandler writes them.
    """

    rank: int
    size: int
    host: str
    pid: int
    reason: str
    time: float
    limit: float = 0.0
    error: str = ""
    failed: str = ""
    groups: Mapping[int, Sequence[int]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[tuple[int, str], int] = field(default_factory=dict)
    open: Sequence[Call] = ()
    done: Sequence[Call] = ()
    stacks: str = ""
    offset: float | None = None
    machine: str = ""

    def shifted(self, seconds: float) -> Record:
        """Return the record with later times."""

        def later(call: Call) -> Call:
            ended = None if call.ended is None else call.ended + seconds
            return replace(call, enqueued=call.enqueued + seconds, ended=ended)

        return replace(
            self,
            time=self.time + seconds,
            open=[later(call) for call in self.open],
            done=[later(call) for call in self.done],
            offset=None if self.offset is None else self.offset + seconds,
        )

    @property
    def failed_call(self) -> Call | None:
        """The last call of the collective that failed; None if the record does not have it."""
        # The engine writes the record while the call that fails is still one of the open calls.
        # Another process set may have a later call of the same name.
        failing = [call for call in self.open if call.ended is not None]
        calls = [call for call in (*self.done, *self.open) if call.name == self.failed]
        failed = [call for call in failing if call.name == self.failed] or calls
        return max(failed, key=lambda call: call.enqueued, default=None)

    def label(self, name: str) -> str | None:
        """Return what a collective reduces, such as a bucket's parameters; None if not known."""
        # A bucket may take several collectives: NAME, NAME.1, …
        name += "."
        return next((text for part, text in self.labels.items() if f"{part}." in name), None)

    def members(self, group: int) -> Sequence[int]:
        """Return the ranks of a process set."""
        return self.groups.get(group) or range(self.size)


def parse(text: str) -> Record:
    """Return the record in `text`.

    Raises:
        HvdkitError: it is not a record of this version.
    """
    try:
        content: dict[str, Any] = parse_json(text)
        if content["version"] != VERSION:
            raise HvdkitError(
                f"the record has version {content['version']}; expected {VERSION}. Read it with "
                f"the version of hvdkit that wrote it"
            )
        return Record(
            rank=rank_number(content["rank"]),
            size=rank_number(content["size"]),
            host=str(content["host"]),
            pid=whole(content["pid"]),
            reason=str(content["reason"]),
            time=seconds(content["time"]),
            limit=seconds(content["limit"]),
            error=str(content["error"]),
            failed=str(content["failed"]),
            groups={
                whole(group): [rank_number(each) for each in ranks]
                for group, ranks in content["groups"].items()
            },
            labels={part: str(text) for part, text in content["labels"].items()},
            calls=dict(_counts(content["calls"], content["groups"])),
            open=[_call(call) for call in content["open"]],
            done=[_call(call) for call in content["done"]],
            stacks=str(content["stacks"]),
            # Earlier engines did not write these fields.
            offset=None if content.get("offset") is None else seconds(content["offset"]),
            machine=str(content.get("machine", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise HvdkitError(
            f"not a record of a rank ({error!r}); expected a file that the engine's flight "
            "recorder wrote. Delete the file to read the others"
        ) from error


def with_all_groups(records: Mapping[int, Record]) -> dict[int, Record]:
    """Return the records with the process sets of all of them.

    A shutdown removes the process sets one after the other, so the record of a rank that has failed
    may lack some.

    Args:
        records: the records, by rank.
    """
    known: dict[int, Sequence[int]] = {}
    for record in records.values():
        for group, ranks in record.groups.items():
            known.setdefault(group, ranks)
    return {
        rank: replace(record, groups=known | dict(record.groups))
        for rank, record in records.items()
    }


def _counts(
    content: Mapping[str, Any], groups: Collection[str]
) -> Iterator[tuple[tuple[int, str], int]]:
    for key, value in content.items():
        if isinstance(value, dict):
            for name, count in value.items():
                yield (whole(key), name), whole(count)
        else:
            # An earlier engine counted the calls of a name in all process sets together.
            for group in {"0", *groups}:
                yield (whole(group), key), whole(value)


def _call(content: Mapping[str, Any]) -> Call:
    ended = content["ended"]
    return Call(
        name=str(content["name"]),
        number=whole(content["call"]),
        operation=_named(_OPERATIONS, content["operation"]),
        group=whole(content["set"]),
        dtype=_named(_DTYPES, content["dtype"]),
        bytes=whole(content["bytes"]),
        enqueued=seconds(content["enqueued"]),
        ended=None if ended is None else seconds(ended),
        # Earlier engines did not write this field.
        line=str(content.get("line", "")),
    )


def _named(names: Sequence[str], number: int) -> str:
    """Return the name with this number; the number itself if this version does not know it."""
    return names[number] if 0 <= number < len(names) else str(number)


def read(folder: Path) -> dict[int, Record]:
    """Return the records in a folder, by rank.

    Raises:
        HvdkitError: the folder cannot be read, or a file in it is not a record.
    """
    found = {}
    try:
        for path in sorted(folder.iterdir()):
            if match := _FILE.fullmatch(path.name):
                try:
                    text = read_text(path)
                    record = found[int(match[1])] = parse(text)
                    if record.rank != int(match[1]):
                        raise HvdkitError(
                            f"the file has the record of rank {record.rank}; expected that of rank "
                            f"{match[1]}. Give the file the name with which it was written"
                        )
                except HvdkitError as error:
                    raise HvdkitError(f"{path}: {error}") from error
    except OSError as error:
        raise HvdkitError(
            f"cannot read {error.filename or folder}: {error.strerror}. Expected a folder of "
            f"`hvdkit run --output-dir`, or of HVDKIT_RECORD_DIR"
        ) from error
    return found
