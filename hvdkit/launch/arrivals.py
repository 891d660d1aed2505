"""Agents that another launcher, mpirun or srun, starts in the ranks' places.

It is told where the door is and what opens it; each agent comes in by itself, and says its rank.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from hvdkit.errors import HvdkitError
from hvdkit.launch import messages
from hvdkit.launch.agents import Agents
from hvdkit.launch.connection import SocketConnection
from hvdkit.launch.plan import Plan
from hvdkit.processes import ProcessGroup

_TOKEN_SECONDS = 5.0
_TOKEN_BYTES = 100
_ACCEPT_SECONDS = 0.2
# So many lines that are not of this job may be open at once.
_STRANGERS = 64
# A launcher ends by itself once its ranks have; it gets this long.
_END_SECONDS = 10.0

Member = TypeVar("Member")


class Listener(Generic[Member]):
    """Accepts connections of this job's agents only.

    Args:
        server: where they connect.
        size: how many there are.
        admit: given a connection, talks with the other side and returns who it is; None where it
            is not of this job. It must not take longer than some seconds. An OSError counts as
            None.
    """

    def __init__(
        self, server: socket.socket, size: int, admit: Callable[[socket.socket], Member | None]
    ) -> None:
        self._server = server
        self._admit = admit
        self._accepted: queue.Queue[tuple[Member, socket.socket]] = queue.Queue()
        # Strangers that keep a line open are not waited for, and only so many are let speak.
        self._speaking = threading.BoundedSemaphore(size + _STRANGERS)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def accept(self) -> tuple[Member, socket.socket] | None:
        """Return the next agent and its line; None where nobody has come for a moment."""
        try:
            return self._accepted.get(timeout=_ACCEPT_SECONDS)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._thread.join()
        while not self._accepted.empty():
            self._accepted.get()[1].close()

    def _listen(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return  # closed
            if not self._speaking.acquire(blocking=False):
                line.close()
                continue
            threading.Thread(target=self._let_in, args=(line,), daemon=True).start()

    def _let_in(self, line: socket.socket) -> None:
        member = None
        try:
            member = self._admit(line)
            if member is not None:
                line.settimeout(None)
                _notice_silence(line)
        except OSError:
            member = None  # it is treated as what it is: nobody of ours
        finally:
            self._speaking.release()
        if member is None:
            line.close()
        else:
            self._accepted.put((member, line))


class Door(Listener[int]):
    """Accepts the agents of ranks, which show a token and say their rank.

    Args:
        address: this machine's, at which they reach it.
        size: how many there are.

    Attributes:
        at: where it is.
    """

    def __init__(self, address: str, size: int) -> None:
        self._token = secrets.token_hex(16)
        self._size = size
        server = socket.create_server((address, 0), backlog=size)
        self.at: tuple[str, int] = (address, server.getsockname()[1])
        super().__init__(server, size, self._rank)

    def variables(self) -> dict[str, str]:
        """Return the variables that an agent needs to connect."""
        return {
            messages.ADDRESS_VARIABLE: "{}:{}".format(*self.at),
            messages.TOKEN_VARIABLE: self._token,
        }

    def _rank(self, line: socket.socket) -> int | None:
        token, _, rank = read_line(line, _TOKEN_BYTES).partition(" ")
        known = hmac.compare_digest(token.encode(), self._token.encode())
        fits = rank.isascii() and rank.isdigit() and int(rank) < self._size
        return int(rank) if known and fits else None


def read_line(line: socket.socket, most: int) -> str:
    """Read until the end of a line, for a few seconds in all.

    Args:
        line: where from.
        most: bytes; what is longer is cut.
    """
    deadline = time.monotonic() + _TOKEN_SECONDS
    said = b""
    while not said.endswith(b"\n") and len(said) < most:
        line.settimeout(max(0.001, deadline - time.monotonic()))
        byte = line.recv(1)
        if not byte:
            break
        said += byte
    return said.decode(errors="replace").rstrip("\n")


def _notice_silence(line: socket.socket) -> None:
    """Let the system find out within 40 seconds that the other host is gone.

    The launcher alone does so. An agent has output to send, which may wait for long because nobody
    reads it, and TCP_USER_TIMEOUT would take that for a broken line.
    """
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 40_000),
    ):
        line.setsockopt(socket.IPPROTO_TCP, option, value)


class Starter:
    """The running launcher. What it says itself is passed on to the user.

    Args:
        name: what the user knows it as.
        command: what starts it.
        env: its environment.
        say: tells the user something at once.

    Raises:
        HvdkitError: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._name = name
        self._group = ProcessGroup()
        process = self._group.start(command, env, "/", stdout=subprocess.PIPE)
        assert process.stdout
        self._process = process
        self._pipe = process.stdout
        self._say = say
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def check(self) -> None:
        """Raises HvdkitError where it has ended, before its ranks were there."""
        if (status := self._process.poll()) is not None:
            self._reader.join(timeout=1)
            raise HvdkitError(
                f"{self._name} ended with status {status} and started no ranks; see above"
            )

    def end(self) -> None:
        """Let it end, which it does once its ranks have; else end it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for _ in self._group.ending(_END_SECONDS):
            time.sleep(0.05)
        self._reader.join(timeout=1)
        if not self._reader.is_alive():
            self._pipe.close()

    def _read(self) -> None:
        own = f"{self._name}: "
        for line in self._pipe:
            if text := line.decode(errors="replace").strip():
                self._say(f"{self._name}: {text.removeprefix(own)}")


def let_in(
    agents: Agents, door: Door, running: Starter, plan: Plan, timeout: float
) -> list[SocketConnection]:
    """Wait for the agents of all ranks; they become the connections, in the order of ranks.

    Raises:
        HvdkitError: some have not come within `timeout` seconds, or `running` has ended.
    """
    come: dict[int, SocketConnection] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(come) < plan.size:
            running.check()
            if time.monotonic() > deadline:
                missing = [place for place in plan.places if place.rank not in come]
                names = ", ".join(f"{place.rank} on {place.host.name}" for place in missing[:8])
                raise HvdkitError(
                    f"rank {names} did not come up within {timeout:g} s (--start-timeout)"
                )
            if (arrival := door.accept()) is not None:
                rank, line = arrival
                come[rank] = SocketConnection(plan.places[rank].host, line, agents.events)
                # From now on it is told that the launcher is there.
                agents.connections.append(come[rank])
    finally:
        agents.connections[:] = [come[rank] for rank in sorted(come)]
    return [come[rank] for rank in sorted(come)]
