"""One spare interpreter, as its agent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import mpi_segments
from hvdkit.launch.spares.command import PythonCommand
from hvdkit.processes import ProcessGroup, wait_for_killed, without_rank_variables

#: The folder of the module `sitecustomize` that the first Python of a rank imports.
HOOK = Path(__file__).parents[1] / "hook"
_VARIABLE = "HVDKIT_SPARE"
_SEND_SECONDS = 1.0
_WAIT_SECONDS = 0.2


def with_hook(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank whose first Python imports the module in `HOOK`."""
    paths = [str(HOOK), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


class Spare:
    """A Python process that imports modules, and waits for the environment of a rank.

    Args:
        group: the group of the ranks of the next start.
        command: the command of the rank.
        python: the parts of `command`, as `recognise` returns them.
        directory: the working directory of the rank.
        environment: the environment that the rank has now.
        cpus: the CPUs that the rank is bound to.

    Attributes:
        ready: whether the spare has imported the modules of all calls of `load`.
        loads: the number of calls of `load`.
        loading_since: the time of the last call of `load` (`time.monotonic`).
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
        self.ready = False
        self.loads = 0
        self.loading_since = time.monotonic()
        self._python = python
        self._environment = dict(environment)
        self._cpus = list(cpus)
        self._directory = directory
        self._received = b""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as unless_started, theirs:
            unless_started.callback(ours.close)
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
        ours.setblocking(False)
        self._socket = ours
        self._group = group

    def load(
        self, modules: Mapping[str, str | None], environment: Mapping[str, str], nice: int | None
    ) -> None:
        """Let the spare import these modules.

        Args:
            modules: name -> the file that the rank has loaded it from.
            environment: the environment during the imports, as the script has changed it.
            nice: the priority of the spare until it is started; None to leave it.
        """
        self.ready = False
        self.loads += 1
        self.loading_since = time.monotonic()
        self._send(
            "load",
            environment=dict(environment),
            modules=dict(modules),
            path=list(self._python.path),
            file=self._python.file,
            nice=nice,
        )

    def fits(self, environment: Mapping[str, str], cpus: Sequence[int]) -> bool:
        """Return whether the spare can run a rank with this environment."""
        return list(cpus) == self._cpus and same_for_imports(environment, self._environment)

    def poll(self) -> None:
        """Update `ready`."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._received += self._socket.recv(4096)
        if self._received.endswith(b"ready\n"):
            self._received, self.ready = b"", True

    def start(self, environment: Mapping[str, str]) -> None:
        """Let the spare run its command as a rank with this environment."""
        # The folder may have been replaced since the spare was started.
        self._send("start", environment=dict(environment), directory=self._directory)

    def wait_for_start(self, timeout: float, waiting: Callable[[], None] = lambda: None) -> bool:
        """Return whether the spare has begun to run its command within `timeout` seconds.

        Args:
            timeout: the seconds.
            waiting: called several times per second while this method waits.
        """
        deadline = time.monotonic() + timeout
        while not self._received.endswith(b"started\n"):
            left = deadline - time.monotonic()
            self._socket.settimeout(min(max(left, 0.001), _WAIT_SECONDS))
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                if left <= 0:
                    return False
                waiting()
                continue
            except OSError:
                return False
            if not data:
                return False
            self._received += data
        return True

    def close(self) -> None:
        """Close the connection. The process ends, unless `start` was called before."""
        self._socket.close()

    def kill(self) -> None:
        """End the process."""
        self.close()
        self.process.kill()
        wait_for_killed(self.process)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self._group.forget(self.process)

    def _send(self, kind: str, **fields: Any) -> None:
        # A spare that is stopped does not read.
        self._socket.settimeout(_SEND_SECONDS)
        try:
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError:
            pass  # the spare has ended, which `SparePool.step` notices
        finally:
            self._socket.setblocking(False)


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
