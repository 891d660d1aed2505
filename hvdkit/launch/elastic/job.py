"""Run an elastic job: connect its hosts, its supervisor and the launcher of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdkit.errors import HvdkitError
from hvdkit.launch import prepare
from hvdkit.launch.elastic.members import Members
from hvdkit.launch.elastic.supervisor import ElasticLimits, ElasticSupervisor, Exclusions
from hvdkit.launch.gloo import Gloo
from hvdkit.launch.hosts import Host, total_slots
from hvdkit.launch.launcher import Settings
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import Plan


@dataclass(frozen=True)
class ElasticJob:
    """An elastic job.

    Attributes:
        plan: returns the plan of the given number of ranks on the given hosts.
        hosts: returns the current list of hosts. Its argument returns whether to give up.
        settings: how ranks are started.
        limits: the limits of the job.
        run: starts the ranks of a plan with a launcher, and returns the outcome.
        say: prints a message for the user.
    """

    plan: Callable[[Sequence[Host], int], Plan]
    hosts: Callable[[Callable[[], bool]], Sequence[Host]]
    settings: Settings
    limits: ElasticLimits
    run: Callable[[Plan, Gloo], Outcome]
    say: Callable[[str], None]

    def start(self) -> Outcome:
        """Run the job until it ends.

        Raises:
            HvdkitError: the first start of the job failed.
        """
        limits = self.limits
        exclusions = Exclusions(limits.cooldown)
        members = Members(
            self.hosts,
            prepare.task(self.plan([Host("localhost", 1)], 1), self.settings),
            self.settings,
            limits.min_size,
            limits.max_size,
            exclusions.__contains__,
            self.say,
        )
        with members:
            return ElasticSupervisor(
                self._start_ranks, self.plan, members, exclusions, limits, self.say
            ).run()

    def describe(self) -> str:
        """Return the plan of a start on the current hosts as text.

        Raises:
            HvdkitError: there are no hosts now, or a host cannot take part.
        """
        found = self.hosts(lambda: False)
        if not found:
            raise HvdkitError(
                "there are no hosts now: expected at least one for a dry run. Check what "
                "--host-discovery-script prints"
            )
        slots = total_slots(found)
        size = slots if self.limits.max_size is None else min(slots, self.limits.max_size)
        return Gloo(self.plan(found, size), self.settings).describe(self.say)

    def _start_ranks(self, plan: Plan, variables: Callable[[Host], Mapping[str, str]]) -> Outcome:
        return self.run(plan, Gloo(plan, replace(self.settings, elastic_variables=variables)))
