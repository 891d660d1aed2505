"""`hvdkit run --launcher mpi` on several hosts, with each installed MPI."""

import os
import signal
import sys
from pathlib import Path

import pytest

from hvdkit.engine.toolchain import which
from tests.cluster.launches import BOTH, describe, python, wait_for
from tests.cluster.test_engine_hosts import INT8, INT8_BYTES, SCATTER, SUMS, check_sent
from tests.cluster.test_run import ORDERLY, REDUCE
from tests.parallel.rank_pool import REPOSITORY, Configuration, skip_where_unsupported

MPI = ("--launcher", "mpi", *BOTH)
PATHS = {
    "own": which("mpirun") or "no mpirun",
    # Installed by `scripts/test --long`.
    "openmpi4": str(REPOSITORY / ".venv-openmpi4/bin/mpirun"),
    "mpich": str(REPOSITORY / ".venv-mpich/bin/mpirun"),
}


@pytest.fixture(params=PATHS)
def mpi(request):
    path = PATHS[request.param]
    if not Path(path).exists():
        pytest.skip(f"no {path} here")
    return (*MPI, "--mpirun", path)


def test_ranks_on_hosts_with_other_interface_names_reduce(launches):
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    done = launches.run(*MPI, sys.executable, "-c", REDUCE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] place 0 0 1 0 2", "[1] place 1 0 1 1 2"]


@pytest.mark.parametrize(
    ("slots", "code", "sent"),
    [
        pytest.param("2,1", SUMS, 1.0, marks=pytest.mark.long),
        ("1,1", INT8, INT8_BYTES),
        pytest.param("2,1", SCATTER, None, marks=pytest.mark.long),
        pytest.param("2,2", INT8, INT8_BYTES, marks=pytest.mark.long),
    ],
    ids=["sums", "int8", "scatter", "int8-2x2"],
)
def test_sums_between_hosts(launches, slots, code, sent):
    skip_where_unsupported(Configuration("torch", "mpi", 4))
    first, second = slots.split(",")
    hosts = ("-np", str(int(first) + int(second)), "-H", f"host0:{first},host1:{second}")
    done = launches.run(
        *("--launcher", "mpi", *hosts), sys.executable, "-c", code, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == int(first) + int(second)
    if sent is not None:
        check_sent(lines, 2, sent)


def test_each_host_has_its_rank_and_the_environment(launches, mpi):
    # The agents, which are the parents of the ranks, need the paths of environment modules.
    code = (
        "agent = open(f'/proc/{agent}/environ').read();"
        "print(os.uname().nodename, os.environ.get('MINE'), os.environ['HOROVOD_CONTROLLER'],"
        "'PYTHONPATH=/modules' in agent.split(chr(0)))"
    )
    done = launches.run(*mpi, "-x", "MINE=a b", *python(code), PYTHONPATH="/modules")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] host0 a b mpi True", "[1] host1 a b mpi True"]


SEARCH = """

def contents(name):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            yield open(f'/proc/{pid}/{name}', 'rb').read() + bytes(1)
        except OSError:
            continue  # it has ended

lines = b''.join(contents('cmdline'))
token = b''.join(contents('environ')).partition(b'HVDKIT_LAUNCHER_TOKEN=')[2].partition(bytes(1))[0]
print(len(token), token in lines, b'hid' + b'den' in lines)
"""


def test_no_command_line_shows_the_environment_or_the_token(launches, mpi):
    done = launches.run(*mpi, "-x", "MINE", *python(SEARCH), MINE="hid" + "den")
    assert sorted(done.stdout.splitlines()) == ["[0] 32 False False", "[1] 32 False False"]


def test_the_job_ends_with_the_status_of_the_rank_that_failed(launches, mpi):
    code = "print('last words'); sys.exit(3) if rank == 1 else time.sleep(60)"
    done = launches.run(*mpi, *python(code))
    assert done.returncode == 3
    assert "rank 1 on host1 failed: exit status 3" in done.stderr
    assert "  last words" in done.stderr


def test_a_rank_that_is_killed(launches, mpi):
    code = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"
    done = launches.run(*mpi, *python(code))
    assert done.returncode == 128 + 9
    assert "rank 1 on host1 failed: killed by signal 9 (Killed)" in done.stderr


# Rank 1 sleeps before `hvd.init()`, or is stopped in it.
ABSENT = "print('thinking'); time.sleep(60) if rank else hvd.init()"
STOPPED_IN_INIT = (
    "init = hvd.runtime._runtime._horovod.init\n"
    "def stop(*args, **kwargs): os.kill(os.getpid(), 19); init(*args, **kwargs)\n"
    "if rank: hvd.runtime._runtime._horovod.init = stop\n"
    "hvd.init()"
)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        pytest.param(ABSENT, "rank 1 on host1 did not register within 4 s of the first rank"),
        pytest.param(
            STOPPED_IN_INIT,
            "MPI did not connect ranks 0 on host0, 1 on host1 within 4 s (--start-timeout). Rank 1 "
            "on host1 is stopped (SIGSTOP)",
        ),
    ],
    ids=["absent", "stopped"],
)
def test_a_rank_that_is_late_in_init(launches, code, text):
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    done = launches.run(
        *(*MPI, "--start-timeout", "4"), *python(f"import hvdkit.torch as hvd\n{code}")
    )
    assert done.returncode == 1
    assert text in done.stderr


@pytest.mark.long
def test_an_mpirun_that_is_stopped_while_the_ranks_end(launches, start, monkeypatch):
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    monkeypatch.setenv("HVDKIT_STALL_TIMEOUT", "3")
    code = "import hvdkit.torch as hvd; hvd.init(); print('up', flush=True); time.sleep(3)"
    job = start(*MPI, *python(code))
    wait_for(job, "[0] up", "[1] up")
    # `mpirun` of Open MPI 5 executes `prterun`.
    names = ("mpirun", "prterun")
    found = [p for p in launches.processes() if str(*describe(p)[:1]).endswith(names)]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    text = "Ranks 0, 1 are in hvd.shutdown(), or have reached the end of the script but not ended."
    assert any(text in line for line in iter(job.stderr.readline, ""))
    for pid in found:
        os.kill(pid, signal.SIGCONT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err


def test_arguments_that_mpirun_does_not_know(launches, mpi):
    done = launches.run(*mpi, "--mpi-args=--no-such-argument", "true")
    assert done.returncode == 1
    assert "hvdkit run: mpirun ended with status" in done.stderr
    assert "no-such-argument" in done.stderr


def test_no_rank_outlives_a_launcher_that_is_killed(launches, start, mpi):
    code = "subprocess.Popen(['sleep', '60'], start_new_session=True); print('up'); time.sleep(60)"
    job = start(*mpi, *python(code))
    wait_for(job, "[0] up", "[1] up")
    job.kill()
    job.wait(timeout=10)
    launches.check_nothing_is_left(20)


def test_ctrl_c_lets_every_rank_save(start, mpi):
    job = start(*mpi, *python(ORDERLY))
    wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=30)
    assert sorted(out.splitlines()) == ["[0] saving", "[1] saving"]
    assert "start the job again to resume it" in err
    assert job.returncode == 75
