"""Start, watch and end the ranks of one Horovod job on this machine.

A rank is a process of the job. Over Gloo, this module starts each rank, and the ranks find each
other through `hvdkit.rendezvous.server`. Over MPI, `mpirun` starts them. Both return a `RankGroup`:
each rank writes to its own file, `wait` has a timeout, and no process of the job outlives the
group.

Example:
    results = start_gloo([sys.executable, "train.py"], 2).wait(timeout=600)
    print(results[0].output)
"""

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.mpi.mpirun import identify_mpirun
from hvdkit.mpi.segments import SegmentFolder
from hvdkit.rendezvous.server import RendezvousServer, gloo_environment
from hvdkit.system.owned_folders import OwnedFolder, temporary
from hvdkit.system.processes import ProcessGroup, exit_text, without_rank_variables

_POLL_SECONDS = 0.02
_TAIL_LINES = 20


@dataclass(frozen=True)
class RankCommand:
    """The command of one rank and its environment.

    Attributes:
        command: the command, with any prefix such as `ip netns exec NAME`.
        env: all environment variables of the rank. It inherits no others.
    """

    command: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class RankResult:
    """The result of one rank.

    `exit_status` is negative for a signal. It is None for a rank that did not end by itself: it
    was ended with the group, or never started.
    """

    rank: int
    exit_status: int | None
    output: str


class RanksFailed(HvdkitError):
    """One or more ranks failed, or the group ran out of time.

    Attributes:
        results: the result of each rank, by rank.
        failed: the ranks that ended by themselves with an exit status other than 0, in the order in
            which they ended. The first one is often the cause. The order is uncertain if ranks
            end within milliseconds of each other.
        timed_out: whether the timeout has passed.
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
    return "ended with the group" if status is None else exit_text(status)


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


@dataclass(frozen=True)
class _End:
    status: int
    at: int  # nanoseconds since the epoch


class RankGroup:
    """The running ranks of one job, as `start_gloo`, `start_mpi` and `start_ranks` return them.

    As a context manager, it ends its ranks on exit.
    """

    def __init__(self, size: int, on_stop: Sequence[Callable[[], None]] = ()) -> None:
        self.size = size
        self._on_stop = on_stop
        self._group = ProcessGroup()
        # If this process is killed, the next group deletes the folder.
        self._folder = OwnedFolder(temporary(), "hvdkit-ranks-")
        self._directory = self._folder.path
        self._seen: dict[int, _End] = {}
        self._stopped = False
        atexit.register(self.stop)

    def running(self) -> bool:
        """Return whether a rank (or mpirun) still runs."""
        return self._group.running()

    def output(self, rank: int) -> str:
        """Return the output of `rank` until now, standard output and error together."""
        return _read(self._directory / f"rank.{rank}")

    def wait(self, timeout: float, failure_grace: float = 5.0) -> list[RankResult]:
        """Wait until every rank has ended, then stop the group and remove its files.

        Args:
            timeout: seconds before the whole group is ended.
            failure_grace: seconds for the other ranks to end by themselves after one has failed, so
                that they can report errors.

        Returns:
            One result per rank, in the order of ranks, all with exit status 0.

        Raises:
            RanksFailed: a rank failed, or the timeout has passed.
        """
        deadline = time.monotonic() + timeout
        timed_out = False
        failing_since: float | None = None
        try:
            while self.running():
                now = time.monotonic()
                # Call `_ends` in each iteration: it also records when a rank has ended.
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
            # End the ranks before reading their files: ranks may write while they end.
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
        """End every process of the group (SIGTERM, a grace period, SIGKILL), and remove its files.

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
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
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
        """Return the ranks that have ended by themselves until now."""
        for rank, process in enumerate(self._group.started):
            if rank not in self._seen and (status := process.poll()) is not None:
                self._seen[rank] = _End(status, time.time_ns())
        return dict(self._seen)

    def _terminate(self, grace: float = 3.0) -> None:
        for _ in self._group.terminate(grace):
            time.sleep(_POLL_SECONDS)


class _MpiRankGroup(RankGroup):
    """Ranks that mpirun starts."""

    # mpirun mixes the output of all ranks and reports one exit status. A shell between mpirun and
    # each rank writes the output and the exit status of the rank to separate files.
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
        # A killed mpirun of Open MPI (5 and 4) leaves socket files behind. This puts them into the
        # group's folder, which `stop` deletes.
        sessions = {"PRTE_MCA_prte_tmpdir_base": folder, "OMPI_MCA_orte_tmpdir_base": folder}
        wrapped = [*launcher, "sh", "-c", self._WRAPPER, "sh", folder, *command]
        self._start(wrapped, sessions | dict(env), cwd, "launcher")

    def _ends(self) -> dict[int, _End]:
        for rank in range(self.size):
            path = self._directory / f"status.{rank}"
            if rank not in self._seen and path.exists():
                status = int(path.read_text())
                # A shell's status 128 + n is signal n.
                status = 128 - status if 128 < status <= 128 + 64 else status
                self._seen[rank] = _End(status, path.stat().st_mtime_ns)
        return dict(self._seen)


def start_ranks(
    commands: Sequence[RankCommand],
    *,
    cwd: str | os.PathLike[str] | None = None,
    on_stop: Sequence[Callable[[], None]] = (),
) -> RankGroup:
    """Start one process per command; rank i runs the i-th.

    For ranks that need different prefixes or environments (network namespaces, a GPU each).
    Otherwise use `start_gloo`.

    Args:
        commands: the command and the complete environment of each rank.
        cwd: the ranks' working directory; default this process's.
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
    stores_without_key: bool = False,
) -> RankGroup:
    """Start `size` ranks of `command` on this machine, connected over Gloo.

    Args:
        command: the command of every rank.
        size: the number of ranks.
        env: the ranks' environment, to which the rank variables are added; default this process's.
        cwd: the ranks' working directory; default this process's.
        interface: the network interface of the ranks.
        stores_without_key: as for `RendezvousServer`, for an engine such as stock Horovod.
    """
    _check_size(size)
    segments = SegmentFolder()
    base = {
        **segments.variables,
        **without_rank_variables(os.environ if env is None else env),
    }
    server = RendezvousServer(size=size, stores_without_key=stores_without_key)
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
            on_stop=[server.close, segments.remove],
        )
    except BaseException:
        server.close()
        segments.remove()
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
        command: the command of every rank.
        size: the number of ranks; may exceed the number of cores.
        mpirun: the mpirun of the MPI that Horovod was built with.
        env: the ranks' environment, to which variables that select MPI are added; default this
            process's.
        cwd: the ranks' working directory; default this process's.
    """
    _check_size(size)
    launcher = [os.fspath(mpirun)]
    if identify_mpirun(launcher[0]).open_mpi:
        # Horovod's ranks have several threads: bound to one core, they would be slow.
        launcher += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            launcher.append("--allow-run-as-root")
    segments = SegmentFolder()
    ranks_env = {
        **segments.variables,
        **without_rank_variables(os.environ if env is None else env),
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
    }
    group = _MpiRankGroup(size, [segments.remove])
    try:
        group._start_under([*launcher, "-n", str(size)], command, ranks_env, cwd)
    except BaseException:
        group.stop()
        raise
    return group


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"number of ranks is {size}: expected at least 1")


def _read(path: Path) -> str:
    # A rank that was never started has no file.
    return path.read_text(errors="replace") if path.exists() else ""
