"""The arguments of `hvdkit run`, and those of `hvdkit doctor` for several hosts."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path

from hvdkit.errors import UsageError
from hvdkit.flags import flag
from hvdkit.launch.nodes.settings import START_SECONDS
from hvdkit.launch.ssh import HOST_SECONDS
from hvdkit.launch.timeouts import Timeouts

HELP = "start the ranks of a job, on this machine or on several, and watch them"
EXAMPLE = """\
  hvdkit run -np 2 python train.py
  hvdkit run -np 8 -H host1:4,host2:4 python train.py --epochs 10
  hvdkit run --hostfile hosts.txt --output-dir logs/ -x WANDB_API_KEY python train.py
  hvdkit run train.py                              # a rank for each GPU; runs python train.py
  hvdkit run -np 2 --dry-run python train.py       # print the plan"""

# Seconds, about 30 years. The system refuses to wait for much longer.
_LONGEST = 1e9


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit run`."""
    verb.add_argument(
        "-np",
        "--num-proc",
        type=_count,
        metavar="N",
        help="number of ranks, or `auto` (the default): one per slot of the hosts or allocation. "
        "Without hosts: one per GPU of this machine, or one without GPUs",
    )
    verb.add_argument(
        "--launcher",
        choices=["auto", "gloo", "mpi", "slurm"],
        default="auto",
        help="(default: slurm in a Slurm allocation; else gloo, or mpi if Horovod has no Gloo)",
    )
    verb.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the commands; hosts are contacted, no rank is started",
    )
    add_host_arguments(verb)
    verb.add_argument(
        "--no-preflight",
        action="store_true",
        help="skip the checks of several hosts before the start (those of `hvdkit doctor --hosts`)",
    )
    _add_node_arguments(verb)
    _add_launcher_arguments(verb)
    _add_environment_arguments(verb)
    output = verb.add_argument_group("output")
    output.add_argument(
        "--all-output",
        action="store_true",
        help="show the output of all ranks (default: of rank 0 only, if there are more than 16)",
    )
    _add_restart_arguments(verb)
    _add_elastic_arguments(verb)
    output.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="write each rank's output, and the first failure, to a new folder of DIR",
    )
    output.add_argument(
        "--debug-rank",
        type=int,
        metavar="R",
        help="give rank R this terminal, for breakpoint() and input(); other ranks wait for it "
        "without a timeout",
    )
    verb.add_argument(
        "--stop-grace",
        type=_seconds,
        default=Timeouts.stop,
        metavar="S",
        help="seconds for an orderly stop of ranks after Ctrl-C, SIGTERM or SIGUSR1 "
        f"(default: {Timeouts.stop:g})",
    )
    files = verb.add_argument_group("these arguments in a file")
    files.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read arguments from FILE (TOML: num-proc = 8); the command line has precedence",
    )
    files.add_argument(
        "--write-config",
        type=Path,
        metavar="FILE",
        help="write these arguments to FILE, and start no rank",
    )
    verb.add_argument("command", nargs=argparse.REMAINDER, help="the command of every rank")
    # For `horovodrun`: makes the output in place of `Output`.
    verb.set_defaults(make_output=None)


def _add_node_arguments(verb: argparse.ArgumentParser) -> None:
    nodes_group = verb.add_argument_group("nodes without ssh: the same command on each")
    nodes_group.add_argument("--nodes", type=int, metavar="N", help="the number of nodes")
    nodes_group.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="the number of this node, from 0 (default: JOB_COMPLETION_INDEX of Kubernetes, "
        "SKYPILOT_NODE_RANK, NODE_RANK or SLURM_NODEID)",
    )
    meeting = nodes_group.add_mutually_exclusive_group()
    meeting.add_argument("--rdzv", metavar="HOST:PORT", help="the address of node 0")
    meeting.add_argument(
        "--rdzv-file",
        type=Path,
        metavar="FILE",
        help="on a shared disk: node 0 writes its address and a key there",
    )
    nodes_group.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="the file with the job's key, the same on every node (default: $HVDKIT_JOB_KEY)",
    )


def _add_launcher_arguments(verb: argparse.ArgumentParser) -> None:
    mpi_group = verb.add_argument_group("MPI")
    mpi_group.add_argument(
        "--mpirun",
        metavar="FILE",
        help="the mpirun of Horovod's MPI (default: that of this Python environment, or on PATH)",
    )
    mpi_group.add_argument(
        "--mpi-args",
        type=_quoted,
        default="",
        metavar="ARGS",
        help="further arguments for mpirun, e.g. '--report-bindings'",
    )
    slurm_group = verb.add_argument_group("Slurm")
    slurm_group.add_argument(
        "--mpi",
        metavar="KIND",
        help="run ranks over MPI, with srun --mpi=KIND: pmix, pmi2 (default: over Gloo)",
    )


def _add_environment_arguments(verb: argparse.ArgumentParser) -> None:
    ranks = verb.add_argument_group("the ranks' environment")
    ranks.add_argument(
        "-x",
        action="append",
        default=[],
        dest="variables",
        metavar="NAME[=VALUE]",
        help="give the ranks this variable; 'WANDB_*' gives all with this prefix. Without -x, "
        "ranks on other hosts get most variables, but no secrets (names like *TOKEN* and *KEY*)",
    )
    ranks.add_argument(
        "--env-file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file with lines NAME=VALUE or NAME, as for -x",
    )
    ranks.add_argument(
        "--pin-gpus",
        action="store_true",
        help="set CUDA_VISIBLE_DEVICES to one GPU per rank, for programs that use a GPU before "
        "hvd.init()",
    )
    ranks.add_argument(
        "--bind",
        action="store_true",
        help="bind each rank to its own cores, of one NUMA node (--dry-run shows them)",
    )
    ranks.add_argument(
        "--no-torch-env",
        action="store_true",
        help="do not set the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...",
    )


def _add_restart_arguments(verb: argparse.ArgumentParser) -> None:
    restarts = verb.add_argument_group("restarts")
    restarts.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="if the job fails, start it again, at most N times in a row without a new checkpoint "
        "or commit of hvdkit (default: 0; with --elastic 3)",
    )
    restarts.add_argument(
        "--min-np",
        "--min-num-proc",
        type=int,
        metavar="M",
        help="restart without hosts that are lost, or on which ranks failed twice, if at least M "
        "ranks remain (default: -np; with --elastic but without -np: 1)",
    )
    restarts.add_argument(
        "--host-timeout",
        type=_seconds,
        default=HOST_SECONDS,
        metavar="S",
        help=f"seconds without an answer after which a host is lost (default: {HOST_SECONDS:g})",
    )
    restarts.add_argument(
        "--no-spares",
        action="store_true",
        help="keep no spare interpreters, which make restarts faster but need memory",
    )
    restarts.add_argument(
        "--host-discovery-script",
        type=Path,
        metavar="FILE",
        help="a program that prints the hosts, HOST:SLOTS per line, before each start; with "
        "--elastic it is run every second",
    )


def _add_elastic_arguments(verb: argparse.ArgumentParser) -> None:
    elastic = verb.add_argument_group("elastic jobs (names as for horovodrun)")
    elastic.add_argument(
        "--elastic",
        action="store_true",
        help="start the ranks again, from the last state.commit(), after a failure and when the "
        "hosts of --host-discovery-script or --hostfile have changed",
    )
    elastic.add_argument(
        "--max-np",
        "--max-num-proc",
        type=int,
        metavar="M",
        help="the largest number of ranks (default: all slots)",
    )
    elastic.add_argument(
        "--slots-per-host",
        type=int,
        metavar="N",
        help="the slots of a host that --host-discovery-script prints without a number "
        "(default: 1)",
    )
    elastic.add_argument(
        "--elastic-timeout",
        type=_seconds,
        metavar="S",
        help="seconds to wait for -np slots at the start, and for --min-np later (default: 600)",
    )
    elastic.add_argument(
        "--reset-limit",
        type=int,
        metavar="N",
        help="the most restarts, after failures and after changes of the hosts together "
        "(default: no limit)",
    )
    elastic.add_argument(
        "--blacklist-cooldown-range",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds for which a host is left out after ranks have failed there twice: MIN, "
        "doubled by each further failure up to MAX (default: for the rest of the job)",
    )


def add_doctor_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit doctor` for several hosts."""
    add_host_arguments(verb)
    verb.add_argument(
        "--bandwidth",
        action="store_true",
        help="also measure the bandwidth between the first two hosts",
    )


def check_alone(options: argparse.Namespace) -> None:
    """Check that `hvdkit doctor` without hosts has no argument for other hosts.

    Raises:
        UsageError: it has such an argument.
    """
    for name in ("bandwidth", "network", "start_timeout", "ssh_port", "ssh_identity", "ssh_arg"):
        if getattr(options, name):
            raise UsageError(
                f"{flag(name)} was given without hosts: expected --hosts HOST,HOST or --hostfile "
                f"FILE"
            )


def add_host_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that name other hosts, and say how to reach them."""
    where = verb.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="H:N,…", help="hosts and their numbers of ranks")
    where.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="a file with the hosts, as for Open MPI, MPICH or PBS: `host slots=4`",
    )
    network = verb.add_argument_group("other hosts")
    network.add_argument("-p", "--ssh-port", type=int, metavar="PORT")
    network.add_argument("-i", "--ssh-identity", metavar="FILE", help="the private key")
    network.add_argument(
        "--ssh-arg", action="append", default=[], metavar="ARG", help="e.g. --ssh-arg=-Jgateway"
    )
    network.add_argument(
        "--python",
        default=sys.executable,
        metavar="FILE",
        help="the path of Python on the other hosts (default: that of this Python)",
    )
    network.add_argument(
        "--network",
        metavar="NET",
        help="the ranks' network: 10.0.0.0/8, eth1 or host1=eth0,host2=ens3 "
        "(default: the subnet that all hosts are on)",
    )
    network.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help="seconds for hosts to answer, and for all ranks to call hvd.init() after the first "
        f"rank (default: {Timeouts.start:g}; for --nodes to join: {START_SECONDS:g})",
    )


def _count(text: str) -> int | None:
    """Return the number of `-np`; None for `auto`."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number; expected a number, or auto"
        ) from None


def _quoted(text: str) -> str:
    """Return a text that a shell can divide into words."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; correct the quotes") from None
    return text


def _seconds(text: str) -> float:
    """Return a number of seconds above 0, at most `_LONGEST`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds above 0")
    return min(seconds, _LONGEST)
