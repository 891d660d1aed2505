"""Start the ranks of one Horovod job on this machine, watch them, and end them.

A rank is a process of the job. Over Gloo each rank is started here, directly, and finds the others
through `hvdkit.rendezvous`; over MPI `mpirun` starts them. Either way the
result is a `RankGroup`: every rank writes into a file of its own, `wait` has a deadline, and
nothing that the job started outlives it.

Example:
    results = start_gloo([sys.executable, "train.py"], 2).wait(timeout=600)
    print(results[0].output)
"""

import atexit
import functools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.processes import ProcessGroup, ending_text, without_place
from hvdkit.rendezvous import RendezvousServer, gloo_environment

_POLL_SECONDS = 0.02
_TAIL_LINES = 20


@dataclass(frozen=True)
class RankCommand:
    """What one rank runs: the command (with any prefix, such as `ip netns exec NAME`) and its
    complete environment."""

    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    `exit_status` is negative for a signal, and None for a rank that did not end by itself: it was
    still running when the group had to be ended (or never started).
    """

    rank: int
    exit_status: int | None
    output: str


class RanksFailed(HvdkitError):
    """One or more ranks failed, or the group ran out of time.

    Attributes:
        results: how every rank ended, by rank.
        failed: the ranks that ended by themselves and not with 0, in the order of their ends. The
            first is often, not always, the cause: the others end within milliseconds of it.
        timed_out: True when the deadline passed.
    """

    def __init__(
        self,
        results: Sequence[RankResult],
        failed: Sequence[int],
        timeout: float | None = None,
        launcher_output: str = "",
    ) -> None:
        self.results = list(results)
        self.failed = list(failed)
        self.timed_out = timeout is not None
        running = [str(result.rank) for result in results if result.exit_status is None]
        lines = []
        if timeout is not None:
            lines.append(f"timed out after {timeout:g} s, still running: rank {', '.join(running)}")
        if failed:
            endings = (f"rank {r} ({_ending(self.results[r].exit_status)})" for r in failed)
            lines.append("failed, in this order: " + ", ".join(endings))
        elif timeout is None:
            lines.append("the launcher failed, not its ranks")
        for result in results:
            lines.append(f"--- rank {result.rank}, {_ending(result.exit_status)} ---")
            lines.append(_tail(result.output))
        if launcher_output.strip():
            lines += ["--- launcher ---", _tail(launcher_output)]
        super().__init__("\n".join(lines))


def _ending(status: int | None) -> str:
    return "ended with the group" if status is None else ending_text(status)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


@dataclass(frozen=True)
class _End:
    status: int
    at: int  # nanoseconds since the epoch


class RankGroup:
    """The running ranks of one job. `start_gloo`, `start_mpi` and `start_ranks` make one.

    As a context manager it ends its ranks on the way out, whatever happened inside.
    """

    def __init__(self, size: int, on_stop: Sequence[Callable[[], None]] = ()) -> None:
        self.size = size
        self._on_stop = on_stop
        self._group = ProcessGroup()
        self._directory = Path(tempfile.mkdtemp(prefix="hvdkit-ranks-"))
        self._seen: dict[int, _End] = {}
        self._stopped = False
        atexit.register(self.stop)

    def running(self) -> bool:
        """True while a rank (or mpirun) has not ended."""
        return self._group.running()

    def output(self, rank: int) -> str:
        """What `rank` has written until now, standard output and error in one."""
        return _read(self._directory / f"rank.{rank}")

    def wait(self, timeout: float, failure_grace: float = 5.0) -> list[RankResult]:
        """Wait until every rank has ended; the group is stopped and cleaned up in any case.

        Args:
            timeout: seconds after which the whole group is ended.
            failure_grace: seconds that the other ranks get to end by themselves, once one has
                failed, so that they can say what they saw.

        Returns:
            One result per rank, in the order of ranks, all with exit status 0.

        Raises:
            RanksFailed: a rank failed, or time ran out.
        """
        deadline = time.monotonic() + timeout
        timed_out = False
        failing_since: float | None = None
        try:
            while self.running():
                now = time.monotonic()
                # Looked at each time, because it is what notes when a rank ended.
                failed_until_now = any(end.status for end in self._ends().values())
                if failing_since is None and failed_until_now:
                    failing_since = now
                if failing_since is not None and now > failing_since + failure_grace:
                    break
                if now > deadline:
                    timed_out = True
                    break
                time.sleep(_POLL_SECONDS)
            ends = self._ends()
            launcher_failed = not timed_out and any(p.poll() for p in self._group.started)
            # Before the files are read: a rank that is told to end may still say something.
            self._terminate()
            results = [
                RankResult(rank, ends[rank].status if rank in ends else None, self.output(rank))
                for rank in range(self.size)
            ]
            launcher_output = _read(self._directory / "launcher")
        finally:
            self.stop()
        failed = sorted((rank for rank in ends if ends[rank].status), key=lambda r: ends[r].at)
        if timed_out or failed or launcher_failed:
            raise RanksFailed(results, failed, timeout if timed_out else None, launcher_output)
        return results

    def stop(self) -> None:
        """End every process of the group (SIGTERM, a grace period, SIGKILL), remove its files.

        May be called again.
        """
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        try:
            self._terminate()
        finally:
            for action in self._on_stop:
                action()
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        output: str,
    ) -> None:
        with (self._directory / output).open("wb") as stream:
            self._group.start(command, env, cwd, stdout=stream)

    def _ends(self) -> dict[int, _End]:
        """The ranks that have ended by themselves until now."""
        for rank, process in enumerate(self._group.started):
            if rank not in self._seen and (status := process.poll()) is not None:
                self._seen[rank] = _End(status, time.time_ns())
        return dict(self._seen)

    def _terminate(self, grace: float = 3.0) -> None:
        for _ in self._group.ending(grace):
            time.sleep(_POLL_SECONDS)


class _MpiRankGroup(RankGroup):
    """Ranks that are mpirun's children, not ours."""

    # The launchers mix all ranks into one stream and report one exit status. A shell between
    # mpirun and each rank keeps both apart, with either MPI, by the rank that it is told.
    _WRAPPER = (
        'rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; dir=$1; shift; "$@" >"$dir/rank.$rank" 2>&1; '
        'status=$?; echo $status >"$dir/ending.$rank"; '
        'mv "$dir/ending.$rank" "$dir/status.$rank"; exit $status'
    )

    def _start_under(
        self,
        launcher: Sequence[str],
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
    ) -> None:
        folder = os.fspath(self._directory)
        # Where Open MPI (5, 4) keeps its sockets, which it leaves behind when it is killed.
        sessions = {"PRTE_MCA_prte_tmpdir_base": folder, "OMPI_MCA_orte_tmpdir_base": folder}
        wrapped = [*launcher, "sh", "-c", self._WRAPPER, "sh", folder, *command]
        self._start(wrapped, sessions | dict(env), cwd, "launcher")

    def _ends(self) -> dict[int, _End]:
        for rank in range(self.size):
            path = self._directory / f"status.{rank}"
            if rank not in self._seen and path.exists():
                status = int(path.read_text())
                # 128 + n is the shell's way to say "killed by signal n".
                status = 128 - status if 128 < status <= 128 + 64 else status
                self._seen[rank] = _End(status, path.stat().st_mtime_ns)
        return dict(self._seen)


