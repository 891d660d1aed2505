"""The timeline that Horovod writes on rank 0: the phases of each collective.

HOROVOD_TIMELINE turns the timeline on. The file has Chrome's trace event format, with one process
for each tensor. Times are microseconds since the start time, which the first event contains.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from hvdkit.errors import HvdkitError
from hvdkit.profiling.events import (
    OWN,
    TIMELINE,
    Event,
    complete,
    name_process,
    name_thread,
    process_number,
)
from hvdkit.runtime import time_of_day
from hvdkit.system.plain_files import json_items, open_regular, whole
from hvdkit.system.whole_files import beside

# The variable that names the file. With the value `DYNAMIC`, `hvd.start_timeline` names the file.
_VARIABLE = "HOROVOD_TIMELINE"
_DYNAMIC = "DYNAMIC"


class Control(Protocol):
    """The functions of Horovod that start and stop its timeline."""

    def start_timeline(self, file_path: str) -> None:
        """Begin to write the timeline."""
        ...

    def stop_timeline(self) -> None:
        """Close the timeline."""
        ...


class Timeline:
    """Horovod's timeline while a profile is recorded.

    If HOROVOD_TIMELINE names a file, the profile reads this file. If the variable is `DYNAMIC`, the
    profile starts a timeline of its own, and deletes its file at the end.

    Args:
        control: starts and stops the timeline.
        path: the file of the profile.
        rank: this rank.
    """

    def __init__(self, control: Control, path: Path, rank: int) -> None:
        self._control = control
        self._path = path
        self._is_written = rank == 0
        # The time of day minus this rank's clock, in nanoseconds, when the recording began.
        self._offset = 0
        self._file: Path | None = None

    def start(self) -> None:
        """Begin the recording."""
        self._offset = time_of_day.offset()
        if self._is_written and os.environ.get(_VARIABLE) == _DYNAMIC:
            self._file = beside(self._path)
            self._control.start_timeline(str(self._file))

    def stop(self) -> None:
        """Stop the profile's own timeline, if it was started, and delete its file."""
        file, self._file = self._file, None
        if file is not None:
            self._control.stop_timeline()
            file.unlink(missing_ok=True)

    def events(self, began: int, ended: int) -> list[Event]:
        """Stop the recording, and return its events between two times; empty on other ranks.

        Raises:
            HvdkitError: see `read`.
        """
        value = os.environ.get(_VARIABLE)
        if not (self._is_written and value):
            return []
        if self._file is None:
            return read(Path(value), 0, began, ended, self._offset)
        try:
            self._control.stop_timeline()  # writes all that is in memory
            return read(self._file, 0, began, ended, self._offset)
        finally:
            self.stop()


def read(path: Path, rank: int, begin: int, end: int, offset: int) -> list[Event]:
    """Return the events of a timeline between two times.

    Args:
        path: the file.
        rank: the rank that wrote it.
        begin: nanoseconds of the rank's clock.
        end: nanoseconds of the rank's clock.
        offset: the nanoseconds since 1970, minus those of the rank's clock, when the timeline was
            started.

    Raises:
        HvdkitError: the file cannot be read, or is not a timeline.
    """
    try:
        with open(open_regular(path.resolve()), encoding="utf-8", errors="replace") as file:
            content = json_items(file)
            start = next(
                event["args"]["start_time_since_epoch_in_micros"]
                for event in content
                if "start_time_since_epoch_in_micros" in event.get("args", {})
            )
            return _convert(content, rank, whole(start) * 1000 - offset, begin, end)
    except OSError as error:
        raise HvdkitError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise HvdkitError(f"{path} is not a timeline of Horovod ({error!r})") from error


def _convert(
    content: Iterable[dict[str, Any]], rank: int, start: int, begin: int, end: int
) -> list[Event]:
    names: dict[int, str] = {}
    open_phases: dict[int, list[tuple[str, int]]] = {}
    used: dict[int, None] = {}
    events: list[Event] = []
    pid = process_number(rank, TIMELINE)
    for event in content:
        tensor, phase = whole(event.get("pid", 0)), event.get("ph")
        if phase == "M" and event["name"] == "process_name" and "name" in event["args"]:
            names[tensor] = event["args"]["name"]
            continue
        if phase not in ("B", "E") or OWN in names.get(tensor, ""):
            continue
        time = start + whole(event["ts"]) * 1000
        phases = open_phases.setdefault(tensor, [])
        if phase == "B":
            phases.append((event["name"], time))
        elif phases:
            name, began = phases.pop()
            if begin <= began and time <= end:
                used[tensor] = None
                events.append(complete(name, pid, tensor, began, time))
    named = [each for t in used for each in name_thread(pid, t, names.get(t, str(t)))]
    if events:
        named += name_process(rank, TIMELINE, f"rank {rank}: Horovod's timeline")
    return named + events
