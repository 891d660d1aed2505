"""Start a job, and start it again if it has failed.

The ranks resume from their last checkpoint or commit by themselves. A job that fails again and
again without a new one ends.

`Supervisor` is the same for all jobs. `RestartedJob` is a job of `hvdkit run --restarts N`, whose
hosts the user names. Its restarts leave out hosts that are lost, cannot be reached, have made a
start fail, or have failed twice, if the other hosts have enough slots (`--min-np`). The other kind
of job is `elastic.job.ElasticJob`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hvdkit.errors import RESUMABLE, HvdkitError, UsageError
from hvdkit.launch.control import readers
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.questions import named
from hvdkit.launch.control.reachability import best_connected
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host, name_slots, total_slots
from hvdkit.system.signals import begin_to_note, status_before_start, stop_noting

# Seconds before a restart, after a failure without a new checkpoint: the first, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
#: Failures on one host after which a restart leaves the host out.
MOST_FAILURES = 2

#: Returns the variables for the ranks of an elastic job on a host.
Variables = Callable[[Host], Mapping[str, str]]


class TooFewHosts(HvdkitError):
    """There are too few hosts for a restart, and the job does not wait for more."""


def in_a_row(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the failures since the last checkpoint or commit, with the one that has saved it."""
    saved = [number for number, outcome in enumerate(outcomes) if outcome.saved]
    return [each for each in outcomes[saved[-1] if saved else 0 :] if not each.hosts_changed]


@dataclass(kw_only=True)
class Supervisor(ABC):
    """Start a job, and start it again if it fails.

    Attributes:
        start: starts the ranks of a plan, and returns the outcome. Its second argument is None in
            jobs that are not elastic.
        make_plan: returns the plan of a job of the given size on the given hosts.
        restarts: the most restarts in a row without progress.
        hosts_return: whether a host that was lost may take part again later.
        requeue: whether a job that has lost a host ends with status `RESUMABLE`, because only the
            batch system can give the job another host.
        pause: waits for some seconds.
        outcomes: the outcomes of the starts until now.
        proven: the names of the hosts on which ranks have been started.
        progress: the name of what permits all restarts again.
    """

    start: Callable[[Plan, Variables | None], Outcome]
    make_plan: Callable[[Sequence[Host], int], Plan]
    restarts: int
    hosts_return: bool = True
    requeue: bool = False
    pause: Callable[[float], None] = time.sleep
    outcomes: list[Outcome] = field(default_factory=list, init=False)
    proven: set[str] = field(default_factory=set, init=False)
    progress: ClassVar[str] = "checkpoint"

    def run(self) -> Outcome:
        """Run the job until it succeeds, is stopped, or fails too often.

        Raises:
            HvdkitError: the job could not be started for the first time.
        """
        plan = self._first_plan()
        self.outcomes.append(self._begin(plan))
        while (outcome := self.outcomes[-1]).restartable and not (outcome.lost and self.requeue):
            # After a change of hosts, the ranks end so that they can be started again. If they are
            # not started again, the job has failed.
            last = replace(outcome, status=1) if outcome.hosts_changed else outcome
            failures = in_a_row(self.outcomes)
            if not outcome.hosts_changed:
                self._learn(plan, outcome)
            if (refusal := self._refusal(outcome, failures)) is not None:
                if refusal:
                    readers.say(refusal)
                return last
            if (stopped := self._stopped(outcome)) is not None:
                return stopped
            if not outcome.hosts_changed and len(failures) > 1:
                self.pause(min(_FIRST_PAUSE * 2 ** (len(failures) - 2), _LONGEST_PAUSE))
            try:
                # If the start fails, the failure belongs to the new plan. It may have other hosts.
                plan = self._next_plan(plan, outcome)
                outcome = self._begin(plan)
            except TooFewHosts as error:
                begin_to_note()
                readers.say(str(error))
                return last
            except HvdkitError as error:
                begin_to_note()
                readers.say(str(error))
                outcome = Outcome.not_started(error)
                # A lost host may answer again at the next restart, or the other hosts are enough.
                again = self.hosts_return or bool(outcome.unfit(plan.hosts, self.proven))
                outcome = replace(outcome, restartable=again)
            self.outcomes.append(outcome)
        if not (self.requeue and outcome.lost) or outcome.status == 0:
            return outcome
        # Also after a stop signal: before a node is taken away, Slurm may send one.
        readers.say(
            f"the allocation has lost a node. The job ends with status {RESUMABLE}: it can resume "
            f"in a new allocation"
        )
        return replace(outcome, status=RESUMABLE)

    def _stopped(self, outcome: Outcome) -> Outcome | None:
        """Return the outcome of a job that would start again, but has got a stop signal.

        The status is that of a signal in the pause before a restart. None without a signal: from
        now on, a signal ends the command.
        """
        number = outcome.interrupted or stop_noting()
        if number is None:
            return None
        status = status_before_start(number)
        text = f"no restart after {number.name}. The job ends with status {status}"
        if status == RESUMABLE:
            # The job has failed, and maybe saved nothing. Commits end with it.
            text += ". If you start the job again, it can resume from its last checkpoint on disk"
        readers.say(text)
        return replace(outcome, status=status, restartable=False)

    def _begin(self, plan: Plan) -> Outcome:
        outcome = self.start(plan, self._variables(plan))
        self.proven.update(host.name for host in plan.hosts)
        return outcome

    def _refusal(self, outcome: Outcome, failures: Sequence[Outcome]) -> str | None:
        """Return why no restart may follow; "" without --restarts, and None if one may.

        Args:
            outcome: the outcome of the last start.
            failures: as `in_a_row` returns them.
        """
        if outcome.hosts_changed or len(failures) <= self.restarts:
            return None
        if not self.restarts:
            return ""
        count = f"{len(failures)} times in a row" if len(failures) > 1 else "once"
        return (
            f"the job failed {count} without a new {self.progress}, and ends (--restarts). "
            f"The first failure: {failures[0].reason}"
        )

    @abstractmethod
    def _first_plan(self) -> Plan:
        """Return the plan of the first start."""

    @abstractmethod
    def _learn(self, plan: Plan, outcome: Outcome) -> None:
        """Note the hosts that have failed."""

    @abstractmethod
    def _next_plan(self, plan: Plan, outcome: Outcome) -> Plan:
        """Tell the user of a restart, and return its plan.

        Raises:
            HvdkitError: there are too few hosts.
        """

    def _variables(self, plan: Plan) -> Variables | None:  # noqa: ARG002
        """Return what `start` needs in an elastic job."""
        return None

    def _unfit(self, plan: Plan, outcome: Outcome) -> list[Host]:
        """Return the hosts because of which the start has failed."""
        if outcome.start_error and (undecided := outcome.start_error.undecided(self.proven)):
            readers.say(undecided)
        return outcome.unfit(plan.hosts, self.proven)


