"""Start Horovod, in new processes and with other launchers."""

import sys

import pytest

from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import which
from hvdkit.ranks import RanksFailed, start_mpi
from tests.alone import run_alone
from tests.ranks.rank_pool import REPOSITORY

REPORT = (
    "import os, hvdkit.torch as hvd; before = dict(os.environ); hvd.init();"
    "print(hvd.rank(), hvd.size(), hvd.local_size(), hvd.mpi_enabled(), hvd.gloo_enabled());"
    "print(*sorted(os.environ.items() - before.items()));"
)


def test_a_plain_script_is_a_job_of_one_rank_without_mpi():
    lines = run_alone(REPORT + "hvd.shutdown()").splitlines()
    assert "0 1 1 False True" in lines
    # No variable stays in the environment that would affect a launcher started by the script.
    assert "('HOROVOD_STALL_SHUTDOWN_TIME_SECONDS', '1800')" in lines


def test_horovod_can_be_started_again():
    code = "import torch; hvd.shutdown(); hvd.init(); print(hvd.allreduce(torch.ones(2)).tolist())"
    assert "[1.0, 1.0]" in run_alone(REPORT + code)


def test_calls_that_need_horovod_raise_before_init():
    code = (
        "import torch, hvdkit.torch as hvd\n"
        "try: hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))\n"
        "except ValueError as error: print(error)"
    )
    assert "call hvd.init()" in run_alone(code)


def test_gloo_cannot_connect_what_mpirun_started():
    mpirun = which("mpirun")
    if installed() is None or mpirun is None:
        pytest.skip("needs Horovod and mpirun")
    code = "import os; os.environ['HOROVOD_CONTROLLER'] = 'gloo'; " + REPORT
    with pytest.raises(RanksFailed) as caught:
        start_mpi([sys.executable, "-c", code], 2, mpirun=mpirun, cwd=REPOSITORY).wait(60)
    # mpirun may end the second rank before it has printed the same error.
    first = caught.value.results[caught.value.failed[0]]
    assert "mpirun or srun started 2 processes, but HOROVOD_CONTROLLER" in first.output
