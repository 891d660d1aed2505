"""Start ranks without importing the framework in each of them.

The import of PyTorch or TensorFlow takes longer than most jobs of a test. A fork server is a
process that has imported the framework, but has not called `hvd.init()`. Each rank is a fork of the
server, with the command, environment, working directory and output of the rank:

    with forked("torch"):
        group = start_gloo([sys.executable, "-c", code], 2)

Forks have the same hash seed, unlike separate processes. So the ranks of `rank_pool`, on which most
tests run, are separate processes: they show mistakes with the order of sets.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from hvdkit import ranks
from hvdkit.system.processes import GROUP_VARIABLE, ProcessGroup

#: Framework -> the modules that its server imports.
MODULES = {
    # PyTorch imports torch._dynamo when a script creates an optimizer.
    "torch": ["torch._dynamo", "hvdkit.torch"],
    "tensorflow": ["hvdkit.tensorflow"],
}
#: The environment variable of servers, which their forks inherit.
MARK = "HVDKIT_TEST_FORK_SERVER"

_HEADER_BYTES = 8
_servers: dict[str, _Server] = {}


@contextlib.contextmanager
def forked(framework: str | None) -> Iterator[None]:
    """Let the ranks that are started in this block be forks of the server of `framework`.

    Commands of another Python, and frameworks without a server, are started as always.
    """
    if framework not in MODULES:
        yield
        return
    server = _servers.get(framework)
    if server is None or not server.running():
        server = _servers[framework] = _Server(framework)
    with mock.patch.object(ranks, "ProcessGroup", functools.partial(_ForkedProcesses, server)):
        yield


def stop_servers() -> None:
    """End all servers."""
    while _servers:
        _servers.popitem()[1].stop()


class _Server:
    """The server of one framework, in the pytest process."""

    def __init__(self, framework: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks.fork_server", str(theirs.fileno())]
                + MODULES[framework],
                env=os.environ | {MARK: framework, "OMP_NUM_THREADS": "1"},
                cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the pytest process, which ends the server.
                start_new_session=True,
            )
        self._received = b""
        self._statuses: dict[int, int] = {}

    def running(self) -> bool:
        """Return whether the server has not ended."""
        return self._process.poll() is None

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, outputs: Sequence[int]
    ) -> int:
        """Start `command`, and return its process ID."""
        task = {"arguments": list(command[1:]), "environment": dict(env), "directory": cwd}
        message = json.dumps(task).encode()
        header = len(message).to_bytes(_HEADER_BYTES, "big")
        socket.send_fds(self._socket, [header], list(outputs))
        self._socket.sendall(message)
        while True:
            line = self._line(120.0)
            assert line is not None, "the fork server did not answer"
            if "started" in line:
                return int(line["started"])
            self._statuses[line["ended"]] = line["status"]

    def status(self, pid: int, timeout: float) -> int | None:
        """Return the exit status of a fork, as `subprocess` has it, or None if it still runs."""
        deadline = time.monotonic() + timeout
        while pid not in self._statuses:
            line = self._line(max(0.0, deadline - time.monotonic()))
            if line is None:
                return None
            self._statuses[line["ended"]] = line["status"]
        return self._statuses[pid]

    def _line(self, timeout: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                data = self._socket.recv(65536)
            except (BlockingIOError, TimeoutError):
                return None
            finally:
                self._socket.settimeout(None)
            if not data:
                raise RuntimeError("the fork server has ended; its output is above")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return dict(json.loads(line))

    def stop(self) -> None:
        """End the server."""
        self._socket.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)


class _Fork:
    """A fork, with those members of `subprocess.Popen` that `ProcessGroup` uses."""

    stdin = stdout = stderr = None

    def __init__(self, server: _Server, pid: int, command: Sequence[str]) -> None:
        self._server = server
        self.pid = pid
        self.args = command

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._server.status(self.pid, 0.0)

    def wait(self, timeout: float = 3600.0) -> int:
        status = self._server.status(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _ForkedProcesses(ProcessGroup):
    def __init__(self, server: _Server) -> None:
        super().__init__()
        self._server = server

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: Any = None, **how: Any):
        is_code_or_script = command[1] == "-c" or not command[1].startswith("-")
        if command[0] != sys.executable or not is_code_or_script:
            return super().start(command, env, cwd, **how)
        output = how["stdout"].fileno()
        environment = dict(env) | {GROUP_VARIABLE: self._id}
        pid = self._server.fork(command, environment, os.fspath(cwd or os.getcwd()), [output])
        process = _Fork(self._server, pid, command)
        self.started.append(process)  # type: ignore[arg-type]
        return process


def serve(control: socket.socket) -> None:
    """Fork for each request until the pytest process closes the connection."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    # Objects that no collection looks at stay shared with the forks.
    gc.collect()
    gc.freeze()
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(control)
        if control in ready:
            header, outputs, *_ = socket.recv_fds(control, _HEADER_BYTES, 1, socket.MSG_WAITALL)
            if not header:
                return
            task = json.loads(_read(control, int.from_bytes(header, "big")))
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for end in (woken, wake):
                    os.close(end)
                control.close()
                _become(task, outputs[0])
                return
            os.close(outputs[0])
            control.sendall(json.dumps({"started": pid}).encode() + b"\n")


def _read(control: socket.socket, length: int) -> bytes:
    parts = b""
    while len(parts) < length:
        parts += control.recv(length - len(parts))
    return parts


def _report_ended(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            control.sendall(json.dumps({"ended": ended[0], "status": status}).encode() + b"\n")


def _become(task: dict[str, Any], output: int) -> None:
    """Run the command of a rank in this fork."""
    os.setsid()
    os.chdir(task["directory"])
    os.environ.clear()
    os.environ.update(task["environment"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # Python puts the folder of the server's command there.
    first, *arguments = task["arguments"]
    if first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        importlib.import_module(_name)
    serve(socket.socket(fileno=int(sys.argv[1])))
