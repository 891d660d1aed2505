"""The launcher's connection to an agent: a process started here or over ssh, or a socket."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import messages
from hvdkit.launch.control.messages import Message
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import FAILED, NO_ANSWER, Ssh
from hvdkit.system.processes import exit_text, kill_group, wait_for_end, wait_for_killed
from hvdkit.system.sealed import BrokenSeal, SealedConnection

_AGENT = ["-P", "-m", "hvdkit.launch.agent.main"]
_STDERR_LINES = 50
# The errors of a connection to a host that does not answer.
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
# Seconds after which the missing answer to a heartbeat counts as a silence.
_SILENCE_SECONDS = 1.0
# The most bytes of a line that an error shows.
_SHOWN_BYTES = 80
#: The search paths of Python modules and of libraries.
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Event:
    """A message of an agent. A message of kind `lost` means that the connection has ended.

    Attributes:
        connection: the connection to the agent.
        message: the message.
        received_at: the time of its arrival (`time.monotonic`).
        counted: its bytes if it counts for `messages.WINDOW`; otherwise 0.
    """

    connection: Connection
    message: Message
    received_at: float = field(default_factory=time.monotonic)
    counted: int = 0


Events = queue.Queue[Event]


@dataclass(frozen=True)
class Silence:
    """A time in which an agent did not answer a heartbeat.

    Attributes:
        seconds: its length.
        ended_at: its end (`time.monotonic`); infinite if it has not ended.
    """

    seconds: float
    ended_at: float


class Heartbeats:
    """The heartbeats to an agent, and the times in which it has not answered.

    Attributes:
        silent_since: the time since which the launcher has waited for a message (`time.monotonic`);
            infinite while no answer is expected: before the first answer, after the end, and
            for agents that send none (`--nodes`).
    """

    def __init__(self) -> None:
        self.silent_since = float("inf")
        # The time of the heartbeat that the agent has not answered yet, and the last silence.
        self._asked_at: float | None = None
        self._silence: Silence | None = None

    def ask(self) -> None:
        """Note that a heartbeat is sent."""
        if self._asked_at is None and self.silent_since < float("inf"):
            self._asked_at = time.monotonic()

    def answer(self, answers: bool) -> None:
        """Note a message of the agent.

        Args:
            answers: whether the message shows that the agent answers heartbeats.
        """
        now = time.monotonic()
        if self._asked_at is not None and now > self._asked_at + _SILENCE_SECONDS:
            self._silence = Silence(now - self._asked_at, now)
        self._asked_at = None
        if answers or self.silent_since < float("inf"):
            self.silent_since = now

    def end(self) -> None:
        """Expect no more answers."""
        self.silent_since, self._asked_at = float("inf"), None

    def silence(self, now: float) -> Silence | None:
        """Return the silence at a time, as `Connection.silence` does."""
        asked_at = self._asked_at
        if asked_at is not None and now > asked_at + _SILENCE_SECONDS:
            return Silence(now - asked_at, float("inf"))
        return self._silence


class Connection:
    """A connection to an agent. A thread puts the agent's messages into the queue `events`.

    The queue has no limit, so no message waits in the network. `messages.WINDOW` limits the bytes
    in the queue. `AgentPool.next_event` acknowledges each message that it takes from the queue.

    Attributes:
        host: the agent's host.
        greeted: whether the agent's greeting has arrived.
        ended: whether the connection has ended.
        idle: whether the agent has no ranks, and waits for the next start.
        opened_at: when the launcher opened it (`time.monotonic`).
        peer: the IPv4 address of an agent that opened the connection; None for other agents, and
            over IPv6.
    """

    peer: str | None = None

    def __init__(self, host: Host, sent: io.RawIOBase, received: IO[bytes], events: Events) -> None:
        self.host = host
        self.greeted = False
        self.ended = False
        self.idle = True
        self.opened_at = time.monotonic()
        self._heartbeats = Heartbeats()
        self._sent = sent
        self._received = received
        self._events = events
        self._error: OSError | None = None
        # The last line before the greeting, of a login shell.
        self._said = ""
        self._disconnected = threading.Event()
        # A thread writes the messages: an agent that is stopped must not delay the launcher, and a
        # signal handler may send while the main thread does. The value None in the queue closes
        # the agent's input.
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, without waiting for the agent.

        If the agent is lost, nothing happens: the reader thread reports it.
        """
        if not self._disconnected.is_set():
            self._unsent.put(messages.encode(kind, **fields))

    def acknowledge(self, event: Event) -> None:
        """Tell the agent that one of its messages was taken from the queue."""
        if event.counted:
            self.send("read", bytes=event.counted)

    def _write(self) -> None:
        while (data := self._unsent.get()) is not None:
            try:
                while data:
                    data = data[self._sent.write(data) or 0 :]
            except OSError as error:
                # The system reports a lost host only once: either here or to the reader.
                self._error = self._error or error
        self._close_input()

    def send_heartbeat(self) -> None:
        """Send a heartbeat, but only after all earlier messages have been written."""
        if self._unsent.empty():
            self._heartbeats.ask()
            self.send("heartbeat")

    @property
    def silent_since(self) -> float:
        """The time since which the launcher has waited for a message; see `Heartbeats`."""
        return self._heartbeats.silent_since

    def silence(self, now: float) -> Silence | None:
        """Return the current silence of the agent, or else its last one; None if there was none.

        A silence is longer than a second.

        Args:
            now: the time (`time.monotonic`).
        """
        return self._heartbeats.silence(now)

    def disconnect(self) -> None:
        """Close the agent's input after the last message. The agent then ends its ranks and itself.

        This method does not wait for the agent; `close` does.
        """
        if not self._disconnected.is_set():
            self._disconnected.set()
            self._unsent.put(None)

    @property
    def disconnected(self) -> bool:
        """Whether `disconnect` was called."""
        return self._disconnected.is_set()

    def close(self, timeout: float) -> None:
        """Wait until the agent has ended, and cut the connection after `timeout` seconds."""
        raise NotImplementedError

    def cut(self) -> None:
        """Cut the connection to an agent that does not answer. Kill a local agent, or its ssh."""
        raise NotImplementedError

    def explain(self) -> str:
        """Return why the agent has ended or does not answer, and what to do."""
        raise NotImplementedError

    def lost_host(self) -> bool:
        """Return whether the connection has ended because the host does not answer."""
        raise NotImplementedError

    def failed_transiently(self) -> bool:
        """Return whether the agent did not start, but may start at the next attempt."""
        return False

    def restart(self) -> Connection:
        """Close this connection, start the agent again, and return the new connection."""
        raise NotImplementedError

    def _close_input(self) -> None:
        raise NotImplementedError

    def _read(self) -> None:
        try:
            for line in self._received:
                if not self.greeted:
                    # The start-up files of a login shell may print text without a line end.
                    self.greeted = line.endswith(messages.GREETING)
                    self._said = line.decode(errors="replace").strip() or self._said
                elif line.endswith(b"\n"):  # an agent that is killed may leave half a line
                    self._receive(line)
        except OSError as error:  # of a socket whose other host is gone
            self._error = error
        self.ended = True
        self._heartbeats.end()
        self._put({"kind": "lost"})

    def _receive(self, line: bytes) -> None:
        message = _decoded(line)
        self._heartbeats.answer(message["kind"] == "alive")
        if message["kind"] != "alive":
            self._put(message, len(line) if message["kind"] in messages.COUNTED else 0)

    def _put(self, message: Message, counted: int = 0) -> None:
        # After `disconnect` nothing reads the queue, but the agent's output must be read fully.
        if not self._disconnected.is_set():
            self._events.put(Event(self, message, counted=counted))


