"""The end of a job."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.launch.failures import Failure
from hvdkit.launch.hosts import Host
from hvdkit.launch.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        status: the exit status of the job. After a failure: that of the rank that caused it. After
            signal n: 128 + n.
        report: the message for the user; empty after a success.
        failure: the failure that ended the job; None if there is none.
        suspects: the ranks that may have caused it, see `Failures.suspects`.
        restartable: whether the job failed by itself; False after a stop on request.
        saved: whether a new checkpoint or a new commit was saved.
        committed: whether the hosts have the newest commit of an elastic job.
        lost: the hosts that could not be reached any more.
        hosts_changed: whether the ranks have ended to be started on other hosts.
        is_verdict: whether the report is a verdict on a stall.
        possible_causes: the possible causes of a failure that only reports a lost peer, with which
            the report begins; empty for others.
    """

    status: int
    report: str = ""
    failure: Failure | None = None
    restartable: bool = False
    saved: bool = False
    committed: bool = False
    lost: tuple[Host, ...] = ()
    hosts_changed: bool = False
    suspects: tuple[int, ...] = ()
    is_verdict: bool = False
    possible_causes: str = ""

    def failing_host(self, plan: Plan) -> str | None:
        """Return the host on which the failure began; None if this is not known."""
        names = {plan.places[rank].host.name for rank in self.suspects}
        return names.pop() if len(names) == 1 else None

    @property
    def reason(self) -> str:
        """The failure in one line."""
        if self.failure is None:
            # The first line alone does not name the hosts or the ranks.
            return " ".join(line.strip() for line in self.report.splitlines())
        if self.possible_causes:
            return " ".join(self.report.splitlines()[:2])
        line = self.report.partition("\n")[0]
        exception = self.failure.exception
        return f"{line} {exception}" if exception else line
