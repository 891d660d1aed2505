"""Describe what happens to a job by small events, which are only appended to a list.

| event | what has happened | from |
|---|---|---|
| `Reported` | a rank has reported its end: an exception, `sys.exit`, the script's end | rank |
| `CollectiveFailed` | the engine of a rank says that its last collective has failed | rank |
| `ShutDown` | a rank has called `hvd.shutdown()` | rank |
| `InHorovod` | how far `hvd.init()` or `hvd.shutdown()` is in a rank | rank |
| `Answered` | a rank has sent a record, maybe because it waits for too long | rank |
| `Exited`, `Ended` | the process of a rank has ended; all its output has arrived | agent |
| `Observed` | an agent has looked which of its ranks are stopped | agent |
| `AgentSignalled` | an agent got a stop signal | agent |
| `AgentFailed`, `AgentDone` | an agent cannot continue; all processes there have ended | agent |
| `AgentLost` | the connection to an agent has ended, or the agent is silent | launcher |
| `Unconfirmed` | agents did not confirm the end of their ranks | launcher |
| `StopAsked` | the launcher got a stop signal | launcher |
| `LateStart`, `LateStop` | ranks were late in `hvd.init()`, or after a request to stop | launcher |
| `Resumed` | the launcher runs again after it was stopped | launcher |
| `Asked` | all ranks are asked for their records | launcher |
| `Judged` | the answers are judged: there is a verdict on a stall, or no stall | launcher |
| `Saved`, `Committed` | a checkpoint or commit was saved; the hosts have the newest commit | rank |
| `EndBegan` | the launcher begins to end the ranks | launcher |
| `Found` | what the launcher has found when all ranks had ended | launcher |

`outcome` derives everything else from the list. Each event has the time at which it happened, on
the launcher's monotonic clock: an agent says how long ago it was, because the clocks of hosts
differ. The place in the list is only the order in which the launcher has learnt of the events. It
decides nothing.

The launcher writes the list to `events.jsonl` in the output folder of a start, and `hvdkit why`
computes the outcome from it again.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hvdkit import exit_statuses
from hvdkit.errors import HvdkitError
from hvdkit.faults.rank_report import RankReport
from hvdkit.launch.control.plan import describe_ranks
from hvdkit.system.plain_files import parse_json

#: The file with the list, in the output folder of a start.
EVENTS = "events.jsonl"
# After so many ends of ranks, only so many last lines of each rank are written.
_WHOLE_TAILS, _LINES = 64, 5
#: The version of the file. Readers refuse a newer one.
VERSION = 1


@dataclass(frozen=True)
class JobPlan:
    """The part of a job's plan that its outcome depends on.

    Attributes:
        hosts: the host of each rank.
        ends_others_with: as for `Controller`.
        elastic: whether ranks may end because the hosts have changed.
        stop_seconds: the time for an orderly stop.
    """

    hosts: tuple[str, ...]
    ends_others_with: tuple[int, ...] = ()
    elastic: bool = False
    stop_seconds: float = 120.0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def orderly(self) -> tuple[int, ...]:
        """The exit statuses of orderly ends, which are no failures."""
        return exit_statuses.orderly(self.elastic)

    def describe(self, ranks: Sequence[int]) -> str:
        """Return a text for ranks, such as "rank 1 on host1"."""
        return describe_ranks(ranks, self.hosts)


@dataclass(frozen=True)
class Event:
    """Something that has happened to a job.

    Attributes:
        at: when (`time.monotonic` of the launcher).
    """

    at: float


@dataclass(frozen=True)
class Reported(Event):
    """A rank has reported its own end."""

    rank: int
    report: RankReport


@dataclass(frozen=True)
class CollectiveFailed(Event):
    """A rank's last collective has failed: its name, and the engine's error."""

    rank: int
    name: str
    error: str


@dataclass(frozen=True)
class ShutDown(Event):
    """A rank has called `hvd.shutdown()`: where, as a sentence; "" if it has started again."""

    rank: int
    text: str


@dataclass(frozen=True)
class InHorovod(Event):
    """A rank starts Horovod, runs it, or shuts it down.

    Attributes:
        start: the number of its last start of Horovod, from 1.
        connected: whether this start has connected the rank; over Gloo, whether the rank has
            registered at the rendezvous, because the engine has a timeout for the rest.
        leaving: whether the rank is in `hvd.shutdown()`, or its script has ended. Only over MPI.
    """

    rank: int
    start: int
    connected: bool
    leaving: bool = False


@dataclass(frozen=True)
class Answered(Event):
    """A rank has sent a record, see `RankRecords`.

    Attributes:
        reason: as for `Record`.
        call: the key of the oldest collective for which it waits; "" for none.
        waited: the seconds for which it waits.
        overdue: whether a collective has failed that had waited until its limit.
    """

    rank: int
    reason: str
    call: str = ""
    waited: float = 0.0
    overdue: bool = False


@dataclass(frozen=True)
class Observed(Event):
    """An agent has looked at the processes of some ranks, and these of them are stopped."""

    ranks: tuple[int, ...]
    stopped: tuple[int, ...]


@dataclass(frozen=True)
class Exited(Event):
    """The process of a rank has ended. Its last output may follow."""

    rank: int
    status: int


@dataclass(frozen=True)
class Ended(Event):
    """The process of a rank has ended, and all its output has arrived.

    Attributes:
        status: its exit status, negative for a signal.
        hint: the probable cause of its end, if the agent knows one.
        stack: the lines of faulthandler after a crash.
    """

    rank: int
    status: int
    tail: tuple[str, ...] = ()
    hint: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentSignalled(Event):
    """An agent got a stop signal, and has asked its ranks to stop."""

    host: str
    number: int


@dataclass(frozen=True)
class AgentFailed(Event):
    """The agent of some ranks cannot continue."""

    host: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class AgentDone(Event):
    """The agent of some ranks has confirmed that no process of the job is left."""

    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class AgentLost(Event):
    """The agent of some ranks is lost.

    Attributes:
        text: the sentences for the user.
        with_host: whether the host does not answer; otherwise only the agent has ended.
        paused: whether the agent has ended because the launcher was stopped.
        silent: whether the agent does not answer, for example because it is stopped.
    """

    host: str
    ranks: tuple[int, ...]
    text: str
    with_host: bool = False
    paused: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Unconfirmed(Event):
    """Agents on these hosts did not confirm the end of their ranks."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class StopAsked(Event):
    """The launcher got a stop signal."""

    number: int


