"""`hvdkit run`: choose hosts and a launcher from the options, and run the job.

The launchers other than Gloo's are imported only if they are used, because imports take time.
"""

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

from hvdkit.console.diagnostics import Diagnostic
from hvdkit.engine.describe import installed
from hvdkit.errors import UsageError
from hvdkit.launch.control import environment, preflight, readers
from hvdkit.launch.control.messages import longest_silence
from hvdkit.launch.control.plan import Plan, check_command, make_plan
from hvdkit.launch.control.running import Runner
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.hosts import allocation, hosts
from hvdkit.launch.hosts.allocation import Allocation, batch_hosts
from hvdkit.launch.hosts.discovery import discover
from hvdkit.launch.hosts.ssh import HOST_SECONDS, Ssh
from hvdkit.launch.launchers.gloo import Gloo
from hvdkit.launch.launchers.launcher import Launcher
from hvdkit.launch.launchers.nodes import settings as node_options
from hvdkit.launch.launchers.nodes.settings import NodeSettings
from hvdkit.launch.options import arguments, supervised
from hvdkit.runtime import shared_gpus
from hvdkit.system.plain_files import printable
from hvdkit.system.signals import ignored

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
    if options.config is not None or options.write_config is not None:
        from hvdkit.launch.options import config_file
    if options.config is not None:
        options = config_file.parse_with(options.config, options.parser, options.words)
    if options.write_config is not None:
        config_file.write(options.write_config, options, options.parser)
        return 0
    arguments.check(options)
    variables = [
        *(line for path in options.env_file for line in environment.read_file(path)),
        *options.x,
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
        steps=bool(options.restarts) and not options.elastic,
    )
    if options.elastic:
        return _run_elastic(options, settings)
    options.restarts = options.restarts or 0
    if options.nodes is not None:
        return _run_as_node(options, settings)
    launcher = _launcher(options, settings)
    supervised.check(options, launcher.in_allocation)
    plan = _plan(options, launcher)
    launcher.check(options, plan)
    with launcher:
        if options.dry_run:
            print(printable(launcher.describe(plan)))
            return 0
        # Named hosts also include those without ranks.
        job_hosts = (lambda: _hosts(options) or []) if _named(options) else None
        return supervised.run(plan, options, launcher, job_hosts).status


def _check_pinning(variables: Sequence[str]) -> None:
    given = os.environ | environment.explicit(os.environ, variables)
    if given.get(shared_gpus.VARIABLE) == "1":
        raise UsageError(
            f"--pin-gpus gives each rank a GPU of its own, but {shared_gpus.VARIABLE}=1 lets ranks "
            f"share GPUs. Remove one of them"
        )


def _run_elastic(options: argparse.Namespace, settings: Settings) -> int:
    """Run `hvdkit run --elastic`."""
    from hvdkit.launch.elastic import job
    from hvdkit.launch.elastic.options import limits

    job_limits = limits(options)
    if not _named(options) and (allocation.inside(os.environ) or batch_hosts(os.environ)):
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

    def plan_of(given: Sequence[hosts.Host], size: int) -> Plan:
        return make_plan(command, _directory(), given, size)

    launcher = Gloo(settings)
    if options.dry_run:
        print(printable(job.describe(launcher, plan_of, current_hosts, job_limits)))
        return 0
    start = Runner(options, launcher).run
    return job.run(launcher, plan_of, current_hosts, job_limits, start).status


def _launcher(options: argparse.Namespace, settings: Settings) -> Launcher:
    """Return the launcher of a job that is neither elastic nor one of `--nodes`."""
    if (slurm_allocation := _allocation(options)) is not None:
        from hvdkit.launch.launchers.slurm import Slurm

        return Slurm(settings, slurm_allocation, options.mpi)
    if options.launcher == "mpi" or (options.launcher == "auto" and _only_mpi()):
        from hvdkit.launch.launchers.mpi import Mpi, find

        return Mpi(settings, find(options.mpirun), shlex.split(options.mpi_args))
    return Gloo(settings)


def _run_as_node(options: argparse.Namespace, settings: Settings) -> int:
    """Run `hvdkit run --nodes`."""
    from hvdkit.launch.launchers.nodes import joining
    from hvdkit.launch.launchers.nodes.gathering import Nodes

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
        return joining.join(node, command, _directory())

    supervised.check(options, in_allocation=False)
    with Nodes(node, settings) as launcher:
        found = launcher.hosts(None)
        plan = make_plan(command, _directory(), found, hosts.total_slots(found))
        outcome = supervised.run(plan, options, launcher, None)
        launcher.send_outcome(outcome)
        return outcome.status


def _node_settings(options: argparse.Namespace) -> NodeSettings:
    """Return this node's settings.

    Raises:
        UsageError: an option is missing, or a number is out of range.
    """
    count = options.nodes
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


def _allocation(options: argparse.Namespace) -> Allocation | None:
    """Return the Slurm allocation for the job; None if the job does not use Slurm."""
    found = options.launcher == "auto" and not _named(options) and allocation.inside(os.environ)
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


def _plan(options: argparse.Namespace, launcher: Launcher) -> Plan:
    command = command_of(options)
    job_hosts = launcher.hosts(options.num_proc)
    if job_hosts is None:
        job_hosts = _hosts(options)
    if job_hosts is None and (found := batch_hosts(os.environ)) is not None:
        variable, job_hosts = found
        readers.say(f"the hosts of {variable}: {hosts.describe_slots(job_hosts)}")
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
    from hvdkit.launch.agent import inspection

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(inspection.gpus()) if visible is None else len([d for d in visible.split(",") if d])
    one = "1 rank, because there is no GPU here; -np N starts N"
    readers.say(f"{gpus} rank{'s' if gpus > 1 else ''}, one for each GPU" if gpus else one)
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


def _named(options: argparse.Namespace) -> bool:
    """Return whether the user names hosts."""
    return any((options.hosts, options.hostfile, options.host_discovery_script))


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


def _only_mpi() -> bool:
    engine = installed()
    controllers = engine.controllers if engine is not None else None
    return controllers is not None and "gloo" not in controllers
