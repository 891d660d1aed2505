"""Find the rank whose failure is the cause of the other failures, and write the report.

When a rank raises, the other ranks lose a peer, and often end before the rank that raised. Its
traceback, threads and `atexit` functions take time, while the other ranks notice the lost
connection at once. So the first rank that ends may not be the cause. Failures are collected for a
moment, and a failure that reports a lost peer is the cause only if there is no other failure.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hvdkit.errors import RESUMABLE
from hvdkit.processes import exit_text

#: Kinds of failures, from probable causes to probable consequences: a traceback or a signal, an
#: exit status alone, SIGTERM over MPI, a broken connection, a lost peer.
_EXPLAINED, _UNEXPLAINED, _TERMINATED, _BROKEN_CONNECTION, _LOST_PEER = range(5)
#: By kind, the seconds to wait for other ranks to fail by themselves.
_WAITS = (0.5, 2.0, 2.0, 5.0, 5.0)
#: The same after SIGKILL, which no rank gets as a consequence of another failure.
_KILLED_WAIT = 0.1
#: The most seconds between the traceback of a rank and its end. An earlier traceback may be that of
#: an error that the script has caught.
RAISED_SECONDS = 10.0

#: The most failures whose last lines are shown. Failures with the same last line are shown once.
_SHOWN = 3
#: A line of at least this share of a frame's width is probably broken at a space.
_BROKEN_SHARE = 0.6
#: The most lines that are shown of a failure, and of its error if it comes before these lines.
_SHOWN_LINES = 20
_SHOWN_OF_ERROR = 5

# Messages of Horovod, and of the libraries that it uses. Messages of libraries may also be about
# other connections, such as to an object store.
_SHUT_DOWN = re.compile(r"Horovod has been shut down")
# A rank has ended, does not answer, or has raised an error in the collective.
_IN_COLLECTIVE = re.compile(
    r"collective (?:in shared memory|over the network): "
    r"(?:no message from rank|rank \d+ has (?:ended|not answered|not got|failed))"
)
# A shutdown removes the process sets on all ranks. A later call on such a set then finds none.
_NO_PROCESS_SET = re.compile(r"Process set provided does not exist")
_BROKEN = re.compile(
    r"Connection (?:closed|reset) by peer|ncclRemoteError|remote process exited|Broken pipe"
)
# The same, in a connection between ranks: of Gloo and NCCL, and of torch.distributed.
_BETWEEN_RANKS = re.compile(
    r"HorovodInternalError|gloo/transport/|ncclRemoteError|remote process exited"
    r"|torch[./]distributed"
)
# The same if a connection of Gloo gets no data for too long, or the other host does not answer.
_SILENT = re.compile(
    r"gloo/transport/.*(?:Timed out|[Tt]imeout|timed out|No route to host|is unreachable)"
)
# Horovod writes the reason as a line before the traceback of this error.
_INIT_FAILED = re.compile(r"Horovod initialization failed")
# Open MPI 5 writes this in each rank if mpirun has lost its daemon on a host.
_LOST_DAEMON = re.compile(r"An error occurred in PMIx Event Notification")
TRACEBACK = "Traceback (most recent call last)"
# Before each line of an exception group, and before those of the exceptions within it.
_GROUP, _WITHIN_GROUP = re.compile(r"^  [+|] "), re.compile(r"^ {4,}\|")
_GROUP_HEADING = "Exception Group Traceback"
# Before the traceback of an error that does not end the rank: of a destructor, and of a thread.
_DOES_NOT_END = re.compile(r"^Exception (?:ignored |in thread )")
# torch.distributed writes this before each line of a traceback, after `init_process_group()`.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_CHAINED = re.compile(r"direct cause of the following|During handling of the above")
_NUMBER = re.compile(r"\d+")
# The library `rich`, which Typer uses, draws a frame around all of a traceback but the exception,
# and breaks the exception into lines of the width of this frame.
_FRAME = re.compile(r"^(?=[╭│╰|]|\+-)")
_FRAME_END = re.compile(r"^  (?:╰|\+-+\+\s*$)")


@dataclass(frozen=True)
class Failure:
    """One rank that has ended with a status other than 0.

    Attributes:
        rank: the rank.
        status: its exit status, negative for a signal.
        tail: its last lines of output.
        over_mpi: whether MPI may have ended it. When a rank calls MPI_Abort, mpirun sends SIGTERM
            to all ranks.
        hint: the probable cause of its end, if the agent knows one; otherwise empty.
        began: when it raised its error, or else ended (`time.monotonic`).
        caught: whether the script has caught the error of its last traceback, so that this error is
            not the failure.
        engine_error: the error of its last collective; empty if it did not fail.
    """

    rank: int
    status: int
    tail: Sequence[str]
    over_mpi: bool = False
    began: float = 0.0
    hint: str = ""
    caught: bool = False
    engine_error: str = ""

    @property
    def end(self) -> str:
        """The end of the rank in words, with the hint."""
        return ", ".join(filter(None, [exit_text(self.status), self.hint]))

    @property
    def traceback(self) -> list[str]:
        """The lines from the last traceback on, including chained exceptions; may be empty.

        The traceback of a destructor or a thread counts only if there is no other one.
        """
        if self.caught:
            return []
        lines = [_FRAME.sub("  ", _RANK_PREFIX.sub("", line)) for line in self.tail]
        starts = [
            i for i, line in enumerate(lines) if TRACEBACK in line and not _WITHIN_GROUP.match(line)
        ]
        others = [i for i in starts if i > 0 and _DOES_NOT_END.match(lines[i - 1])]
        if ending := [i for i in starts if i not in others]:
            after = next((i for i in others if i > ending[-1]), len(lines) + 1)
            starts, lines = ending, lines[: after - 1]
        while len(starts) > 1 and _CHAINED.search("\n".join(lines[starts[-2] : starts[-1]])):
            starts.pop()
        return _without_breaks(lines[starts[-1] :]) if starts else []

    @property
    def shows_error(self) -> bool:
        """Whether the last line of output is that of the error. It is not after a signal."""
        return bool(self.traceback) or (self.status >= 0 and bool(self.last_line))

    @property
    def is_chained(self) -> bool:
        """Whether the traceback also has the error that led to its last one."""
        return _CHAINED.search("\n".join(self.traceback)) is not None

    @property
    def exception(self) -> str | None:
        """The first line of the last exception; None without a traceback."""
        found = None
        before = ""
        lines = self.traceback
        if lines and _GROUP_HEADING in lines[0]:
            lines = [_GROUP.sub("", line) for line in lines]
        for line in lines:
            if TRACEBACK in line and not _WITHIN_GROUP.match(line):
                found = None
            # All lines of a traceback but the first are indented. The text of the exception may
            # have several lines, and warnings may follow.
            elif found is None and before.startswith("  ") and line[:1].strip():
                found = line
            # TensorFlow writes an empty line after each frame.
            before = line if line.strip() else before
        return found

    @property
    def is_lost_peer(self) -> bool:
        """Whether the rank failed only because another rank had ended."""
        return self.kind == _LOST_PEER

    @property
    def kind(self) -> int:
        """The kind of the failure, which tells how likely it is the cause of the others."""
        # The script may catch and hide the error of a collective, but a signal has another cause.
        hidden = [self.engine_error] if self.status >= 0 else []
        text = "\n".join(self.traceback or [*([] if self.caught else self.tail), *hidden])
        if _INIT_FAILED.search(text):
            text = "\n".join(self.tail)
        broken = _BROKEN.search(text)
        if any(each.search(text) for each in (_SHUT_DOWN, _NO_PROCESS_SET, _IN_COLLECTIVE)):
            return _LOST_PEER
        if (broken and _BETWEEN_RANKS.search(text)) or _SILENT.search(text):
            return _LOST_PEER
        if broken:
            return _BROKEN_CONNECTION
        if self.lost_daemon:
            return _LOST_PEER
        if self.over_mpi and self.status == -signal.SIGTERM and not self.traceback:
            return _TERMINATED
        return _EXPLAINED if self.traceback or self.status < 0 else _UNEXPLAINED

    @property
    def lost_daemon(self) -> bool:
        """Whether MPI has ended the rank, because mpirun has lost its daemon on a host."""
        return self.over_mpi and not self.traceback and bool(_LOST_DAEMON.search(str(self.tail)))

    @property
    def last_line(self) -> str:
        """The last line without its numbers, which is equal for ranks that failed alike."""
        # The last line of an exception group is a border, such as `+-----`.
        lines = [line for line in self.tail if line.strip(" |+-")]
        return _NUMBER.sub("", lines[-1]) if lines else ""


class Failures:
    """The failures of a job.

    Args:
        describe: returns a text for ranks, such as "rank 1 on host1".
        orderly: the statuses of orderly ends, which are not failures.
        over_mpi: whether the ranks run over MPI.
    """

    def __init__(
        self,
        describe: Callable[[list[int]], str],
        orderly: Collection[int] = (RESUMABLE,),
        over_mpi: bool = False,
    ) -> None:
        self._describe = describe
        self._orderly = orderly
        self._over_mpi = over_mpi
        self._found: list[Failure] = []
        # Rank -> the last line of its traceback.
        self._raised: dict[int, str] = {}
        self._deadline = float("inf")

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(
        self,
        rank: int,
        status: int,
        tail: Sequence[str],
        raised_at: float = float("-inf"),
        hint: str = "",
        engine_error: Callable[[], str] = str,
    ) -> None:
        """Add a rank that has ended now.

        Args:
            rank: the rank.
            status: its exit status, which is not 0.
            tail: its last lines of output.
            raised_at: when it wrote its last traceback (`time.monotonic`). Its `atexit` functions
                run afterwards, so another rank may raise later and end earlier.
            hint: as for `Failure`.
            engine_error: returns that of `Failure`. Only called for a rank without a traceback.
        """
        now = time.monotonic()
        is_recent = now - raised_at < RAISED_SECONDS
        # Status 1: Python's after an exception. Functions of `atexit` may then run for long.
        caught = not is_recent and status != 1 and raised_at > float("-inf")
        began = raised_at if is_recent else now
        failure = Failure(rank, status, tail, self._over_mpi, began, hint, caught)
        if not failure.traceback:
            failure = replace(failure, engine_error=engine_error())
        self._found.append(failure)
        if status not in self._orderly:
            wait = _KILLED_WAIT if status == -signal.SIGKILL else _WAITS[failure.kind]
            self._deadline = min(self._deadline, time.monotonic() + wait)

    def add_success(self, rank: int, tail: Sequence[str], raised_at: float) -> None:
        """Add a rank that has ended now with exit status 0.

        It may have raised an error: the script catches and prints it, or calls `os._exit(0)`.

        Args:
            rank: the rank.
            tail: its last lines of output.
            raised_at: when it wrote its last traceback (`time.monotonic`).
        """
        end = Failure(rank, 0, tail)
        is_recent = time.monotonic() - raised_at < RAISED_SECONDS
        if is_recent and end.exception is not None and not end.is_lost_peer:
            self._raised[rank] = end.exception

    @property
    def deadline(self) -> float:
        """The time to end the ranks that still run; infinite while none has failed."""
        return self._deadline

    @property
    def orderly(self) -> bool:
        """Whether all of them are orderly ends, so that the job can be resumed."""
        return all(failure.status in self._orderly for failure in self._found)

    @property
    def cause(self) -> Failure:
        """The failure that is the most likely cause of the others."""
        return self._ordered()[0]

    @property
    def suspects(self) -> list[int]:
        """The ranks that may have caused the failures. Empty if all of them had lost a peer.

        Several ranks if they failed with the same error, such as one about a difference of the
        ranks, or one of the interpreter, which has no traceback.
        """
        first, *others = self._ordered()
        if first.is_lost_peer:
            return []
        alike = [
            each.rank
            for each in others
            if first.shows_error
            and each.shows_error
            and (each.status, each.kind) == (first.status, first.kind)
            and (each.last_line, each.is_chained) == (first.last_line, first.is_chained)
        ]
        return [first.rank, *alike]

    def _ordered(self) -> list[Failure]:
        failures = [failure for failure in self._found if failure.status not in self._orderly]
        failures.sort(key=lambda failure: (failure.kind, failure.began))
        # An error of one rank that all ranks raise, such as one of a checkpoint.
        alike = [each for each in failures if each.last_line == failures[0].last_line]
        origin = next((each for each in alike if each.is_chained), failures[0])
        return [origin, *(each for each in failures if each is not origin)]

    def report(
        self,
        ended: int,
        finished: Sequence[int],
        before: str = "",
        departed: Sequence[str] = (),
        remarks: Sequence[str] = (),
        aborted_by: str = "",
        awaited: Mapping[int, str] = MappingProxyType({}),
    ) -> tuple[str, str]:
        """Return the possible causes, and the report for the user that follows them.

        The causes are empty unless every failure only reports a lost peer.

        Args:
            ended: the number of ranks that the launcher ended because of the failures.
            finished: the ranks that ended without an error.
            before: the verdict on the stall in which the ranks failed; empty if there was none.
            departed: for each rank that has called `hvd.shutdown()`, a sentence.
            remarks: sentences about hosts that did not answer, and ranks that have not failed.
            aborted_by: "srun" if it has then sent SIGKILL to all ranks; otherwise empty.
            awaited: rank -> the collective in which it has failed.
        """
        first, *others = self._ordered()
        if aborted_by:
            others = [failure for failure in others if failure.status != -signal.SIGKILL]
        alike = self.suspects
        # The first one to end is no more the cause than the others.
        all_alike = len(alike) == len(self._found) > 1 and not ended and not finished
        if all_alike:
            parts = [f"all ranks failed with the same error: {first.end}"]
        else:
            parts = [f"{self._describe([first.rank])} failed: {first.end}"]
        after = [f for f in others if f.kind == _LOST_PEER and first.kind < _LOST_PEER]
        if after:
            parts.append(f"{_count(len(after))} failed after it, because the connection was lost")
        lines = ["; ".join(parts) + "."]
        if ended:
            lines[0] += f" The launcher ended {_others(ended)}."
        if first.kind < _TERMINATED and (by_mpi := sum(f.kind == _TERMINATED for f in others)):
            lines[0] += f" MPI ended {_others(by_mpi)}."
        if aborted_by:
            lines[0] += f" {aborted_by} then ended all other ranks."
        stopped = [each.rank for each in self._found if each.status == RESUMABLE]
        # Without a stall or such ranks, the script has used a process set that it had not added.
        is_cause = _NO_PROCESS_SET.search("\n".join(first.traceback)) and not (
            before or departed or finished or stopped
        )
        causes = ""
        if first.kind == _LOST_PEER and not is_cause:
            if departed:
                causes = _shut_down(departed)
            elif before and not finished and not stopped:
                causes = before.replace("\n", " ")
            else:
                raised = {rank: self._raised[rank] for rank in finished if rank in self._raised}
                waited = awaited.get(first.rank, "")
                causes = _without_cause(self._describe, finished, raised, stopped, remarks, waited)
            # The causes come first: the rank that failed is not at fault.
            lines = [f"Then {lines[0]}"]
        if first.kind == _TERMINATED or first.lost_daemon:
            lines.append(
                "If mpirun or srun gets a signal, or loses its daemon on a host, it ends all ranks."
            )
        lines.append(end_of(first))
        shown = {first.last_line}
        consequences = (_TERMINATED, _LOST_PEER) if first.kind < _TERMINATED else (_LOST_PEER,)
        similar = [f for f in others if f.kind not in consequences or f.kind == first.kind]
        for failure in similar:
            if failure.last_line not in shown and len(shown) < _SHOWN:
                shown.add(failure.last_line)
                rank = _capitalized(self._describe([failure.rank]))
                lines.append(f"{rank} failed, too: {failure.end}.")
                lines.append(end_of(failure))
        same = sum(failure.last_line == first.last_line for failure in similar)
        if same and not all_alike:
            lines.append(
                f"{same} more rank{'s' if same > 1 else ''} failed like rank {first.rank}."
            )
        return causes, "\n".join(lines)


def _without_breaks(traceback: list[str]) -> list[str]:
    """Return a traceback with the last exception in one line, if `rich` has broken it."""
    ends = [i for i, line in enumerate(traceback) if _FRAME_END.match(line)]
    if not ends:
        return traceback
    begin = end = ends[-1] + 1
    while end < len(traceback) and len(traceback[end]) > _BROKEN_SHARE * len(traceback[begin - 1]):
        end += 1
    exception = " ".join(line.strip() for line in traceback[begin : end + 1])
    return [*traceback[:begin], exception, *traceback[end + 1 :]]


def _shut_down(departed: Sequence[str]) -> str:
    """Return what ranks have shut Horovod down."""
    more = len(departed) - _SHOWN
    return " ".join(
        [
            *departed[:_SHOWN],
            *([f"{more} more called it."] if more > 0 else []),
            "This shuts Horovod down on all ranks: call it only after the last collective of every "
            "rank.",
        ]
    )


def _without_cause(
    describe: Callable[[list[int]], str],
    finished: Sequence[int],
    raised: Mapping[int, str],
    stopped: Sequence[int],
    remarks: Sequence[str],
    awaited: str,
) -> str:
    """Return the possible causes where every failure is a lost peer."""

    def named(ranks: list[int]) -> str:
        return _capitalized(describe(ranks))

    text = "Each rank that failed reported only that another rank had ended or did not answer."
    for rank, error in raised.items():
        text += (
            f" {named([rank])} had written a traceback, and had ended with exit status 0: "
            f"{error}. After an error, end the script with another exit status."
        )
    if finished and not raised:
        text += f" {named(list(finished))} had ended without an error"
        text += f", and the failed ranks waited for {awaited}" if awaited else ""
        text += ": check whether all ranks had the same number of batches"
        text += ", and have called hvd.join()." if awaited.startswith("join()") else "."
    if stopped:
        text += f" {named(list(stopped))} had made an orderly stop (exit status {RESUMABLE})."
    return " ".join([text, *remarks])


def end_of(failure: Failure) -> str:
    """Return the last lines of a rank that has failed, after its error if they lack it."""
    text, exception = tail_of(failure.rank, failure.tail), failure.exception
    if exception is None or " ".join(exception.split()) in " ".join(text.split()):
        return text
    traceback = failure.traceback
    end = traceback.index(next(line for line in traceback if exception in line)) + 1
    shown = [f"  {line}" for line in traceback[:end][-_SHOWN_OF_ERROR:]]
    return "\n".join([f"Rank {failure.rank}'s error:", *shown, text])


def tail_of(rank: int, tail: Sequence[str]) -> str:
    """Return the last lines of a rank, under a heading."""
    if not tail:
        return f"Rank {rank} wrote nothing."
    shown = tail[-_SHOWN_LINES:]
    return "\n".join([f"Rank {rank}'s last lines:", *(f"  {line}" for line in shown)])


def _capitalized(text: str) -> str:
    """Return a text with which a sentence can begin."""
    return text[0].upper() + text[1:]


def _others(number: int) -> str:
    return f"{number} other rank{'' if number == 1 else 's'}"


def _count(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
