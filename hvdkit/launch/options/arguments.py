"""The arguments of `hvdkit run`, and those of `hvdkit doctor` for several hosts."""

from __future__ import annotations

import argparse
import math
import shlex
import sys

from hvdkit.console.flags import TYPES, add_options, check_least, flag
from hvdkit.errors import UsageError
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.hosts.ssh import HOST_SECONDS
from hvdkit.launch.launchers.nodes.settings import START_SECONDS

HELP = "start the ranks of a job, on this machine or on several, and watch them"
EXAMPLE = """\
  hvdkit run -np 2 python train.py
  hvdkit run -np 8 -H host1:4,host2:4 python train.py --epochs 10
  hvdkit run --hostfile hosts.txt --output-dir logs/ -x WANDB_API_KEY python train.py
  hvdkit run train.py                              # a rank for each GPU; runs python train.py
  hvdkit run -np 2 --dry-run python train.py       # print the plan"""

# Seconds, about 30 years. The system refuses to wait for much longer.
_LONGEST = 1e9

_RUN = f"""
-np --num-proc RANKS      number of ranks, or `auto` (the default): one per slot of the hosts or
                          allocation. Without hosts: one per GPU of this machine, or one without
                          GPUs
--launcher {{auto,gloo,mpi,slurm}}  (default: slurm in a Slurm allocation; else gloo, or mpi if
                          Horovod has no Gloo)
--dry-run                 print the plan and the commands; hosts are contacted, no rank is started
--no-preflight            skip the checks of several hosts before the start (those of `hvdkit
                          doctor --hosts`)
--stop-grace S            seconds for an orderly stop of ranks after Ctrl-C, SIGTERM or SIGUSR1
                          (default: {Timeouts.stop:g})
[nodes without ssh: the same command on each]
--nodes N                 the number of nodes
--node-rank N             the number of this node, from 0 (default: JOB_COMPLETION_INDEX of
                          Kubernetes, SKYPILOT_NODE_RANK, NODE_RANK or SLURM_NODEID)
| --rdzv HOST:PORT        the address of node 0
| --rdzv-file FILE        on a shared disk: node 0 writes its address and a key there
--key-file FILE           the file with the job's key, the same on every node
                          (default: $HVDKIT_JOB_KEY)
[MPI]
--mpirun PROGRAM          the mpirun of Horovod's MPI (default: that of this Python environment, or
                          on PATH)
--mpi-args ARGS           further arguments for mpirun, e.g. '--report-bindings'
[Slurm]
--mpi KIND                run ranks over MPI, with srun --mpi=KIND: pmix, pmi2 (default: over Gloo)
[the ranks' environment]
-x NAME[=VALUE]...        give the ranks this variable; 'WANDB_*' gives all with this prefix.
                          Without -x, ranks on other hosts get most variables, but no secrets (names
                          like *TOKEN* and *KEY*)
--env-file FILE...        a file with lines NAME=VALUE or NAME, as for -x
--pin-gpus                set CUDA_VISIBLE_DEVICES to one GPU per rank, for programs that use a GPU
                          before hvd.init()
--bind                    bind each rank to its own cores, of one NUMA node (--dry-run shows them)
--no-torch-env            do not set the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK,
                          MASTER_ADDR, ...
[output]
--all-output              show the output of all ranks (default: of rank 0 only, if there are more
                          than 16)
--output-dir DIR          write each rank's output, and the first failure, to a new folder of DIR
--debug-rank N            give rank N this terminal, for breakpoint() and input(); other ranks wait
                          for it without a timeout
[restarts]
--restarts N              if the job fails, start it again, at most N times in a row without a new
                          checkpoint or commit of hvdkit (default: 0; with --elastic 3)
--min-np --min-num-proc N  restart without hosts that are lost, or on which ranks failed twice, if
                          at least N ranks remain (default: -np; with --elastic but without -np: 1)
--host-timeout S          seconds without an answer after which a host is lost
                          (default: {HOST_SECONDS:g})
--no-spares               keep no spare interpreters, which make restarts faster but need memory
--host-discovery-script FILE  a program that prints the hosts, HOST:SLOTS per line, before each
                          start; with --elastic it is run every second
[elastic jobs (names as for horovodrun)]
--elastic                 start the ranks again, from the last state.commit(), after a failure and
                          when the hosts of --host-discovery-script or --hostfile have changed
--max-np --max-num-proc N  the largest number of ranks (default: all slots)
--slots-per-host N        the slots of a host that --host-discovery-script prints without a number
                          (default: 1)
--elastic-timeout S       seconds to wait for -np slots at the start, and for --min-np later
                          (default: 600)
--reset-limit N           the most restarts, after failures and after changes of the hosts together
                          (default: no limit)
--blacklist-cooldown-range MIN MAX  seconds for which a host is left out after ranks have failed
                          there twice: MIN, doubled by each further failure up to MAX (default: for
                          the rest of the job)
[these arguments in a file]
--config FILE             read arguments from FILE (TOML: num-proc = 8); the command line has
                          precedence
--write-config FILE       write these arguments to FILE, and start no rank
"""

