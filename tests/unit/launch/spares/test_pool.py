"""When the spares of a host are started, and which rank gets which."""

import contextlib
import json
import os
import signal
import sys
import time

import numpy
import psutil
import pytest

from hvdkit.launch.agent.keeper import KeptProcess
from hvdkit.launch.agent.spares import pool as pool_module
from hvdkit.launch.agent.spares.pool import Slot, SparePool
from hvdkit.runtime import loaded_modules
from tests.unit.launch.commands import execute, wait_until
from tests.unit.launch.spares.test_spare import SECONDS, environment

GROUP = {"modules": {"numpy": numpy.__spec__.origin}, "variables": {}}
REPORT = {"imports": [GROUP]}


@pytest.fixture
def new_pool(monkeypatch, tmp_path):
    """Return a function that makes a pool, which does not wait for the ranks to train."""
    monkeypatch.setattr(pool_module, "_SETTLE_SECONDS", 0.0)
    (tmp_path / "script.py").write_text(
        "import os, sys; print(os.environ['HOROVOD_RANK'], 'numpy' in sys.modules)"
    )
    made = []

    def make(slots):
        made.append(SparePool([sys.executable, "script.py"], str(tmp_path), slots))
        return made[-1]

    yield make
    for each in made:
        each.end()
        for _ in each.group.terminate(0.0):
            time.sleep(0.01)
        each.group.close()


@pytest.fixture
def pool(new_pool):
    """Return a pool for the ranks of `slots`."""
    return new_pool(slots())


def output_of(process):
    output = process.stdout.read()
    assert process.wait(SECONDS) == 0
    return output


def slots(**others):
    return [Slot(rank, environment(HOROVOD_RANK=str(rank), **others), []) for rank in range(2)]


def children():
    # Other tests of the session keep children, too.
    found = psutil.Process().children(recursive=True)
    alive = [child for child in found if child.status() != "zombie"]
    return [child for child in alive if "HVDKIT_SPARE" in child.environ()]


def report(tmp_path, rank, text=REPORT):
    text = text if isinstance(text, str) else json.dumps(text)
    (tmp_path / loaded_modules.file_name(rank)).write_text(text)


def watch(pool, tmp_path, text=REPORT, ranks=(0,)):
    """Let a pool look at the reports of ranks once, before their spares can be ready."""
    for rank in ranks:
        report(tmp_path, rank, text)
    pool.step(tmp_path)


def prepare(pool, tmp_path, ranks=(0, 1)):
    """Report the modules of ranks, and wait until their spares are ready or given up."""
    watch(pool, tmp_path, ranks=ranks)
    wait_until_ready(pool, tmp_path, ranks)


def wait_until_ready(pool, tmp_path, ranks, loads=1):
    def are_ready():
        pool.step(tmp_path)
        waiting = [rank for rank in pool._slots if rank in ranks]
        ready = [s for s in pool._spares.values() if s.ready and len(s.loads) >= loads]
        return len(ready) == len(waiting)

    wait_until(are_ready, SECONDS)


def test_each_rank_gets_a_spare(pool, tmp_path):
    prepare(pool, tmp_path)
    started = pool.claim(slots(HOROVOD_GLOO_RENDEZVOUS_PORT="1", NCCL_SOCKET_IFNAME="=x"))
    outputs = [output_of(started[rank]) for rank in range(2)]
    assert outputs == [b"0 True\n", b"1 True\n"]
    assert set(pool.group.started) == set(started.values())


@pytest.mark.parametrize("differ", [False, True])
def test_a_rank_gets_the_spare_of_another_one_only_if_their_reports_are_equal(
    pool, tmp_path, differ
):
    """The script may set a variable to a value of the rank before it imports modules."""
    for rank in range(2):
        group = GROUP | {"variables": {"TMPDIR": f"/tmp/{rank if differ else 0}"}}
        report(tmp_path, rank, {"imports": [group]})
    watch(pool, tmp_path, ranks=())
    wait_until_ready(pool, tmp_path, [0, 1])
    pool._spares[0].process.kill()
    pool._spares[0].process.wait(SECONDS)
    pool.step(tmp_path)
    started = pool.claim(slots()[:1])
    assert list(started) == ([] if differ else [0])
    for process in started.values():
        assert output_of(process) == b"0 True\n"


@pytest.mark.parametrize("variables", [{}, {"TMPDIR": "/tmp/1"}])
def test_the_only_spare_of_a_host_for_another_rank(new_pool, tmp_path, variables):
    """The script may have set a variable to a value of the rank."""
    pool = new_pool(slots()[1:])
    given = {n: v for n, v in slots()[1].environment.items() if loaded_modules.read_by_imports(n)}
    group = GROUP | {"variables": given | variables}
    watch(pool, tmp_path, {"imports": [group]}, [1])
    wait_until_ready(pool, tmp_path, [1])
    started = pool.claim(slots()[:1])
    assert list(started) == ([] if variables else [0])
    for process in started.values():
        assert output_of(process) == b"0 True\n"


