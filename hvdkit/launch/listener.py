"""The launcher's listener for agents that it does not start itself.

mpirun, srun or a user starts these agents. The agents receive the listener's address and a token
(with `--nodes` a key). They connect to the listener, and prove that they know it (`hvdkit.sealed`).
"""

from __future__ import annotations

import queue
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from hvdkit import process_limit
from hvdkit.errors import HvdkitError
from hvdkit.launch import messages
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.connection import SocketConnection
from hvdkit.launch.plan import Plan
from hvdkit.launch.ssh import HOST_SECONDS, LOST_LINE
from hvdkit.launch.start_error import StartError
from hvdkit.processes import ProcessGroup, exit_text
from hvdkit.sealed import SealedConnection, greet

_ACCEPT_SECONDS = 0.2
# How many strangers, connections that are not of this job, may be open beside those of agents.
_STRANGERS = 64
#: Connections that the system may keep until they are accepted. If this is too small, the system
#: drops connections, and an agent tries again only after seconds. All agents connect at once.
BACKLOG = 4096
# Threads of connections that were closed a moment ago count too.
_THREADS_PER_CONNECTION = 4
# After an error of the system, such as too many open files, the seconds before the next attempt.
_RETRY_SECONDS = 0.1
# The seconds for the threads of connections to end after these were shut down.
_THREAD_SECONDS = 1.0
# The largest values that Linux accepts: in seconds, and in milliseconds.
_LONGEST_KEEPALIVE, _LONGEST_USER_TIMEOUT = 32767, 2**31 - 1
# The seconds in which mpirun and srun should end by themselves after their ranks.
_END_SECONDS = 10.0
# What srun says if it ends all tasks, and the seconds in which it then ends.
_STEP_ABORTED, _ABORT_SECONDS = "Job step aborted", 2.0

Peer = TypeVar("Peer")


class Listener(Generic[Peer]):
    """Accept connections, and keep those of this job's agents.

    Args:
        server: the listening socket.
        size: the number of agents.
        authenticate: given a connection, talks to the other side and returns its identity and the
            sealed connection; None if it is not of this job. Must end within some seconds, and
            soon after the connection was shut down. An OSError counts as None.
        silence: the seconds without an answer after which the host of an agent is lost.

    Attributes:
        silence: as given.
        problem: why a connection of any side was closed: this process may start no more threads;
            empty if none was.

    If strangers open too many connections, the oldest connection that is not authenticated is
    closed. Agents authenticate at once, so their connections are rarely closed. One that is closed
    while it authenticates is returned by `accept`, too: the caller finds that the agent is lost.
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
        # not delay agents. This dict has the connections that are being checked, oldest first.
        self._checked: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._most = size + _STRANGERS
        self._threads = threading.BoundedSemaphore(_THREADS_PER_CONNECTION * self._most)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def accept(self) -> tuple[Peer, SealedConnection] | None:
        """Return the next agent and its connection; None if no agent connects within a moment."""
        try:
            return self._accepted.get(timeout=_ACCEPT_SECONDS)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening, and close the connections of strangers. May be called again."""
        self._closed.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._thread.join()
        with self._lock:
            checked = dict(self._checked)
        for connection in checked:
            _shut_down(connection)  # wakes its thread
        for thread in checked.values():
            thread.join(_THREAD_SECONDS)
        while not self._accepted.empty():
            self._accepted.get()[1].close()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or too many open files, or an error of one connection
                self._closed.wait(_RETRY_SECONDS)
                continue
            if not self._threads.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._check, args=(connection,), daemon=True)
            with self._lock:
                if len(self._checked) >= self._most:
                    oldest = next(iter(self._checked))
                    del self._checked[oldest]
                    _shut_down(oldest)
                self._checked[connection] = thread
            try:
                thread.start()
            except RuntimeError:  # this user may start no more threads
                self.problem = process_limit.describe()
                self._end_check(connection, None)
                self._closed.wait(_RETRY_SECONDS)

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
        self._threads.release()


