"""Find out why a job makes no progress: ask the ranks for records, and give a verdict.

A rank sends a record when a collective has waited for too long (`hvdkit/runtime/recorder.py`). Then
the launcher asks all ranks for records, and waits for them for a few seconds. `Stalls` derives from
the events when to ask, and the verdict; `StallWatch` sends the questions and shows the verdicts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.faults import records
from hvdkit.faults.names import ENDED, LEAVING, STOPPED
from hvdkit.faults.records import Call, Record
from hvdkit.faults.verdict import Verdict, judge, overdue, overdue_calls
from hvdkit.launch.control import readers
from hvdkit.launch.control.start_watch import LateStart, late_start
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.ending import events as e
from hvdkit.launch.ending.facts import Facts
from hvdkit.launch.ending.failure import Kind
from hvdkit.launch.ending.journal import Journal
from hvdkit.runtime.record_files import FOLDER, RAISED, RECORD, SILENT, STATES
from hvdkit.system.whole_files import write

#: Seconds to wait for the records of all ranks.
ANSWER_SECONDS = 5.0
#: Seconds for which the launcher waits, after the time limit of a stall, for the engines to end the
#: job. They do not end it if all ranks have called the collective, or if the engine of a rank does
#: not run, for example because its process is stopped.
_ENGINE_SECONDS = 15.0
_MARGIN_SECONDS = 1.0
#: The file with the last verdict.
VERDICT = "verdict.txt"


class Stalls:
    """Questions to the ranks of a job, and verdicts on a lack of progress, from the events."""

    def __init__(self, journal: Journal, timeouts: Timeouts) -> None:
        self._journal = journal
        self._answers = journal.of(e.Answered)
        self._asked = [each.at for each in journal.of(e.Asked)]
        self._judged = list(journal.of(e.Judged))
        self._size = journal.plan.size
        self._hosts = journal.plan.hosts
        self._timeouts = timeouts
        # 0: the launcher never says what the last ranks do.
        self._patience = timeouts.stall or float("inf")

    @cached_property
    def _facts(self) -> Facts:
        return self._journal.facts

    # When to ask

    @property
    def is_open(self) -> bool:
        """Whether the launcher waits for answers."""
        return len(self._asked) > len(self._judged)

    def is_due(self, now: float) -> bool:
        """Return whether to ask all ranks for records now."""
        return not self.is_open and (
            self._is_new_stall() or any(at < now and self._is_unasked(at) for at in self._planned)
        )

    def _is_unasked(self, at: float) -> bool:
        return not self._asked or self._asked[-1] < at

    def _is_new_stall(self) -> bool:
        """Return whether a rank has reported a stall that no verdict has described."""
        last = self._judged[-1].at if self._judged else float("-inf")
        return any(
            each.at > last and not self._was_told(each.call, each.at - each.waited)
            for each in self._reports
        )

    @cached_property
    def _reports(self) -> Sequence[e.Answered]:
        """The answers of ranks that wait for too long.

        Not by the reason: a call may have ended just before the rank wrote the record of a stall,
        and the record for a question may replace that of a stall before the agent reads it.
        """
        least = self._timeouts.stall
        reasons = ("stall", "request") if least else ("stall",)
        waiting = (each for each in self._answers if each.reason in reasons and each.call)
        return [each for each in waiting if each.waited >= least]

    def _was_told(self, call: str, began: float) -> bool:
        """Return whether a verdict has described the stall of a call that began at a time.

        All calls of a name that are not counted have the same key: only the time tells them apart.
        """
        return any(call in each.stalled and began < each.at for each in self._judged)

    @cached_property
    def _planned(self) -> Sequence[float]:
        """When to ask, beside new stalls."""
        starts = [] if self.late is None else [self.late.due]
        return [*self._limits, *self._last_ranks, *starts]

    @cached_property
    def late(self) -> LateStart | None:
        """The ranks that have not started Horovod, although others have."""
        notes, pauses = self._journal.of(e.InHorovod), self._journal.of(e.Resumed)
        return late_start(self._size, notes, pauses, self._timeouts.start)

    def is_late(self, now: float) -> bool:
        """Return whether ranks are late, and all agents have told since then which are stopped.

        An agent of `--nodes` that is itself stopped never tells.
        """
        if self.late is None or self._is_unasked(self.late.due):
            return False
        asked = self._asked[-1]
        observed = (each for each in self._journal.of(e.Observed) if each.at >= asked)
        looked = {rank for each in observed for rank in each.ranks}
        return looked.issuperset(self._facts.running) or now > asked + self._timeouts.lost

    @cached_property
    def begun(self) -> set[int]:
        """The ranks that have begun to start Horovod."""
        return {each.rank for each in self._journal.of(e.InHorovod)}

    @cached_property
    def _limits(self) -> list[float]:
        """When the limits of stalls have passed, and the engines had time to end the job."""
        ends = [each.at + _ENGINE_SECONDS for each in self._answers if each.overdue]
        return ends + [each.ask_at for each in self._judged if each.ask_at]

    @cached_property
    def _last_ranks(self) -> list[float]:
        """When ranks run long after others have ended or shut Horovod down, or after an error."""
        if self._facts.failures:
            return []  # the others end soon
        since = [end.at for end in self._facts.ends.values()]
        since += [each.at for each in self._leaving.values()]
        due = [max(since) + self._patience] if since else []
        told = max((each.at for each in self._judged if each.text), default=float("-inf"))
        raised = [
            each.at
            for rank, each in self._raised.items()
            if rank not in self._facts.ends and each.at > told
        ]
        return due + [at + self._patience + ANSWER_SECONDS for at in raised]

    @cached_property
    def _leaving(self) -> Mapping[int, e.InHorovod]:
        last = {each.rank: each for each in self._journal.of(e.InHorovod)}
        return {rank: each for rank, each in last.items() if each.leaving}

    @cached_property
    def _raised(self) -> Mapping[int, e.Reported]:
        """Rank -> its exception, of ranks that still run, or that the launcher has ended."""
        facts = self._facts
        return {
            rank: each
            for rank, each in facts.raised.items()
            if each.report.kind != Kind.PEER.reported
            and (rank not in facts.ends or facts.ends[rank].at > facts.end_began)
        }

    @property
    def raised(self) -> dict[int, str]:
        """Rank -> the exception, as for `verdict.judge`."""
        return {rank: each.report.error for rank, each in self._raised.items()}

    @cached_property
    def stopped(self) -> set[int]:
        """The ranks whose processes were stopped when their agents last looked."""
        found: set[int] = set()
        for each in self._journal.of(e.Observed):
            found = found.difference(each.ranks).union(each.stopped)
        return found

    # What to say

    def is_answered(self, now: float) -> bool:
        """Return whether the running ranks have answered, or their time is over."""
        if not self.is_open:
            return False
        asked = self._asked[-1]
        running = set(range(self._size)) - self._facts.statuses.keys()
        return now >= asked + ANSWER_SECONDS or running <= self._answered

    @cached_property
    def _answered(self) -> set[int]:
        """The ranks that have sent a record since they were asked."""
        return {each.rank for each in self._answers if each.at >= self._asked[-1]}

    def explains(self, record: Record) -> bool:
        """Return whether a new record may explain the end of the job."""
        if any(each.is_final for each in self._judged):
            return False  # the launcher ends the ranks, and they do other things
        # A rank whose last collective has failed waits no more: the record of its error says more.
        errors = self._journal.records.errors
        return record.reason != "request" or not (record.error and record.rank in errors)

    @property
    def states(self) -> dict[int, str]:
        """The states of the ranks' processes, as for `verdict.judge`."""
        return {
            **dict.fromkeys(self._leaving, LEAVING),
            **dict.fromkeys(self.stopped, STOPPED),
            **dict.fromkeys(self._facts.statuses, ENDED),
        }

    def judge(self, now: float, silent_hosts: Sequence[str]) -> e.Judged:
        """Return the verdict after the answers. Its text is "" if no stall is left or new."""
        verdict = self._verdict(silent_hosts)
        if verdict is None:
            return e.Judged(now, "")
        keys = tuple(" ".join(map(str, key)) for key in verdict.stalled)
        all_run = not (verdict.stopped or self.stopped)
        margin = _ENGINE_SECONDS if verdict.missing and all_run else _MARGIN_SECONDS
        at = now + max(verdict.left, 0.0) + margin if verdict.left < float("inf") else 0.0
        if verdict.is_final:
            return e.Judged(now, verdict.whole_text, stalled=keys)
        told = {key for each in self._judged for key in each.stalled if not key.endswith(" 0")}
        if keys and told.issuperset(keys) and not self._asks(self._last_ranks):
            return e.Judged(now, "", stalled=keys, ask_at=at)
        return e.Judged(now, verdict.whole_text, verdict.outlook, keys, at)

    def _verdict(self, silent_hosts: Sequence[str]) -> Verdict | None:
        facts = self._facts
        all_run = not (facts.failures or facts.statuses or self._leaving)
        if all_run and self._asks(self._limits) and (verdict := self._overdue()) is not None:
            # The engines have ended the collective, but the ranks have not ended.
            return verdict
        # An older record of a silent rank does not say what the rank does now.
        known = self._answered | facts.statuses.keys()
        current = {rank: each for rank, each in self._journal.records.last.items() if rank in known}
        seconds = min((each.waited for each in self._reports), default=float("inf"))
        verdict = judge(
            current, self.states, self._size, seconds, silent_hosts, self._hosts, self.raised
        )
        return verdict if verdict.call is not None or self._asks(self._last_ranks) else None

    def _asks(self, planned: Sequence[float]) -> bool:
        """Return whether the last question is the first one after one of these times."""
        before = self._asked[-2] if len(self._asked) > 1 else float("-inf")
        return any(before < at <= self._asked[-1] for at in planned)

    # After the end of the ranks

    def verdict_on_failure(self) -> str:
        """Return the verdict on the stall in which the ranks failed; "" if there is none."""
        verdict = self._overdue()
        if verdict is not None:
            return verdict.whole_text
        last = next((each for each in reversed(self._judged) if each.text), None)
        return last.text if last is not None and self._has_failed(last) else ""

    def _overdue(self) -> Verdict | None:
        """Return the verdict on a collective that has failed at its limit; None without one."""
        states = dict.fromkeys(self.stopped, STOPPED)
        failed = self._journal.records.of_failure
        return overdue(failed, states, self._size, self._hosts, self.raised)

    def _has_failed(self, verdict: e.Judged) -> bool:
        """Return whether a rank failed in a collective of a verdict."""
        arrived = {each.rank: each.at for each in self._answers}
        return any(
            _key(call) in verdict.stalled
            and arrived[rank] - (record.time - call.enqueued) < verdict.at
            for rank, record in self._journal.records.last.items()
            if record.error
            for call in (record.failed_call, *record.open)
            if call is not None
        )


