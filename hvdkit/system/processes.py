"""The processes of one job on this machine: start, find and end them.

All processes of a job have the job's id in an environment variable. A process that has left its
parent and its session (mpirun's ranks, a daemon) is found by this variable. A process without the
variable is found by its parent, or by its session if the parent has ended. The agents of
`hvdkit run` use `hvdkit.launch.agent.keeper` instead, which needs no variable.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

import psutil

from hvdkit.errors import HvdkitError
from hvdkit.system import process_limit

#: The variable with the ids of a process's nested groups, outermost first, separated by colons.
GROUP_VARIABLE = "HVDKIT_RANK_GROUP"

# Variables for a process's rank in a job. A new job must not inherit those of an outer job.
_RANK_PREFIXES = (
    *("HVDKIT_ELASTIC_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_"),
    *("ROLE_", "TORCHELASTIC_"),
)
_RANK_VARIABLES = {
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER"),
    *("HOROVOD_CPU_OPERATIONS", "HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    *("HOROVOD_GLOO_RENDEZVOUS_PORT", "HVDKIT_RECORD_DIR", "HVDKIT_RENDEZVOUS_KEY"),
    *("HVDKIT_HOST_FOLDERS", "HVDKIT_JOB_KEY", "HVDKIT_REPORT_RANK", "RANK", "WORLD_SIZE"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("GLOBAL_RANK", "NNODES", "GROUP_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
}

#: Seconds for programs that delete shared memory, after the other processes have ended. PyTorch's
#: `torch_shm_manager` waits for two seconds before it deletes files and ends.
_CLEAN_SECONDS = 6.0
# The seconds to wait for one process after SIGKILL.
_KILLED_SECONDS = 1.0
_END_POLL_SECONDS = 0.02

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class StartedProcess(Protocol):
    """A process that a group has started, with members of `subprocess.Popen`."""

    pid: int
    returncode: int | Any
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


def python_command(*arguments: str) -> list[str]:
    """Return a command of this Python that does not import modules from the current folder.

    Other users may write there, for example in a shared folder for data.
    """
    return [sys.executable, "-P", *arguments]


def run_python(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run this Python in the folder `/`, and return its output.

    For code that loads a framework or MPI. UCX, which Open MPI loads, reads a file `ucx.conf` in
    the current folder. Such a file of another user could replace a file of this user by a log.

    Raises:
        subprocess.TimeoutExpired: it has not ended within `seconds`.
    """
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return subprocess.run(
        python_command(*arguments),
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


class ProcessGroup:
    """The processes of one job on this machine."""

    def __init__(self) -> None:
        self._id = os.urandom(16).hex()
        self.started: list[StartedProcess] = []
        self._owner = os.getpid()
        self._ended: set[int] = set()
        # Processes that were found, because later they may be found neither by parent nor session.
        self._found: set[psutil.Process] = set()
        # Processes that this user may not signal, and that did not end by themselves.
        self._left: set[psutil.Process] = set()

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = subprocess.STDOUT,
        stdin: int = subprocess.DEVNULL,
        dies_with_us: bool = False,
        cpus: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
    ) -> StartedProcess:
        """Start `command` in a session of its own, with exactly the environment `env`.

        Args:
            env: its environment variables, to which the group's id is added.
            cwd: its working directory; default this process's.
            stdout: as for `subprocess.Popen`.
            stderr: as for `subprocess.Popen`.
            stdin: as for `subprocess.Popen`.
            dies_with_us: let the kernel kill the new process when this process ends. Only if this
                process has one thread.
            cpus: the CPUs to which the new process is bound; empty for all. Only if this process
                has one thread.
            pass_fds: file descriptors that the new process inherits.

        Raises:
            HvdkitError: the command cannot be started.
        """
        outer = os.environ.get(GROUP_VARIABLE)

        def before() -> None:
            if dies_with_us:
                die_with_parent()
            if cpus:
                os.sched_setaffinity(0, cpus)

        try:
            process = subprocess.Popen(
                list(command),
                env=dict(env) | {GROUP_VARIABLE: f"{outer}:{self._id}" if outer else self._id},
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                # A process of another session gets no Ctrl-C from the terminal. This process gets
                # it, and ends the group.
                start_new_session=True,
                preexec_fn=before if dies_with_us or cpus else None,
                pass_fds=pass_fds,
            )
        except subprocess.SubprocessError as error:
            # Of `before`: this process was bound to other CPUs meanwhile. Python hides the reason.
            raise HvdkitError(
                f"cannot start {os.fspath(command[0])!r}: it cannot be bound to the CPUs "
                f"{sorted(cpus)}; expected some of {sorted(os.sched_getaffinity(0))}, which this "
                f"process may use. Start the job again, or without --bind"
            ) from error
        except ValueError as error:
            # A NUL in an argument or a variable.
            raise HvdkitError(f"cannot start {os.fspath(command[0])!r}: {error}") from error
        except OSError as error:
            reason = explain_failed_start(error)
            if error.errno == errno.E2BIG:
                longest = max(env, key=lambda name: len(name) + len(env[name]), default="")
                if len(env.get(longest, "")) > sum(map(len, command)):
                    reason = f"{reason}; the longest variable of the environment is {longest}"
            what = error.filename if error.filename == cwd and cwd is not None else command[0]
            raise HvdkitError(f"cannot start {os.fspath(what)!r}: {reason}") from error
        self.started.append(process)
        return process

    def forget(self, process: StartedProcess) -> None:
        """Remove a process that has ended from the group."""
        self.started.remove(process)

    def running(self) -> bool:
        """Return whether a process that was started here still runs."""
        self.find_orphans()
        return any(process.poll() is None for process in self.started)

    def find_orphans(self) -> None:
        """Find the processes in the sessions of started processes that have just ended.

        Call it soon after the end of each process that was started here. Later, the number of its
        session may belong to a process of another program.
        """
        if os.getpid() != self._owner:
            return  # a guard, which does not know when the processes have ended
        ended = {process.pid for process in self.started if process.poll() is not None}
        if new := ended - self._ended:
            self._ended |= new
            for pid in psutil.pids():
                with contextlib.suppress(OSError, psutil.Error):
                    if os.getsid(pid) in new:
                        self._found.add(psutil.Process(pid))

    def terminate(self, grace: float, kill_grace: float = 3.0) -> Iterator[None]:
        """End every process: SIGTERM, then SIGKILL to those that still run after `grace` seconds.

        Programs that delete the shared memory of other processes get no signal, because they end
        after these processes. If they do not end within six seconds, they get SIGKILL, too.

        A process that this user may not signal, as with sudo, has `grace` seconds to end. Then it
        is left, unless it was started here.

        Yields while processes run. The caller must continue the iteration a few times per second.

        Raises:
            HvdkitError: a process still runs `kill_grace` seconds after SIGKILL.
        """
        cleaned_by = time.monotonic() + _CLEAN_SECONDS
        started = {process.pid for process in self.started}
        refused: set[psutil.Process] = set()
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, kill_grace)):
            deadline = time.monotonic() + seconds
            signalled: set[psutil.Process] = set()
            while members := self._members() - self._left:
                targets = {process for process in members if not _cleans(process)}
                if targets:
                    # Processes may start new ones meanwhile.
                    refused |= {p for p in targets - signalled if not _send(p, number)}
                    signalled |= targets
                    cleaned_by = time.monotonic() + _CLEAN_SECONDS
                elif time.monotonic() > cleaned_by:
                    for process in members:
                        _send(process, signal.SIGKILL)
                if time.monotonic() > (deadline if targets else cleaned_by + kill_grace):
                    break
                yield
            else:
                return
            self._left |= {process for process in refused if process.pid not in started}
        pids = sorted(process.pid for process in members)
        if members <= refused:
            raise HvdkitError(
                f"processes {pids} of a group of ranks still run, and this user may not signal "
                f"them; expected processes of this user. End them with `sudo kill`, and start "
                f"ranks without sudo"
            )
        raise HvdkitError(
            f"processes {pids} of a group of ranks did not end within {kill_grace:g} s of SIGKILL; "
            f"look at them with `ps -o pid,stat,wchan,cmd`"
        )

    def _members(self) -> set[psutil.Process]:
        self.find_orphans()
        own = self._own()
        return own | {process for process in self._find_others() - own if _alive(process)}

    def _own(self) -> set[psutil.Process]:
        """Return the processes that were started here and run."""
        own: set[psutil.Process] = set()
        for started in self.started:
            # Not by status: a process whose first thread has ended looks like a zombie while other
            # threads run. `poll` also reaps the process.
            if started.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    own.add(psutil.Process(started.pid))
        return own

    def _find_others(self) -> set[psutil.Process]:
        """Return processes that were not started here. Some may have ended."""
        others = {process for process in self._found if _alive(process)}
        children = children_of_all()
        for process in itertools.chain.from_iterable(children.values()):
            # Errors: another user's process, or a process that has ended meanwhile.
            with contextlib.suppress(psutil.Error):
                if self._id in process.environ().get(GROUP_VARIABLE, "").split(":"):
                    others.add(process)
        # Descendants as well, because sudo and the like clear the environment.
        own = self._own()
        others |= descendants(children, [process.pid for process in own | others])
        self._found = others - own
        return others


