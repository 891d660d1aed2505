"""The job of one variant: its ranks, which execute commands, and stop between their turns."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hvdkit.bench import control
from hvdkit.bench.places import Place
from hvdkit.bench.rank_listener import RankListener
from hvdkit.engine.describe import Engine, installed
from hvdkit.errors import HvdkitError
from hvdkit.ranks import RankGroup

#: Timeout of the start in seconds: ranks import their framework, connect and build the model.
START_SECONDS = 180.0
COMMAND_SECONDS = 600.0
IDLE_SECONDS = 0.5

_GUARD_SECONDS = 30.0
_END_SECONDS = 60.0
_FAILURE_SECONDS = 3.0


@dataclass(frozen=True)
class JobPlan:
    """The program of a job.

    Attributes:
        name: the name of the variant.
        module: the module whose `build` makes the `worker.Workload` of a rank.
        controller: `gloo` or `mpi`.
        size: the number of ranks.
        spec: the settings of the workload. Values that JSON can represent.
        engine: the engine to use; None for a variant without one.
        hvdkit: the folder of another hvdkit to measure; None for this one.
        env: further environment variables of the ranks.
    """

    name: str
    module: str
    controller: str
    size: int
    spec: Mapping[str, Any]
    engine: Engine | None = None
    hvdkit: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Started:
    """The processes of a job.

    Attributes:
        group: starts and stops them.
        ranks: the connections to the ranks.
        guards: the connections to their guards.
    """

    group: RankGroup
    ranks: Sequence[control.Peer]
    guards: Sequence[control.Peer]


class Job:
    """The ranks of one variant.

    Args:
        plan: the program of the ranks.
        place: where the ranks run.
        folder: a folder of this machine that exists until the job has ended.

    Attributes:
        plan: as given.
        facts: the answer of each rank to its start, by rank.
    """

    def __init__(self, plan: JobPlan, place: Place, folder: Path) -> None:
        self.plan = plan
        self.facts: list[dict[str, Any]] = []
        self._place = place
        self._folder = folder
        self._started: _Started | None = None

    @property
    def name(self) -> str:
        """The name of the variant."""
        return self.plan.name

    def start(self) -> None:
        """Start the ranks, wait until they are ready, and stop them until their first turn.

        Raises:
            HvdkitError: a rank has ended, or is not ready in time.
        """
        connections = RankListener(self._place.addresses, self.plan.size)
        try:
            group = self._launch(connections)
            # `close` ends the group after an exception.
            self._started = _Started(group, (), ())
            accepted = connections.accept(START_SECONDS, group.running)
        finally:
            connections.close()
        if accepted is None:
            self._fail("did not start")
        self._started = _Started(group, *accepted)
        self._answers("to start")
        self.facts = self._answers("to be ready", START_SECONDS)
        self._ask_guards("stop")

    def _launch(self, connections: RankListener) -> RankGroup:
        plan = self.plan
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(plan.env)
        environment |= connections.environment
        # A rank that is stopped while it waits for another one must not time out later.
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"
        spec = dict(plan.spec) | connections.spec | {"module": plan.module}
        spec["store"] = str(self._folder / f"{plan.name}.store") if self._shares_files else None
        package = (plan.hvdkit or Path(__file__).parents[1]).resolve()
        # Python imports a package from the first folder on the path that has it.
        path = [str(package.parent)] if plan.hvdkit else []
        if plan.engine is not None:
            # None: not checked, because other hosts may have hvdkit and its engine elsewhere.
            own_engine = plan.engine == installed() and not self._shares_files
            spec["engine"] = None if own_engine else str(plan.engine.path)
            own_hvdkit = plan.hvdkit is None and not self._shares_files
            spec["hvdkit"] = None if own_hvdkit else str(package)
            path.append(str(plan.engine.path.parent))
        path += filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(path)
        rank = ["-P", "-m", "hvdkit.bench.rank"]
        if plan.hvdkit is not None:
            # Start rank.py of this hvdkit: the other hvdkit has another benchmark or none.
            rank = [str(Path(__file__).with_name("rank.py"))]
        return self._place.launch(
            [self._place.python, *rank, json.dumps(spec)],
            environment,
            plan.controller,
            plan.size,
        )

    @property
    def _shares_files(self) -> bool:
        return self._place.shares_files

    def ask(self, command: str, **message: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks. Return their answers, by rank.

        Raises:
            HvdkitError: a rank has ended, or does not answer.
        """
        with contextlib.suppress(OSError):
            for rank in self._running.ranks:
                rank.send({"do": command, **message})
        return self._answers(command)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the ranks run in this context. Between its turns, a job is stopped (SIGSTOP)."""
        self.resume()
        yield
        self._ask_guards("stop")

    def resume(self) -> None:
        """Continue the ranks."""
        self._ask_guards("continue")

    def idle_share(self) -> float:
        """Return the share of a core that all ranks use together while they are idle."""
        with self.turn():
            before = self._usage("cpu")
            time.sleep(IDLE_SECONDS)
            return (self._usage("cpu") - before) / IDLE_SECONDS

    def unshared_memory(self) -> float:
        """Return the unshared memory of all ranks together, in bytes."""
        return self._usage("memory")

    def finish(self) -> int:
        """Let the ranks end by themselves.

        Returns:
            The largest peak of a rank's resident memory, in bytes.
        """
        self.resume()
        peak = max(int(answer["peak"]) for answer in self.ask("finish"))
        # Keep the connections until the ranks have ended: a guard whose connection has ended kills
        # its rank some seconds later.
        self._running.group.wait(_END_SECONDS)
        self._close_connections()
        return peak

    def close(self) -> None:
        """End the ranks in any state. May be called again."""
        if self._started is not None:
            self._started.group.stop()
            self._close_connections()

    def _close_connections(self) -> None:
        for peer in (*self._running.ranks, *self._running.guards):
            peer.close()

    @property
    def _running(self) -> _Started:
        assert self._started is not None
        return self._started

    def _usage(self, what: str) -> float:
        return sum(float(answer[what]) for answer in self._ask_guards("usage"))

    def _ask_guards(self, command: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            for guard in self._running.guards:
                guard.send({"do": command})
        found = control.answers(self._running.guards, _GUARD_SECONDS)
        if found is None:
            self._fail(f"did not answer to {command!r} within {_GUARD_SECONDS:g} s, or has ended")
        return found

    def _answers(self, command: str, seconds: float = COMMAND_SECONDS) -> list[dict[str, Any]]:
        found = control.answers(self._running.ranks, seconds)
        if found is None:
            self._fail(f"did not answer to {command!r}")
        return found

    def _fail(self, what: str) -> NoReturn:
        """Raise an error with the output of the ranks."""
        try:
            self._running.group.wait(_FAILURE_SECONDS)
        except HvdkitError as error:
            raise HvdkitError(f"{self.name} {what}:\n{error}") from error
        raise HvdkitError(f"{self.name} {what}: its ranks ended without an error")