@dataclass(frozen=True)
class LateStart(Event):
    """Ranks were late in `hvd.init()`."""

    text: str


@dataclass(frozen=True)
class LateStop(Event):
    """Ranks run after the time for an orderly stop."""

    text: str


@dataclass(frozen=True)
class Resumed(Event):
    """The launcher has not run for some seconds: it was stopped, or the machine suspended."""

    seconds: float


@dataclass(frozen=True)
class Asked(Event):
    """The launcher asks all ranks for their records."""


@dataclass(frozen=True)
class Judged(Event):
    """The ranks have answered, or their time is over.

    Attributes:
        text: the verdict on a stall; "" if there is no stall, or no new one.
        outlook: how the job continues; "" if it must end, because no rank can continue, or because
            the limit of the stall has passed.
        stalled: the collectives that have stalled.
        ask_at: when the limit of one of them passes, and the ranks must be asked again; 0 for
            never.
    """

    text: str
    outlook: str = ""
    stalled: tuple[str, ...] = ()
    ask_at: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether the job must end."""
        return bool(self.text) and not self.outlook


@dataclass(frozen=True)
class Saved(Event):
    """A new checkpoint or a new commit was saved: only the first one counts."""


@dataclass(frozen=True)
class Committed(Event):
    """The hosts have the newest commit of an elastic job: only the first report counts."""


@dataclass(frozen=True)
class EndBegan(Event):
    """The launcher begins to end the ranks, or gives them less time.

    Attributes:
        grace: the seconds between SIGTERM and SIGKILL.
    """

    grace: float = 0.0


@dataclass(frozen=True)
class Found(Event):
    """The launcher has examined the job after the end of all ranks; each field is "" for nothing.

    Attributes:
        verdict: the verdict on the stall in which ranks failed.
        mismatch: which ranks differ in the collective that failed.
        silent: sentences about hosts that did not answer.
        killed: a sentence if the mpirun or srun that started the agents was killed.
        aborted_by: the srun that has ended all agents.
    """

    verdict: str = ""
    mismatch: str = ""
    silent: tuple[str, ...] = ()
    killed: str = ""
    aborted_by: str = ""


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _all_are(item: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is tuple and all(type(each) is item for each in value)


# The types of the fields -> whether a value has the type.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "bool": _is(bool),
    "int": _is(int),
    "str": _is(str),
    "float": lambda value: type(value) in (int, float) and math.isfinite(value),
    "tuple[str, ...]": _all_are(str),
    "tuple[int, ...]": _all_are(int),
    "RankReport": _is(RankReport),
}
_KINDS: dict[str, type[Event]] = {each.__name__: each for each in Event.__subclasses__()}


def to_text(plan: JobPlan, events: Iterable[Event]) -> str:
    """Return the plan and the events as text, one JSON object per line."""
    lines: list[dict[str, Any]] = [{"version": VERSION, **asdict(plan)}]
    left = _WHOLE_TAILS
    for event in events:
        if isinstance(event, Ended):
            kept = _LINES if left <= 0 else len(event.tail)
            event, left = replace(event, tail=event.tail[-kept:]), left - 1
        lines.append({"kind": type(event).__name__, **asdict(event)})
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _values(content: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}


def _check(part: JobPlan | Event, size: int) -> None:
    """Raise a ValueError if a field has another type, or is no rank of a job of this size."""
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        of_type = _FIELDS[str(field.type)](value)
        ranks = {"rank": (value,), "ranks": value}.get(name, ())
        if not of_type or not all(0 <= rank < size for rank in ranks):
            raise ValueError(f"{type(part).__name__}: {name} is {value!r}")
        if name == "number":
            signal.Signals(value)
        if name == "status" and not -signal.NSIG < value < 2**31:
            raise ValueError(f"{type(part).__name__}: {name} is {value!r}")


def parse(text: str) -> tuple[JobPlan, list[Event]]:
    """Return the plan and the events in `text`.

    Raises:
        HvdkitError: it is not a list of events of this version.
    """
    try:
        # One after the other: only what becomes an event stays in memory.
        lines = (parse_json(line[0]) for line in re.finditer(r"[^\n]+", text))
        first: dict[str, Any] = next(lines, {})
        if first.pop("version") > VERSION:
            raise HvdkitError("the list of events is of a newer hvdkit: update hvdkit")
        plan = JobPlan(**_values(first))
        _check(plan, 1)
        if not plan.hosts:
            raise ValueError("no ranks")
        events: list[Event] = []
        for line in lines:
            kind = _KINDS[line.pop("kind")]
            values = _values(line)
            if isinstance(values.get("report"), dict):
                values["report"] = RankReport.of(values["report"])
            events.append(kind(**values))
            _check(events[-1], plan.size)
        return plan, events
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise HvdkitError(f"not the events of a job ({error!r})") from error
