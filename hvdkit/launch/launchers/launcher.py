"""The interface of launchers: the ways to start the agents and the ranks of a job.

| launcher | agents are started | ranks communicate over |
|---|---|---|
| `gloo.Gloo` | here and over ssh, one on each host | Gloo |
| `nodes.gathering.Nodes` | by users, one on each node | Gloo |
| `mpi.Mpi` | by mpirun, one for each rank | MPI |
| `slurm.Slurm` | by srun, one for each rank | Gloo or MPI |

Slurm has an agent for each rank, because Slurm binds CPUs and GPUs to its tasks, and accounts for
them. In one task for each node, all ranks of the node would share these. MPI needs a task for each
rank, too.

To add a launcher, derive a class from `Launcher`, as `slurm.py` does: how agents are started, how
ranks find each other, and which options it refuses. Return it from `_launcher` in
`hvdkit/launch/options/command.py`, and add it to `tests/hosts/test_launchers.py`. For each further
failure, test the message, the exit status, and that no process is left.
"""

from __future__ import annotations

import argparse
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Self

from hvdkit.console.flags import flag
from hvdkit.errors import UsageError
from hvdkit.launch.control import preflight, prepare
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.controller import Controller
from hvdkit.launch.control.job import Job
from hvdkit.launch.control.messages import Message
from hvdkit.launch.control.network import Interface
from hvdkit.launch.control.output import Output
from hvdkit.launch.control.plan import Place, Plan
from hvdkit.launch.control.prepare import Workers
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host


class Launcher(ABC):
    """One way to start the ranks of a job. A context manager for all starts of the job.

    Attributes:
        refused: an option of `hvdkit run` that this launcher does not take -> why, and what to do.
        in_allocation: whether the hosts are those of an allocation. They stay the same, and only
            the batch system can give the job another host.
        hosts_return: whether a host that was lost may take part again later.
    """

    refused: ClassVar[Mapping[str, str]] = {}
    in_allocation: ClassVar[bool] = False
    hosts_return: ClassVar[bool] = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:  # noqa: B027
        """End all agents that are left."""

    def check(self, options: argparse.Namespace, plan: Plan) -> None:  # noqa: ARG002
        """Check the options of `hvdkit run`.

        Raises:
            UsageError: the launcher does not take one of them, or its value.
        """
        for name, why in self.refused.items():
            value = getattr(options, name)
            if value not in (None, "") and value is not False:
                raise UsageError(why.format(flag(name)))

    def hosts(self, size: int | None) -> Sequence[Host] | None:  # noqa: ARG002
        """Return the hosts of the job; None if the user names them.

        Args:
            size: the number of ranks; None for all slots.

        Raises:
            UsageError: the hosts have fewer slots.
        """
        return None

    def next_hosts(self, plan: Plan) -> Sequence[Host]:
        """Return the hosts of a restart, if the user names none.

        Args:
            plan: the plan of the first start.
        """
        return plan.hosts

    @property
    @abstractmethod
    def name(self) -> str:
        """The network of the ranks, and what starts them, after "2 ranks over "."""

    @abstractmethod
    def examined(self, plan: Plan, checks: bool = True) -> AbstractContextManager[Workers]:
        """Examine the hosts, and choose the network. May end the agents on exit.

        Args:
            checks: whether to make the preflight, and to warn of a faster network.

        Raises:
            HvdkitError: the job could not be started.
        """

    def _examine(
        self, agents: AgentPool, plan: Plan, facts: Mapping[Host, Message], checks: bool
    ) -> Workers:
        """Choose the network, and make the preflight if `checks`."""
        workers = prepare.choose_network(agents, plan, facts, self.settings, checks)
        if checks:
            preflight.before_start(workers, plan, self.settings)
        return workers

    def workers(self, plan: Plan) -> AbstractContextManager[Workers]:
        """Start the agents that start the ranks: one for each host, or one for each rank.

        Raises:
            HvdkitError: the job could not be started.
        """
        return self.examined(plan)

    @abstractmethod
    def controller(self, plan: Plan, workers: Workers) -> AbstractContextManager[Controller]:
        """Start what the ranks need to find each other."""

    @abstractmethod
    def commands(self, plan: Plan, workers: Workers) -> Sequence[Sequence[str]]:
        """Return the commands that start the agents of the ranks."""

    def problems(self, plan: Plan, timeout: float) -> Mapping[Host, str]:  # noqa: ARG002
        """Return the hosts of a plan that do not answer or cannot take part now, and why.

        Args:
            timeout: seconds for the hosts to answer.
        """
        return {}

    def after_failure(self, outcome: Outcome, plan: Plan, workers: Workers) -> Outcome:  # noqa: ARG002
        """Return the outcome with what the agents find after a failure."""
        return outcome

    @contextmanager
    def run(
        self,
        plan: Plan,
        output: Output,
        elastic: Callable[[Host], Mapping[str, str]] | None = None,
    ) -> Iterator[Outcome]:
        """Start the ranks, and watch them until they have ended. The context has the outcome.

        On exit, the context closes the agents that do not stay. This may take many seconds.

        Args:
            output: gets the ranks' output.
            elastic: returns the variables for the ranks of an elastic job on a host; None in other
                jobs.

        Raises:
            HvdkitError: the job could not be started.
        """
        prepare.warn_of_withheld(plan, self.settings)
        with self.workers(plan) as workers, self.controller(plan, workers) as controller:

            def variables(place: Place, interface: Interface) -> Mapping[str, str]:
                own = {} if elastic is None else elastic(place.host)
                return {**controller.variables(place, interface), **own}

            prepare.start_ranks(plan, workers, self.settings, variables)
            timeouts = self.settings.rank_timeouts
            job = Job(plan, workers.agents, output, timeouts, controller, elastic is not None)
            yield self.after_failure(job.run(), plan, workers)

    def describe(self, plan: Plan) -> str:
        """Return the plan as text, with the commands of the agents and of the ranks.

        This starts agents to ask the hosts, but starts no rank.

        Raises:
            HvdkitError: a host cannot take part.
        """
        with (
            self.examined(plan, checks=False) as workers,
            self.controller(plan, workers) as controller,
        ):
            lines = [
                f"{plan.size} ranks over {self.name}, in {plan.directory}",
                *prepare.host_lines(plan, workers, self.settings),
                "\nThis starts the agents:",
                *(f"  {shlex.join(command)}" for command in self.commands(plan, workers)),
                "\nThe agents start the ranks, with more variables in their environment:",
                *prepare.rank_lines(plan, workers, self.settings, controller.variables),
            ]
            return "\n".join(lines)
