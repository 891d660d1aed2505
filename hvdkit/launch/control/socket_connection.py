"""A connection that an agent has opened, which mpirun, srun or a user has started."""

from __future__ import annotations

import contextlib
import errno
import io
import re
import socket
from collections.abc import Callable

from hvdkit.launch.control.connection import Connection, Events
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import NO_ANSWER
from hvdkit.system.sealed import BrokenSeal, SealedConnection

# The errors of a connection to a host that does not answer.
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class SocketConnection(Connection):
    """A connection that an agent opened, because mpirun, srun or a user started the agent.

    Args:
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
