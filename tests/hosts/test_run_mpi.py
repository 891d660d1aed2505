"""`hvdkit run --launcher mpi` on several hosts. `test_launchers.py` has each installed MPI."""

import sys
from pathlib import Path

import pytest

from tests.hosts.launches import BOTH, python
from tests.hosts.test_engine_hosts import INT8, INT8_BYTES, SCATTER, SUMS, check_sent
from tests.hosts.test_launchers import MPIRUNS
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

MPI = ("--launcher", "mpi", *BOTH)


@pytest.mark.long
@pytest.mark.parametrize(
    ("slots", "code", "sent"),
    [
        ("2,1", SUMS, 1.0),
        ("1,1", INT8, INT8_BYTES),
        ("2,1", SCATTER, None),
        ("2,2", INT8, INT8_BYTES),
    ],
    ids=["sums", "int8", "scatter", "int8-2x2"],
)
def test_sums_between_hosts(launches, slots, code, sent):
    skip_where_unsupported(Configuration("torch", "mpi", 4))
    hosts = ("-H", "host0:{},host1:{}".format(*slots.split(",")))
    own = ("--launcher", "mpi", *hosts, sys.executable, "-c", code)
    done = launches.run(*own, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == sum(map(int, slots.split(",")))
    if sent is not None:
        check_sent(lines, 2, sent)


@pytest.mark.long
def test_a_rank_that_is_late_in_init(launches, tmp_path):
    """Rank 1 is stopped in `hvd.init()`. The agents must start in this time, too."""
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    program = f"""
import hvdkit.torch as hvd
mark, init = {str(tmp_path / "mark")!r}, hvd.runtime._runtime.horovod.init
def stop(*args, **kwargs): open(mark, 'w'); os.kill(os.getpid(), 19); init(*args, **kwargs)
if rank: hvd.runtime._runtime.horovod.init = stop
while not (rank or os.path.exists(mark)): time.sleep(0.1)
hvd.init()
"""
    done = launches.run(*MPI, "--start-timeout", "20", *python(program))
    assert done.returncode == 1
    assert (
        "MPI did not connect ranks 0 on host0, 1 on host1 within 20 s (--start-timeout). Rank 1 on "
        "host1 is stopped (SIGSTOP)"
    ) in done.stderr


@pytest.mark.parametrize("mpirun", MPIRUNS.values(), ids=MPIRUNS)
def test_arguments_that_mpirun_does_not_know(launches, mpirun):
    if not Path(mpirun).exists():
        pytest.skip(f"no {mpirun} here")
    done = launches.run(*MPI, "--mpirun", mpirun, "--mpi-args=--no-such-argument", "true")
    assert done.returncode == 1
    assert "hvdkit run: mpirun ended with status" in done.stderr
    assert "no-such-argument" in done.stderr