def start_ranks(
    commands: Sequence[RankCommand],
    *,
    cwd: str | os.PathLike[str] | None = None,
    on_stop: Sequence[Callable[[], None]] = (),
) -> RankGroup:
    """Start one process per command; rank i is the i-th.

    For ranks that need a prefix or an environment of their own (network namespaces, a GPU each);
    `start_gloo` is the ordinary way.

    Args:
        commands: what each rank runs, and its complete environment.
        cwd: the ranks' working directory, default this process's.
        on_stop: called once when the group is stopped.
    """
    if not commands:
        raise UsageError("no ranks to start: expected at least one command")
    group = RankGroup(len(commands), on_stop)
    try:
        for rank, rank_command in enumerate(commands):
            group._start(rank_command.command, rank_command.env, cwd, f"rank.{rank}")
    except BaseException:
        group.stop()
        raise
    return group


def start_gloo(
    command: Sequence[str],
    size: int,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    interface: str = "lo",
) -> RankGroup:
    """Start `size` ranks of `command` on this machine, connected over Gloo.

    Args:
        command: what every rank runs.
        size: number of ranks.
        env: the ranks' environment, to which their place in the job is added; default this
            process's.
        cwd: the ranks' working directory, default this process's.
        interface: the network interface that they connect over.
    """
    _check_size(size)
    base = without_place(os.environ if env is None else env)
    server = RendezvousServer(size=size)
    try:
        return start_ranks(
            [
                RankCommand(
                    command,
                    base
                    | gloo_environment(
                        rank, size, server.address, server.port, interface, key=server.key
                    ),
                )
                for rank in range(size)
            ],
            cwd=cwd,
            on_stop=[server.close],
        )
    except BaseException:
        server.close()
        raise


def start_mpi(
    command: Sequence[str],
    size: int,
    *,
    mpirun: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> RankGroup:
    """Start `size` ranks of `command` on this machine with Open MPI's or MPICH's `mpirun`.

    Args:
        command: what every rank runs.
        size: number of ranks; may exceed the number of cores.
        mpirun: the launcher, of the same MPI that the Horovod in use was built with.
        env: the ranks' environment, to which Horovod's choice of MPI is added; default this
            process's.
        cwd: the ranks' working directory, default this process's.
    """
    _check_size(size)
    launcher = [os.fspath(mpirun)]
    if identify_mpirun(launcher[0]).open_mpi:
        # Horovod's ranks have threads of their own: binding each to one core would starve them.
        launcher += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            launcher.append("--allow-run-as-root")
    ranks_env = without_place(os.environ if env is None else env) | {
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
    }
    group = _MpiRankGroup(size)
    try:
        group._start_under([*launcher, "-n", str(size)], command, ranks_env, cwd)
    except BaseException:
        group.stop()
        raise
    return group


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"number of ranks is {size}: expected at least 1")


@dataclass(frozen=True)
class Mpirun:
    """The launcher of an MPI.

    Attributes:
        path: where it is.
        open_mpi: Open MPI's; else it is Hydra, which MPICH and Intel MPI have.
        major: the first number of its version; 0 where it does not say.
    """

    path: str
    open_mpi: bool
    major: int


@functools.cache
def identify_mpirun(path: str) -> Mpirun:
    """Which MPI's launcher is at `path`.

    Raises:
        HvdkitError: it does not run, or is none that is known.
    """
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdkitError(f"cannot run {path!r} --version: {error}") from error
    text = answer.stdout + answer.stderr
    version = re.search(r"\b(\d+)\.\d+", text)
    major = int(version[1]) if version else 0
    if any(name in text for name in ("Open MPI", "OpenRTE", "PRRTE")):
        return Mpirun(path, True, major)
    if "HYDRA" in text.upper() or "MPICH" in text or "Intel(R) MPI" in text:
        return Mpirun(path, False, major)
    raise HvdkitError(
        f"{path!r} is not the launcher of Open MPI or MPICH; its --version says {_tail(text)!r}"
    )


def _read(path: Path) -> str:
    # A rank that was never started has no file.
    return path.read_text(errors="replace") if path.exists() else ""
