"""Collect the facts about this host that the launcher needs before it starts ranks."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.engine.describe import installed
from hvdkit.errors import HvdkitError
from hvdkit.launch.agent import binding
from hvdkit.launch.control.network import own_interfaces, reached_address


def facts(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the `hello` message for this `task` message."""
    # sshd sets it to "client-address client-port own-address own-port".
    connection = os.environ.get("SSH_CONNECTION", "").split()
    interfaces = own_interfaces()
    return {
        "hvdkit": hvdkit.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "hostname": socket.gethostname(),
        "engine": engine_revision(),
        "cores": usable_cores(),
        "topology": binding.topology() if task.get("bind") else [],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interfaces": [asdict(interface) for interface in interfaces],
        "reached_at": (
            reached_address(connection[2], interfaces) if len(connection) == 4 else None
        ),
        "problems": problems(task["command"], task["directory"], task["path"], task["files"]),
    }


def engine_revision() -> int:
    """Return the revision of the engine, the Horovod of `hvdkit build`; 0 for another Horovod."""
    version = ""
    # The ranks report an engine that is damaged, or that this user may not read.
    with contextlib.suppress(HvdkitError, OSError):
        engine = installed()
        version = "" if engine is None else engine.version
    revision = version.partition("+hvdkit.")[2].partition(".")[0]
    return int(revision) if revision.isdigit() else 0


def problems(
    command: Sequence[str], directory: str, path: str | None, files: Sequence[str]
) -> list[str]:
    """Return why this host cannot run `command`; empty if it can.

    Args:
        path: the PATH of the ranks; None for this process's own.
        files: the arguments of the command that are files on the launcher's host.
    """
    if not Path(directory).is_dir():
        return [f"no directory {directory}; every host must see the job's files there"]
    found = []
    program = command[0] if "/" not in command[0] else str(Path(directory, command[0]))
    if shutil.which(program, path=path) is None:
        found.append(_problem_of_program(command[0], directory))
    found += [
        f"no file {name} in {directory}; copy it there, or share the directory"
        for name in files
        if not os.path.exists(os.path.join(directory, name))
    ]
    return found


def _problem_of_program(name: str, directory: str) -> str:
    """Return why the program of a command cannot be started, and what to do."""
    if "/" not in name:
        return f"no program {name!r} on PATH; install it, or give its full path"
    path = os.path.join(directory, name)
    if os.path.isdir(path):
        return f"{name!r} is a directory; expected a program"
    if os.path.exists(path):
        return (
            f"the file {name!r} is not executable; run `chmod +x {shlex.quote(name)}` there, or "
            f"start it with its interpreter, such as `bash {shlex.quote(name)}`"
        )
    return f"no file {name!r} in {directory}; copy it there, or share the directory"


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
