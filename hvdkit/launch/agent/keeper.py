"""Start processes so that nothing they leave can be missed, and end it if this process is killed.

Between this process and each one that it starts is a *keeper*, a process that only waits. The
kernel makes a keeper the parent of all its descendants that have lost their own parent ("child
subreaper", see prctl(2)). So the descendants of the keepers of a group are the processes of the
group, whatever they have done with their environment, session and parent. If this process is
killed, each keeper ends its descendants.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any, NoReturn

import psutil

from hvdkit.errors import HvdkitError
from hvdkit.faults import record_folder
from hvdkit.launch.agent.host_folders import remove_abandoned_steps
from hvdkit.mpi import segments as mpi_segments
from hvdkit.system import processes
from hvdkit.system.owned_folders import remove_abandoned, temporary
from hvdkit.system.processes import ProcessGroup, StartedProcess
from hvdkit.system.signals import STOP_SIGNALS

#: Seconds between SIGTERM and SIGKILL, where the launcher does not choose them.
ORPHAN_GRACE = 8.0

_POLL_SECONDS = 0.05
_READ_BYTES = 4096

# The pids of the children of this process that are no adopted orphans; None if it adopts none. Then
# the processes of a keeper that was killed are found as those of `ProcessGroup` are.
_own_children: set[int] | None = None


def adopt_orphans() -> None:
    """Make this process the parent of the processes of a keeper that is killed.

    Only for a process whose descendants are all of the job: it ends each orphan that it gets.
    """
    global _own_children
    processes.adopt_orphans()
    _own_children = {child.pid for child in psutil.Process().children()}


def may_get_orphans_of_others() -> bool:
    """Return whether this process may become the parent of processes of other programs.

    It may if it had children before, as with `services & exec hvdkit run`, or if it is the first
    process of a container.
    """
    return os.getpid() == 1 or bool(psutil.Process().children())


class KeptProcess:
    """A process with a keeper, with those members of `subprocess.Popen` that are needed here.

    Args:
        keeper: the pid of its keeper.
        connection: the connection to the keeper, which sends the pid of the process and then its
            exit status, and gets the numbers of signals for the process. When the connection is
            closed, the keeper ends its descendants.
        stdout: the read end of the pipe for its output; None without one.
        stderr: the same for its errors.

    Raises:
        HvdkitError: the process could not be started.
    """

    def __init__(
        self,
        keeper: int,
        connection: socket.socket,
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
    ) -> None:
        self.keeper = keeper
        self.returncode: int | Any = None
        self.stdout, self.stderr = stdout, stderr
        self._connection = connection
        report = b""
        data: bytes | None
        while not report.endswith(b"\n") and (data := connection.recv(_READ_BYTES)):
            report += data
        if not report.endswith(b"\n"):
            self.close()
            raise HvdkitError(report.decode(errors="replace") or "a keeper has ended at its start")
        pid, _, self._report = report.partition(b"\n")
        self.pid = int(pid)
        connection.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self.returncode is None:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                data = None
            self._report += data or b""
            if self._report.endswith(b"\n"):
                self.returncode = int(self._report)
            elif data == b"":
                # The keeper was killed. The kernel then kills the process.
                self.returncode = -signal.SIGKILL
            else:
                self._continue_keeper()
        return self.returncode

    def _continue_keeper(self) -> None:
        """Continue the keeper if it was stopped. It could not report the end of the process."""
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if os.waitid(os.P_PID, self.keeper, os.WSTOPPED | os.WNOHANG):
                os.kill(self.keeper, signal.SIGCONT)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            wait_for([self._connection.fileno()], min(left, 1.0))
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process still runs.

        The keeper sends it, because it reaps the process. After that, another process may have the
        same number.
        """
        if self.poll() is None:
            with contextlib.suppress(OSError):  # the keeper was killed
                self._connection.send(bytes([number]))

    def kill(self) -> None:
        """Send SIGKILL, if the process still runs."""
        self.send_signal(signal.SIGKILL)

    def has_lost_keeper(self) -> bool:
        """Return whether the keeper was killed."""
        return bool(os.waitid(os.P_PID, self.keeper, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def close(self) -> None:
        """End the keeper, after all its descendants have ended, and close the pipes."""
        if self._connection.fileno() < 0:
            return
        # Before the connection is closed. SIGKILL also ends a keeper that is stopped.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.keeper, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.keeper, 0)
        (_own_children or set()).discard(self.keeper)
        self._connection.close()
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        for pipe in filter(None, (self.stdout, self.stderr)):
            pipe.close()


class KeptGroup(ProcessGroup):
    """A group whose processes have keepers.

    Call `close` after all processes have ended.
    """

    @property
    def _kept(self) -> list[KeptProcess]:
        return [each for each in self.started if isinstance(each, KeptProcess)]

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = subprocess.STDOUT,
        stdin: int = subprocess.DEVNULL,
        dies_with_us: bool = False,  # noqa: ARG002
        cpus: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
    ) -> StartedProcess:
        """Start a process as `ProcessGroup.start` does. The kernel kills it with its keeper."""
        with contextlib.ExitStack() as on_exit, contextlib.ExitStack() as unless_started:
            connection, of_keeper = socket.socketpair()
            on_exit.enter_context(of_keeper)
            unless_started.enter_context(connection)
            streams: list[IO[bytes] | None] = []
            ends: list[int | IO[bytes] | None] = []
            for end in (stdout, stderr):
                stream = None
                if end == subprocess.PIPE:
                    read_end, end = os.pipe()
                    on_exit.callback(os.close, end)
                    stream = unless_started.enter_context(os.fdopen(read_end, "rb", 0))
                streams.append(stream)
                ends.append(end)
            parent = os.getpid()
            inherited = [*ends, stdin, *pass_fds]
            # A keeper must not run the handlers of this process.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            on_exit.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                with warnings.catch_warnings():
                    # Other threads may exist. The new process uses none of their locks.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    keeper = os.fork()
            except OSError as error:
                reason = processes.explain_failed_start(error)
                raise HvdkitError(f"cannot start {command[0]!r}: {reason}") from error
            if keeper == 0:
                # An exception must not reach the caller, whose code must not run in this process.
                with contextlib.suppress(BaseException):
                    made = _Keeper(self._id, parent, of_keeper, inherited)
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    try:
                        out, errors = ends
                        made.start(command, env, cwd, out, errors, stdin, True, cpus, pass_fds)
                    except HvdkitError as error:
                        of_keeper.sendall(str(error).encode())
                        os._exit(1)
                    made.keep()
                os._exit(1)
            if _own_children is not None:
                _own_children.add(keeper)
            unless_started.pop_all()
        process = KeptProcess(keeper, connection, *streams)
        self.started.append(process)
        return process

    def find_orphans(self) -> None:
        """Do nothing: the keepers have them."""

    def forget(self, process: StartedProcess) -> None:
        super().forget(process)
        assert isinstance(process, KeptProcess)
        process.close()

    def close(self) -> None:
        """End the keepers. All processes of the group have ended, or may not be signalled."""
        for process in self._kept:
            self.forget(process)

    def _find_others(self) -> set[psutil.Process]:
        children = processes.children_of_all()
        others = processes.descendants(children, [each.keeper for each in self._kept])
        if _own_children is not None:
            mine = children.get(os.getpid(), ())
            adopted = {child for child in mine if child.pid not in _own_children}
            return others | adopted | processes.descendants(children, [p.pid for p in adopted])
        self._found |= others
        if any(process.has_lost_keeper() for process in self._kept):
            return super()._find_others()
        return others


class _Keeper(ProcessGroup):
    """The group of a process and all its descendants, in their keeper.

    Args:
        group: the id of the group of its parent.
        parent: the pid of the process that has started it.
        connection: the connection to its parent.
        inherited: the descriptors and files that the process to start gets, or values like
            `subprocess.DEVNULL` and None. All others are closed.
    """

    def __init__(
        self,
        group: str,
        parent: int,
        connection: socket.socket,
        inherited: Sequence[int | IO[bytes] | None],
    ) -> None:
        super().__init__()
        self._id = group
        self._parent, self._connection = parent, connection
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGCHLD):
            # Not SIG_IGN, which the started process would inherit.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        # Among the others are the connections to earlier keepers.
        files = {each if isinstance(each, int) else each.fileno() for each in inherited if each}
        _close_all_but({*range(3), connection.fileno(), *files})
        # A signal to the process group of the parent must not end this process.
        os.setsid()
        processes.adopt_orphans()
        # If it is stopped, it must notice the end of the parent nevertheless.
        processes.get_signal_with_parent(signal.SIGCONT)

    def keep(self) -> NoReturn:
        """Report the end of the process. When the parent has ended, end all descendants."""
        (process,) = self.started
        woken, wakeup = os.pipe()
        for end in (woken, wakeup):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakeup)
        # mpirun, srun and ssh wait for the ends of their pipes.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        connection = self._connection.fileno()
        _close_all_but({*range(3), connection, woken, wakeup})
        with contextlib.suppress(OSError):  # the parent has ended, which the loop notices
            os.write(connection, b"%d\n" % process.pid)
        reported = False
        while True:
            self._reap(process)
            if process.returncode is not None and not reported:
                reported = True
                with contextlib.suppress(OSError):
                    os.write(connection, b"%d\n" % process.returncode)
                    if os.getppid() == self._parent:
                        os.kill(self._parent, signal.SIGCHLD)
            if connection in wait_for([connection, woken]):
                numbers = b""
                with contextlib.suppress(OSError):  # the parent has ended
                    numbers = os.read(connection, _READ_BYTES)
                if not numbers:
                    break
                for number in numbers:
                    with contextlib.suppress(PermissionError):  # a rank of another user
                        process.send_signal(number)
            with contextlib.suppress(BlockingIOError):
                os.read(woken, _READ_BYTES)
        files = mpi_segments.mpich_files(process.pid)
        # At once: the launcher may start the next ranks already.
        with contextlib.suppress(PermissionError):  # a rank of another user
            process.kill()
        try:
            for _ in self.terminate(ORPHAN_GRACE):
                self._reap(process)
                time.sleep(_POLL_SECONDS)
        finally:
            # The parent has ended, so nobody owns its folders.
            remove_abandoned(temporary(), record_folder.PREFIX)
            remove_abandoned_steps()
            mpi_segments.remove_abandoned_folders()
            for file in files:
                file.unlink(missing_ok=True)
        os._exit(0)

    def find_orphans(self) -> None:
        """Do nothing: this process adopts them."""

    def _find_others(self) -> set[psutil.Process]:
        return processes.descendants(processes.children_of_all(), [os.getpid()])

    @staticmethod
    def _reap(process: StartedProcess) -> None:
        """Let the system forget all children that have ended."""
        with contextlib.suppress(ChildProcessError):  # there is no child
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid == process.pid:
                    process.poll()
                else:
                    os.waitpid(found.si_pid, os.WNOHANG)


def wait_for(descriptors: Sequence[int], seconds: float | None = None) -> list[int]:
    """Wait until one of these descriptors can be read or has ended. Return those."""
    poll = select.poll()  # `select.select` takes only descriptors below 1024
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [found for found, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def _close_all_but(kept: Collection[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # that of the list
                os.close(descriptor)


def _do_nothing(number: int, frame: object) -> None:
    """Handle a signal that only wakes the process."""
