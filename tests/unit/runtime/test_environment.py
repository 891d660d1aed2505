"""Environment variables at the start of Horovod."""

import pytest

from hvdkit.errors import UsageError
from hvdkit.runtime.environment import (
    check_gloo_timeout,
    limit_stalls,
    one_rank_over_gloo,
    processes_started_for_mpi,
)


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
def test_stalls_end_unless_the_user_says_otherwise(given, expected):
    names = {
        "CHECK": "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "SHUTDOWN": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "DISABLE": "HOROVOD_STALL_CHECK_DISABLE",
    }
    environ = {names[key]: value for key, value in given.items()}
    limit_stalls(environ)
    assert environ == {names[key]: value for key, value in expected.items()}


@pytest.mark.parametrize("text", ["soon", "", "-5", "1e3", "99999999999"])
def test_a_time_that_horovod_cannot_use_is_refused(text):
    with pytest.raises(UsageError, match=f"TIME_SECONDS is '{text}': expected a whole number"):
        limit_stalls({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": text})
    with pytest.raises(UsageError, match=f"TIMEOUT_SECONDS is '{text}': expected a whole number"):
        check_gloo_timeout({"HOROVOD_GLOO_TIMEOUT_SECONDS": text})
    with pytest.raises(UsageError, match="is '0': expected a whole number from 1"):
        check_gloo_timeout({"HOROVOD_GLOO_TIMEOUT_SECONDS": "0"})


@pytest.mark.parametrize(
    ("environ", "processes"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2"}, 8),
        # A batch script itself is not a step, for any number of tasks.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1),
        ({"PMIX_RANK": "0"}, 0),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}, 0),
    ],
)
def test_processes_of_each_launcher_are_counted(environ, processes):
    assert processes_started_for_mpi(environ) == processes


@pytest.mark.parametrize("given", [{}, {"HOROVOD_GLOO_IFACE": "eth7"}])
def test_one_rank_uses_gloo_and_leaves_no_variables(given):
    environ = dict(given)
    with one_rank_over_gloo(environ):
        expected = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
        assert environ == {f"HOROVOD_{key}": value for key, value in expected.items()} | given
    assert environ == given


def test_a_controller_that_the_user_has_chosen_stays():
    environ = {"HOROVOD_CONTROLLER": "mpi"}
    with one_rank_over_gloo(environ):
        assert environ == {"HOROVOD_CONTROLLER": "mpi"}