class AgentListener(Listener[int]):
    """Accept the agents of ranks, which know a token and send their rank.

    Args:
        address: the address of this machine to listen at.
        size: the number of ranks.
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


def _cannot_accept(problem: str) -> str:
    return f"this machine has closed connections of agents: {problem}"


class _ExternalLauncher:
    """A running mpirun or srun, whose output is shown to the user.

    When a rank fails, Open MPI describes the failure as that of its agent, in 16 lines that blame
    the program for a missing call. So what mpirun says after the end of an agent is held back, and
    shown only if the outcome of the job does not explain its end. What srun says is always shown:
    it may tell that a process used too much memory.
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
        self._aborted = False
        self._lost_line = ""
        self._holds: Callable[[], bool] = lambda: False
        self._held: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def check(self, problem: str) -> None:
        """Raise HvdkitError if mpirun or srun has ended. Called until all agents have connected.

        Args:
            problem: `Listener.problem`.
        """
        if (status := self._process.poll()) is not None:
            self._reader.join(timeout=1)
            if problem:  # an agent whose connection is closed ends, and then mpirun ends
                raise HvdkitError(_cannot_accept(problem))
            raise HvdkitError(
                f"{self._name} ended with status {status} before all ranks were started; see its "
                f"messages above"
            )

    def killed(self) -> str:
        """Return a sentence if a signal has ended mpirun or srun; otherwise ""."""
        status = self._process.poll()
        return f"{self._name} was {exit_text(status)}" if status is not None and status < 0 else ""

    def lost_line(self) -> str:
        """Return the line in which its ssh says that it has lost a host; "" for none."""
        return self._lost_line

    def aborted(self) -> str:
        """Return "srun" if Slurm has ended the job step, and so all ranks; otherwise "".

        For example, Slurm does so if a rank ends in the middle of MPI (`--mpi=pmix`), or on
        `scancel`.
        """
        # srun says so before it ends.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ABORT_SECONDS)
            self._reader.join(timeout=1)
        return self._name if self._aborted else ""

    def hold(self, when: Callable[[], bool]) -> None:
        """Hold back what it says while `when()` is true."""
        self._holds = when

    def show_held(self) -> None:
        """Show what was held back."""
        for text in self._held:
            self._say(text)
        self._held.clear()

    def end(self) -> None:
        """Wait a few seconds for mpirun or srun to end by itself, then end it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for _ in self._group.terminate(_END_SECONDS):
            time.sleep(0.05)
        self._reader.join(timeout=1)
        if not self._reader.is_alive():
            self._pipe.close()

    def _read(self) -> None:
        own = f"{self._name}: "
        for line in self._pipe:
            # PRRTE, the mpirun of Open MPI 5, writes lines with only a zero byte.
            if text := line.decode(errors="replace").strip("\0 \t\r\n"):
                text = own + text.removeprefix(own)
                self._aborted = self._aborted or _STEP_ABORTED in text
                if LOST_LINE.search(text):
                    self._lost_line = text
                if self._holds():
                    self._held.append(text)
                else:
                    self._say(text)


@contextmanager
def agents_started_by(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    listener: AgentListener,
    plan: Plan,
    timeout: float,
    say: Callable[[str], None],
    holds: bool = False,
) -> Iterator[AgentPool]:
    """Run mpirun or srun, which starts an agent for each rank, and accept the agents.

    Yields the agents, in the order of ranks. On exit all have ended, and the listener is closed.

    Args:
        name: mpirun or srun.
        command: its command line.
        env: its environment.
        listener: the listener for its agents.
        plan: the job.
        timeout: seconds for all agents to connect.
        say: prints a message for the user.
        holds: whether to hold back the command's messages about ranks that have failed.

    Raises:
        HvdkitError: the command cannot be started or ends, or agents do not connect in time.
    """
    launcher = _ExternalLauncher(name, command, env, say)
    connected: dict[int, SocketConnection] = {}
    explained = False
    deadline = time.monotonic() + timeout
    try:
        with AgentPool(listener.silence) as agents:
            while len(connected) < plan.size:
                launcher.check(listener.problem)
                if time.monotonic() > deadline:
                    missing = [place for place in plan.places if place.rank not in connected]
                    names = ", ".join(f"{place.rank} on {place.host.name}" for place in missing[:8])
                    if listener.problem:
                        raise HvdkitError(_cannot_accept(listener.problem))
                    queued = name == "srun" and not connected
                    also = ", and that no other step uses the allocation (`squeue --steps`)"
                    raise StartError(
                        f"rank {names} did not connect within {timeout:g} s (--start-timeout). "
                        f"Check that its host can connect to {listener.address[0]}"
                        f"{also if queued else ''}",
                        [place.host.name for place in missing],
                    )
                if (accepted := listener.accept()) is not None:
                    rank, connection = accepted
                    host = plan.places[rank].host
                    connected[rank] = SocketConnection(
                        host, connection, agents.events, name, launcher.lost_line
                    )
                    # Add it at once: an agent without heartbeats takes the launcher for lost.
                    agents.connections.append(connected[rank])
            agents.connections[:] = [connected[rank] for rank in sorted(connected)]
            agents.killed = launcher.killed
            if name == "srun":
                agents.aborted = launcher.aborted
            listener.close()
            if holds:
                launcher.hold(lambda: agents.explained or any(c.ended for c in connected.values()))
            yield agents
            explained = agents.explained
    except KeyboardInterrupt:
        # A signal before the start of the ranks. Agents that start later cannot connect any more.
        explained = holds
        launcher.hold(lambda: holds)
        raise
    finally:
        listener.close()
        launcher.end()
        if not explained:
            launcher.show_held()