class ProcessConnection(Connection):
    """A connection to an agent that this process starts, here or over ssh.

    Args:
        host: the agent's host.
        local: whether the host is this machine.
        ssh: how to reach other hosts.
        python: the Python of an agent on another host.
        events: the queue for the agent's messages.
        terminal: whether the agent gets this process's standard streams, for a rank.
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
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        command = agent_command(host, local, ssh, python)
        streams = [os.dup(stream) for stream in range(3)] if terminal else []
        shared = {messages.TERMINAL_VARIABLE: ",".join(map(str, streams))} if terminal else {}
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | shared,
                pass_fds=streams,
                # The agent must not import modules from the current directory.
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # The terminal sends its Ctrl-C to the launcher only.
                start_new_session=True,
            )
        except OSError as error:
            raise HvdkitError(f"cannot start {command[0]!r}: {error.strerror}") from error
        finally:
            for stream in streams:
                os.close(stream)
        assert self._process.stdin
        assert self._process.stdout
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        sent = io.FileIO(self._process.stdin.fileno(), "wb", closefd=False)
        super().__init__(host, sent, self._process.stdout, events)

    def _status_and_stderr(self) -> tuple[int | None, str]:
        """Wait a moment for the process to end; return its status and its last errors."""
        status = wait_for_end(self._process, 1)
        self._stderr_reader.join(timeout=1)
        return status, "\n".join(self._stderr)

    def explain(self) -> str:
        status, stderr = self._status_and_stderr()
        if not (self._local or self.greeted):
            # The reader has the last line on standard output.
            self._reader.join(timeout=0 if status is None else 1)
            return self._ssh.explain(self.host, status, stderr, self._python, self._said)
        last = self._stderr[-1] if self._stderr else "it wrote nothing"
        if status is None:
            return f"its agent has not ended; check whether the process is stopped ({last})"
        if not self._local and (status < 0 or status == FAILED):
            return self._ssh.explain_end(status, stderr)
        if status < 0:
            return f"its agent was {exit_text(status)}: {last}"
        return f"its agent ended with status {status}: {last}"

    def lost_host(self) -> bool:
        return not self._local and self._ssh.lost_connection(*self._status_and_stderr())

    def failed_transiently(self) -> bool:
        if self._local or self.greeted:
            return False
        status, stderr = self._status_and_stderr()
        return self._ssh.failed_transiently(status, stderr)

    def restart(self) -> Connection:
        self.close(timeout=1)
        return ProcessConnection(self.host, self._local, self._ssh, self._python, self._events)

    def cut(self) -> None:
        # The whole group, because a ProxyCommand may not notice the end of ssh.
        kill_group(self._process)

    def close(self, timeout: float) -> None:
        self.disconnect()
        if wait_for_end(self._process, timeout) is None:
            self.cut()
        wait_for_killed(self._process)
        self._writer.join(timeout=1)
        pipes = (self._process.stdout, self._process.stderr)
        for thread, pipe in zip((self._reader, self._stderr_reader), pipes, strict=True):
            thread.join(timeout=1)
            # Another process may hold the other end: closing a pipe that is being read would block.
            if pipe is not None and not thread.is_alive():
                pipe.close()

    def disconnect(self) -> None:
        super().disconnect()
        if not self.greeted:
            # There is no agent yet, only an ssh that tries to connect.
            self.cut()

    def _close_input(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    def _read_stderr(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self._stderr.append(line.decode(errors="replace").rstrip())


class SocketConnection(Connection):
    """A connection that an agent opened, because mpirun, srun or a user started the agent.

    Args:
        host: the agent's host.
        accepted: the connection.
        events: the queue for the agent's messages.
        started_by: mpirun or srun; empty if a user started the agent.
        lost_line: returns the line in which mpirun's ssh says that it has lost a host; "" for none.
    """

    def __init__(
        self,
        host: Host,
        accepted: SealedConnection,
        events: Events,
        started_by: str = "",
        lost_line: Callable[[], str] = str,
    ) -> None:
        self._socket = accepted.socket
        self._started_by = started_by
        self._lost_line = lost_line
        # An error: the connection was reset. The reader reports it as lost.
        with contextlib.suppress(OSError):
            peer = str(self._socket.getpeername()[0]).removeprefix("::ffff:")
            # Ranks communicate over IPv4.
            self.peer = None if ":" in peer else peer
        super().__init__(host, accepted, io.BufferedReader(accepted), events)

    def explain(self) -> str:
        if isinstance(self._error, BrokenSeal):
            return str(self._error)
        line = self._lost_line()
        shown = f" ({line})" if line else ""
        if self.lost_host():
            return f"{NO_ANSWER}{shown}"
        if line:
            return (
                f"{self._started_by} has lost a host, and has ended its agents; check the network "
                f"of the hosts, and whether one was shut down{shown}"
            )
        process = f"the process or {self._started_by}" if self._started_by else "the process"
        return (
            f"the connection to its agent has ended; check whether {process} was killed, or the "
            f"host was shut down"
        )

    def lost_host(self) -> bool:
        # If only the process has ended, its host closes the connection, which gives another error.
        if self._error is not None and self._error.errno in _SILENT:
            return True
        # The name is that of ssh, as in `Timeout, server host1 not responding.`
        name = re.escape(self.host.address)
        return re.search(rf"(?<![\w.-]){name}(?![\w-]|\.\w)", self._lost_line()) is not None

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader

    def close(self, timeout: float) -> None:
        self.disconnect()
        self._reader.join(timeout)
        self.cut()
        self._reader.join(timeout=1)
        self._writer.join(timeout=1)
        self._received.close()
        self._socket.close()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def _decoded(line: bytes) -> Message:
    try:
        return messages.decode(line)
    except ValueError:
        reason = (
            f"its agent's output contains {line[:_SHOWN_BYTES]!r}: expected a message of the "
            "agent. Check that no other program writes there, such as a background process of a "
            "shell's start-up files"
        )
        return {"kind": "failed", "reason": reason}


def agent_command(host: Host, local: bool, ssh: Ssh, python: str) -> list[str]:
    """Return the command that starts the agent on `host`.

    Args:
        host: the agent's host.
        local: whether the host is this machine. The agent then runs with this process's Python.
        ssh: how to reach other hosts.
        python: the Python of an agent on another host. It gets this process's PYTHONPATH and
            LD_LIBRARY_PATH.
    """
    if local:
        return local_agent_command()
    paths = [f"{name}={os.environ[name]}" for name in agent_variables()]
    return ssh.command(host, [*(["env", *paths] if paths else []), python, *_AGENT])


def agent_variables() -> list[str]:
    """Return the names of this process's variables that an agent on another host needs.

    Environment modules set them.
    """
    return [name for name in _PATHS if os.environ.get(name)]


def local_agent_command() -> list[str]:
    """Return the command that starts an agent with this process's Python."""
    return [sys.executable, *_AGENT]
