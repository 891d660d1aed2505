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
from hvdkit.faults.call_names import describe_call
from hvdkit.faults.command import FOLDER, RAISED, SILENT, STATES
from hvdkit.faults.mismatch import mismatch
from hvdkit.faults.outdated import without_outdated
from hvdkit.faults.process_states import ENDED, LEAVING, STOPPED
from hvdkit.faults.records import Record
from hvdkit.faults.verdict import Verdict, judge, overdue, overdue_calls, unended
from hvdkit.faults.waits import late_calls
from hvdkit.record_files import RECORD
from hvdkit.whole_files import replacing

#: Seconds to wait for the records of all ranks.
_ANSWER_SECONDS = 5.0
#: Seconds between two rounds of records, which confirm a deadlock.
_CONFIRM_SECONDS = 3.0
#: Seconds after a verdict in which a further record of a stall does not lead to a new verdict. If
#: the record is about another call, the launcher asks for records after these seconds: a rank
#: reports a stall once.
_PAUSE_SECONDS = 10.0
#: Seconds for which the launcher waits, after the time limit of a stall, for the engines to end the
#: job. They do not end it if all ranks have called the collective, or if the engine of a rank does
#: not run, for example because its process is stopped.
_ENGINE_SECONDS = 15.0
_MARGIN_SECONDS = 1.0
#: Seconds that a record may take from the rank to the launcher.
_DELAY_SECONDS = 1.0
#: The file with the last verdict.
VERDICT = "verdict.txt"


