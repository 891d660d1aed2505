"""The launcher's listener for agents that it does not start itself.

mpirun, srun or a user starts these agents. The agents receive the listener's address and a token
(with `--nodes` a key). They connect to the listener, and prove that they know it
(`hvdkit.system.sealed`).
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from hvdkit.launch.control import messages
from hvdkit.launch.hosts.ssh import HOST_SECONDS
from hvdkit.system import process_limit
from hvdkit.system.sealed import SealedConnection, greet

_ACCEPT_SECONDS = 0.2
# How many strangers, connections that are not of this job, may be open beside those of agents.
_STRANGERS = 64
#: Connections that the system may keep until they are accepted. If this is too small, the system
#: drops connections, and an agent tries again only after seconds. All agents connect at once.
BACKLOG = 4096
# The most threads, in connections that may be open: closed ones have a thread for a moment.
_THREADS_PER_CONNECTION = 4
# After an error of the system, such as too many open files, the seconds before the next attempt.
_RETRY_SECONDS = 0.1
# The largest values that Linux accepts: in seconds, and in milliseconds.
_LONGEST_KEEPALIVE, _LONGEST_USER_TIMEOUT = 32767, 2**31 - 1

Peer = TypeVar("Peer")


class Listener(Generic[Peer]):
    """Accept connections, and keep those of this job's agents.

    Args:
        size: the number of agents.
        authenticate: given a connection, talks to the other side and returns its identity and the
            sealed connection; None if it is not of this job. Must end within some seconds, and
            soon after the connection was shut down. An OSError counts as None.
        silence: the seconds without an answer after which the host of an agent is lost.

    Attributes:
        problem: why a connection of any side was closed: this process may start no more threads;
            empty if none was.

    If strangers open too many connections, one that is not authenticated is closed: the oldest one
    of the host that has most of them, so a flood from one host closes no connections of others.
    Agents authenticate at once, so their connections are rarely closed. One that is closed while it
    authenticates is returned by `accept`, too: the caller finds that the agent is lost.
    """

    def __init__(
        self,
        server: socket.socket,
        size: int,
        authenticate: Callable[[socket.socket], tuple[Peer, SealedConnection] | None],
        silence: float = HOST_SECONDS,
    ) -> None:
        self._server = server
        self.silence = silence
        self.problem = ""
        self._authenticate = authenticate
        self._accepted: queue.Queue[tuple[Peer, SealedConnection]] = queue.Queue()
        # Each connection is checked in a thread of its own, so that a connection without data does
        # not delay agents. Only the thread that accepts connections changes the list of threads.
        self._threads: list[threading.Thread] = []
        # The connections that are being checked, oldest first -> the address of the other host.
        self._checked: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._most = size + _STRANGERS
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def accept(self) -> tuple[Peer, SealedConnection] | None:
        """Return the next agent and its connection; None if no agent connects within a moment."""
        try:
            return self._accepted.get(timeout=_ACCEPT_SECONDS)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening, and end the connections and threads of strangers. May be called again."""
        self._closed.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._thread.join()
        with self._lock:
            for connection in self._checked:
                _shut_down(connection)  # wakes its thread
        for thread in self._threads:
            thread.join()
        while not self._accepted.empty():
            self._accepted.get()[1].close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._server.accept()
            except OSError:  # closed, or too many open files, or an error of one connection
                self._closed.wait(_RETRY_SECONDS)
                continue
            self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) >= _THREADS_PER_CONNECTION * self._most:
                connection.close()
                continue
            thread = threading.Thread(target=self._check, args=(connection,), daemon=True)
            with self._lock:
                if len(self._checked) >= self._most:
                    [(crowd, _)] = Counter(self._checked.values()).most_common(1)
                    oldest = next(each for each, host in self._checked.items() if host == crowd)
                    del self._checked[oldest]
                    _shut_down(oldest)
                self._checked[connection] = peer[0]
            try:
                thread.start()
            except RuntimeError:  # this user may start no more threads
                self.problem = process_limit.describe()
                self._end_check(connection, None)
                self._closed.wait(_RETRY_SECONDS)
            else:
                self._threads.append(thread)

    def _check(self, connection: socket.socket) -> None:
        accepted = None
        try:
            accepted = self._authenticate(connection)
            if accepted is not None:
                _enable_keepalive(connection, self.silence)
        except OSError:
            pass  # if the agent has authenticated, the caller of `accept` finds that it is lost
        finally:
            self._end_check(connection, accepted)

    def _end_check(
        self, connection: socket.socket, accepted: tuple[Peer, SealedConnection] | None
    ) -> None:
        with self._lock:
            self._checked.pop(connection, None)
            if accepted is not None:
                self._accepted.put(accepted)
        if accepted is None:
            connection.close()


class AgentListener(Listener[int]):
    """Accept the agents of ranks, which know a token and send their rank.

    Args:
        address: the address of this machine to listen at.
        silence: as for `Listener`.

    Attributes:
        address: the address and the port.
    """

    def __init__(self, address: str, size: int, silence: float = HOST_SECONDS) -> None:
        self._token = secrets.token_hex(16)
        self._size = size
        server = socket.create_server((address, 0), backlog=BACKLOG)
        self.address: tuple[str, int] = (address, server.getsockname()[1])
        super().__init__(server, size, self._read_rank, silence)

    def variables(self) -> dict[str, str]:
        """Return the environment variables that an agent needs to connect."""
        return {
            messages.ADDRESS_VARIABLE: "{}:{}".format(*self.address),
            messages.TOKEN_VARIABLE: self._token,
        }

    def _read_rank(self, connection: socket.socket) -> tuple[int, SealedConnection] | None:
        hello = greet(connection, self._token.encode())
        if hello is None:
            return None
        rank = int(hello.fields["rank"]) if hello.known else -1
        if not 0 <= rank < self._size:
            hello.refuse(f"it is rank {rank} of {self._size}")
            return None
        return rank, hello.accept()


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _enable_keepalive(connection: socket.socket, silence: float) -> None:
    """Let the system end the connection if the other host does not answer for some seconds.

    Only the launcher does this. An agent's output may wait for a long time until the user reads it.
    TCP_USER_TIMEOUT would then end the agent's connection.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = min(max(1, int(silence / 3)), _LONGEST_KEEPALIVE)
    milliseconds = min(int(1000 * silence), _LONGEST_USER_TIMEOUT)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, milliseconds),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
