"""`hvdkit run`: from its arguments to a job."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.engine.describe import installed
from hvdkit.errors import UsageError
from hvdkit.findings import Finding
from hvdkit.launch import (
    allocation,
    environment,
    gloo,
    hosts,
    inspection,
    joining,
    membership,
    mpi,
    nodes,
    open_files,
    output_folder,
    preflight,
    prepare,
    run_file,
)
from hvdkit.launch.allocation import Allocation
from hvdkit.launch.gloo import Gloo
from hvdkit.launch.job import Limits, Outcome
from hvdkit.launch.launcher import Launcher
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Plan, check_command, make_plan
from hvdkit.launch.prepare import Settings
from hvdkit.launch.slurm import Slurm
from hvdkit.launch.ssh import Ssh

_SHOWN_HOSTS = 8


def examine(options: argparse.Namespace) -> list[Finding]:
    """Carry out `hvdkit doctor --hosts`.

    Raises:
        HvdkitError: no examination was possible.
    """
    where = _hosts(options)
    assert where is not None
    plan = make_plan(["true"], _directory(), where, hosts.total_slots(where))
    return preflight.examine(plan, _settings(options), options.bandwidth)


def _settings(options: argparse.Namespace, **others: Any) -> Settings:
    return Settings(
        ssh=Ssh(options.ssh_port, options.ssh_identity, options.ssh_arg),
        python=options.python,
        network=options.network,
        limits=Limits(
            options.start_timeout or Limits.start, vars(options).get("stop_grace", Limits.stop)
        ),
        **others,
    )


def run(options: argparse.Namespace) -> int:
    """Carry out `hvdkit run`. Returns the job's exit status.

    Raises:
        HvdkitError: the job could not be started.
    """
    if options.config is not None:
        options = run_file.combined(options.config, options.parser, options.words)
    if options.write_config is not None:
        run_file.write(options.write_config, options, options.parser)
        return 0
    settings = _settings(
        options,
        variables=[*_from_files(options.env_file), *options.variables],
        pin_gpus=options.pin_gpus,
        preflight=not options.no_preflight,
        torch_env=not options.no_torch_env,
        debug_rank=options.debug_rank,
        bind=options.bind,
        own_environments=options.nodes is not None,
    )
    if options.nodes is not None:
        return _run_as_node(options, settings)
    _check_for_nodes(options)
    given = _allocation(options)
    plan = _plan(options, given)
    launcher = _launcher(plan, settings, options, given)
    if options.dry_run:
        print(launcher.describe(_say))
        return 0
    return _watch(plan, options, launcher.run)


def _launcher(
    plan: Plan, settings: Settings, options: argparse.Namespace, given: Allocation | None
) -> Launcher:
    if given is not None and options.bind:
        raise UsageError("--bind is not for Slurm, which binds tasks itself: SLURM_CPU_BIND=cores")
    if options.debug_rank is not None and (given is not None or _over_mpi(options.launcher)):
        raise UsageError("--debug-rank is for ranks that `hvdkit run` starts: --launcher gloo")
    if given is not None:
        return Slurm(plan, settings, given, options.mpi)
    if _over_mpi(options.launcher):
        return Mpi(plan, settings, mpi.find(options.mpirun), shlex.split(options.mpi_args))
    _check_debug_rank(plan, settings)
    return Gloo(plan, settings)


def _watch(
    plan: Plan,
    options: argparse.Namespace,
    carry_out: Callable[[Output, Callable[[str], None]], Outcome],
) -> int:
    _allow_files(plan)
    shown = range(plan.size) if options.all_output else None
    folder = None if options.output_dir is None else output_folder.make(options.output_dir)
    with Output(plan.size, shown, folder, say=_say, progress=options.debug_rank is None) as output:
        outcome = carry_out(output, _say)
    if outcome.report:
        _say(outcome.report)
    if folder is not None and outcome.failure is not None:
        output_folder.write_error(folder, outcome.failure, plan, _say)
    return outcome.status


def _run_as_node(options: argparse.Namespace, settings: Settings) -> int:
    """Carry out `hvdkit run --nodes`."""
    command = _command(options)
    check_command(command)
    mine = _membership(options)
    if options.dry_run:
        role = "listens" if mine.node == 0 else "joins node 0"
        ranks = f"{mine.slots} rank{'s' if mine.slots > 1 else ''}"
        print(
            f"node {mine.node} of {mine.nodes}: {role} at {mine}\n"
            f"then runs {ranks}, in {_directory()}: {shlex.join(command)}"
        )
        return 0
    if mine.node > 0:
        return joining.join(mine, command, _directory(), _say)

    with nodes.Nodes(mine, _say) as gathered:
        plan = make_plan(command, _directory(), gathered.hosts, hosts.total_slots(gathered.hosts))

        def carry_out(output: Output, say: Callable[[str], None]) -> Outcome:
            outcome = gloo.run_with(gathered.agents, plan, settings, output, say)
            gathered.tell(outcome)
            return outcome

        return _watch(plan, options, carry_out)


def _membership(options: argparse.Namespace) -> membership.Membership:
    """Return what the options say of this node.

    Raises:
        UsageError: they contradict each other, or something is missing.
    """
    count = options.nodes
    if count < 1:
        raise UsageError(f"--nodes is {count}; expected at least 1")
    others = {
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--mpi": options.mpi,
        "--debug-rank": options.debug_rank,
        "--launcher": None if options.launcher in ("auto", "gloo") else options.launcher,
    }
    if given := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"{given[0]} does not go with --nodes: there the nodes come by themselves")
    if options.rdzv is None and options.rdzv_file is None:
        raise UsageError(f"--nodes {count}: where do they meet? Give --rdzv or --rdzv-file")
    size = options.num_proc
    if size is not None and (size < 1 or size % count):
        raise UsageError(
            f"-np is {size}; with --nodes {count} it is the number of all ranks, and each node has "
            f"as many: expected a multiple of {count}"
        )
    node = membership.node_rank(options.node_rank, count, os.environ)
    key = membership.read_key(options.key_file, os.environ, may_lack=options.rdzv_file is not None)
    return membership.Membership(
        nodes=count,
        node=node,
        slots=_ranks_here() if size is None else size // count,
        address=None if options.rdzv is None else membership.parse_address(options.rdzv),
        file=options.rdzv_file,
        key=key,
        size=size,
        timeout=options.start_timeout or membership.START_SECONDS,
    )


def _check_for_nodes(options: argparse.Namespace) -> None:
    """Refuse what says something about nodes, without `--nodes`."""
    others = {
        "--node-rank": options.node_rank,
        "--rdzv": options.rdzv,
        "--rdzv-file": options.rdzv_file,
        "--key-file": options.key_file,
    }
    if given := [name for name, value in others.items() if value is not None]:
        raise UsageError(f"{given[0]} needs --nodes N, the number of nodes")


def _check_debug_rank(plan: Plan, settings: Settings) -> None:
    rank = settings.debug_rank
    if rank is None:
        return
    if not 0 <= rank < plan.size:
        raise UsageError(f"--debug-rank is {rank}; the ranks are 0 to {plan.size - 1}")
    host = plan.places[rank].host
    if not prepare.local_hosts(plan)[host]:
        raise UsageError(
            f"--debug-rank {rank} runs on {host.name}, and this terminal is on another host; start "
            f"the job there, or choose a rank of this host"
        )


def _allow_files(plan: Plan) -> None:
    """Raise the limit on open files as far as the job needs."""
    needed = open_files.of_launcher(plan.size, len(plan.hosts))
    if (limit := open_files.allow(needed)) < needed:
        _say(
            f"this process may open {limit:,} files, and may need {needed:,} for a job of "
            f"{plan.size} ranks; raise the limit (`ulimit -Hn`) if it fails"
        )


def _allocation(options: argparse.Namespace) -> Allocation | None:
    """The Slurm allocation that the job is to run in; None where it is none of Slurm's."""
    hosts_named = options.hosts is not None or options.hostfile is not None
    found = options.launcher == "auto" and not hosts_named and allocation.inside(os.environ)
    if not found and options.launcher != "slurm":
        if options.mpi is not None:
            raise UsageError(f"--mpi {options.mpi} is for Slurm; elsewhere: --launcher mpi")
        return None
    if hosts_named:
        raise UsageError("--launcher slurm: the allocation says which hosts; leave -H out")
    given = allocation.read(os.environ)
    if options.mpi is None and _only_mpi():
        raise UsageError(
            "Horovod was built without Gloo here. Say which of `srun --mpi=list` its MPI takes: "
            "--mpi pmix or --mpi pmi2"
        )
    return given


