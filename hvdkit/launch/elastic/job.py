"""Start the ranks of an elastic job, and start them again after a failure or a change of hosts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import prepare, readers
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.questions import named
from hvdkit.launch.control.reachability import best_connected
from hvdkit.launch.control.restarting import (
    MOST_FAILURES,
    Supervisor,
    TooFewHosts,
    Variables,
    in_a_row,
)
from hvdkit.launch.elastic.choice import assignment_of
from hvdkit.launch.elastic.members import Members
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host, total_slots
from hvdkit.launch.launchers.gloo import Gloo
from hvdkit.runtime.elastic_start import ElasticStart

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


@dataclass(kw_only=True)
class ElasticJob(Supervisor):
    """An elastic job.

    Attributes:
        exclusions: the hosts that are left out.
    """

    progress: ClassVar[str] = "commit or checkpoint"
    members: Members
    exclusions: Exclusions
    limits: ElasticLimits

    def _first_plan(self) -> Plan:
        return self._plan(self.members.wait_for(self.limits.first_size, self.limits.timeout))

    def _next_plan(self, plan: Plan, outcome: Outcome) -> Plan:  # noqa: ARG002
        if outcome.hosts_changed:
            readers.say("the hosts have changed: the ranks start again")
        else:
            readers.say(
                f"restart {len(in_a_row(self.outcomes))} (at most {self.restarts} in a row without "
                f"a new {self.progress})"
            )
        self.members.confirm(outcome.committed)
        try:
            hosts = self.members.wait_for(self.limits.min_size, self.limits.timeout)
        except HvdkitError as error:
            raise TooFewHosts(str(error)) from error
        return self._plan(hosts)

    def _plan(self, hosts: Sequence[Host]) -> Plan:
        slots = total_slots(hosts)
        size = slots if self.limits.max_size is None else min(slots, self.limits.max_size)
        plan = self.make_plan(hosts, size)
        shown = ", ".join(f"{name}:{count}" for name, count in assignment_of(plan))
        readers.say(f"{size} rank{'s' if size > 1 else ''} on {shown}")
        return plan

    def _variables(self, plan: Plan) -> Variables:
        version, number = self.members.begin(plan), len(self.outcomes)
        committed = any(outcome.committed for outcome in self.outcomes)
        return lambda host: ElasticStart(
            self.members.folders(host), number, version, committed
        ).variables()

    def _refusal(self, outcome: Outcome, failures: Sequence[Outcome]) -> str | None:
        refusal = super()._refusal(outcome, failures)
        if refusal is None and self._is_last_start:
            resets = self.limits.resets
            times = "once" if resets == 1 else f"{resets} times"
            return f"the job was restarted {times}, and ends (--reset-limit)"
        return refusal

    @property
    def _is_last_start(self) -> bool:
        return len(self.outcomes) - 1 == self.limits.resets

    def _learn(self, plan: Plan, outcome: Outcome) -> None:
        tried = self._tried_for_commit(plan, outcome)
        name = outcome.failing_host(plan)
        if name is not None and (message := self.exclusions.add(name)):
            readers.say(message)
        without = best_connected(plan.hosts, outcome.broken)[1]
        self._leave_out(without, "because connections to other hosts fail")
        unfit = self._unfit(plan, outcome)
        holders = self.members.holders() & {host.name for host in plan.hosts}
        if holders <= {host.name for host in unfit}:
            # Without the newest commit, the training would begin again.
            unfit = [host for host in unfit if host.name not in holders]
        self._leave_out(unfit, "because of a failed start")
        is_last_restart = len(in_a_row(self.outcomes)) == self.restarts
        if tried and is_last_restart and outcome.interrupted is None and not self._is_last_start:
            # Make the last restart possible without hosts on which ranks end before they load.
            for host in tried:
                self.members.give_up(host.name)
            readers.say(
                f"the last commit, on {named(tried)}, could not be loaded. The last restart does "
                f"without it if the other hosts are enough"
            )

    def _tried_for_commit(self, plan: Plan, outcome: Outcome) -> Sequence[Host]:
        """Return the excluded hosts that took part because of their commit, which was not loaded.

        Hosts that have been excluded after this start are not among them.
        """
        if outcome.committed:
            return []
        holders = self.members.holders()
        return [h for h in plan.hosts if h.name in holders and h.name in self.exclusions]

    def _leave_out(self, hosts: Sequence[Host], why: str) -> None:
        by_seconds: dict[float, list[Host]] = {}
        for host in hosts:
            by_seconds.setdefault(self.exclusions.leave_out(host.name), []).append(host)
        for seconds, group in by_seconds.items():
            readers.say(
                f"left out for {seconds:g} s if the other hosts are enough, {why}: {named(group)}"
            )


#: Returns the current list of hosts. Its argument returns whether to give up.
FindHosts = Callable[[Callable[[], bool]], Sequence[Host]]
#: Returns the plan of a job of the given size on the given hosts.
MakePlan = Callable[[Sequence[Host], int], Plan]


def run(
    launcher: Gloo,
    make_plan: MakePlan,
    hosts: FindHosts,
    limits: ElasticLimits,
    start: Callable[[Plan, Variables | None], Outcome],
) -> Outcome:
    """Run an elastic job until it ends.

    Args:
        make_plan: see `MakePlan`.
        hosts: see `FindHosts`.
        start: as for `Supervisor`.

    Raises:
        HvdkitError: the first start of the job failed.
    """
    exclusions = Exclusions(limits.cooldown)
    members = Members(
        hosts,
        prepare.task(make_plan([Host("localhost", 1)], 1), launcher.settings),
        launcher.settings,
        limits.min_size,
        limits.max_size,
        exclusions.__contains__,
    )

    def start_ranks(plan: Plan, variables: Variables | None) -> Outcome:
        launcher.keep_only(plan.hosts)
        return start(plan, variables)

    with launcher, members:
        return ElasticJob(
            start=start_ranks,
            make_plan=make_plan,
            restarts=limits.restarts,
            members=members,
            exclusions=exclusions,
            limits=limits,
        ).run()


def describe(launcher: Gloo, make_plan: MakePlan, hosts: FindHosts, limits: ElasticLimits) -> str:
    """Return the plan of a start on the current hosts as text. The arguments are those of `run`.

    Raises:
        HvdkitError: there are no hosts now, or a host cannot take part.
    """
    found = hosts(lambda: False)
    if not found:
        raise HvdkitError(
            "there are no hosts now: expected at least one for a dry run. Check what "
            "--host-discovery-script prints"
        )
    slots = total_slots(found)
    size = slots if limits.max_size is None else min(slots, limits.max_size)
    with launcher:
        return launcher.describe(make_plan(found, size))