@dataclass(kw_only=True)
class RestartedJob(Supervisor):
    """A job whose hosts the user or a batch system names.

    Attributes:
        first: the plan of the first start.
        hosts: returns the hosts of the next start. If it raises UsageError, they stay the same.
        answering: returns those of the given hosts that can be reached, and prints why the other
            hosts cannot.
        min_size: the smallest number of ranks of a restart.
    """

    first: Plan
    hosts: Callable[[], Sequence[Host]]
    answering: Callable[[Sequence[Host]], Sequence[Host]]
    min_size: int
    # The names of hosts -> their failures.
    _failures: Counter[str] = field(default_factory=Counter, init=False)
    # The hosts that have made a start fail since the last checkpoint.
    _left_out: set[str] = field(default_factory=set, init=False)

    def _first_plan(self) -> Plan:
        return self.first

    def _learn(self, plan: Plan, outcome: Outcome) -> None:
        if outcome.saved:
            self._left_out.clear()
        if (name := outcome.failing_host(plan)) is not None:
            self._failures[name] += 1
        unfit = {host.name for host in self._unfit(plan, outcome)}
        self._left_out.update(unfit)
        self._failures.update(unfit)

    def _next_plan(self, plan: Plan, outcome: Outcome) -> Plan:
        readers.say(f"restart {len(in_a_row(self.outcomes))} of {self.restarts}")
        try:
            hosts = self.hosts()
        except UsageError as error:  # someone may be writing the file at this moment
            readers.say(f"the hosts stay the same: {error}")
            hosts = plan.hosts
        if not self.requeue:
            left = self._without_bad(hosts, outcome)
            # Starting an agent on an unused host takes time: only if the host may be needed.
            needed = self.min_size < self.first.size or len(left) < len(hosts)
            usable = self.answering(left) if needed else left
            if total_slots(usable) < self.min_size and len(left) < len(hosts):
                # Not all idle hosts answer, so the hosts that were left out are needed.
                usable = self.answering(hosts)
            hosts = usable
        size = min(self.first.size, total_slots(hosts))
        if size < self.min_size:
            raise HvdkitError(
                f"the hosts that can be used have {name_slots(size)}: expected at least "
                f"{self.min_size} (--min-np, or -np without it)"
            )
        if size < self.first.size:
            readers.say(f"{size} rank{'s' if size > 1 else ''} instead of {self.first.size}")
        return self.make_plan(hosts, size)

    def _without_bad(self, hosts: Sequence[Host], outcome: Outcome) -> Sequence[Host]:
        """Return the hosts without those that would make a start with them fail."""
        # Connecting to a lost host would take many seconds. A later restart connects to it again.
        lost = set(outcome.lost)
        left = self._without(hosts, lost, "because the connection was lost")
        left = self._without(left, self._left_out, "because of a failed start")
        unconnected = {host.name for host in best_connected(left, outcome.broken)[1]}
        left = self._without(left, unconnected, "because connections to other hosts fail")
        failing = {name for name, count in self._failures.items() if count >= MOST_FAILURES}
        return self._without(left, failing, f"because the job failed there {MOST_FAILURES} times")

    def _without(self, hosts: Sequence[Host], names: Collection[str], why: str) -> Sequence[Host]:
        """Return the hosts without the named ones. Return all if the rest has too few slots."""
        left = [host for host in hosts if host.name not in names]
        if len(left) == len(hosts) or total_slots(left) < self.min_size:
            return hosts
        readers.say(f"left out, {why}: {named([host for host in hosts if host.name in names])}")
        return left
