"""Events of a trace: steps and collectives of one rank.

The events are those of Chrome's trace event format, which Perfetto reads. Times are nanoseconds of
the rank's clock until `finish` converts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdkit.faults.names import name_call
from hvdkit.faults.records import Call, Record

#: An event of Chrome's trace event format.
Event = dict[str, Any]

#: The entries that the engine's flight recorder keeps.
RECORDED = 1000
#: The prefix of the names of the profile's own collectives.
OWN = "hvdkit.profile"

# The processes of a rank in the trace have the numbers RANK * _PROCESSES + 1, ...
_PROCESSES = 1000
#: The process of a rank with steps and collectives. Those of the framework come after it.
HVDKIT, FRAMEWORK, TIMELINE = 1, 2, _PROCESSES - 1

_STEPS_THREAD = 0


def process_number(rank: int, number: int) -> int:
    """Return the number of a process of a rank in the trace."""
    return rank * _PROCESSES + number


def name_process(rank: int, number: int, name: str) -> list[Event]:
    """Return the events that set the name and the position of a process."""
    pid = process_number(rank, number)
    return _names("process", pid, 0, name, pid)


def name_thread(pid: int, tid: int, name: str) -> list[Event]:
    """Return the events that name a thread of a process, and sort threads by number."""
    return _names("thread", pid, tid, name, tid)


def _names(kind: str, pid: int, tid: int, name: str, place: int) -> list[Event]:
    facts = {f"{kind}_name": {"name": name}, f"{kind}_sort_index": {"sort_index": place}}
    return [
        {"ph": "M", "name": key, "pid": pid, "tid": tid, "args": args}
        for key, args in facts.items()
    ]


def complete(name: str, pid: int, tid: int, begin: int, end: int, **args: Any) -> Event:
    """Return an event from `begin` to `end`."""
    event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin}
    return {**event, "args": args} if args else event


def step_events(rank: int, first: int, steps: Sequence[tuple[int, int]]) -> list[Event]:
    """Return the events of steps.

    Args:
        rank: the rank.
        first: the number of the first step.
        steps: the beginning and the end of each step.
    """
    pid = process_number(rank, HVDKIT)
    return name_thread(pid, _STEPS_THREAD, "steps") + [
        complete(f"step {first + k}", pid, _STEPS_THREAD, begin, end)
        for k, (begin, end) in enumerate(steps)
    ]


def nanoseconds(seconds: float) -> int:
    """Convert a time of the flight recorder, rounded to microseconds, to nanoseconds."""
    return round(seconds * 1e6) * 1000


def calls_between(record: Record, begin: int, end: int) -> list[Call]:
    """Return the collectives that were called between two times, except those of the profile.

    A collective that began in this time belongs to the result even if it ended later.

    Args:
        record: the record of a rank, with times of the rank's clock.
        begin: nanoseconds of the rank's clock.
        end: nanoseconds of the rank's clock.
    """
    return sorted(
        (
            call
            for call in record.done
            if call.ended is not None
            and begin <= nanoseconds(call.enqueued) <= end
            and OWN not in call.name
        ),
        key=lambda call: call.enqueued,
    )


def is_complete(record: Record, begin: int) -> bool:
    """Return whether the record contains all collectives that were called after `begin`."""
    done = record.done
    return len(done) < RECORDED or any(nanoseconds(call.ended or 0) < begin for call in done)


def collective_events(rank: int, record: Record, calls: Sequence[Call]) -> list[Event]:
    """Return the events of collectives, each from its call to its end.

    Events of one thread must not overlap, and collectives may, so there are several threads.
    """
    pid = process_number(rank, HVDKIT)
    events: list[Event] = []
    ends: list[float] = []  # of the last collective of each thread
    for call in calls:
        assert call.ended is not None
        free = [k for k, end in enumerate(ends) if end <= call.enqueued]
        thread = free[0] if free else len(ends)
        if not free:
            ends.append(0.0)
            events += name_thread(pid, thread + 1, "collectives")
        ends[thread] = call.ended
        events.append(
            complete(
                name_call(call, record),
                pid,
                thread + 1,
                nanoseconds(call.enqueued),
                nanoseconds(call.ended),
                collective=call.name,
                operation=call.operation,
                call=call.number,
                bytes=call.bytes,
                dtype=call.dtype,
            )
        )
    return events


def from_the_end(calls: Sequence[Call]) -> list[tuple[str, Call]]:
    """Return the calls with keys that are the same on all ranks.

    The ranks have called the same collectives, up to the end of the profile. A rank that began to
    record later than the others, or whose record is too short, lacks the first ones. So calls of a
    name are counted from the last one.
    """
    counts: Counter[str] = Counter()
    keyed = []
    for call in reversed(calls):
        counts[call.name] += 1
        keyed.append((f"{call.name} -{counts[call.name]}", call))
    return keyed


def finish(events: Iterable[Event], to_first: Callable[[int], int], start: int) -> list[Event]:
    """Convert times to microseconds of the first rank's clock since `start`.

    Args:
        events: events with times in nanoseconds of the rank's clock.
        to_first: converts a time of the rank's clock to one of the first rank's.
        start: nanoseconds of the first rank's clock.
    """
    finished = []
    for event in events:
        if "ts" in event:
            begin = to_first(event["ts"])
            changed: Event = {"ts": (begin - start) / 1e3}
            if "dur" in event:
                changed["dur"] = (to_first(event["ts"] + event["dur"]) - begin) / 1e3
            event = {**event, **changed}
        finished.append(event)
    return finished