def children_of_all() -> dict[int, list[psutil.Process]]:
    """Return the pid of each process that has children -> its children."""
    # Not with `Process.children`, which reads the parents of all processes in each call.
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    return children


def descendants(
    children: Mapping[int, Sequence[psutil.Process]], roots: Iterable[int]
) -> set[psutil.Process]:
    """Return the descendants of processes.

    Args:
        children: as `children_of_all` returns them.
        roots: the pids of the processes.
    """
    found: set[psutil.Process] = set()
    parents = list(roots)
    while parents:
        new = set(children.get(parents.pop(), ())) - found
        found |= new
        parents += [process.pid for process in new]
    return found


def explain_failed_start(error: OSError) -> str:
    """Return why a process could not be started."""
    reason = error.strerror or str(error)
    return f"{reason}; {process_limit.describe()}" if process_limit.is_reached(error) else reason


def without_rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables for a process's rank in a job."""
    return {
        name: value
        for name, value in env.items()
        if name not in _RANK_VARIABLES
        # PMIX_MCA_* are the user's settings.
        and not (name.startswith(_RANK_PREFIXES) and not name.startswith("PMIX_MCA_"))
    }


def wait_for_killed(process: StartedProcess | subprocess.Popen[Any]) -> None:
    """Wait at most a second for a process that got SIGKILL.

    SIGKILL does not end a process that waits for a disk or a GPU.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_SECONDS)


def wait_for_end(process: subprocess.Popen[Any], seconds: float | None = None) -> int | None:
    """Wait for the end of a child, without reaping it; see `kill_group`.

    Args:
        seconds: how long to wait; None for any time.

    Returns:
        Its exit status, as of `subprocess`; None while it runs.
    """
    deadline = time.monotonic() + (seconds or 0.0)
    options = os.WEXITED | os.WNOWAIT | (0 if seconds is None else os.WNOHANG)
    while process.returncode is None:
        try:
            found = os.waitid(os.P_PID, process.pid, options)
        except ChildProcessError:
            # The kernel reaps the children of a process that ignores SIGCHLD.
            process.poll()
            break
        if found is not None:
            exited = found.si_code == os.CLD_EXITED
            return found.si_status if exited else -found.si_status
        if time.monotonic() >= deadline:
            return None
        time.sleep(_END_POLL_SECONDS)
    status: int | None = process.returncode
    return status


def kill_group(process: subprocess.Popen[Any], number: int = signal.SIGKILL) -> None:
    """Send a signal to the process group of a child that leads one, also after its end.

    After the child is reaped, its number may belong to a group of another program, and nothing is
    sent. So wait for its end with `wait_for_end`, and reap it last, with `wait_for_killed`.
    """
    # Errors: no process is left, or this user may not signal those that were started with sudo.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.returncode is None:
            os.killpg(process.pid, number)


def exit_text(status: int) -> str:
    """Return a text for an exit status of `subprocess`, which is negative after a signal."""
    if status < 0:
        return f"killed by signal {-status} ({signal.strsignal(-status)})"
    return f"exit status {status}"


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _cleans(process: psutil.Process) -> bool:
    """Return whether a process deletes the shared memory of other processes when these have ended.

    Such programs are the resource trackers of multiprocessing and joblib, and PyTorch's manager of
    shared tensors (the sharing strategy `file_system`).
    """
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    if words and os.path.basename(words[0]) == "torch_shm_manager":
        return True
    return any(w.startswith("from ") and "resource_tracker import main" in w for w in words)


def _send(process: psutil.Process, number: int) -> bool:
    """Send a signal. Return False if this user may not signal the process."""
    try:
        process.send_signal(number)
        # A stopped process handles SIGTERM only after SIGCONT.
        process.send_signal(signal.SIGCONT)
    except psutil.AccessDenied:
        return False
    except psutil.Error:
        pass  # it has ended
    return True


_libc = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants that lose their own parent."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    get_signal_with_parent(signal.SIGKILL)


def get_signal_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
