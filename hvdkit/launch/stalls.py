"""Find out why a job makes no progress: collect the ranks' records, and give a verdict.

A rank writes a record when a collective has waited for too long (`hvdkit/core/recorder.py`). Then
the launcher asks all ranks for records and waits for them for a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.faults import records
from hvdkit.faults.command import FOLDER, RAISED, SILENT, STATES
from hvdkit.faults.mismatch import mismatch
from hvdkit.faults.process_states import ENDED, LEAVING, STOPPED
from hvdkit.faults.records import Call, Record, with_all_groups
from hvdkit.faults.verdict import Verdict, judge, overdue, overdue_calls, unended
from hvdkit.faults.waits import find_waits, late_calls, long_waits
from hvdkit.launch.rank_records import RankRecords
from hvdkit.launch.record_rounds import ANSWER_SECONDS, Reason, RecordRounds, Round
from hvdkit.record_files import RECORD
from hvdkit.whole_files import replacing

#: A call that all ranks have made has stalled if the last of them has waited for these seconds.
ENTERED_SECONDS = 4.0
#: Seconds for which the launcher waits, after the time limit of a stall, for the engines to end the
#: job. They do not end it if all ranks have called the collective, or if the engine of a rank does
#: not run, for example because its process is stopped.
_ENGINE_SECONDS = 15.0
_MARGIN_SECONDS = 1.0
#: The file with the last verdict.
VERDICT = "verdict.txt"


class Stalls:
    """The stalls of a job.

    Args:
        size: the number of ranks.
        output: the output folder of this start; None for none.
        ask: asks all ranks for records.
        patience: the seconds for which the last ranks may run after another rank has ended or has
            shut Horovod down, until the launcher says what they do; 0 for any time.
        hosts: as for `judge`.
        tracebacks: returns, for each running rank that has written a traceback, when it has written
            the last one (`time.monotonic`), and its exception.
    """

    def __init__(
        self,
        size: int,
        output: Path | None,
        ask: Callable[[], None],
        patience: float = 0.0,
        hosts: Sequence[str] = (),
        tracebacks: Callable[[], Mapping[int, tuple[float, str]]] = dict,
    ) -> None:
        self._size = size
        self._folder = None if output is None else output / FOLDER
        self._records = RankRecords()
        self._rounds = RecordRounds(ask)
        self._patience = patience or float("inf")
        self._hosts = hosts
        self._tracebacks = tracebacks
        self._states: dict[int, str] = {}
        # The ranks that shut Horovod down.
        self._leaving: set[int] = set()
        self._verdict: Verdict | None = None
        self._judged_at = float("-inf")
        # The keys of the calls that have waited for too long -> when the launcher learned this
        # (`time.monotonic`). A verdict is given only if one of these calls still waits.
        self._late: dict[tuple[int, str, int], float] = {}
        # The keys of the calls that waited at the last verdict.
        self._judged: set[tuple[int, str, int]] = set()
        # The ranks that have ended or shut Horovod down.
        self._last_seen: set[int] = set()
        # The last traceback of a running rank.
        self._raised_at = float("-inf")

    def add(self, text: str, now: float) -> None:
        """Add the record of a rank. If it reports a new stall, ask all ranks for records."""
        try:
            record = records.parse(text)
        except HvdkitError:
            return  # written by another version of hvdkit
        if self._explains(record):
            self._keep(RECORD.format(record.rank), text)
        self._records.add(record, now)
        self._rounds.answer(record.rank, now)
        if record.reason == "stall":
            self._add_stall(record, now)
        elif record.reason == "error" and overdue_calls(record):
            self._rounds.plan(Reason.LIMIT, now + _ENGINE_SECONDS)

    def _explains(self, record: Record) -> bool:
        """Return whether a new record may explain the end of the job."""
        if self._verdict is not None and self._verdict.is_final:
            return False  # the launcher ends the ranks, and they do other things
        if record.reason != "request":
            return True
        # Outside of a round, `hvdkit inspect --live` has asked for it. A rank whose last collective
        # has failed waits no more: the record of its error says more.
        after_error = record.error and self._records.has_error(record.rank)
        return self._rounds.is_running and not after_error

    def _add_stall(self, record: Record, now: float) -> None:
        late = late_calls([record])
        self._late |= dict.fromkeys(late, now)
        # Each rank reports a stall. The launcher asks once.
        if not self._rounds.is_running and not late <= self._judged:
            self._rounds.begin(Reason.STALL, now)

    def set_states(self, states: Mapping[int, str]) -> None:
        """Set the states of the processes of some ranks."""
        for rank, state in states.items():
            if state:
                self._states[rank] = state
            else:
                self._states.pop(rank, None)

    def set_leaving(self, rank: int, leaving: bool) -> None:
        """Set whether a rank shuts Horovod down."""
        (self._leaving.add if leaving else self._leaving.discard)(rank)

    @property
    def stopped(self) -> set[int]:
        """The ranks whose processes were stopped when their states were last asked for."""
        return {rank for rank, state in self._states.items() if state == STOPPED}

    def mismatch(self) -> str:
        """Return which ranks differ in the collective that failed; "" if there are none."""
        return mismatch(self._records.current) or ""

    def failed_collective(self, rank: int) -> tuple[str, str]:
        """Return the collective that failed last on a rank, and its error.

        Both are empty if there is none, or if a later collective has ended without an error.
        """
        return self._records.failed_collective(rank)

    def failed_at(self, rank: int) -> float | None:
        """Return when it has failed (`time.monotonic` of the rank's host); None if not known."""
        return self._records.failed_at(rank)

    def verdict_on_failure(self) -> str:
        """Return the last verdict if the ranks failed in the collective of this verdict.

        If they have continued since the verdict, return the verdict on a collective that has
        waited until its limit meanwhile; "" without one.
        """
        verdict = self._failed_verdict(self._raised())
        return "" if verdict is None else verdict.whole_text

    def check(
        self,
        now: float,
        ended: Collection[int],
        silent_hosts: Callable[[], Sequence[str]] = tuple,
        failed: bool = False,
        raised_at: float = float("-inf"),
    ) -> Verdict | None:
        """Return a verdict when the ranks have answered, or when their time is over; else None.

        Args:
            now: the time (`time.monotonic`).
            ended: the ranks that have ended.
            silent_hosts: returns a sentence for each host that did not answer the launcher for some
                time.
            failed: whether a rank has failed. The other ranks then end soon.
            raised_at: when a running rank has written the last traceback (`time.monotonic`).
        """
        self._plan(now, ended, failed, raised_at)
        self._rounds.begin_due(now)
        if not self._rounds.is_running:
            return None
        answers = self._rounds.end(now, [r for r in range(self._size) if r not in ended])
        if answers is None:
            return None
        all_run = not (failed or ended or self._leaving)
        return self._judge(now, answers, ended, silent_hosts(), all_run)

    def _plan(self, now: float, ended: Collection[int], failed: bool, raised_at: float) -> None:
        """Plan to ask what the running ranks do, for example after another rank has ended."""
        if failed:
            self._rounds.cancel(Reason.LAST_RANKS)
        elif (last_seen := {*ended, *self._leaving}) != self._last_seen:
            self._last_seen = last_seen
            at = now + self._patience if last_seen else float("inf")
            self._rounds.plan(Reason.LAST_RANKS, at)
        if raised_at > self._raised_at:
            self._raised_at = raised_at
            self._rounds.plan(Reason.RAISED, raised_at + self._patience + ANSWER_SECONDS)

    def _judge(
        self,
        now: float,
        answers: Round,
        ended: Collection[int],
        silent_hosts: Sequence[str],
        all_run: bool,
    ) -> Verdict | None:
        """Return the verdict after a round; None if there is none, or if it must be confirmed."""
        last = self._records.last
        waiting = self._waiting_since()
        self._late = {k: at for k, at in self._late.items() if waiting.get(k, float("inf")) <= at}
        leaving = dict.fromkeys(self._leaving, LEAVING)
        states = leaving | self._states | dict.fromkeys(ended, ENDED)
        raised = self._raised()
        # An older record of a silent rank does not say what the rank does now.
        current = {rank: each for rank, each in last.items() if rank not in answers.silent}
        of_last_ranks = Reason.LAST_RANKS in answers.reasons
        verdict: Verdict | None
        if (
            Reason.LIMIT in answers.reasons
            and all_run
            and (verdict := self._failed_verdict(raised)) is not None
        ):
            # The engines have ended the collective, but the ranks have not ended.
            verdict = replace(verdict, expired=True)
        elif not (of_last_ranks or self._late):
            # The late rank has come.
            return self._unended(now, current, raised)
        else:
            lately = self._entered_lately(current)
            late = set() if of_last_ranks else self._late.keys() - lately
            verdict = judge(current, states, self._size, silent_hosts, late, self._hosts, raised)
            is_late = late or (of_last_ranks and getattr(verdict.call, "key", None) not in lately)
            if not is_late:
                for reason in answers.reasons:
                    self._rounds.plan(reason, now + ENTERED_SECONDS)
                return None
            verdict = self._limited(now, verdict, STOPPED in states.values())
        self._judged_at, self._verdict = now, verdict
        self._judged = {call.key for each in current.values() for call in each.open}
        # This verdict has named the exception.
        self._rounds.cancel(Reason.RAISED)
        if verdict.call is not None:
            self._late[verdict.call.key] = now
        self._keep(STATES, json.dumps(states))
        self._keep(SILENT, json.dumps(list(silent_hosts)))
        self._keep(RAISED, json.dumps(raised))
        self._keep(VERDICT, f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{verdict.whole_text}\n")
        return verdict

    def _waiting_since(self) -> dict[tuple[int, str, int], float]:
        """Return the keys of the calls that wait -> when the first uncounted call began.

        All uncounted calls of a name have the same key, so only the time tells them apart. For a
        counted call, the time is in the infinite past.
        """
        found: dict[tuple[int, str, int], float] = {}
        for rank, record in self._records.last.items():
            for call in record.open:
                began = float("-inf") if call.number else self._records.began(rank, call)
                found[call.key] = min(began, found.get(call.key, float("inf")))
        return found

    def _raised(self) -> dict[int, str]:
        return self._records.raised(self._tracebacks())

    def _failed_verdict(self, raised: Mapping[int, str]) -> Verdict | None:
        """Return the verdict on the collective in which the ranks have failed; None without one."""
        failed = self._records.of_failure
        verdict = overdue(failed, self._states, self._size, self._hosts, raised)
        if verdict is None and self._verdict is not None and self._has_failed(self._verdict):
            return self._verdict
        return verdict

    def _has_failed(self, verdict: Verdict) -> bool:
        """Return whether a rank failed in the collective of a verdict."""
        call = verdict.call
        return call is not None and any(
            record.error
            and record.calls.get(call.collective, 0) == call.number
            # Otherwise the call has ended, and a later one has failed.
            and (
                record.failed == call.name
                or any(c.collective == call.collective for c in record.open)
            )
            and (call.number > 0 or self._began_before_verdict(record, call))
            for rank in verdict.waiting
            if (record := self._records.last.get(rank)) is not None
        )

    def _began_before_verdict(self, record: Record, call: Call) -> bool:
        """Return whether a rank that has failed began its last call like `call` before the verdict.

        The number of an uncounted call does not show this.
        """
        failed = [] if record.failed_call is None else [record.failed_call]
        return any(
            each.collective == call.collective
            and self._records.began(record.rank, each) <= self._judged_at
            for each in (*record.open, *failed)
        )

    def _unended(
        self, now: float, current: Mapping[int, Record], raised: Mapping[int, str]
    ) -> Verdict | None:
        """Return the verdict on ranks that run after their script has raised; None without one."""
        if self._judged_at >= self._raised_at:
            return None  # a verdict has already named the exception
        verdict = unended(current, raised)
        if verdict is not None:
            self._judged_at = now
            self._rounds.cancel(Reason.RAISED)
        return verdict

    def _entered_lately(self, current: Mapping[int, Record]) -> set[tuple[int, str, int]]:
        """Return the keys of calls that all ranks have made, and that may have ended meanwhile.

        The ranks do not write their records at the same time. A call has not ended if the last rank
        has made it seconds before its record, and all records answer the same question. For calls
        that lack a rank, this does not matter: a rank that waits continues only after each missing
        rank has made the call, and the counts of calls only grow.
        """
        known = with_all_groups(current)
        old = long_waits(known, self._size, ENTERED_SECONDS)
        return {
            wait.call.key
            for wait in find_waits(known, self._size)
            if not wait.missing
            and (
                wait.call.key not in old
                or any(known[rank].reason != "request" for rank in wait.waiting)
            )
        }

    def _limited(self, now: float, verdict: Verdict, some_stopped: bool) -> Verdict:
        """Return the verdict with whether its limit has passed. Else plan a round at the limit."""
        if not verdict.limit:
            return verdict
        left = verdict.limit - verdict.waited
        engines_end = not (_all_entered(verdict) or some_stopped)
        margin = _ENGINE_SECONDS if engines_end else _MARGIN_SECONDS
        self._rounds.plan(Reason.LIMIT, now + max(left, 0) + margin)
        return replace(verdict, expired=left <= 0)

    def _keep(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the job
            self._folder.mkdir(exist_ok=True)
            with replacing(self._folder / name) as draft:
                draft.write_text(text, encoding="utf-8")


def _all_entered(verdict: Verdict) -> bool:
    """Return whether all ranks have called the collective of a verdict."""
    return verdict.call is not None and not verdict.missing
