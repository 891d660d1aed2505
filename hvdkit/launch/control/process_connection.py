"""A connection to an agent that the launcher has started, here or over ssh."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections import deque

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import messages
from hvdkit.launch.control.agent_command import agent_command
from hvdkit.launch.control.connection import Connection, Events
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import FAILED, Ssh
from hvdkit.system.processes import exit_text, kill_group, wait_for_end, wait_for_killed

_STDERR_LINES = 50


class ProcessConnection(Connection):
    """A connection to an agent that this process starts, here or over ssh.

    Args:
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
