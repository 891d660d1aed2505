"""One spare interpreter, as its agent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.launch.agent.spares.command import PythonCommand
from hvdkit.mpi import segments as mpi_segments
from hvdkit.system.processes import ProcessGroup, wait_for_killed, without_rank_variables

#: The folder of the module `sitecustomize` that the first Python of a rank imports.
HOOK = Path(__file__).parents[1] / "hook"
_VARIABLE = "HVDKIT_SPARE"
_SEND_SECONDS = 1.0


def with_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank whose first Python imports the module in `HOOK`."""
    paths = [str(HOOK), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


class Spare:
    """A Python process that imports modules, and waits for the environment of a rank.

    Args:
        group: the group of the ranks of the next start.
        python: the parts of `command`, as `recognise` returns them.
        environment: the environment that the rank has now.
        cpus: the CPUs that the rank is bound to.

    Attributes:
        socket: the connection to it, which does not block.
        loads: the times of the calls of `load` (`time.monotonic`).
    """

    def __init__(
        self,
        group: ProcessGroup,
        command: Sequence[str],
        python: PythonCommand,
        directory: str,
        environment: Mapping[str, str],
        cpus: Sequence[int],
    ) -> None:
        self.loads: list[float] = []
        self._python = python
        self._environment = dict(environment)
        self._cpus = list(cpus)
        self._directory = directory
        self._answers = b""
        self._group = group
        self.socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as unless_started, theirs:
            unless_started.callback(self.socket.close)
            descriptor = theirs.fileno()
            self.process = group.start(
                command,
                with_hook(self._environment) | {_VARIABLE: str(descriptor)},
                directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                dies_with_us=True,
                cpus=cpus,
                pass_fds=[descriptor],
            )
            unless_started.pop_all()
        self.socket.setblocking(False)

    def load(self, modules: Mapping[str, str | None], environment: Mapping[str, str]) -> None:
        """Let the spare import these modules.

        Args:
            modules: name -> the file that the rank has loaded it from.
            environment: the environment during the imports, as the script has changed it.
        """
        self.loads.append(time.monotonic())
        self._send(
            "load",
            environment=dict(environment),
            modules=dict(modules),
            path=list(self._python.path),
            file=self._python.file,
        )

    def fits(self, environment: Mapping[str, str], cpus: Sequence[int]) -> bool:
        """Return whether the spare is ready to run a rank with this environment."""
        same = list(cpus) == self._cpus and same_for_imports(environment, self._environment)
        return same and self.ready

    @property
    def ready(self) -> bool:
        """Whether the spare has imported the modules of all calls of `load`."""
        return self._read().count(b"ready\n") == len(self.loads)

    @property
    def started(self) -> bool:
        """Whether the spare has begun to run its command."""
        return self._read().endswith(b"started\n")

    def _read(self) -> bytes:
        """Return all that the spare has answered."""
        with contextlib.suppress(OSError):  # nothing new, or the spare has ended
            self._answers += self.socket.recv(4096)
        return self._answers

    def start(self, environment: Mapping[str, str]) -> None:
        """Let the spare run its command as a rank with this environment."""
        # The folder may have been replaced since the spare was started.
        self._send("start", environment=dict(environment), directory=self._directory)

    def close(self) -> None:
        """Close the connection. The process ends, unless `start` was called before."""
        self.socket.close()

    def kill(self) -> None:
        """End the process."""
        self.close()
        self.process.kill()
        wait_for_killed(self.process)
        for pipe in filter(None, (self.process.stdout, self.process.stderr)):
            pipe.close()
        self._group.forget(self.process)

    def _send(self, kind: str, **fields: Any) -> None:
        # A spare that is stopped does not read.
        self.socket.settimeout(_SEND_SECONDS)
        # Errors: the spare has ended, which `SparePool.step` notices.
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        self.socket.setblocking(False)


def same_for_imports(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Return whether two environments have the same variables that imports may read.

    A script's modules may read any variable. The only exceptions are those to which hvdkit gives
    other values in each start: the variables of a rank, NCCL's network, and the folder of Open
    MPI's files. NCCL and MPI read them only when ranks connect.
    """

    def read(environment: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in without_rank_variables(environment).items()
            if not name.startswith("NCCL_") and name not in mpi_segments.VARIABLES
        }

    return read(first) == read(second)
