"""`hvdkit run`: choose hosts and a launcher from the options, and run the job."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdkit.core import shared_gpus
from hvdkit.diagnostics import Diagnostic
from hvdkit.engine.describe import installed
from hvdkit.errors import UsageError
from hvdkit.flags import flag
from hvdkit.launch import (
    allocation,
    config_file,
    conflicts,
    environment,
    hosts,
    inspection,
    mpi,
    preflight,
    prepare,
    supervised,
)
from hvdkit.launch.allocation import Allocation
from hvdkit.launch.batch_systems import batch_hosts
from hvdkit.launch.discovery import discover
from hvdkit.launch.elastic.job import ElasticJob
from hvdkit.launch.elastic.options import limits
from hvdkit.launch.gloo import Gloo
from hvdkit.launch.kept_agents import KeptAgents
from hvdkit.launch.launcher import Launcher, Settings
from hvdkit.launch.messages import longest_silence
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.nodes import joining
from hvdkit.launch.nodes import settings as node_options
from hvdkit.launch.nodes.gathering import GatheredNodes
from hvdkit.launch.nodes.settings import NodeSettings
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import Plan, check_command, make_plan
from hvdkit.launch.restarting import in_allocation
from hvdkit.launch.running import Runner, say
from hvdkit.launch.slurm import Slurm
from hvdkit.launch.ssh import HOST_SECONDS, Ssh
from hvdkit.launch.timeouts import Timeouts
from hvdkit.plain_files import printable
from hvdkit.signals import ignored

_SHOWN_HOSTS = 8
# Seconds between SIGTERM and SIGKILL after a rank has failed, in a job with restarts.
_END_SECONDS = 3.0


def examine(options: argparse.Namespace) -> list[Diagnostic]:
    """Examine the hosts for `hvdkit doctor --hosts`, and return the diagnostics.

    Raises:
        HvdkitError: the hosts cannot be examined.
    """
    given_hosts = _hosts(options)
    assert given_hosts is not None
    plan = make_plan(["true"], _directory(), given_hosts, hosts.total_slots(given_hosts))
    return preflight.examine(plan, _settings(options), options.bandwidth)


def _settings(options: argparse.Namespace, **others: Any) -> Settings:
    # `hvdkit doctor` has only some of the options of `hvdkit run`.
    silence = vars(options).get("host_timeout", HOST_SECONDS)
    timeouts = Timeouts(
        options.start_timeout or Timeouts.start, vars(options).get("stop_grace", Timeouts.stop)
    )
    if vars(options).get("restarts") or vars(options).get("elastic"):
        # After a failure, the other ranks cannot save, so they need little time to end.
        timeouts = replace(timeouts, end=_END_SECONDS, lost=longest_silence(silence))
    return Settings(
        ssh=Ssh(options.ssh_port, options.ssh_identity, options.ssh_arg, silence),
        python=options.python,
        network=options.network,
        timeouts=timeouts,
        **others,
    )


# A batch system may send it to all processes, for scripts that handle it.
@ignored(signal.SIGUSR2)
def run(options: argparse.Namespace) -> int:
    """Run `hvdkit run`. Returns the job's exit status.

    Raises:
        HvdkitError: the job could not be started.
    """
    if options.config is not None:
        options = config_file.parse_with(options.config, options.parser, options.words)
    if options.write_config is not None:
        config_file.write(options.write_config, options, options.parser)
        return 0
    conflicts.check(options)
    variables = [
        *(line for path in options.env_file for line in environment.read_file(path)),
        *options.variables,
    ]
    if options.pin_gpus:
        _check_pinning(variables)
    settings = _settings(
        options,
        variables=variables,
        pin_gpus=options.pin_gpus,
        preflight=not options.no_preflight,
        torch_env=not options.no_torch_env,
        debug_rank=options.debug_rank,
        bind=options.bind,
        use_agent_environment=options.nodes is not None,
        agents_stay=True,
        spares=bool(options.restarts) and not options.elastic and not options.no_spares,
    )
    if options.elastic:
        return _run_elastic(options, settings)
    options.restarts = options.restarts or 0
    if options.nodes is not None:
        return _run_as_node(options, settings)
    slurm_allocation = _allocation(options)
    supervised.check(options, slurm_allocation is not None)
    plan = _plan(options, slurm_allocation)
    launcher = _launcher(plan, settings, options, slurm_allocation)
    if options.dry_run:
        print(printable(launcher.describe(say)))
        return 0
    runner = Runner(options)
    if not options.restarts:
        outcome = runner.run(plan, launcher.run)
        if slurm_allocation is not None:
            outcome = in_allocation(outcome, say)
        return outcome.status
    with KeptAgents(silence=options.host_timeout) as kept:

        def start(next_plan: Plan) -> Outcome:
            launcher = _launcher(next_plan, settings, options, slurm_allocation, kept)
            return runner.run(next_plan, launcher.run)

        # The hosts of an allocation stay the same. Named hosts also include those without ranks.
        named = options.hosts or options.hostfile or options.host_discovery_script
        in_slurm = slurm_allocation is not None
        job_hosts = (
            (lambda: plan.hosts) if in_slurm or not named else (lambda: _hosts(options) or [])
        )
        return supervised.run(plan, options, settings, kept, start, job_hosts, in_slurm).status


def _check_pinning(variables: Sequence[str]) -> None:
    given = os.environ | environment.explicit(os.environ, variables)
    if given.get(shared_gpus.VARIABLE) == "1":
        raise UsageError(
            f"--pin-gpus gives each rank a GPU of its own, but {shared_gpus.VARIABLE}=1 lets ranks "
            f"share GPUs. Remove one of them"
        )


def _run_elastic(options: argparse.Namespace, settings: Settings) -> int:
    """Run `hvdkit run --elastic`."""
    job_limits = limits(options)
    supervised.check_host_timeout(options)
    named = any((options.hosts, options.hostfile, options.host_discovery_script))
    if not named and (allocation.inside(os.environ) or batch_hosts(os.environ)):
        raise UsageError(
            "--elastic was given in an allocation, whose nodes stay the same. Use --restarts, or "
            "name the hosts (-H, --hostfile or --host-discovery-script)"
        )
    if _only_mpi():
        raise UsageError(
            "--elastic needs Gloo, but the installed Horovod has only MPI. Build a Horovod with "
            "Gloo (`hvdkit build`)"
        )
    command = command_of(options)
    check_command(command)
    here = [hosts.Host("localhost", job_limits.first_size)]

    def current_hosts(stopped: Callable[[], bool] = lambda: False) -> Sequence[hosts.Host]:
        if options.host_discovery_script is not None:
            slots = options.slots_per_host or 1
            return discover(options.host_discovery_script, slots, stopped)
        return _hosts(options) or here

    runner = Runner(options)
    job = ElasticJob(
        plan=lambda given, size: make_plan(command, _directory(), given, size),
        hosts=current_hosts,
        settings=settings,
        limits=job_limits,
        run=lambda plan, launcher: runner.run(plan, launcher.run),
        say=say,
    )
    if options.dry_run:
        print(printable(job.describe()))
        return 0
    return job.start().status


def _launcher(
    plan: Plan,
    settings: Settings,
    options: argparse.Namespace,
    slurm_allocation: Allocation | None,
    kept: KeptAgents | None = None,
) -> Launcher:
    in_slurm, over_mpi = slurm_allocation is not None, _over_mpi(options.launcher)
    if in_slurm and options.bind:
        raise UsageError(
            "--bind was given, but Slurm binds tasks itself. Set SLURM_CPU_BIND=cores instead"
        )
    if options.debug_rank is not None and (in_slurm or over_mpi):
        raise UsageError(
            "--debug-rank needs ranks that `hvdkit run` starts itself. Use --launcher gloo"
        )
    for name in ("mpirun", "mpi_args"):
        if getattr(options, name) and (in_slurm or not over_mpi):
            raise UsageError(f"{flag(name)} needs --launcher mpi: add it, or remove {flag(name)}")
    if in_slurm or over_mpi:
        # srun and mpirun start new agents for each start.
        settings = replace(settings, agents_stay=False, spares=False)
    if slurm_allocation is not None:
        return Slurm(plan, settings, slurm_allocation, options.mpi)
    if over_mpi:
        return Mpi(
            plan,
            settings,
            mpi.find(options.mpirun),
            shlex.split(options.mpi_args),
        )
    _check_debug_rank(plan, settings)
    return Gloo(plan, settings, kept)


def _run_as_node(options: argparse.Namespace, settings: Settings) -> int:
    """Run `hvdkit run --nodes`."""
    command = command_of(options)
    check_command(command)
    node = _node_settings(options)
    if options.dry_run:
        role = "listens" if node.node == 0 else "joins node 0"
        ranks = f"{node.slots} rank{'s' if node.slots > 1 else ''}"
        print(
            f"node {node.node} of {node.nodes}: {role} at {node.rendezvous}\n"
            f"then runs {ranks}, in {_directory()}: {shlex.join(command)}"
        )
        return 0
    if node.node > 0:
        return joining.join(node, command, _directory(), say)

    supervised.check(options, in_slurm=False)
    with GatheredNodes(node, say, options.host_timeout) as gathered:
        plan = make_plan(command, _directory(), gathered.hosts, hosts.total_slots(gathered.hosts))
        kept = KeptAgents(gathered.agents)
        runner = Runner(options)

        def start(next_plan: Plan) -> Outcome:
            return runner.run(next_plan, Gloo(next_plan, settings, kept).run)

        if options.restarts:
            outcome = supervised.run(plan, options, settings, kept, start)
        else:
            outcome = start(plan)
        gathered.send_outcome(outcome)
        return outcome.status


def _node_settings(options: argparse.Namespace) -> NodeSettings:
    """Return this node's settings.

    Raises:
        UsageError: an option is missing, or a number is out of range.
    """
    count = options.nodes
    if count < 1:
        raise UsageError(f"--nodes is {count}; expected at least 1")
    if options.rdzv is None and options.rdzv_file is None:
        raise UsageError(
            f"--nodes is {count}, without the address of node 0; give --rdzv or --rdzv-file"
        )
    size = options.num_proc
    if size is not None and (size < 1 or size % count):
        raise UsageError(
            f"-np is {size} with --nodes {count}: expected a multiple of {count}. -np is the "
            f"number of ranks on all nodes together, and every node has the same number of ranks"
        )
    return NodeSettings(
        nodes=count,
        node=node_options.node_rank(options.node_rank, count, os.environ),
        slots=_ranks_here() if size is None else size // count,
        address=None if options.rdzv is None else node_options.parse_address(options.rdzv),
        file=options.rdzv_file,
        key=node_options.read_key(
            options.key_file, os.environ, optional=options.rdzv_file is not None
        ),
        size=size,
        timeout=options.start_timeout or node_options.START_SECONDS,
    )


def _check_debug_rank(plan: Plan, settings: Settings) -> None:
    rank = settings.debug_rank
    if rank is None:
        return
    if not 0 <= rank < plan.size:
        raise UsageError(f"--debug-rank is {rank}; the ranks are 0 to {plan.size - 1}")
    host = plan.places[rank].host
    if not prepare.local_hosts(plan)[host]:
        raise UsageError(
            f"--debug-rank {rank} runs on {host.name}, but this terminal is on another host; start "
            f"the job there, or choose a rank of this host"
        )


def _allocation(options: argparse.Namespace) -> Allocation | None:
    """Return the Slurm allocation for the job; None if the job does not use Slurm."""
    hosts_named = any((options.hosts, options.hostfile, options.host_discovery_script))
    found = options.launcher == "auto" and not hosts_named and allocation.inside(os.environ)
    if not found and options.launcher != "slurm":
        if options.mpi is not None:
            raise UsageError(
                f"--mpi {options.mpi} is an option of srun, but this job does not run in a Slurm "
                f"allocation. Give --launcher mpi instead of --mpi"
            )
        return None
    slurm_allocation = allocation.read(os.environ)
    if options.mpi is None and _only_mpi():
        raise UsageError(
            "the installed Horovod has no Gloo. Give a kind that its MPI supports: --mpi pmix or "
            "--mpi pmi2 (`srun --mpi=list` lists them)"
        )
    return slurm_allocation


def _plan(options: argparse.Namespace, slurm_allocation: Allocation | None) -> Plan:
    command = command_of(options)
    job_hosts = list(slurm_allocation.hosts) if slurm_allocation is not None else _hosts(options)
    if slurm_allocation is not None and options.num_proc is not None:
        allocation.check_size(slurm_allocation, options.num_proc)
    if job_hosts is None and (found := batch_hosts(os.environ)) is not None:
        variable, job_hosts = found
        shown = ", ".join(f"{host.name}:{host.slots}" for host in job_hosts[:_SHOWN_HOSTS])
        more = ", ..." if len(job_hosts) > _SHOWN_HOSTS else ""
        say(f"the hosts of {variable}: {shown}{more}")
    if job_hosts is None:
        slots = _ranks_here() if options.num_proc is None else max(1, options.num_proc)
        job_hosts = [hosts.Host("localhost", slots)]
    size = hosts.total_slots(job_hosts) if options.num_proc is None else options.num_proc
    return make_plan(command, _directory(), job_hosts, size)


def command_of(options: argparse.Namespace) -> list[str]:
    """Return the command of every rank, with Python before a script that is not executable."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return _with_python(command, options.python)


