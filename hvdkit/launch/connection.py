"""The launcher's line to an agent: a process that it started, here or over ssh, or a socket."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from hvdkit.errors import HvdkitError
from hvdkit.launch import messages
from hvdkit.launch.hosts import Host
from hvdkit.launch.messages import Message
from hvdkit.launch.ssh import Ssh

_AGENT = ["-m", "hvdkit.launch.agent"]
_STDERR_LINES = 50
#: Where Python finds modules, and the linker libraries.
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Event:
    """A message of an agent; of kind `lost` when its line has ended."""

    connection: Connection
    message: Message


Events = queue.Queue[Event]


class Connection:
    """A line to an agent. What the agent says is put into the queue `events`.

    Attributes:
        host: the agent's host.
        greeted: whether the agent has spoken.
        ended: whether its line has ended.
        began: when the launcher opened it (`time.monotonic`).
        peer: the IPv4 address that it connects from; None where it does not connect by itself, or
            over IPv6.
    """

    peer: str | None = None

    def __init__(self, host: Host, orders: int, reports: IO[bytes], events: Events) -> None:
        self.host = host
        self.greeted = False
        self.ended = False
        self.began = time.monotonic()
        self._orders = orders
        self._reports = reports
        self._events = events
        self._dropped = threading.Event()
        # A signal's handler may send while the main thread is about to.
        self._sending = threading.RLock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Tell the agent something. One that is gone is noticed by the reader."""
        data = messages.encode(kind, **fields)
        with self._sending, contextlib.suppress(ConnectionError):
            while data and not self._dropped.is_set():
                data = data[os.write(self._orders, data) :]

    def hang_up(self) -> None:
        """End the agent's input: it ends its ranks and goes."""
        with self._sending:
            if not self._dropped.is_set():
                self._dropped.set()
                self._end_orders()

    def close(self, timeout: float) -> None:
        """Wait until the agent has gone; after `timeout` seconds its line is cut."""
        raise NotImplementedError

    def explain(self) -> str:
        """Why the agent is not there, and what to do."""
        raise NotImplementedError

    def refused_for_now(self) -> bool:
        """Return whether the agent could not be started, and may be a moment later."""
        return False

    def again(self) -> Connection:
        """Close this line, start the agent again, and return the line to it."""
        raise NotImplementedError

    def _end_orders(self) -> None:
        raise NotImplementedError

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # a socket's way to say that the other host is gone
            for line in self._reports:
                # An agent that is killed may leave half a line.
                if self.greeted and line.endswith(b"\n"):
                    self._put(messages.decode(line))
                self.greeted = self.greeted or line == messages.GREETING
        self.ended = True
        self._put({"kind": "lost"})

    def _put(self, message: Message) -> None:
        # Once nobody takes events any more, the agent's line must still be read to its end.
        while not self._dropped.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(Event(self, message), timeout=0.1)
                return


class ProcessConnection(Connection):
    """An agent that is started here, or on its host over ssh.

    Args:
        host: its host.
        local: whether that is this machine.
        ssh: how other hosts are reached.
        python: the Python that runs it on another host.
        events: where what it says is put.
        terminal: whether it gets this process's standard streams, for a rank.
    """

    def __init__(
        self,
        host: Host,
        local: bool,
        ssh: Ssh,
        python: str,
        events: Events,
        terminal: bool = False,
    ) -> None:
        self._local = local
        self._ssh = ssh
        self._python = python
        self._said: deque[str] = deque(maxlen=_STDERR_LINES)
        command = agent_command(host, local, ssh, python)
        streams = [os.dup(stream) for stream in range(3)] if terminal else []
        shared = {messages.TERMINAL_VARIABLE: ",".join(map(str, streams))} if terminal else {}
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | shared,
                pass_fds=streams,
                # What lies in the current directory must not be imported in the agent.
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # The terminal's Ctrl-C is for the launcher.
                start_new_session=True,
            )
        except OSError as error:
            raise HvdkitError(f"cannot start {command[0]!r}: {error.strerror}") from error
        finally:
            for stream in streams:
                os.close(stream)
        assert self._process.stdin
        assert self._process.stdout
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        super().__init__(host, self._process.stdin.fileno(), self._process.stdout, events)

    def _last_words(self) -> tuple[int | None, str]:
        """Return the status of the process and what it wrote last, once both are there."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._listener.join(timeout=1)
        return self._process.poll(), "\n".join(self._said)

    def explain(self) -> str:
        status, said = self._last_words()
        if self._local:
            last = self._said[-1] if self._said else "it said nothing"
            return f"its agent ended with status {status}: {last}"
        return self._ssh.explain(self.host, status, said, self._python)

    def refused_for_now(self) -> bool:
        if self._local or self.greeted:
            return False
        status, said = self._last_words()
        return self._ssh.refused_for_now(status, said)

    def again(self) -> Connection:
        self.hang_up()
        self.close(timeout=1)
        return ProcessConnection(self.host, self._local, self._ssh, self._python, self._events)

    def close(self, timeout: float) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        pipes = (self._process.stdout, self._process.stderr)
        for thread, pipe in zip((self._reader, self._listener), pipes, strict=True):
            thread.join(timeout=1)
            # Another process may hold its other end; to close what is being read would wait for it.
            if pipe is not None and not thread.is_alive():
                pipe.close()

    def _end_orders(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        if not self.greeted:
            # There is nobody to end anything, only an ssh that still tries to connect.
            self._kill()

    def _kill(self) -> None:
        # With its ProxyCommand, which may not notice that ssh has gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())


class SocketConnection(Connection):
    """An agent that another launcher (mpirun, srun) started, and that has come by itself.

    Args:
        host: its host.
        line: the socket that it speaks through.
        events: where what it says is put.

    """

    def __init__(self, host: Host, line: socket.socket, events: Events) -> None:
        self._socket = line
        peer = str(line.getpeername()[0]).removeprefix("::ffff:")
        # Ranks talk over IPv4.
        self.peer = None if ":" in peer else peer
        super().__init__(host, line.fileno(), line.makefile("rb"), events)

    def explain(self) -> str:
        return "its agent is gone; was the process killed, or the host shut down?"

    def close(self, timeout: float) -> None:
        self._reader.join(timeout)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, if it still reads
        self._reader.join(timeout=1)
        self._reports.close()
        self._socket.close()

    def _end_orders(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def agent_command(host: Host, local: bool, ssh: Ssh, python: str) -> list[str]:
    """Return the command that starts the agent on `host`.

    Args:
        host: its host.
        local: whether that is this machine, where it runs under the launcher's own Python.
        ssh: how other hosts are reached.
        python: the Python that runs it on another host. It finds its modules and libraries as this
            one does, where environment modules tell so in variables.
    """
    if local:
        return own_agent()
    paths = [f"{name}={os.environ[name]}" for name in _PATHS if os.environ.get(name)]
    return ssh.command(host, [*(["env", *paths] if paths else []), python, *_AGENT])


def own_agent(arguments: Sequence[str] = ()) -> list[str]:
    """An agent under this very Python."""
    return [sys.executable, *_AGENT, *arguments]