class StallWatch:
    """Ask the ranks of a job, and show the verdicts.

    Args:
        output: the output folder of this start; None for none.
        ask: asks all ranks for records.
    """

    def __init__(
        self,
        journal: Journal,
        timeouts: Timeouts,
        output: Path | None,
        ask: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._folder = None if output is None else output / FOLDER
        self._ask = ask
        # Number of the first events -> the facts that follow.
        self._stalls = lru_cache(maxsize=1)(lambda _count: Stalls(journal, timeouts))

    @property
    def stalls(self) -> Stalls:
        """The facts that follow from the events until now."""
        return self._stalls(len(self._journal.events))

    def add(self, text: str, now: float) -> None:
        """Add the record of a rank."""
        try:
            record = records.parse(text)
        except HvdkitError:
            return  # written by another version of hvdkit
        if record.reason == "request" and not self.stalls.is_open:
            return  # `hvdkit inspect --live` has asked for it
        if self.stalls.explains(record):
            self._keep(RECORD.format(record.rank), text)
        self._journal.records.add(record)
        call, late = next(iter(record.open), None), bool(overdue_calls(record))
        key, waited = (_key(call), record.time - call.enqueued) if call else ("", 0.0)
        self._journal.add(e.Answered(now, record.rank, record.reason, key, waited, late))

    def check(self, now: float, silent_hosts: Callable[[], Sequence[str]] = tuple) -> None:
        """Ask the ranks, or show the verdict, if it is time.

        Args:
            silent_hosts: returns a sentence for each host that did not answer the launcher for some
                time.
        """
        stalls = self.stalls
        if stalls.is_due(now):
            self._journal.add(e.Asked(now))
            self._ask()
        elif stalls.is_answered(now):
            silent = silent_hosts()
            judged = stalls.judge(now, silent)
            self._journal.add(judged)
            if judged.text:
                self._keep(STATES, json.dumps(stalls.states))
                self._keep(SILENT, json.dumps(list(silent)))
                self._keep(RAISED, json.dumps(stalls.raised))
                self._keep(VERDICT, f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{judged.text}\n")
            if judged.outlook:
                readers.say(f"{judged.text}\n{judged.outlook}")

    def _keep(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the job
            self._folder.mkdir(exist_ok=True)
            write(self._folder / name, text)


def _key(call: Call) -> str:
    return " ".join(map(str, call.key))