def _ranks_here() -> int:
    """Return the default number of ranks of this machine: one per GPU, at least 1. Print it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(inspection.gpus()) if visible is None else len([d for d in visible.split(",") if d])
    one = "1 rank, because there is no GPU here; -np N starts N"
    say(f"{gpus} rank{'s' if gpus > 1 else ''}, one for each GPU" if gpus else one)
    return max(1, gpus)


def _with_python(command: list[str], python: str) -> list[str]:
    """Return the command; put Python before a script that is not executable."""
    program = command[0] if command else ""
    if not program.endswith(".py"):
        return command
    script = Path(program)
    if not script.is_file():
        if shutil.which(program) is not None:
            return command
        raise UsageError(f"there is no file {program} in {_directory()}: expected a script to run")
    with script.open("rb") as file:
        runs_itself = "/" in program and os.access(script, os.X_OK) and file.read(2) == b"#!"
    return command if runs_itself else [python, *command]


def _directory() -> str:
    """Return the working directory, as $PWD names it if possible.

    $PWD keeps symbolic links, which may lead to different folders on different hosts.

    Raises:
        UsageError: the working directory does not exist any more.
    """
    named = os.environ.get("PWD", "")
    try:
        actual = os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(
            f"the working directory{f' {named}' if named else ''} does not exist any more: the "
            f"ranks would run in it. Change to another directory"
        ) from error
    return named if named and os.path.realpath(named) == actual else actual


def _hosts(options: argparse.Namespace) -> list[hosts.Host] | None:
    """Return the hosts that the user has named; None if the user has named none."""
    if vars(options).get("host_discovery_script") is not None:
        if not (found := discover(options.host_discovery_script)):
            raise UsageError(
                f"--host-discovery-script {options.host_discovery_script} printed no hosts: "
                f"expected HOST:SLOTS in each line"
            )
        return found
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    return None if options.hostfile is None else hosts.read_hostfile(options.hostfile)


def _over_mpi(launcher: str) -> bool:
    return launcher == "mpi" or (launcher == "auto" and _only_mpi())


def _only_mpi() -> bool:
    engine = installed()
    controllers = engine.controllers if engine is not None else None
    return controllers is not None and "gloo" not in controllers
