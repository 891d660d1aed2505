"""Read the records that the engine's flight recorder writes (`engine/sources/recorder.h`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.runtime.record_files import RECORD
from hvdkit.system.plain_files import Budget, parse_json, rank_number, read_text, seconds, whole

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
        host: the rank's hostname.
        reason: why the record was written: `stall`, `request`, `signal` or `error`.
        time: when the record was written, in seconds since 1970.
        offset: the time of day minus the monotonic clock, in seconds, when the record was written.
            All times of the record have this offset.
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
    offset: float = 0.0
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
            offset=self.offset + seconds,
        )

    @functools.cached_property
    def open_by_collective(self) -> Mapping[tuple[int, str], Sequence[Call]]:
        """The collectives that wait, see `Call.collective`."""
        found: dict[tuple[int, str], list[Call]] = {}
        for call in self.open:
            found.setdefault(call.collective, []).append(call)
        return found

    @functools.cached_property
    def joined(self) -> Collection[int]:
        """The process sets in whose `join` the rank waits."""
        return {call.group for call in self.open if call.operation == "join"}

    @property
    def failed_call(self) -> Call | None:
        """The last call of the collective that failed; None if the record does not have it."""
        # The engine writes the record while the call that fails is still one of the open calls.
        # Another process set may have a later call of the same name.
        failing = [call for call in self.open if call.ended is not None]
        calls = [call for call in (*self.done, *self.open) if call.name == self.failed]
        failed = [call for call in failing if call.name == self.failed] or calls
        return max(failed, key=lambda call: call.enqueued, default=None)

    @cached_property
    def completed(self) -> Mapping[tuple[int, str], Call]:
        """Process set and name -> the last counted call that ended without an error."""
        failure = self.failed_call.ended if self.failed_call else None
        if self.error and failure is None:
            return {}
        ended = (call for call in self.done if call.number and call.ended is not None)
        return {c.collective: c for c in ended if failure is None or (c.ended or 0.0) < failure}

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
            calls={
                (whole(group), name): whole(count)
                for group, counts in content["calls"].items()
                for name, count in counts.items()
            },
            open=[_call(call) for call in content["open"]],
            done=[_call(call) for call in content["done"]],
            stacks=str(content["stacks"]),
            offset=seconds(content["offset"]),
            machine=str(content["machine"]),
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
    """
    known = known_groups(records)
    return {rank: replace(record, groups=known) for rank, record in records.items()}


def known_groups(records: Mapping[int, Record]) -> Mapping[int, Sequence[int]]:
    """Return the process sets of all records: id -> ranks."""
    known: dict[int, Sequence[int]] = {}
    for record in records.values():
        for group, ranks in record.groups.items():
            known.setdefault(group, ranks)
    return known


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
        line=str(content.get("line", "")),
    )


def _named(names: Sequence[str], number: int) -> str:
    """Return the name with this number; the number itself if this version does not know it."""
    return names[number] if 0 <= number < len(names) else str(number)


def files(folder: Path) -> dict[int, Path]:
    """Return the files with records in a folder, by rank.

    Raises:
        OSError: the folder cannot be read.
    """
    found = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _by_size(file: tuple[int, Path]) -> tuple[int, int]:
    rank, path = file
    return path.lstat().st_size, rank


def read(folder: Path, budget: Budget) -> dict[int, Record]:
    """Return the records in a folder, by rank.

    Args:
        budget: the memory for the records. The largest files are left out.

    Raises:
        HvdkitError: the folder cannot be read, or a file in it is not a record.
    """
    found: dict[int, Record] = {}
    try:
        for rank, path in sorted(files(folder).items(), key=_by_size):
            if not budget.allows(path):
                continue
            try:
                text = read_text(path)
                budget.spend(text)
                record = found[rank] = parse(text)
                if record.rank != rank:
                    raise HvdkitError(
                        f"the file has the record of rank {record.rank}; expected that of rank "
                        f"{rank}. Give the file the name with which it was written"
                    )
            except HvdkitError as error:
                raise HvdkitError(f"{path}: {error}") from error
    except OSError as error:
        raise HvdkitError(
            f"cannot read {error.filename or folder}: {error.strerror}. Expected a folder of "
            f"`hvdkit run --output-dir`, or of HVDKIT_RECORD_DIR"
        ) from error
    return dict(sorted(found.items()))
