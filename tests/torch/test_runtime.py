"""Starting Horovod. What needs a fresh process, or another launcher, starts it itself."""

import os
import sys

import pytest

from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import which
from hvdkit.errors import UsageError
from hvdkit.ranks import RankCommand, RanksFailed, start_mpi, start_ranks
from tests.parallel.rank_pool import REPOSITORY

PLACES = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")


def run_alone(code, **env):
    """Run Python code as a user without any launcher does; its output."""
    if installed() is None:
        pytest.skip("no Horovod here: run `hvdkit build`")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(PLACES)}
    command = RankCommand([sys.executable, "-c", code], inherited | env)
    return start_ranks([command], cwd=REPOSITORY).wait(timeout=60)[0].output


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"SHUTDOWN": "1800"}),
        ({"CHECK": "10"}, {"CHECK": "10", "SHUTDOWN": "1800"}),
        # Horovod ignores a shutdown time below the check time.
        ({"CHECK": "3600"}, {"CHECK": "3600", "SHUTDOWN": "7200"}),
        ({"SHUTDOWN": "20"}, {"CHECK": "10", "SHUTDOWN": "20"}),
        ({"SHUTDOWN": "1"}, {"CHECK": "1", "SHUTDOWN": "1"}),
        ({"SHUTDOWN": "600"}, {"SHUTDOWN": "600"}),
        ({"SHUTDOWN": "0"}, {"SHUTDOWN": "0"}),
        ({"SHUTDOWN": "20", "CHECK": "30"}, {"SHUTDOWN": "20", "CHECK": "30"}),
        ({"DISABLE": "1"}, {"DISABLE": "1"}),
        ({"DISABLE": "0"}, {"DISABLE": "0", "SHUTDOWN": "1800"}),
    ],
)
def test_stalls_end_unless_the_user_says_otherwise(hvd, given, expected):
    from hvdkit.torch import runtime

    names = {
        "CHECK": "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "SHUTDOWN": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "DISABLE": "HOROVOD_STALL_CHECK_DISABLE",
    }
    environ = {names[key]: value for key, value in given.items()}
    runtime._limit_stalls(environ)
    assert environ == {names[key]: value for key, value in expected.items()}


def test_a_stall_time_that_is_no_number_is_refused(hvd):
    from hvdkit.torch import runtime

    with pytest.raises(UsageError, match="'soon': expected a whole number"):
        runtime._limit_stalls({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "soon"})


@pytest.mark.parametrize(
    ("environ", "processes"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2"}, 8),
        # A batch script is not a step, however many tasks its job has.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1),
        ({"PMIX_RANK": "0"}, 0),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, 0),
    ],
)
def test_launchers_are_told_apart(hvd, environ, processes):
    from hvdkit.torch import runtime

    assert runtime._processes_started_for_mpi(environ) == processes


REPORT = (
    "import os, hvdkit.torch as hvd; before = dict(os.environ); hvd.init();"
    "print(hvd.rank(), hvd.size(), hvd.local_size(), hvd.mpi_enabled(), hvd.gloo_enabled());"
    "print(*sorted(os.environ.items() - before.items()));"
)


def test_a_plain_script_is_a_job_of_one_rank_without_mpi():
    lines = run_alone(REPORT + "hvd.shutdown()").splitlines()
    assert "0 1 1 False True" in lines
    # Nothing is left in the environment that would mislead a launcher which the script starts.
    assert "('HOROVOD_STALL_SHUTDOWN_TIME_SECONDS', '1800')" in lines


def test_horovod_can_be_started_again():
    code = "import torch; hvd.shutdown(); hvd.init(); print(hvd.allreduce(torch.ones(2)).tolist())"
    assert "[1.0, 1.0]" in run_alone(REPORT + code)


def test_a_stock_horovod_is_told_apart_once():
    output = run_alone(REPORT + "hvd.shutdown(); hvd.init()")
    said = output.count("was not built by `hvdkit build`")
    assert said == (0 if installed().ours else 1)


def test_what_needs_horovod_says_so_before_init():
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
    # mpirun may end the second before it has said the same.
    first = caught.value.results[caught.value.failed[0]]
    assert "2 processes were started by mpirun or srun, and HOROVOD_CONTROLLER" in first.output


def test_processes_that_do_not_become_one_job_are_an_error():
    # As when mpirun is of another MPI than Horovod: its ranks do not know of each other.
    code = (
        "import hvdkit.torch as hvd\n"
        "if not hvd.mpi_built(): print('no MPI')\n"
        "try: hvd.init()\n"
        "except RuntimeError as error: print(error)"
    )
    output = run_alone(code, PMI_SIZE="3")
    if "no MPI" in output:
        assert "has no MPI to connect them" in output
    else:
        assert "3 processes were started by mpirun or srun, but each became" in output