# The calls of a rank (collective -> their number), and the keys of those that wait.
_Seen = tuple[Mapping[tuple[int, str], int], Collection[tuple[int, str, int]]]


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
        self._ask = ask
        self._records: dict[int, Record] = {}
        # Those that are not outdated; None if they must be found again.
        self._current: Mapping[int, Record] | None = None
        # Rank -> its record of an error. Later records lack the calls that have failed.
        self._errors: dict[int, Record] = {}
        self._received: dict[int, float] = {}
        # Rank -> `time.monotonic` here, less the time on the rank's clock. It contains the shortest
        # delay of a record.
        self._clock_offsets: dict[int, float] = {}
        self._states: dict[int, str] = {}
        self._verdict: Verdict | None = None
        self._asked_at = float("-inf")
        self._judged_at = float("-inf")
        # The keys of the calls that have waited for too long. A verdict is given only if one of
        # these calls still waits.
        self._late: set[tuple[int, str, int]] = set()
        # The keys of the calls that waited at the last verdict.
        self._judged: set[tuple[int, str, int]] = set()
        # The ranks' states at the first verdict that needs a second one, and the time to ask again.
        self._unconfirmed: Mapping[int, _Seen] | None = None
        self._confirm_at = float("inf")
        # The time to ask for records because of a stall that was reported in a pause.
        self._next_stall_at = float("inf")
        # The time to check whether the limit of a stall is over, and whether the launcher has asked
        # for this reason.
        self._expires_at = float("inf")
        self._at_limit = False
        self._patience = patience
        self._hosts = hosts
        self._tracebacks = tracebacks
        # The ranks that shut Horovod down.
        self._leaving: set[int] = set()
        # The ranks that have ended or shut Horovod down, the time to ask what the running ranks do,
        # and whether the launcher has asked for this reason.
        self._last_seen: set[int] = set()
        self._last_ranks_at = float("inf")
        self._for_last_ranks = False
        # The last traceback of a running rank, and the time to ask whether its script has ended.
        self._raised_at = float("-inf")
        self._check_raised_at = float("inf")

    def add(self, text: str, now: float) -> None:
        """Add the record of a rank. If it reports a new stall, ask all ranks for records."""
        try:
            record = records.parse(text)
        except HvdkitError:
            return  # written by another version of hvdkit
        self._records[record.rank] = record
        self._current = None
        self._received[record.rank] = now
        offsets = self._clock_offsets
        offsets[record.rank] = min(now - record.time, offsets.get(record.rank, float("inf")))
        is_final = self._verdict is not None and self._verdict.is_final
        # After a final verdict the launcher ends the ranks, and they do other things. A rank whose
        # last collective has failed waits no more: the record of its error says more.
        after_error = record.reason == "request" and record.error and record.rank in self._errors
        if not (is_final or after_error):
            self._keep(RECORD.format(record.rank), text)
        known = (
            self._asking or self._unconfirmed is not None or now < self._judged_at + _PAUSE_SECONDS
        )
        if record.reason == "stall":
            late = late_calls([record])
            if not known:
                self._asked_at = now
                self._ask()
            elif not self._asking and self._unconfirmed is None and not late <= self._judged:
                self._next_stall_at = self._judged_at + _PAUSE_SECONDS
            self._late |= late
        elif record.reason == "error":
            self._errors[record.rank] = record
            if overdue_calls(record):
                self._expires_at = now + _ENGINE_SECONDS

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
        return mismatch(self._current_records()) or ""

    def verdict_on_failure(self) -> str:
        """Return the last verdict if the ranks failed in the collective of this verdict.

        If they have continued since the verdict, return the verdict on a collective that has
        waited until its limit meanwhile; "" without one.
        """
        verdict = self._failed_verdict()
        return "" if verdict is None else verdict.whole_text

    def failed_collective(self, rank: int) -> tuple[str, str]:
        """Return the collective that failed last on a rank, and its error.

        Both are empty if there is none, or if a later collective has ended without an error.
        """
        record = self._records.get(rank)
        if record is None or not record.error or rank not in self._current_records():
            return "", ""
        call = record.failed_call
        name = record.failed if call is None else describe_call(call, record)
        return name, record.error.removeprefix("failed: ")

    def _current_records(self) -> Mapping[int, Record]:
        """Return the records that are not outdated.

        To find them takes 0.07 s for 1,000 ranks, and all of them may end after one failure.
        """
        if self._current is None:
            self._current = without_outdated(self._records)
        return self._current

    def _failed_verdict(self) -> Verdict | None:
        """Return the verdict on the collective in which the ranks have failed; None without one."""
        errors = {r: each for r, each in self._errors.items() if self._records[r].error}
        records = without_outdated(self._records | errors)
        verdict = overdue(records, self._states, self._size, self._hosts, self._raised())
        if verdict is None and self._verdict is not None and self._has_failed(self._verdict):
            return self._verdict
        return verdict

    def _raised(self) -> dict[int, str]:
        """Return rank -> the exception, for ranks with a traceback after their last collective."""
        found = {}
        for rank, (raised_at, exception) in self._tracebacks().items():
            record = self._records.get(rank)
            ends = [] if record is None else [call.ended or 0.0 for call in record.done]
            last_end = max(ends, default=float("-inf")) + self._clock_offsets.get(rank, 0.0)
            if raised_at > last_end - _DELAY_SECONDS:
                found[rank] = exception
        return found

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
            for rank in verdict.waiting
            if (record := self._records.get(rank)) is not None
        )

    def _has_waited(self, verdict: Verdict) -> bool:
        """Return whether the verdict's ranks waited in its call also in the last round."""
        call, before = verdict.call, self._unconfirmed or {}
        return call is not None and all(
            rank in before and call.key in before[rank][1] for rank in verdict.waiting
        )

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
        if failed:
            self._last_ranks_at = float("inf")
        elif (last_seen := {*ended, *self._leaving}) != self._last_seen:
            self._last_seen = last_seen
            patience = self._patience if last_seen else 0.0
            self._last_ranks_at = now + (patience or float("inf"))
        if raised_at > self._raised_at:
            self._raised_at = raised_at
            self._check_raised_at = raised_at + (self._patience or float("inf")) + _ANSWER_SECONDS
        check_raised = now > self._check_raised_at and not self._asking
        if check_raised:
            self._check_raised_at = float("inf")
            # Otherwise a verdict has already named the exception.
            check_raised = self._judged_at < self._raised_at
        times = self._confirm_at, self._next_stall_at, self._expires_at, self._last_ranks_at
        if check_raised or now > min(times):
            self._for_last_ranks |= now > self._last_ranks_at
            # The round may give no verdict, so the limit of the stall stays.
            if now > self._expires_at:
                self._at_limit, self._expires_at = True, float("inf")
            self._confirm_at = self._last_ranks_at = self._next_stall_at = float("inf")
            self._asked_at = now
            self._ask()
        if not self._asking:
            return None
        silent = [
            rank
            for rank in range(self._size)
            if self._received.get(rank, float("-inf")) < self._asked_at and rank not in ended
        ]
        if silent and now < self._asked_at + _ANSWER_SECONDS:
            return None
        self._asked_at = float("-inf")
        self._late &= {call.key for each in self._records.values() for call in each.open}
        at_limit, self._at_limit = self._at_limit, False
        leaving = dict.fromkeys(self._leaving, LEAVING)
        states = leaving | self._states | dict.fromkeys(ended, ENDED)
        silent_sentences, raised = silent_hosts(), self._raised()
        all_run = not (failed or ended or self._leaving)
        if at_limit and all_run and (verdict := self._failed_verdict()) is not None:
            # The engines have ended the collective, but the ranks have not ended.
            self._verdict = replace(verdict, expired=True)
            self._keep_verdict(self._verdict, states, silent_sentences, raised)
            return self._verdict
        # An older record of a silent rank does not say what the rank does now.
        current = {rank: record for rank, record in self._records.items() if rank not in silent}
        if not self._for_last_ranks and not self._late:
            # The late rank has come.
            self._unconfirmed = None
            if self._judged_at < self._raised_at:
                verdict = unended(current, raised)
                self._judged_at = self._judged_at if verdict is None else now
                return verdict
            return None
        late = () if self._for_last_ranks else self._late
        self._for_last_ranks = False
        verdict = judge(current, states, self._size, silent_sentences, late, self._hosts, raised)
        all_entered = verdict.call is not None and not verdict.missing
        if verdict.deadlock or all_entered:
            # The ranks do not write their records at the same time. One rank may continue while
            # another rank writes. If two rounds give the same states, all ranks had them at the
            # same time.
            # Without times: each record has another offset to the time of day.
            seen = {
                rank: (record.calls, [call.key for call in record.open])
                for rank, record in current.items()
            }
            if self._unconfirmed is None:
                self._unconfirmed, self._confirm_at = seen, now + _CONFIRM_SECONDS
                # The ranks may fail before the second round.
                self._verdict = replace(verdict, deadlock=False)
                return None
            if all_entered and not self._has_waited(verdict):
                # The last rank called the collective between the records, so it has ended.
                self._unconfirmed = self._verdict = None
                # Another late call may still wait.
                self._confirm_at = now + _CONFIRM_SECONDS
                return None
            verdict = replace(verdict, deadlock=verdict.deadlock and self._unconfirmed == seen)
        if verdict.limit:
            left = verdict.limit - verdict.waited
            verdict = replace(verdict, expired=left <= 0)
            engines_end = not all_entered and STOPPED not in states.values()
            margin = _ENGINE_SECONDS if engines_end else _MARGIN_SECONDS
            self._expires_at = now + max(left, 0) + margin
        self._unconfirmed, self._judged_at, self._verdict = None, now, verdict
        self._judged = {call.key for each in current.values() for call in each.open}
        self._next_stall_at = float("inf")
        if verdict.call is not None:
            self._late.add(verdict.call.key)
        self._keep_verdict(verdict, states, silent_sentences, raised)
        return verdict

    @property
    def _asking(self) -> bool:
        return self._asked_at > float("-inf")

    def _keep_verdict(
        self,
        verdict: Verdict,
        states: Mapping[int, str],
        silent: Sequence[str],
        raised: Mapping[int, str],
    ) -> None:
        self._keep(STATES, json.dumps(states))
        self._keep(SILENT, json.dumps(list(silent)))
        self._keep(RAISED, json.dumps(raised))
        self._keep(VERDICT, f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{verdict.whole_text}\n")

    def _keep(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # a full disk must not end the job
            self._folder.mkdir(exist_ok=True)
            with replacing(self._folder / name) as draft:
                draft.write_text(text, encoding="utf-8")