_HOSTS = f"""
[hosts]
| -H --hosts H:N,…        hosts and their numbers of ranks
| --hostfile FILE         a file with the hosts, as for Open MPI, MPICH or PBS: `host slots=4`
-p --ssh-port N           the port of their ssh servers
-i --ssh-identity KEY     the file with the private key
--ssh-arg ARG...          e.g. --ssh-arg=-Jgateway
--python PATH             the path of Python on the other hosts (default: that of this Python)
--network NET             the ranks' network: 10.0.0.0/8, eth1 or host1=eth0,host2=ens3
                          (default: the subnet that all hosts are on)
--start-timeout S         seconds for hosts to answer, and for all ranks to call hvd.init() after
                          the first rank (default: {Timeouts.start:g}; for --nodes to join:
                          {START_SECONDS:g})
"""


# The least values of options. A busy host may need almost as long as --host-timeout for an answer.
_LEAST = {"nodes": 1, "restarts": 0, "reset_limit": 0, "slots_per_host": 1, "host_timeout": 2}


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit run`."""
    types = {**TYPES, "RANKS": _count, "S": _seconds, "ARGS": _quoted, "MIN": float}
    add_host_arguments(verb)
    add_options(
        verb,
        _RUN,
        types,
        launcher="auto",
        stop_grace=Timeouts.stop,
        host_timeout=HOST_SECONDS,
        mpi_args="",
    )
    verb.add_argument("command", nargs=argparse.REMAINDER, help="the command of every rank")
    # For `horovodrun`: makes the output in place of `Output`.
    verb.set_defaults(make_output=None)


def add_doctor_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit doctor` for several hosts."""
    add_host_arguments(verb)
    add_options(verb, "--bandwidth  also measure the bandwidth between the first two hosts")


def add_host_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that name other hosts, and say how to reach them."""
    add_options(verb, _HOSTS, {**TYPES, "S": _seconds}, python=sys.executable)


def check(options: argparse.Namespace) -> None:
    """Check that the options of `hvdkit run` can be given together.

    Conflicts with the environment, such as a Slurm allocation, are found later, in `command` and
    `supervised`.

    Raises:
        UsageError: a number is out of range, two options exclude each other, or one needs another.
    """
    check_least(options, _LEAST)
    # Whether a rule applies to the job, the options that it refuses, and the error: {} becomes the
    # first of these options that was given.
    rules = (
        (
            not options.elastic,
            "--max-np --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range",
            "{} needs --elastic",
        ),
        (
            options.elastic and options.host_discovery_script is None,
            "--slots-per-host",
            "{} needs --host-discovery-script: it sets the slots of hosts that the script prints "
            "without a number. With -H or --hostfile, give the slots of each host, such as host1:4",
        ),
        (
            options.elastic,
            "--nodes --debug-rank --mpi --launcher",
            "--elastic cannot be combined with {}: an elastic job starts its ranks over Gloo, with "
            "an agent on each host",
        ),
        (
            options.nodes is None,
            "--node-rank --rdzv --rdzv-file --key-file",
            "{} needs --nodes N, the number of nodes",
        ),
        (
            options.nodes is not None,
            "--hosts --hostfile --mpi --debug-rank --host-discovery-script --launcher",
            "{} cannot be combined with --nodes, where each node joins by itself",
        ),
        (
            not (options.restarts or options.elastic),
            "--min-np",
            "{0} needs --restarts N: add it, or remove {0}",
        ),
        (
            options.restarts,
            "--debug-rank",
            "--restarts cannot be combined with {}. Remove one of them",
        ),
        (
            options.host_discovery_script is not None,
            "--hosts --hostfile",
            "--host-discovery-script was given with hosts. Remove -H and --hostfile, or the script",
        ),
        (
            options.launcher == "slurm",
            "--hosts --hostfile --host-discovery-script",
            "--launcher slurm was given with hosts, but the hosts are those of the allocation. "
            "Remove -H, --hostfile and --host-discovery-script",
        ),
    )
    # Jobs that refuse --launcher use Gloo, so `--launcher gloo` does not conflict.
    is_gloo = options.launcher in ("auto", "gloo")
    given = vars(options) | {"launcher": None if is_gloo else options.launcher}
    for applies, refused, error in rules:
        for name in refused.split() if applies else ():
            value = given[name.removeprefix("--").replace("-", "_")]
            if value is not None:
                shown = {"--hosts": "-H", "--launcher": f"--launcher {value}"}.get(name, name)
                raise UsageError(error.format(shown))


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
