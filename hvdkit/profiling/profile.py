"""`BaseProfile`: record some steps on all ranks, and write one trace on the first rank.

All ranks count steps alike, so they enter the collectives below alike. A failure on one rank, such
as a profiler that does not start, is exchanged before any rank raises.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import check_consistency, grouped
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults.records import parse
from hvdkit.profiling import clocks, events, trace_file
from hvdkit.profiling.clocks import Round
from hvdkit.profiling.events import OWN, Event
from hvdkit.profiling.overlap import Span, contradictions
from hvdkit.profiling.timeline import Control, Timeline
from hvdkit.runtime.recorder import Recorder

_Batch = TypeVar("_Batch")

_log = logging.getLogger("hvdkit.profiling")

_WITHOUT_RECORDER = "no collectives, because the engine has no flight recorder: run `hvdkit build`."


class Framework(Protocol):
    """A framework's own profiler."""

    def start(self) -> None:
        """Begin to record."""
        ...

    def step_begins(self, number: int) -> None:
        """Mark the beginning of a step."""
        ...

    def step_ends(self) -> None:
        """Mark the end of a step."""
        ...

    def stop(self) -> None:
        """End the recording, and its current step. May be called again, and without `start`."""
        ...

    def events(self, rank: int) -> list[Event]:
        """Return the recorded events of this rank, as `hvdkit.profiling.events` describes them.

        Raises:
            HvdkitError: the events cannot be read.
        """
        ...


@dataclass
class _Recording:
    """The recording of this rank.

    Attributes:
        began: nanoseconds of this rank's clock.
        rounds: the rounds of `clocks.measure` at the beginning.
        steps: the beginning and the end of each step.
        step_began: the beginning of the current step.
    """

    began: int
    rounds: list[Round]
    steps: list[tuple[int, int]]
    step_began: int