UNKNOWN = {"imports": [{"modules": {"antigravity": None}, "variables": {}}]}


@pytest.mark.parametrize(
    "text", [{"imports": [{"modules": {}}]}, "[" * 100_000, {"imports": 5}, UNKNOWN]
)
def test_a_report_that_is_malformed_or_has_other_modules_is_ignored(pool, tmp_path, text):
    watch(pool, tmp_path, text)
    assert children() == []


def test_spares_that_are_not_started(new_pool, pool, tmp_path, monkeypatch):
    # No rank has reported.
    watch(pool, tmp_path, ranks=())
    assert children() == []
    # The CPUs that the agent may use have changed since the start of the rank.
    watch(new_pool([Slot(0, environment(HOROVOD_RANK="0"), [900])]), tmp_path)
    assert children() == []
    # Little memory is left to the ranks.
    monkeypatch.setattr(pool_module, "_MEMORY", 1 << 60)
    watch(pool, tmp_path, ranks=(0, 1))
    assert children() == []


def test_a_rank_with_another_environment_gets_none(pool, tmp_path):
    prepare(pool, tmp_path)
    started = pool.claim(slots(OMP_NUM_THREADS="7"))
    assert (started, pool.group.started, children()) == ({}, [], [])


@pytest.mark.parametrize("steps", [0, 3])
def test_a_spare_that_dies_is_neither_used_nor_replaced(pool, tmp_path, steps):
    prepare(pool, tmp_path)
    for child in children():
        child.kill()
        child.wait(SECONDS)
    for _ in range(steps):
        pool.step(tmp_path)
    assert children() == []
    assert pool.claim(slots()) == {}


def test_a_spare_that_is_not_ready_is_not_used(pool, tmp_path):
    watch(pool, tmp_path)
    assert pool.claim(slots()) == {}
    assert children() == []


def test_a_spare_that_is_stopped_does_not_block(pool, tmp_path):
    prepare(pool, tmp_path)
    for spare in pool._spares.values():
        os.kill(spare.process.pid, signal.SIGSTOP)
    calls = []
    started = pool.claim(slots(), lambda: calls.append(time.monotonic()))
    assert started == {}
    assert len(calls) >= 4  # in two seconds
    assert not children()


def test_a_spare_that_sigkill_does_not_end_does_not_block(pool, tmp_path, monkeypatch):
    """A process that waits for a disk or a GPU does not end after SIGKILL."""
    prepare(pool, tmp_path)
    found = children()
    with monkeypatch.context() as patched:
        patched.setattr(KeptProcess, "kill", lambda _: None)
        for child in found:
            child.suspend()
        began = time.monotonic()
        pool.end()
        assert time.monotonic() - began < 10
    for child in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        child.wait(SECONDS)


def test_a_rank_reports_modules_and_variables(tmp_path, monkeypatch):
    # It makes an import fail, as scripts do for an optional dependency.
    monkeypatch.setitem(sys.modules, "h5py", None)
    read = {"OMP_NUM_THREADS": "3", "TMPDIR": "/t", "TORCHINDUCTOR_USE_FAST_MATH": "1"}
    env = read | {"HVDKIT_RECORD_DIR": str(tmp_path), "SECRET_TOKEN": "x"}
    loaded_modules.report(1, env, loaded_modules.ImportGroups())
    (group,) = json.loads((tmp_path / "modules-1.json").read_text())["imports"]
    assert group["modules"]["numpy"] == numpy.__spec__.origin
    assert "h5py" not in group["modules"]
    assert group["variables"] == read


def test_modules_are_imported_with_the_variables_of_their_time(new_pool, tmp_path):
    """A variable that the script changes after an import has no effect on the module."""
    for name in ("h5py", "scipy"):
        (tmp_path / f"{name}.py").write_text("import os; THREADS = os.getenv('OMP_NUM_THREADS')")
    (tmp_path / "script.py").write_text(
        """
import os, sys
del os.environ["OMP_NUM_THREADS"]
import h5py
from hvdkit.runtime import loaded_modules
os.environ["OMP_NUM_THREADS"] = "7"
import scipy
loaded_modules.report(0)
print(h5py.THREADS, scipy.THREADS)
"""
    )
    command = [sys.executable, "script.py"]
    own = slots(HVDKIT_RECORD_DIR=str(tmp_path))[:1]
    before = execute(command, env=own[0].environment, cwd=tmp_path, text=False).stdout
    assert before == b"None 7\n"
    pool = new_pool(own)
    wait_until_ready(pool, tmp_path, [0], loads=2)
    started = pool.claim(own)
    assert output_of(started[0]) == before
