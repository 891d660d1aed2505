"""Start Horovod, in new processes and with other launchers."""

import sys

import pytest

from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import which
from hvdkit.ranks import RanksFailed, start_mpi
from tests.alone import run_alone
from tests.parallel.rank_pool import REPOSITORY


def test_every_public_name_of_horovod_is_there(hvd):
    import horovod.torch

    modules = {"compression", "mpi_lib_v2", "mpi_ops", "sync_batch_norm"}
    public = {name for name in dir(horovod.torch) if not name.startswith("_")} - modules
    assert not {name for name in public if not hasattr(hvd, name)}
    assert set(hvd.__all__) <= set(dir(hvd))


def test_the_functions_that_hvdkit_replaces_take_horovods_arguments(hvd):
    import inspect

    import horovod.torch

    for name in (
        "DistributedOptimizer",
        "broadcast_parameters",
        "broadcast_optimizer_state",
        "broadcast_object",
        "allgather_object",
        "shutdown",
    ):
        theirs = inspect.signature(getattr(horovod.torch, name)).parameters
        ours = list(inspect.signature(getattr(hvd, name)).parameters)
        wanted = [p for p in theirs if p not in ("args", "kwargs")]
        assert ours[: len(wanted)] == wanted, name


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


def test_a_stock_horovod_logs_one_warning():
    output = run_alone(REPORT + "hvd.shutdown(); hvd.init()")
    said = output.count("was not built by `hvdkit build`")
    assert said == (0 if installed().ours else 1)


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


def test_processes_that_do_not_become_one_job_are_an_error():
    # Like an mpirun of another MPI than Horovod's, whose ranks are not connected.
    code = (
        "import hvdkit.torch as hvd\n"
        "if not hvd.mpi_built(): print('no MPI')\n"
        "try: hvd.init()\n"
        "except RuntimeError as error: print(error)"
    )
    # Open MPI 5 leaves a file in /dev/shm of a process that it did not start, unless it is alone.
    output = run_alone(code, PMI_SIZE="3", OMPI_MCA_btl="self")
    if "no MPI" in output:
        assert "has no MPI to connect them" in output
    else:
        assert "mpirun or srun started 3 processes, but each formed" in output
