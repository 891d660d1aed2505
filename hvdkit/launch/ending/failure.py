"""The end of a rank that has failed, and how likely it is the cause of the other failures.

When a rank raises, the other ranks lose a peer, and often end before the rank that raised. Its
threads and `atexit` functions take time, while the other ranks notice the lost connection at once.
So the first rank that ends may not be the cause. The kind of a failure decides first, and its time
only between failures of the same kind:

| kind | the rank | from | wait |
|---|---|---|---|
| OWN | raised an error of its own, or got a signal | its report; its status | 0.5 s |
| UNEXPLAINED | ended with a status, and its report has no error | its status | 2 s |
| TERMINATED | got SIGTERM over MPI, where mpirun sends it to all ranks | its status | 2 s |
| CONNECTION | lost some other connection, such as to a store | its report | 5 s |
| START | could not connect in `hvd.init()` | its report | 5 s |
| REFUSED | called a collective after Horovod's end | its report | 5 s |
| PEER | lost another rank, or was ended by MPI because of one | its report, its engine | 5 s |

The script of a rank that has lost a peer may raise any error. It is of the kind PEER, too, if the
engine reported the loss before.

The wait is the time for other ranks to fail by themselves, before the launcher ends them. A rank
that does not run Python, or leaves by `os._exit`, has no report. Output decides nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hvdkit.exit_statuses import CRASHES, signal_of, status_text
from hvdkit.faults.rank_report import RankReport
from hvdkit.system.processes import exit_text

#: The most lines that are shown of a failure, and of its error if it comes before these lines.
_SHOWN_LINES = 20
_SHOWN_OF_ERROR = 5
# The signals of a shell's program that a rank does not get because of another one.
_ENDING = (*CRASHES, signal.SIGKILL)
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")


class Kind(Enum):
    """The kind of a failure, from probable causes to probable consequences.

    A new kind is needed only for another place in this order, another wait, or another rule about
    suspects: `_hvdkit_self_report` chooses it. An error that only needs other words is OWN, and
    `Failure` describes it. `tests/unit/launch/test_outcome.py` draws stories with each cause.

    Attributes:
        reported: its name in the report of a rank.
        wait: the seconds for other ranks to fail by themselves.
        is_consequence: whether another rank has caused the failure, so that this rank is not named
            as a suspect.
    """

    OWN = "own", 0.5
    UNEXPLAINED = "unexplained", 2.0
    TERMINATED = "terminated", 2.0
    CONNECTION = "connection", 5.0
    START = "start", 5.0, True
    REFUSED = "refused", 5.0, True
    PEER = "peer", 5.0, True

    def __init__(self, reported: str, wait: float, is_consequence: bool = False) -> None:
        self.reported, self.wait, self.is_consequence = reported, wait, is_consequence


_ORDER = {kind: number for number, kind in enumerate(Kind)}
_REPORTED = {kind.reported: kind for kind in Kind}
#: The wait after SIGKILL, which no rank gets as a consequence of another failure.
_KILLED_WAIT = 0.1


@dataclass(frozen=True)
class Failure:
    """One rank that has failed.

    Attributes:
        status: its exit status, negative for a signal.
        ended: when its process has ended (`time.monotonic`).
        began: when it raised its error, or else ended.
        report: its report; None without one.
        hint: the probable cause of its end, if the agent knows one.
        stack: the lines of faulthandler after a crash.
        engine_error: the error of its last collective; empty if that did not fail.
        awaited: the name of that collective.
        by_controller: whether its status is one of those with which the controller (MPI) ends
            ranks after another one has ended.
        by_launcher: whether it had raised an error, and the launcher has then ended it.
        lost_first: whether it had lost another rank before it raised its error.
    """

    rank: int
    status: int
    ended: float = 0.0
    began: float = 0.0
    tail: Sequence[str] = ()
    report: RankReport | None = None
    hint: str = ""
    stack: Sequence[str] = ()
    engine_error: str = ""
    awaited: str = ""
    by_controller: bool = False
    by_launcher: bool = False
    lost_first: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of the failure."""
        report = self.report
        if report is not None and report.error:
            # A signal after it has ended what remained of Python.
            found = _REPORTED.get(report.kind, Kind.OWN)
            return Kind.PEER if found is Kind.OWN and self.lost_first else found
        if self.by_controller:
            return Kind.TERMINATED if self.status == -signal.SIGTERM else Kind.PEER
        if self.status < 0 or signal_of(self.status) in _ENDING:
            return Kind.OWN
        # The script may hide the error of a collective.
        return Kind.PEER if self.engine_error else Kind.UNEXPLAINED

    @property
    def by_mpi(self) -> bool:
        """Whether MPI has probably ended the rank, which had raised no error."""
        return self.by_controller and self.exception is None

    @property
    def order(self) -> tuple[int, float, int]:
        """The first failure in this order is the most likely cause of the others."""
        return _ORDER[self.kind], self.began, self.rank

    @property
    def wait(self) -> float:
        """The seconds for other ranks to fail by themselves."""
        return _KILLED_WAIT if self.status == -signal.SIGKILL else self.kind.wait

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because of another rank."""
        return self.kind.is_consequence

    def is_before(self, kind: Kind) -> bool:
        """Return whether the failure explains those of a kind."""
        return _ORDER[self.kind] < _ORDER[kind]

    @property
    def exception(self) -> str | None:
        """The class and the first line of the exception; None without one."""
        return self.report.error if self.report is not None and self.report.error else None

    @property
    def traceback(self) -> list[str]:
        """The lines of the traceback; empty without one."""
        return list(self.report.traceback) if self.report is not None else []

    @property
    def is_chained(self) -> bool:
        """Whether another exception has led to the rank's exception."""
        return self.report is not None and self.report.chained

    @property
    def end(self) -> str:
        """The end of the rank in words, with the hint."""
        if self.by_launcher:
            return "it raised an error, and had not ended when the launcher ended it"
        text = exit_text(self.status) if self.status < 0 else status_text(self.status)
        return ", ".join(filter(None, [text, self.hint]))

    @property
    def shows_error(self) -> bool:
        """Whether the error of the rank is known. It is not after a signal."""
        return self.exception is not None or (self.status >= 0 and bool(self.error_text))

    @property
    def error_text(self) -> str:
        """The error without its numbers, which is equal for ranks that failed alike."""
        # The last line of an exception group is a border, such as `+-----`.
        lines = [line for line in self.tail if line.strip(" |+-")]
        return (self.exception or (lines[-1] if lines else "")).translate(_WITHOUT_DIGITS)

    def is_like(self, other: Failure) -> bool:
        """Return whether two ranks failed with the same error."""
        return (self.status, self.kind, self.error_text, self.is_chained) == (
            other.status,
            other.kind,
            other.error_text,
            other.is_chained,
        )

    def lines(self) -> str:
        """Return the last lines of the rank, after its error if they lack it."""
        text = tail_of(self.rank, self.tail)
        if self.stack:
            text += "\n" + "\n".join(["Its stack:", *(f"  {line}" for line in self.stack)])
        traceback = self.traceback
        error = self.exception
        if error is None or not traceback or " ".join(error.split()) in " ".join(text.split()):
            return text
        ends = [number for number, line in enumerate(traceback) if error in line]
        end = ends[-1] + 1 if ends else len(traceback)
        shown = [f"  {line}" for line in traceback[:end][-_SHOWN_OF_ERROR:]]
        return "\n".join([f"Rank {self.rank}'s error:", *shown, text])


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """Return failures, the most likely cause of the others first."""
    found = sorted(failures, key=lambda failure: failure.order)
    # An error of one rank that all ranks raise, such as one of a checkpoint.
    first = found[0].kind, found[0].error_text
    alike = [each for each in found if (each.kind, each.error_text) == first]
    origin = next((each for each in alike if each.is_chained), found[0])
    return [origin, *(each for each in found if each is not origin)]


def suspects(ordered: Sequence[Failure]) -> list[int]:
    """Return the ranks that may have caused the failures. Empty if all of them are consequences.

    Several ranks if they failed with the same error, such as one about a difference of the ranks,
    or one of the interpreter.

    Args:
        ordered: the failures, as `in_order` returns them.
    """
    first, *others = ordered
    if first.is_consequence:
        return []
    shown = first.shows_error
    return [first.rank, *(f.rank for f in others if shown and f.shows_error and f.is_like(first))]


def tail_of(rank: int, tail: Sequence[str]) -> str:
    """Return the last lines of a rank, under a heading."""
    if not tail:
        return f"Rank {rank} wrote nothing."
    shown = tail[-_SHOWN_LINES:]
    return "\n".join([f"Rank {rank}'s last lines:", *(f"  {line}" for line in shown)])