class BaseProfile:
    """Record steps, and write a trace. See `hvdkit.torch.profile`.

    Args:
        collectives: the collectives of the ranks.
        framework: the framework's profiler.
        recorder: the engine's flight recorder.
        control: starts and stops Horovod's timeline.
        path: the file for the trace.
        steps: the number of steps to record.
        wait: the number of steps to skip before the recording.
        settings: further settings, which must be the same on all ranks.

    Attributes:
        summary: a text about the trace and the clocks; empty before the trace is written.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        collectives: Collectives,
        framework: Framework,
        recorder: Recorder,
        control: Control,
        path: str | os.PathLike[str],
        steps: int,
        wait: int,
        settings: Sequence[str] = (),
    ) -> None:
        _check_count("steps", steps, 1)
        _check_count("wait", wait, 0)
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise UsageError(f"path is {path!r}: expected a file, such as trace.json.gz")
        self.summary = ""
        self._collectives = collectives
        self._framework = framework
        self._recorder = recorder
        self._path = Path(path)
        self._timeline = Timeline(control, self._path, collectives.rank)
        self._steps, self._wait = steps, wait
        self._settings = settings
        self._seen = 0
        self._entered = self._open = False
        self._generation = 0
        self._recording: _Recording | None = None

    # --- for scripts ----------------------------------------------------------------------------

    def step(self) -> None:
        """End a step. Every rank calls this after each step of the optimizer.

        The call after `wait` steps begins the recording, and the call after `wait` + `steps` steps
        writes the trace. Only these two calls are collectives. Later calls do nothing.

        Raises:
            UsageError: the context was not entered.
            HvdkitError: on every rank, if a rank could not record or write the file.
        """
        if not self._entered:
            raise UsageError(
                "hvd.profile was called without a context, so nothing is recorded: write `with "
                "hvd.profile(...) as profile:`"
            )
        if not self._open:
            return
        self._seen += 1
        if self._recording is not None:
            now = clocks.now()
            self._framework.step_ends()
            self._recording.steps.append((self._recording.step_began, now))
            if self._seen == self._wait + self._steps:
                self._finish()
                return
            self._begin_step()
        elif self._seen == self._wait:
            self._begin()

    def batches(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of an iterable. A step ends when the next batch is requested."""
        for batch in batches:
            yield batch
            self.step()

    def __enter__(self) -> Self:
        """Compare the settings of all ranks, and check that the file can be written."""
        if self._entered:
            raise UsageError("this profile was used before: call hvd.profile again")
        self._entered = True
        collectives = self._collectives
        collectives.describe(OWN, "hvd.profile, which every rank must call")
        collectives.sum([1], f"{OWN}.call")
        lines = [f"steps: {self._steps}", f"wait: {self._wait}", *self._settings]
        check_consistency(
            collectives, lines, "hvd.profile", "Pass the same arguments on every rank."
        )
        own = trace_file.check(self._path) if self._collectives.is_first else ""
        if problem := self._from_first(own, "path"):
            raise UsageError(problem)
        self._open, self._generation = True, collectives.generation
        if not self._wait:
            self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the trace if fewer steps than `steps` were made; after an exception, write none."""
        if not self._open:
            return
        if kind is not None:
            # The other ranks may not have this exception.
            self.abandon()
        elif self._recording is not None:
            self._finish()
        else:
            self._open = False
            if self._collectives.is_first:
                _log.warning(
                    "no trace was written: the loop ended after %d steps, and wait is %d. Pass a "
                    "smaller wait",
                    *(self._seen, self._wait),
                )

    def abandon(self) -> None:
        """Stop the recording, and write no trace. Not a collective."""
        self._open, self._recording = False, None
        with suppress(Exception):
            self._framework.stop()
        with suppress(Exception):
            self._timeline.stop()

    # --- recording ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin to record. A collective."""
        problem = ""
        try:
            self._framework.start()
            self._timeline.start()
        except Exception as error:
            problem = f"the profiler could not start: {error}"
        self._raise_if_any(problem, "start")
        rounds = clocks.measure(self._collectives, f"{OWN}.clock")
        now = clocks.now()
        self._recording = _Recording(now, rounds, [], now)
        self._begin_step()

    def _begin_step(self) -> None:
        assert self._recording is not None
        self._framework.step_begins(self._seen + 1)
        self._recording.step_began = clocks.now()

    def _finish(self) -> None:
        """Stop the recording and write the trace. A collective."""
        collectives, recording = self._collectives, self._recording
        assert recording is not None
        ended = clocks.now()
        self._open, self._recording = False, None
        # Ranks in `join` add zero. All ranks get the new generation when `join` returns.
        changed = collectives.generation != self._generation
        if changed or sum(collectives.sum([1], f"{OWN}.call")) < len(collectives.ranks):
            self.abandon()
            if self._collectives.is_first:
                _log.warning(
                    "no trace was written: %s in the recorded steps. Record earlier steps",
                    "hvd.init or hvd.join was called" if changed else "a rank has called hvd.join",
                )
            return
        rounds = clocks.measure(collectives, f"{OWN}.clock")
        own = clocks.kernel().encode() + b"\n" + _pack_rounds([*recording.rounds, *rounds])
        first = collectives.broadcast(own, collectives.ranks[0], f"{OWN}.first")
        kernel, _, packed = first.partition(b"\n")
        of_first, count = _unpack_rounds(packed), len(recording.rounds)
        clock = clocks.clock_change(
            clocks.offset_of(recording.rounds, of_first[:count]),
            clocks.offset_of(rounds, of_first[count:]),
            bool(kernel) and kernel.decode() == clocks.kernel(),
        )
        start = of_first[0][0]
        problem, content = "", b""
        facts: dict[str, Any] = {}
        try:
            facts, own_events = self._collect(recording, ended)
            content = trace_file.pack(events.finish(own_events, clock.to_first, start))
            for call in facts["calls"]:
                call[1:] = [clock.to_first(time) for time in call[1:]]
        except Exception as error:
            self.abandon()
            problem = f"the profile could not be read: {type(error).__name__}: {error}"
        self._raise_if_any(problem, "read")
        facts["clock"] = {
            "offset_us": round(clock.offset(recording.began) / 1e3, 3),
            "error_us": round(clock.error / 1e3, 3),
        }
        parts = [b""] * len(collectives.ranks)
        parts[0] = json.dumps(facts).encode() + b"\n" + content
        received = collectives.alltoall(parts, f"{OWN}.events")
        answer = {"problem": "", "summary": ""}
        if self._collectives.is_first:
            try:
                answer["summary"] = self._write(received)
                print(f"hvdkit: {answer['summary']}", flush=True)
            except Exception as error:
                answer["problem"] = f"no trace was written: {error}"
        answer = json.loads(self._from_first(json.dumps(answer), "written"))
        if answer["problem"]:
            raise HvdkitError(answer["problem"])
        self.summary = answer["summary"]

    def _collect(self, recording: _Recording, ended: int) -> tuple[dict[str, Any], list[Event]]:
        """Return facts about the recording of this rank, and its events. Not a collective."""
        rank, notes = self._collectives.rank, []
        self._framework.stop()
        found = [
            *events.name_process(rank, events.HVDKIT, f"rank {rank}: steps and collectives"),
            *events.step_events(rank, self._wait + 1, recording.steps),
        ]
        try:
            found += [
                event
                for event in self._framework.events(rank)
                if recording.began <= event.get("ts", recording.began) <= ended
            ]
        except HvdkitError as error:
            notes.append(f"no operations: {error}.")
        try:
            found += self._timeline.events(recording.began, ended)
        except HvdkitError as error:
            notes.append(f"no timeline of Horovod: {error}.")
        calls = []
        text = self._recorder.read(rank)
        if text is None:
            notes.append(_WITHOUT_RECORDER)
        else:
            # The times of the record are times of day.
            record = parse(text)
            record = record.shifted(-record.offset)
            calls = events.calls_between(record, recording.began, ended)
            found += events.collective_events(rank, record, calls)
            if not events.is_complete(record, recording.began):
                notes.append(
                    f"only the last {events.RECORDED:,} collectives, because the engine keeps no "
                    f"more: record fewer steps."
                )
        facts = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "steps": len(recording.steps),
            "notes": notes,
            "calls": [
                [key, events.nanoseconds(call.enqueued), events.nanoseconds(call.ended or 0)]
                for key, call in events.from_the_end(calls)
                if call.group == 0
            ],
        }
        return facts, found

    def _write(self, received: Sequence[bytes]) -> str:
        """Write the trace. Return the summary. Not a collective."""
        facts, packed = [], []
        for each in received:
            head, _, content = each.partition(b"\n")
            facts.append(json.loads(head))
            packed.append(content)
        spans: dict[str, dict[int, Span]] = {}
        for of_rank in facts:
            for key, enqueued, ended in of_rank.pop("calls"):
                spans.setdefault(key, {})[of_rank["rank"]] = (enqueued, ended)
        errors = {of_rank["rank"]: of_rank["clock"]["error_us"] * 1e3 for of_rank in facts}
        compared, wrong = contradictions(spans, errors)
        largest = max(errors.values()) / 1e3
        data = {
            "ranks": facts,
            "clock_error_us": round(largest, 3),
            "collectives_compared": compared,
            "collectives_that_contradict_the_clocks": wrong,
            "how": "times are those of the first rank's clock; a time of another rank may be wrong "
            "by its clock's error_us",
        }
        trace_file.write(self._path, packed, data)
        steps, ranks = facts[0]["steps"], len(facts)
        sentences = [
            f"wrote {steps} step{'s' * (steps != 1)} of {ranks} rank{'s' * (ranks != 1)} to "
            f"{self._path}."
        ]
        if ranks > 1:
            sentences.append(
                f"The clocks of the ranks are aligned to {largest:,.0f} µs."
                if largest
                else "All ranks have the same clock."
            )
        if wrong:
            sentences.append(
                f"{wrong:,} of {compared:,} collectives do not overlap on all ranks, so a clock "
                f"was set during the recording."
            )
        notes = grouped({of_rank["rank"]: " ".join(of_rank["notes"]) for of_rank in facts})
        return " ".join([*sentences, *(note for note in notes if not note.endswith(": "))])

    # --- exchange -------------------------------------------------------------------------------

    def _raise_if_any(self, problem: str, name: str) -> None:
        """Raise on all ranks if there is a problem on any. A collective."""
        (found,) = self._collectives.max([int(bool(problem))], f"{OWN}.{name}")
        if not found:
            return
        self.abandon()
        texts = self._collectives.allgather(problem.encode(), f"{OWN}.{name}.texts")
        by_rank = dict(zip(self._collectives.ranks, map(bytes.decode, texts), strict=True))
        raise HvdkitError(
            "; ".join(grouped({rank: text for rank, text in by_rank.items() if text}))
        )

    def _from_first(self, text: str, name: str) -> str:
        """Return the text of the first rank. A collective."""
        first = self._collectives.ranks[0]
        return self._collectives.broadcast(text.encode(), first, f"{OWN}.{name}").decode()


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is {value!r}: expected a whole number >= {least}")


def _pack_rounds(rounds: Sequence[Round]) -> bytes:
    return struct.pack(f"<{2 * len(rounds)}q", *(time for each in rounds for time in each))


def _unpack_rounds(data: bytes) -> list[Round]:
    times = struct.unpack(f"<{len(data) // 8}q", data)
    return list(zip(times[::2], times[1::2], strict=True))