def _plan(options: argparse.Namespace, given: Allocation | None) -> Plan:
    command = _command(options)
    where = list(given.hosts) if given is not None else _hosts(options)
    if given is not None and options.num_proc is not None:
        allocation.check_size(given, options.num_proc)
    if where is None and (found := allocation.batch_hosts(os.environ)) is not None:
        variable, where = found
        shown = ", ".join(f"{host.name}:{host.slots}" for host in where[:_SHOWN_HOSTS])
        more = ", ..." if len(where) > _SHOWN_HOSTS else ""
        _say(f"the hosts of {variable}: {shown}{more}")
    if where is None:
        slots = _ranks_here() if options.num_proc is None else max(1, options.num_proc)
        where = [hosts.local_host(slots)]
    size = hosts.total_slots(where) if options.num_proc is None else options.num_proc
    return make_plan(command, _directory(), where, size)


def _command(options: argparse.Namespace) -> list[str]:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return _with_python(command, options.python)


def _ranks_here() -> int:
    """One rank for each GPU that this process may use, else one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(inspection.gpus()) if visible is None else len([d for d in visible.split(",") if d])
    one = "1 rank, because there is no GPU here; -np N starts N"
    _say(f"{gpus} rank{'s' if gpus > 1 else ''}, one for each GPU" if gpus else one)
    return max(1, gpus)


def _from_files(paths: Sequence[Path]) -> list[str]:
    return [line for path in paths for line in environment.read_file(path)]


def _with_python(command: list[str], python: str) -> list[str]:
    """Return the command, with Python before a script that cannot be run by itself."""
    program = command[0] if command else ""
    if not program.endswith(".py"):
        return command
    script = Path(program)
    if not script.is_file():
        if shutil.which(program) is not None:
            return command
        raise UsageError(f"there is no file {program} in {_directory()}; expected a script to run")
    with script.open("rb") as file:
        runs_itself = "/" in program and os.access(script, os.X_OK) and file.read(2) == b"#!"
    return command if runs_itself else [python, *command]


def _directory() -> str:
    """Return the working directory as the shell names it: links may differ on other hosts."""
    named = os.environ.get("PWD", "")
    return named if named and os.path.realpath(named) == os.getcwd() else os.getcwd()


def _hosts(options: argparse.Namespace) -> list[hosts.Host] | None:
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    return None if options.hostfile is None else hosts.read_hostfile(options.hostfile)


def _over_mpi(launcher: str) -> bool:
    return launcher == "mpi" or (launcher == "auto" and _only_mpi())


def _only_mpi() -> bool:
    engine = installed()
    controllers = engine.controllers if engine is not None else None
    return controllers is not None and "gloo" not in controllers


def _say(text: str) -> None:
    # Not through sys.stderr: a signal's handler says something too, perhaps amid another write.
    # And a terminal that is gone must not keep the ranks from saving.
    with contextlib.suppress(OSError):
        os.write(2, f"hvdkit run: {text}\n".encode())
