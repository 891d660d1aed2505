"""`hvdkit.run`: call a function on several ranks of this machine, as `horovod.run`.

Horovod's launcher and ranks exchange pickles over HTTP. Here, they are files in a folder that only
this user can read: `call` reads the function in each rank, and writes its result.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch import call
from hvdkit.launch.hosts.hosts import are_local, parse_hosts, read_hostfile
from hvdkit.launch.options import horovodrun
from hvdkit.system.owned_folders import TemporaryFolder, opened
from hvdkit.system.plain_files import open_regular
from hvdkit.system.processes import python_command
from hvdkit.system.whole_files import create

# `horovodrun`, which ends if this process is killed.
_LAUNCHER = (
    "import signal, sys; from hvdkit.system.processes import get_signal_with_parent; "
    "get_signal_with_parent(signal.SIGTERM); from hvdkit.cli import horovodrun; "
    "sys.exit(horovodrun())"
)
# Lines of the launcher's messages that an error shows.
_SHOWN = 20


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | os.PathLike[str] | None = None,
    disable_cache: bool | None = None,  # noqa: ARG001
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call a function on several ranks of this machine, and return their results.

    The arguments are those of `horovod.run`. The function, its arguments and its results are
    pickled with cloudpickle, in a temporary folder that only this user can read. For ranks on other
    machines, and for elastic jobs, use the command `hvdkit run` with a script.

    Args:
        func: the function that each rank calls.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: the number of ranks.
        min_num_proc: an error if given, as all arguments of elastic jobs.
        max_num_proc: see `min_num_proc`.
        slots: see `min_num_proc`.
        reset_limit: see `min_num_proc`.
        cooldown_range: see `min_num_proc`.
        hosts: names of this machine and numbers of ranks, such as `localhost:2`.
        hostfile: a file with names of this machine.
        host_discovery_script: see `min_num_proc`.
        start_timeout: seconds for the start of the ranks.
        ssh_port: no effect on this machine.
        ssh_identity_file: no effect on this machine.
        disable_cache: no effect: the launcher makes all its checks at each start.
        output_filename: a folder for the output of the ranks.
        verbose: whether to print the command line of the launcher.
        use_gloo: run the ranks over Gloo, which is the default.
        use_mpi: run the ranks over MPI.
        mpi_args: arguments for mpirun.
        network_interface: names with commas, see `network_interfaces`.
        network_interfaces: the network interfaces of the ranks. The default is the loopback
            interface, which no other machine can reach.
        executable: the Python of the ranks; default that of this process.
        np: the older name of `num_proc`.
        min_np: the older name of `min_num_proc`.
        max_np: the older name of `max_num_proc`.

    Returns:
        The results, in the order of the ranks.

    Raises:
        UsageError: an argument is not valid, or the function cannot be pickled.
        HvdkitError: the job failed. The launcher has explained this on standard error.
    """
    if network_interface:
        network_interfaces = network_interface.split(",")
    size = num_proc if np is None else np
    elastic = {
        "min_num_proc": min_num_proc if min_np is None else min_np,
        "max_num_proc": max_num_proc if max_np is None else max_np,
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
    }
    for name, elastic_value in elastic.items():
        if elastic_value is not None:
            raise UsageError(
                f"{name} is for elastic jobs: start a script with `hvdkit run --elastic`"
            )
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"num_proc is {size!r}: expected a number of ranks, at least 1")
    if use_gloo and use_mpi:
        raise UsageError("use_gloo and use_mpi were given: expected one of them")
    launcher = ["--mpi"] * bool(use_mpi) + ["--gloo"] * bool(use_gloo)
    if horovodrun.read(launcher, os.environ).is_for_horovod:
        raise UsageError(
            "here, Horovod's own launcher starts ranks: use `hvdkit run` with a script"
        )
    options = {
        "-np": size,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--mpi-args": mpi_args,
        "--network-interfaces": network_interfaces and ",".join(network_interfaces),
    }
    words = [*launcher, *(["--verbose"] if verbose else []), *_hosts(hosts, hostfile, size)]
    for name, option in options.items():
        if option is not None:
            words += [name, str(option)] if name == "-np" else [f"{name}={option}"]
    try:
        data = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise UsageError(f"the function or its arguments cannot be pickled: {error}") from error
    with TemporaryFolder("hvdkit-run-") as name, opened(Path(name)) as folder:
        create(folder / call.PATH, pickle.dumps((sys.prefix, sys.path)), 0o600)
        create(folder / call.FUNCTION, data, 0o600)
        python = python_command("-m", call.__name__, name)
        _launch([*words, executable or python[0], *python[1:]])
        return [_result(folder, rank) for rank in range(size)]


def _hosts(hosts: str | None, hostfile: str | os.PathLike[str] | None, size: int) -> list[str]:
    """Return the words for the hosts.

    Raises:
        UsageError: a host is another machine, which cannot read the folder with the function.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError("hosts and hostfile were given: expected one of them")
    if hosts is None and hostfile is None:
        return ["-H", f"localhost:{size}"]
    found = read_hostfile(Path(hostfile)) if hostfile else parse_hosts(hosts or "", "hosts")
    for host, is_local in are_local(found).items():
        if not is_local:
            raise UsageError(
                f"{host.name} is another machine, or its name does not resolve: expected names of "
                f"this machine. For several machines, start a script with `hvdkit run`"
            )
    return ["--hostfile", str(hostfile)] if hostfile else ["-H", str(hosts)]


def _launch(words: Sequence[str]) -> None:
    """Run `horovodrun`, and show its messages.

    Raises:
        HvdkitError: its exit status is not 0.
    """
    # Not in the process group of the terminal: after Ctrl-C, the launcher would get two signals.
    launcher = subprocess.Popen(
        python_command("-c", _LAUNCHER, *words),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )
    assert launcher.stderr is not None
    lines: deque[str] = deque(maxlen=_SHOWN)
    try:
        for line in launcher.stderr:
            sys.stderr.write(line)
            lines.append(line)
        status = launcher.wait()
    except BaseException:
        _stop(launcher)
        raise
    finally:
        launcher.stderr.close()
    if status:
        raise HvdkitError(f"the job ended with status {status}:\n{''.join(lines).rstrip()}")


def _stop(launcher: subprocess.Popen[str]) -> None:
    """End the job, and show the launcher's messages. It gets each further Ctrl-C, too."""
    assert launcher.stderr is not None
    while True:
        launcher.send_signal(signal.SIGINT)
        try:
            for line in launcher.stderr:
                sys.stderr.write(line)
            launcher.wait()
        except KeyboardInterrupt:
            continue
        return


def _result(folder: Path, rank: int) -> Any:
    try:
        descriptor = open_regular(folder / call.result_name(rank))
    except FileNotFoundError:
        raise HvdkitError(f"rank {rank} ended without a result of the function") from None
    with open(descriptor, "rb") as file:
        return pickle.load(file)
