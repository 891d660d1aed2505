"""The job of one variant: its ranks, controlled over a socket for each."""

import contextlib
import dataclasses
import io
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks import hosts as network_hosts
from benchmarks.variants import BEFORE, FLAT, Machine, Variant
from hvdkit.errors import HvdkitError
from hvdkit.ranks import RankCommand, RankGroup, start_mpi, start_ranks
from hvdkit.rendezvous import RendezvousServer, gloo_environment

REPOSITORY = Path(__file__).resolve().parent.parent

HOSTS = 2

START_SECONDS = 180  # Until all ranks have imported the framework, connected and built the model.
STEP_SECONDS = 180
WARM_STEPS = 4
IDLE_SECONDS = 0.5


class Job:
    """The ranks of one variant. They receive commands over a socket each."""

    def __init__(
        self,
        machine: Machine,
        variant: Variant,
        folder: Path,
        spec: Mapping[str, Any],
        cluster: network_hosts.Cluster | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.variant = variant
        self.facts: dict[str, Any] = {}
        self.norms: list[float] = []
        self._machine = machine
        self._cluster = cluster
        self._size: int = spec["size"]
        self._path = folder / f"{variant.name}.socket"
        self._spec = dict(spec) | {
            "variant": dataclasses.astuple(variant),
            "socket": str(self._path),
            "store": str(folder / f"{variant.name}.store"),
            "bucket_bytes": machine.options.bucket_mb
            and int(machine.options.bucket_mb * 1_000_000),
        }
        engine = machine.engine(variant)
        self._environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        if variant.optimizer == FLAT:
            self._environment["HVDKIT_COLLECTIVES"] = "flat"
        if engine is not None:
            path = [str(engine.path.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            checkout = REPOSITORY
            if variant.optimizer == BEFORE:
                checkout = machine.options.before.resolve()
                path.insert(0, str(checkout))
            self._spec["hvdkit"] = str(checkout / "hvdkit")
            self._spec["engine"] = str(engine.path)
            self._environment["PYTHONPATH"] = os.pathsep.join(path)
            # A rank that is stopped while it waits for another one must not time out later.
            self._environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"
        self._listener: socket.socket | None = None
        self._group: RankGroup | None = None
        self._processes: list[psutil.Process] = []
        self._streams: list[io.TextIOWrapper] = []
        self._sockets: list[socket.socket] = []

    def launch(self) -> RankGroup:
        """Start the processes of the ranks."""
        variant, options = self.variant, self._machine.options
        if variant.controller == "mpi":
            mpirun = self._machine.mpirun
            assert mpirun is not None
            command = self._command(None)
            self._group = start_mpi(command, self._size, mpirun=mpirun, env=self._environment)
            return self._group
        cluster = self._cluster
        server = RendezvousServer(cluster.address if cluster else "127.0.0.1")
        try:
            commands = []
            for rank in range(self._size):
                place: dict[str, Any] = {}
                command = self._command(rank)
                if cluster is not None:
                    i, local = divmod(rank, options.ranks_per_host)
                    host = cluster.hosts[i]
                    command = host.command(command)
                    place = {
                        "interface": network_hosts.INTERFACE,
                        "hostname": host.name,
                        "local_rank": local,
                        "local_size": options.ranks_per_host,
                        "cross_rank": i,
                        "cross_size": HOSTS,
                    }
                gloo = gloo_environment(
                    rank, self._size, server.address, server.port, key=server.key, **place
                )
                gloo["GLOO_SOCKET_IFNAME"] = gloo["HOROVOD_GLOO_IFACE"]
                commands.append(RankCommand(command, self._environment | gloo))
            self._group = start_ranks(commands, on_stop=[server.close])
        except BaseException:
            server.close()
            raise
        return self._group

    def _command(self, rank: int | None) -> list[str]:
        program = str(self._machine.benchmark.program)
        return [sys.executable, program, "--rank", json.dumps(self._spec | {"rank": rank})]

    def start(self) -> None:
        """Start the ranks, and make the first steps, which are slower."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(self._size)
        self._listener.settimeout(0.2)
        group = self.launch()
        deadline = time.monotonic() + START_SECONDS
        while len(self._sockets) < self._size:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if not group.running() or time.monotonic() > deadline:
                    self._fail("did not start")
                continue
            connection.settimeout(STEP_SECONDS)
            self._sockets.append(connection)
            self._streams.append(connection.makefile("rw"))
        self._processes = [psutil.Process(answer["pid"]) for answer in self._answers("to start")]
        self.facts = self._answers("to build the model")[0]
        self.step()
        self.norms = [answer["norm"] for answer in self._ask("norm")]
        for _ in range(WARM_STEPS - 1):
            self.step()

    def step(self) -> tuple[float, float]:
        """Make a step. Return the seconds of the slowest rank, and the CPU seconds of all ranks.

        CPU time includes the engine's threads.
        """
        self._ask("prepare")
        answers = self._ask("step")
        return max(float(a["seconds"]) for a in answers), sum(float(a["cpu"]) for a in answers)

    def pause(self) -> None:
        """Stop the processes (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the processes."""
        self._signal(signal.SIGCONT)

    def idle_share(self) -> float:
        """Return the share of a core that all ranks use together while they are idle."""
        paused = not self._machine.options.keep_running
        self.resume()
        before = self._cpu_seconds()
        time.sleep(IDLE_SECONDS)
        share = (self._cpu_seconds() - before) / IDLE_SECONDS
        if paused:
            self.pause()
        return share

    def resident(self) -> int:
        """Return the unshared memory of the ranks, in bytes."""
        return sum(process.memory_full_info().uss for process in self._processes)

    def finish(self) -> None:
        """Let the ranks end by themselves."""
        self.resume()
        self._ask("finish")
        assert self._group is not None
        self._group.wait(60)

    def close(self) -> None:
        """End the ranks in any state."""
        # A stopped process does not react to SIGTERM.
        self.resume()
        if self._group is not None:
            self._group.stop()
        with contextlib.suppress(OSError), ExitStack() as stack:
            for opened in (self._listener, *self._sockets, *self._streams):
                if opened is not None:
                    stack.callback(opened.close)
        self._processes = []

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(time.user + time.system for time in times)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _ask(self, what: str) -> list[dict[str, Any]]:
        """Send a command to all ranks. Return their answers in any order."""
        with contextlib.suppress(OSError):
            for stream in self._streams:
                stream.write(what + "\n")
                stream.flush()
        return self._answers(what)

    def _answers(self, what: str) -> list[dict[str, Any]]:
        """Return a line from each rank. Raise if a rank has ended, or after a timeout."""
        answers = []
        waiting = dict(zip(self._sockets, self._streams, strict=True))
        while waiting:
            ready, _, _ = select.select(waiting, (), (), STEP_SECONDS)
            lines = [waiting.pop(one).readline() for one in ready]
            if not ready or not all(lines):
                self._fail(f"did not answer to {what!r}")
            answers += [json.loads(line) for line in lines]
        return answers

    def _fail(self, what: str) -> None:
        try:
            if self._group is not None:
                self._group.wait(3)
        except HvdkitError as error:
            raise HvdkitError(f"{self.variant.name} {what}:\n{error}") from error
        raise HvdkitError(f"{self.variant.name} {what}: its ranks ended without an error")
