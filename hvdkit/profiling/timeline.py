"""Read the timeline that Horovod writes on rank 0: the phases of each collective.

HOROVOD_TIMELINE turns the timeline on. The file has Chrome's trace event format, with one process
for each tensor. Times are microseconds since the start time, which the first event contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from hvdkit.system.plain_files import json_items, open_regular, whole

#: The variable that names the file. With the value `DYNAMIC`, `hvd.start_timeline` names the file.
VARIABLE = "HOROVOD_TIMELINE"
DYNAMIC = "DYNAMIC"


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
