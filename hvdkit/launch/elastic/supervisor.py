"""Start the ranks of an elastic job, and start them again after a failure or a change of hosts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdkit.core.elastic.start import ElasticStart
from hvdkit.errors import HvdkitError
from hvdkit.launch.elastic.members import Members, assignment_of
from hvdkit.launch.hosts import Host, total_slots
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import Plan
from hvdkit.launch.questions import named
from hvdkit.launch.reachability import best_connected
from hvdkit.launch.restarting import MOST_FAILURES, not_restarted, pause_before_restart
from hvdkit.signals import begin_to_note

#: Seconds for which a host is left out whose connections to other hosts fail, or that made a start
#: fail. They double with each further time.
_UNFIT_SECONDS = 600.0


@dataclass(frozen=True)
class ElasticLimits:
    """The limits of an elastic job.

    Attributes:
        first_size: the number of slots to wait for before the first start.
        min_size: the smallest number of ranks.
        max_size: the largest number of ranks; None for all slots.
        restarts: the most restarts in a row after failures, without a new commit or checkpoint.
        resets: the most restarts of any kind; None for no limit.
        timeout: seconds to wait for slots.
        cooldown: the shortest and the longest time in seconds for which a failing host is left out.
            It doubles with each further failure. None: for the rest of the job.
    """

    first_size: int
    min_size: int
    max_size: int | None
    restarts: int
    resets: int | None
    timeout: float
    cooldown: tuple[float, float] | None = None


@dataclass
class Exclusions:
    """The hosts that are left out, because ranks, the agent or a start with them have failed.

    Attributes:
        cooldown: as in `ElasticLimits`.
        now: returns the time in seconds.
    """

    cooldown: tuple[float, float] | None
    now: Callable[[], float] = time.monotonic
    _failures: Counter[str] = field(default_factory=Counter)
    _until: dict[str, float] = field(default_factory=dict)
    # How often a host was left out by `leave_out`.
    _times: Counter[str] = field(default_factory=Counter)

    def add(self, name: str) -> str:
        """Add a failure on a host. Return a message if the host is left out from now on."""
        self._failures[name] += 1
        beyond = self._failures[name] - MOST_FAILURES
        if beyond < 0:
            return ""
        text = (
            f"the job failed {self._failures[name]} times on {name}, which is left out if the "
            f"other hosts are enough"
        )
        if self.cooldown is None:
            self._until[name] = float("inf")
            return text
        shortest, longest = self.cooldown
        seconds = min(longest, shortest * 2**beyond)
        self._until[name] = self.now() + seconds
        return f"{text}, for {seconds:g} s (--blacklist-cooldown-range)"

    def leave_out(self, name: str) -> float:
        """Leave a host out at once, and return for how many seconds. They double each time."""
        seconds = _UNFIT_SECONDS * 2 ** self._times[name]
        self._times[name] += 1
        self._until[name] = max(self.now() + seconds, self._until.get(name, 0.0))
        return seconds

    def __contains__(self, name: str) -> bool:
        return self.now() < self._until.get(name, float("-inf"))


@dataclass
class ElasticSupervisor:
    """Run an elastic job.

    Attributes:
        start: starts the ranks of a plan, and returns the outcome. Its second argument is a
            function that returns the environment variables for the ranks of a host.
        make_plan: returns the plan of a job of the given size on the given hosts.
        members: the hosts.
        exclusions: the hosts that are left out.
        limits: the limits of the job.
        say: prints a message for the user.
        pause: waits for some seconds.
    """

    start: Callable[[Plan, Callable[[Host], Mapping[str, str]]], Outcome]
    make_plan: Callable[[Sequence[Host], int], Plan]
    members: Members
    exclusions: Exclusions
    limits: ElasticLimits
    say: Callable[[str], None]
    pause: Callable[[float], None] = time.sleep
    _starts: int = 0
    _resets: int = 0
    _used: int = 0
    _committed: bool = False
    _first: Outcome | None = None
    # The hosts on which ranks have been started.
    _proven: set[str] = field(default_factory=set)

    def run(self) -> Outcome:
        """Run the job until it succeeds, is stopped, or fails too often.

        Raises:
            HvdkitError: the job could not be started for the first time.
        """
        hosts = self.members.wait_for(self.limits.first_size, self.limits.timeout)
        while True:
            plan = self._plan(hosts)
            outcome = self._start(plan)
            self._starts += 1
            self._committed = self._committed or outcome.committed
            if not outcome.restartable:
                return outcome
            # After a change of hosts, the ranks end so that they can be started again. If they are
            # not started again, the job has failed.
            last = replace(outcome, status=1) if outcome.hosts_changed else outcome
            if not self._may_restart(plan, outcome):
                return last
            if (stopped := not_restarted(outcome, self.say)) is not None:
                return stopped
            self._begin_restart(outcome)
            self.members.confirm(outcome.committed)
            try:
                hosts = self.members.wait_for(self.limits.min_size, self.limits.timeout)
            except HvdkitError as error:
                begin_to_note()
                self.say(str(error))
                return last

    def _plan(self, hosts: Sequence[Host]) -> Plan:
        slots = total_slots(hosts)
        size = slots if self.limits.max_size is None else min(slots, self.limits.max_size)
        plan = self.make_plan(hosts, size)
        shown = ", ".join(f"{name}:{count}" for name, count in assignment_of(plan))
        self.say(f"{size} rank{'s' if size > 1 else ''} on {shown}")
        return plan

    def _start(self, plan: Plan) -> Outcome:
        version = self.members.begin(plan)

        def variables(host: Host) -> Mapping[str, str]:
            folders = self.members.folders(host)
            return ElasticStart(folders, self._starts, version, self._committed).variables()

        try:
            outcome = self.start(plan, variables)
        except HvdkitError as error:
            if self._starts == 0:
                raise
            begin_to_note()
            # A host may just have been lost: a restart can succeed without it.
            self.say(str(error))
            return Outcome.not_started(error)
        self._proven |= {host.name for host in plan.hosts}
        return outcome

    def _may_restart(self, plan: Plan, outcome: Outcome) -> bool:
        """Count a failure, and return whether the limits permit a restart."""
        self._used = 0 if outcome.saved else self._used
        if not outcome.hosts_changed:
            if not self._used or self._first is None:
                self._first = outcome
            tried = self._tried_for_commit(plan, outcome)
            name = outcome.failing_host(plan)
            if name is not None and (message := self.exclusions.add(name)):
                self.say(message)
            without = best_connected(plan.hosts, outcome.broken)[1]
            self._leave_out(without, "because connections to other hosts fail")
            self._leave_out(self._unfit(plan, outcome), "because of a failed start")
            if outcome.start_error and (undecided := outcome.start_error.undecided(self._proven)):
                self.say(undecided)
            if self._used == self.limits.restarts:
                count = f"{self._used + 1} times in a row" if self._used else "once"
                self.say(
                    f"the job failed {count} without a new commit or checkpoint, and ends "
                    f"(--restarts). The first failure: {self._first.reason}"
                )
                return False
        if self._resets == self.limits.resets:
            times = "once" if self._resets == 1 else f"{self._resets} times"
            self.say(f"the job was restarted {times}, and ends (--reset-limit)")
            return False
        is_last = self._used == self.limits.restarts - 1
        if is_last and not outcome.hosts_changed and outcome.interrupted is None:
            self._give_up(tried)
        return True

    def _begin_restart(self, outcome: Outcome) -> None:
        """Count a restart, and wait before it if the job has made no progress."""
        self._resets += 1
        if outcome.hosts_changed:
            self.say("the hosts have changed: the ranks start again")
            return
        if self._used:
            self.pause(pause_before_restart(self._used))
        self._used += 1
        self.say(
            f"restart {self._used} (at most {self.limits.restarts} in a row without a new "
            "commit or checkpoint)"
        )

    def _unfit(self, plan: Plan, outcome: Outcome) -> Sequence[Host]:
        """Return the hosts because of which the start failed, and that can be left out."""
        unfit = outcome.unfit(plan.hosts, self._proven)
        holders = self.members.holders() & {host.name for host in plan.hosts}
        if holders <= {host.name for host in unfit}:
            # Without the newest commit, the training would begin again.
            return [host for host in unfit if host.name not in holders]
        return unfit

    def _tried_for_commit(self, plan: Plan, outcome: Outcome) -> Sequence[Host]:
        """Return the excluded hosts that took part because of their commit, which was not loaded.

        Hosts that have been excluded after this start are not among them.
        """
        if outcome.committed:
            return []
        holders = self.members.holders()
        return [h for h in plan.hosts if h.name in holders and h.name in self.exclusions]

    def _give_up(self, hosts: Sequence[Host]) -> None:
        """Make the last restart possible without hosts on which ranks end before they load."""
        for host in hosts:
            self.members.give_up(host.name)
        if hosts:
            self.say(
                f"the last commit, on {named(hosts)}, could not be loaded. The last restart does "
                f"without it if the other hosts are enough"
            )

    def _leave_out(self, hosts: Sequence[Host], why: str) -> None:
        by_seconds: dict[float, list[Host]] = {}
        for host in hosts:
            by_seconds.setdefault(self.exclusions.leave_out(host.name), []).append(host)
        for seconds, group in by_seconds.items():
            self.say(
                f"left out for {seconds:g} s if the other hosts are enough, {why}: {named(group)}"
            )
