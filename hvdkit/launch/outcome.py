"""The end of a job."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hvdkit.errors import HvdkitError
from hvdkit.launch.failures import Failure
from hvdkit.launch.hosts import Host
from hvdkit.launch.plan import Plan
from hvdkit.launch.reachability import BrokenConnection, best_connected, describe_broken
from hvdkit.launch.start_error import StartError

# The beginning of the line with the broken connections.
_BROKEN = "Connections that fail now: "


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        status: the exit status of the job. After a failure: that of the rank that caused it. After
            signal n: 128 + n.
        report: the message for the user; empty after a success.
        failure: the failure that ended the job; None if there is none.
        suspects: the ranks that may have caused it, see `Failures.suspects`.
        failed_agents: the names of the hosts whose agents have failed. Not those of lost hosts.
        restartable: whether the job failed by itself; False after a stop on request.
        saved: whether a new checkpoint or a new commit was saved.
        committed: whether the hosts have the newest commit of an elastic job.
        lost: the hosts that could not be reached any more.
        hosts_changed: whether the ranks have ended to be started on other hosts.
        is_verdict: whether the report is a verdict on a stall.
        possible_causes: the possible causes of a failure that only reports a lost peer, with which
            the report begins; empty for others.
        unfailed: the last sentence of these causes if it names ranks that had not failed; otherwise
            not part of them.
        broken: the connections between hosts that failed after the end of the ranks. They were only
            tried if the failure does not show its host.
        interrupted: the stop signal that arrived after the failure, for example while these
            connections were tried; None for none. It forbids a restart, but the failure stays the
            end of this start.
        start_error: the error if the ranks could not be started because of certain hosts; None for
            other ends.
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
    unfailed: str = ""
    broken: tuple[BrokenConnection, ...] = ()
    interrupted: signal.Signals | None = None
    failed_agents: tuple[str, ...] = ()
    start_error: StartError | None = None

    @classmethod
    def not_started(cls, error: HvdkitError) -> Outcome:
        """Return the outcome of a start that failed before its ranks were started."""
        start_error = error if isinstance(error, StartError) else None
        return cls(1, str(error), restartable=True, start_error=start_error)

    def unfit(self, hosts: Sequence[Host], proven: Collection[str]) -> list[Host]:
        """Return those of the hosts because of which the ranks could not be started.

        Args:
            hosts: the hosts of the start.
            proven: the names of the hosts on which ranks of the job have been started.
        """
        if self.start_error is None:
            return []
        names = self.start_error.unfit(proven)
        others = [host for host in hosts if host.name not in names]
        names |= {host.name for host in best_connected(others, self.start_error.broken, proven)[1]}
        found = [host for host in hosts if host.name in names]
        # If no host is fit, the cause is something else, such as the user's arguments.
        return found if len(found) < len(hosts) else []

    def failing_host(self, plan: Plan) -> str | None:
        """Return the host on which the failure began; None if this is not known."""
        names = {plan.places[rank].host.name for rank in self.suspects} or {*self.failed_agents}
        return names.pop() if len(names) == 1 else None

    def shows_host(self, plan: Plan) -> bool:
        """Return whether the end of the job has a cause that belongs to certain hosts."""
        return self.hosts_changed or bool(self.lost) or self.failing_host(plan) is not None

    def with_broken(self, broken: Sequence[BrokenConnection]) -> Outcome:
        """Return the outcome with broken connections, which are part of the report."""
        if not broken:
            return self
        found = f"{_BROKEN}{describe_broken(broken)}."
        # They are the cause if each rank only reports a lost peer. No rank was stopped, or hung.
        causes = self.possible_causes.removesuffix(self.unfailed).rstrip()
        failure = self.report.removeprefix(self.possible_causes).lstrip("\n")
        report = "\n".join([causes, found, failure] if causes else [failure, found])
        return replace(self, report=report, possible_causes=causes, broken=tuple(broken))

    @property
    def network(self) -> str:
        """The broken connections, in one line; empty if there are none."""
        return describe_broken(self.broken) if self.broken else ""

    @property
    def reason(self) -> str:
        """The failure in one line, without the broken connections."""
        if self.failure is None:
            # The first line alone does not name the hosts or the ranks.
            return " ".join(line.strip() for line in self.report.splitlines())
        if self.possible_causes:
            lines = [line for line in self.report.splitlines() if not line.startswith(_BROKEN)]
            return " ".join(lines[:2])
        line = self.report.partition("\n")[0]
        exception = self.failure.exception
        if exception and self.failure.status < 0:
            return f"{line} Earlier, the rank had written a traceback: {exception}"
        return f"{line} {exception}" if exception else line
