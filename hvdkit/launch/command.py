"""`hvdkit run`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
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
    mpi,
    open_files,
    preflight,
    slurm,
)
from hvdkit.launch.job import Limits
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Plan, make_plan
from hvdkit.launch.prepare import Settings
from hvdkit.launch.ssh import Ssh

_SHOWN_HOSTS = 8

HELP = "start the ranks of a job, on this machine or on several, and watch them"
EXAMPLE = """\
  hvdkit run -np 2 python train.py
  hvdkit run -np 8 -H host1:4,host2:4 python train.py --epochs 10
  hvdkit run --hostfile hosts.txt --output-dir logs/ -x WANDB_API_KEY python train.py
  hvdkit run train.py                              # a rank for each GPU; as python train.py
  hvdkit run -np 2 --dry-run python train.py       # what would be done"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The arguments of `hvdkit run`."""
    verb.add_argument(
        "-np",
        "--num-proc",
        type=_count,
        metavar="N",
        help="number of ranks (default, and `auto`: all slots of the hosts or the allocation; else "
        "one for each GPU here, or one)",
    )
    verb.add_argument(
        "--launcher",
        choices=["auto", "gloo", "mpi", "slurm"],
        default="auto",
        help="(default: slurm inside an allocation, else gloo, unless Horovod has only MPI)",
    )
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the commands; hosts are asked, nothing is started",
    )
    _add_host_arguments(verb)
    verb.add_argument(
        "--no-preflight",
        action="store_true",
        help="start on several hosts without examining them first (`hvdkit doctor --hosts`)",
    )
    mpi_group = verb.add_argument_group("MPI")
    mpi_group.add_argument(
        "--mpirun",
        metavar="FILE",
        help="of the MPI that Horovod was built with (default: this environment's, or on PATH)",
    )
    mpi_group.add_argument(
        "--mpi-args", default="", metavar="ARGS", help="more for mpirun, e.g. '--report-bindings'"
    )
    slurm_group = verb.add_argument_group("Slurm")
    slurm_group.add_argument(
        "--mpi",
        metavar="KIND",
        help="ranks over MPI, with srun --mpi=KIND: pmix, pmi2 (default: over Gloo)",
    )
    ranks = verb.add_argument_group("the ranks' environment")
    ranks.add_argument(
        "-x",
        action="append",
        default=[],
        dest="variables",
        metavar="NAME[=VALUE]",
        help="forward this variable too; names like *TOKEN* and *KEY* are not otherwise; 'WANDB_*' "
        "is all that begin so",
    )
    ranks.add_argument(
        "--env-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="lines NAME=VALUE or NAME, as for -x",
    )
    ranks.add_argument(
        "--pin-gpus",
        action="store_true",
        help="CUDA_VISIBLE_DEVICES with one GPU per rank, for programs that take a GPU before "
        "hvd.init() gives them theirs",
    )
    ranks.add_argument(
        "--no-torch-env",
        action="store_true",
        help="without RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the others that torchrun sets",
    )
    output = verb.add_argument_group("output")
    output.add_argument(
        "--all-output",
        action="store_true",
        help="show all ranks of a job of more than 16, not only rank 0",
    )
    output.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="also append each rank's output to DIR/rank.N.log",
    )
    verb.add_argument(
        "--stop-grace",
        type=_seconds,
        default=Limits.stop,
        metavar="S",
        help="seconds for ranks to stop in order after Ctrl-C, SIGTERM or SIGUSR1 "
        f"(default: {Limits.stop:g})",
    )
    verb.add_argument("command", nargs=argparse.REMAINDER, help="what every rank runs")


def add_doctor_arguments(verb: argparse.ArgumentParser) -> None:
    """The arguments of `hvdkit doctor` that are about several hosts."""
    _add_host_arguments(verb)
    verb.add_argument(
        "--bandwidth", action="store_true", help="measure it between the first two hosts"
    )


def _add_host_arguments(verb: argparse.ArgumentParser) -> None:
    where = verb.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="H:N,…", help="hosts and their slots")
    where.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="the same from a file: `host slots=4` lines"
    )
    network = verb.add_argument_group("other hosts")
    network.add_argument("-p", "--ssh-port", type=int, metavar="PORT")
    network.add_argument("-i", "--ssh-identity", metavar="FILE", help="the private key")
    network.add_argument(
        "--ssh-arg", action="append", default=[], metavar="ARG", help="e.g. --ssh-arg=-Jgateway"
    )
    network.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="the Python there (default: ours)"
    )
    network.add_argument(
        "--network",
        metavar="NET",
        help="what ranks talk over: 10.0.0.0/8, eth1 or host1=eth0,host2=ens3 "
        "(default: the subnet that all hosts are on)",
    )
    network.add_argument(
        "--start-timeout",
        type=_seconds,
        default=Limits.start,
        metavar="S",
        help="seconds for hosts to answer, and for ranks to follow the first one "
        f"(default: {Limits.start:g})",
    )


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
        **({"limits": Limits(options.start_timeout)} | others),
    )


def run(options: argparse.Namespace) -> int:
    """Carry out `hvdkit run`. Returns the job's exit status.

    Raises:
        HvdkitError: the job could not be started.
    """
    given = _allocation(options)
    plan = _plan(options, given)
    settings = _settings(
        options,
        variables=[*_from_files(options.env_file), *options.variables],
        pin_gpus=options.pin_gpus,
        limits=Limits(options.start_timeout, options.stop_grace),
        preflight=not options.no_preflight,
        torch_env=not options.no_torch_env,
    )
    if given is not None:
        describe = functools.partial(slurm.describe, plan, settings, given, options.mpi, _say)
        carry_out = functools.partial(slurm.run, plan, settings, given, options.mpi)
    elif _over_mpi(options.launcher):
        with_mpi = mpi.find(options.mpirun), shlex.split(options.mpi_args)
        describe = functools.partial(mpi.describe, plan, settings, *with_mpi)
        carry_out = functools.partial(mpi.run, plan, settings, *with_mpi)
    else:
        describe = functools.partial(gloo.describe, plan, settings)
        carry_out = functools.partial(gloo.run, plan, settings)
    if options.dry_run:
        print(describe())
        return 0
    _allow_files(plan)
    shown = range(plan.size) if options.all_output else None
    with Output(plan.size, shown, options.output_dir, say=_say) as output:
        outcome = carry_out(output, _say)
    if outcome.report:
        _say(outcome.report)
    return outcome.status


def _allow_files(plan: Plan) -> None:
    """Raise the limit on open files as far as the job needs."""
    needed = open_files.of_launcher(plan.size, len(plan.hosts))
    if (limit := open_files.allow(needed)) < needed:
        _say(
            f"this process may open {limit:,} files, and may need {needed:,} for a job of "
            f"{plan.size} ranks; raise the limit (`ulimit -Hn`) if it fails"
        )


def _allocation(options: argparse.Namespace) -> allocation.Allocation | None:
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


def _plan(options: argparse.Namespace, given: allocation.Allocation | None) -> Plan:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = _with_python(command, options.python)
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


def _count(text: str) -> int | None:
    """Return the number of `-np`; None for `auto`."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; expected one, or auto") from None


def _seconds(text: str) -> float:
    """Return a number of seconds above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, above 0")
    return seconds


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
    """Where we are, by the name that the user knows: behind a link it may be another elsewhere."""
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
