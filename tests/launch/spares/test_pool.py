"""When the spares of a host are started, and which rank gets which."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import numpy
import psutil
import pytest

from hvdkit.core import loaded_modules
from hvdkit.launch.keeper import KeptProcess
from hvdkit.launch.spares import pool as pool_module
from hvdkit.launch.spares.pool import Slot, SparePool
from tests.launch.spares.test_spare import SECONDS, environment

GROUP = {"modules": {"numpy": numpy.__spec__.origin}, "variables": {}}
REPORT = {"imports": [GROUP]}


@pytest.fixture
def pool(monkeypatch, tmp_path):
    """A pool that does not wait for the ranks to train."""
    monkeypatch.setattr(pool_module, "_SETTLE_SECONDS", 0.0)
    (tmp_path / "script.py").write_text(
        "import os, sys; print(os.environ['HOROVOD_RANK'], 'numpy' in sys.modules)"
    )
    made = SparePool()
    groups = []
    claim = made.claim

    def claim_and_note(*arguments):
        group, started = claim(*arguments)
        groups.append(group)
        return group, started

    monkeypatch.setattr(made, "claim", claim_and_note)
    yield made
    made.end()
    for group in groups:
        for _ in group.terminate(0.0):
            time.sleep(0.01)
        group.close()


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


def prepare(pool, tmp_path, report=REPORT, ranks=(0, 1)):
    """Report the modules of ranks, and wait until their spares are ready or given up."""
    pool.watch([sys.executable, "script.py"], str(tmp_path), slots())
    for rank in ranks:
        (tmp_path / loaded_modules.file_name(rank)).write_text(json.dumps(report))
    wait_until_ready(pool, tmp_path, ranks)


def wait_until_ready(pool, tmp_path, ranks):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pool.step(tmp_path)
        waiting = [slot for slot in pool._slots if slot.rank in ranks]
        ready = [spare for spare in pool._spares.values() if spare.ready]
        if len(ready) == len(waiting):
            return
        time.sleep(0.05)
    raise AssertionError("the spares are not ready")


def test_each_rank_gets_a_spare(pool, tmp_path):
    prepare(pool, tmp_path)
    group, started = pool.claim(slots(HOROVOD_GLOO_RENDEZVOUS_PORT="1", NCCL_SOCKET_IFNAME="=x"))
    outputs = [output_of(started[rank]) for rank in range(2)]
    assert outputs == [b"0 True\n", b"1 True\n"]
    assert set(group.started) == set(started.values())


def kill_first_spare(pool):
    pool._spares[0].process.kill()
    pool._spares[0].process.wait(SECONDS)


def test_a_rank_gets_the_spare_of_another_one_if_their_reports_are_equal(pool, tmp_path):
    prepare(pool, tmp_path)
    kill_first_spare(pool)
    pool.step(tmp_path)
    _, started = pool.claim(slots()[:1])
    assert output_of(started[0]) == b"0 True\n"


def test_a_rank_gets_no_spare_that_has_read_the_variables_of_another_one(pool, tmp_path):
    """The script sets a variable to a value of the rank before it imports modules."""
    pool.watch([sys.executable, "script.py"], str(tmp_path), slots())
    for rank in range(2):
        group = GROUP | {"variables": {"TMPDIR": f"/tmp/{rank}"}}
        report = json.dumps({"imports": [group]})
        (tmp_path / loaded_modules.file_name(rank)).write_text(report)
    wait_until_ready(pool, tmp_path, [0, 1])
    kill_first_spare(pool)
    pool.step(tmp_path)
    _, started = pool.claim(slots())
    assert list(started) == [1]
    assert output_of(started[1]) == b"1 True\n"


@pytest.mark.parametrize("variables", [{}, {"TMPDIR": "/tmp/1"}])
def test_the_only_spare_of_a_host_for_another_rank(pool, tmp_path, variables):
    """The script may have set a variable to a value of the rank."""
    pool.watch([sys.executable, "script.py"], str(tmp_path), slots()[1:])
    given = {n: v for n, v in slots()[1].environment.items() if loaded_modules.read_by_imports(n)}
    group = GROUP | {"variables": given | variables}
    report = json.dumps({"imports": [group]})
    (tmp_path / loaded_modules.file_name(1)).write_text(report)
    wait_until_ready(pool, tmp_path, [1])
    _, started = pool.claim(slots()[:1])
    assert list(started) == ([] if variables else [0])
    for process in started.values():
        assert output_of(process) == b"0 True\n"


@pytest.mark.parametrize(
    "report", [json.dumps({"imports": [{"modules": {}}]}), "[" * 100_000, '{"imports": 5}']
)
def test_a_malformed_report_is_ignored(pool, tmp_path, report):
    pool.watch([sys.executable, "script.py"], str(tmp_path), slots())
    (tmp_path / loaded_modules.file_name(0)).write_text(report)
    pool.step(tmp_path)
    assert children() == []


def test_a_spare_that_cannot_be_bound_to_cpus_is_not_started(pool, tmp_path):
    """The CPUs that the agent may use have changed since the start of the rank."""
    slot = Slot(0, environment(HOROVOD_RANK="0"), [900])
    pool.watch([sys.executable, "script.py"], str(tmp_path), [slot])
    (tmp_path / loaded_modules.file_name(0)).write_text(json.dumps(REPORT))
    pool.step(tmp_path)
    assert children() == []


def test_a_system_that_permits_no_thread(pool, tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    pool_module._can_undo_nice.cache_clear()
    monkeypatch.setattr(pool_module.threading.Thread, "start", start)
    prepare(pool, tmp_path)
    assert sorted(pool.claim(slots())[1]) == [0, 1]
    pool_module._can_undo_nice.cache_clear()


def test_a_rank_with_another_environment_gets_none(pool, tmp_path):
    prepare(pool, tmp_path)
    group, started = pool.claim(slots(OMP_NUM_THREADS="7"))
    assert (started, group.started, children()) == ({}, [], [])


def test_a_spare_that_dies_is_not_used(pool, tmp_path):
    prepare(pool, tmp_path)
    for child in children():
        child.kill()
        child.wait(SECONDS)
    assert pool.claim(slots())[1] == {}


def test_a_spare_that_dies_is_not_replaced(pool, tmp_path):
    prepare(pool, tmp_path)
    for child in children():
        child.kill()
        child.wait(SECONDS)
    for _ in range(3):
        pool.step(tmp_path)
    assert children() == []


def test_a_spare_that_is_not_ready_is_not_used(pool, tmp_path):
    pool.watch([sys.executable, "script.py"], str(tmp_path), slots())
    (tmp_path / loaded_modules.file_name(0)).write_text(json.dumps(REPORT))
    pool.step(tmp_path)
    assert pool.claim(slots())[1] == {}
    assert children() == []


def test_a_spare_that_is_stopped_does_not_block(pool, tmp_path):
    prepare(pool, tmp_path)
    for spare in pool._spares.values():
        spare.process.send_signal(signal.SIGSTOP)
    calls = []
    _, started = pool.claim(slots(), lambda: calls.append(time.monotonic()))
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


def test_ranks_that_report_nothing_have_no_spares(pool, tmp_path):
    prepare(pool, tmp_path, ranks=())
    assert children() == []


def test_a_module_that_the_script_has_blocked_is_not_reported(monkeypatch, tmp_path):
    """`sys.modules[name] = None` makes an import fail, as scripts do for an optional dependency."""
    monkeypatch.setitem(sys.modules, "h5py", None)
    environ = {loaded_modules.FOLDER_VARIABLE: str(tmp_path)}
    loaded_modules.report(0, environ, loaded_modules.ImportGroups())
    (group,) = json.loads((tmp_path / loaded_modules.file_name(0)).read_text())["imports"]
    assert "numpy" in group["modules"]
    assert "h5py" not in group["modules"]


def test_only_known_modules_are_imported(pool, tmp_path):
    report = {"imports": [{"modules": {"antigravity": None}, "variables": {}}]}
    prepare(pool, tmp_path, report=report, ranks=())
    (tmp_path / loaded_modules.file_name(0)).write_text(json.dumps(report))
    pool.step(tmp_path)
    assert children() == []


def test_a_spare_imports_modules_that_are_loaded_later(pool, tmp_path):
    first = {"modules": {}, "variables": {}}
    prepare(pool, tmp_path, report={"imports": [first]})
    for rank in range(2):
        (tmp_path / loaded_modules.file_name(rank)).write_text(
            json.dumps({"imports": [first, GROUP]})
        )
    deadline = time.monotonic() + SECONDS
    while not all(s.loads == 2 and s.ready for s in pool._spares.values()):
        assert time.monotonic() < deadline
        pool.step(tmp_path)
        time.sleep(0.05)
    _, started = pool.claim(slots())
    outputs = [output_of(started[rank]) for rank in range(2)]
    assert outputs == [b"0 True\n", b"1 True\n"]


def test_little_memory_is_left_to_the_ranks(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "_MEMORY", 1 << 60)
    prepare(pool, tmp_path)
    assert children() == []


def test_a_rank_reports_modules_and_variables(tmp_path):
    env = {"HVDKIT_RECORD_DIR": str(tmp_path), "OMP_NUM_THREADS": "3", "SECRET_TOKEN": "x"}
    loaded_modules.report(1, env, loaded_modules.ImportGroups())
    (group,) = json.loads((tmp_path / "modules-1.json").read_text())["imports"]
    assert group["modules"]["numpy"] == numpy.__spec__.origin
    assert group["variables"] == {"OMP_NUM_THREADS": "3"}


def test_modules_are_imported_with_the_variables_of_their_time(pool, tmp_path):
    """A variable that the script changes after an import has no effect on the module."""
    for name in ("h5py", "scipy"):
        (tmp_path / f"{name}.py").write_text("import os; THREADS = os.getenv('OMP_NUM_THREADS')")
    (tmp_path / "script.py").write_text(
        """
