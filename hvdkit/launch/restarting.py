"""Restart a job that has failed: `hvdkit run --restarts N`.

The ranks resume from their last checkpoint by themselves. A job that fails again and again without
a new checkpoint ends. A restart leaves out hosts that are lost, cannot be reached, have made a
start fail, or have failed twice, if the other hosts have enough slots (`--min-np`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from hvdkit.errors import RESUMABLE, HvdkitError, UsageError
from hvdkit.launch.hosts import Host, name_slots, total_slots
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import Plan
from hvdkit.launch.questions import named
from hvdkit.launch.reachability import best_connected
from hvdkit.signals import begin_to_note, status_before_start, stop_noting

# Seconds before a restart, after a failure without a new checkpoint: the first, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
#: Failures on one host after which a restart leaves the host out.
MOST_FAILURES = 2


def pause_before_restart(used: int) -> float:
    """Return the seconds to wait before a restart.

    Args:
        used: the number of restarts since the last new checkpoint or commit, at least 1.
    """
    return min(_FIRST_PAUSE * 2 ** (used - 1), _LONGEST_PAUSE)


def in_allocation(outcome: Outcome, say: Callable[[str], None]) -> Outcome:
    """Return the outcome of a job in a Slurm allocation: resumable if a node was lost.

    Also after a stop signal: before a node is taken away, Slurm may send one.
    """
    if not outcome.lost or outcome.status == 0:
        return outcome
    say(
        f"the allocation has lost a node. The job ends with status {RESUMABLE}: it can resume in a "
        f"new allocation"
    )
    return replace(outcome, status=RESUMABLE)


def not_restarted(outcome: Outcome, say: Callable[[str], None]) -> Outcome | None:
    """Return the outcome of a job that would start again, but has got a stop signal.

    The status is that of a signal in the pause before a restart. None without a signal: from now
    on, a signal ends the command.
    """
    number = outcome.interrupted or stop_noting()
    if number is None:
        return None
    status = status_before_start(number)
    resume = ": start the job again to resume it" if status == RESUMABLE else ""
    say(f"no restart after {number.name}. The job ends with status {status}{resume}")
    return replace(outcome, status=status, restartable=False)


@dataclass
class Supervisor:
    """Start a job, and start it again if it fails.

    Attributes:
        start: starts the ranks of a plan, and returns the outcome of the job.
        make_plan: returns the plan of a job of the given size on the given hosts.
        hosts: returns the hosts of the next start. If it raises UsageError, they stay the same.
        answering: returns those of the given hosts that can be reached, and prints why the other
            hosts cannot.
        size: the number of ranks.
        min_size: the smallest number of ranks of a restart.
        restarts: the most restarts in a row without a new checkpoint.
        say: prints a message for the user.
        hosts_return: whether a host that was lost may take part again later.
        requeue: whether a job that has lost a host ends with status `RESUMABLE`, because only the
            batch system can give the job another host.
        pause: waits for some seconds.
    """

    start: Callable[[Plan], Outcome]
    make_plan: Callable[[Sequence[Host], int], Plan]
    hosts: Callable[[], Sequence[Host]]
    answering: Callable[[Sequence[Host]], Sequence[Host]]
    size: int
    min_size: int
    restarts: int
    say: Callable[[str], None]
    hosts_return: bool = True
    requeue: bool = False
    pause: Callable[[float], None] = time.sleep
    _failures: Counter[str] = field(default_factory=Counter)
    # The hosts that have made a start fail since the last checkpoint.
    _unfit: set[str] = field(default_factory=set)
    # The hosts on which ranks have been started.
    _proven: set[str] = field(default_factory=set)

    def run(self, plan: Plan) -> Outcome:
        """Run the job until it succeeds, is stopped, or fails too often.

        Raises:
            HvdkitError: the job could not be started for the first time.
        """
        outcome = first = self._start(plan)
        used = 0
        while outcome.restartable:
            if outcome.saved:
                used, first = 0, outcome
                self._unfit.clear()
            if outcome.lost and self.requeue:
                break
            if used == self.restarts:
                count = f"{used + 1} times in a row" if used else "once"
                self.say(
                    f"the job failed {count} without a new checkpoint, and ends (--restarts). "
                    f"The first failure: {first.reason}"
                )
                return outcome
            if (stopped := not_restarted(outcome, self.say)) is not None:
                return stopped
            if used:
                self.pause(pause_before_restart(used))
            used += 1
            self.say(f"restart {used} of {self.restarts}")
            try:
                # If the start fails, the failure belongs to the new plan. It may have other hosts.
                plan = self._next_plan(plan, outcome)
                outcome = self._start(plan)
            except HvdkitError as error:
                begin_to_note()
                self.say(str(error))
                outcome = Outcome.not_started(error)
                # A lost host may answer again at the next restart, or the other hosts are enough.
                again = self.hosts_return or bool(outcome.unfit(plan.hosts, self._proven))
                outcome = replace(outcome, restartable=again)
        return in_allocation(outcome, self.say) if self.requeue else outcome

    def _start(self, plan: Plan) -> Outcome:
        outcome = self.start(plan)
        self._proven |= {host.name for host in plan.hosts}
        return outcome

    def _next_plan(self, plan: Plan, outcome: Outcome) -> Plan:
        if (name := outcome.failing_host(plan)) is not None:
            self._failures[name] += 1
        unfit = {host.name for host in outcome.unfit(plan.hosts, self._proven)}
        self._unfit |= unfit
        self._failures.update(unfit)
        if outcome.start_error and (undecided := outcome.start_error.undecided(self._proven)):
            self.say(undecided)
        try:
            hosts = self.hosts()
        except UsageError as error:  # someone may be writing the file at this moment
            self.say(f"the hosts stay the same: {error}")
            hosts = plan.hosts
        if not self.requeue:
            left = self._without_bad(hosts, outcome)
            # Starting an agent on an unused host takes time: only if the host may be needed.
            needed = self.min_size < self.size or len(left) < len(hosts)
            usable = self.answering(left) if needed else left
            if total_slots(usable) < self.min_size and len(left) < len(hosts):
                # Not all idle hosts answer, so the hosts that were left out are needed.
                usable = self.answering(hosts)
            hosts = usable
        size = min(self.size, total_slots(hosts))
        if size < self.min_size:
            raise HvdkitError(
                f"the hosts that can be used have {name_slots(size)}: expected at least "
                f"{self.min_size} (--min-np, or -np without it)"
            )
        if size < self.size:
            self.say(f"{size} rank{'s' if size > 1 else ''} instead of {self.size}")
        return self.make_plan(hosts, size)

    def _without_bad(self, hosts: Sequence[Host], outcome: Outcome) -> Sequence[Host]:
        """Return the hosts without those that would make a start with them fail."""
        # Connecting to a lost host would take many seconds. A later restart connects to it again.
        lost = set(outcome.lost)
        left = self._without(hosts, lost, "because the connection was lost")
        left = self._without(left, self._unfit, "because of a failed start")
        unconnected = {host.name for host in best_connected(left, outcome.broken)[1]}
        left = self._without(left, unconnected, "because connections to other hosts fail")
        failing = {name for name, count in self._failures.items() if count >= MOST_FAILURES}
        return self._without(left, failing, f"because the job failed there {MOST_FAILURES} times")

    def _without(self, hosts: Sequence[Host], names: Collection[str], why: str) -> Sequence[Host]:
        """Return the hosts without the named ones. Return all if the rest has too few slots."""
        left = [host for host in hosts if host.name not in names]
        if len(left) == len(hosts) or total_slots(left) < self.min_size:
            return hosts
        self.say(f"left out, {why}: {named([host for host in hosts if host.name in names])}")
        return left