import os, sys
del os.environ["OMP_NUM_THREADS"]
import h5py
from hvdkit.core import loaded_modules
os.environ["OMP_NUM_THREADS"] = "7"
import scipy
loaded_modules.report(0)
print(h5py.THREADS, scipy.THREADS)
"""
    )
    command = [sys.executable, "script.py"]
    own = slots(HVDKIT_RECORD_DIR=str(tmp_path))[:1]
    before = subprocess.run(
        command, env=own[0].environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert before.stdout == b"None 7\n"
    pool.watch(command, str(tmp_path), own)
    deadline = time.monotonic() + SECONDS
    while not any(s.loads == 2 and s.ready for s in pool._spares.values()):
        assert time.monotonic() < deadline
        pool.step(tmp_path)
        time.sleep(0.05)
    _, started = pool.claim(own)
    assert output_of(started[0]) == before.stdout


@pytest.mark.parametrize(
    "name",
    ["TORCHINDUCTOR_USE_FAST_MATH", "TMPDIR", "TQDM_DISABLE", "NPY_DISABLE_CPU_FEATURES"],
)
def test_variables_that_imports_read_are_reported(name):
    imports = loaded_modules.ImportGroups()
    imports.note({name: "1"})
    assert imports.groups[0]["variables"] == {name: "1"}
