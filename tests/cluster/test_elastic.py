"""Elastic jobs on several hosts: hosts are added, removed and lost."""

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from hvdkit.launch.commit_folder import PREFIX
from hvdkit.owned_folders import OwnedFolder
from tests.cluster.test_run import link_down
from tests.elastic.jobs import ElasticJob
from tests.elastic.training import TORCH, check
from tests.parallel.rank_pool import Configuration, skip_where_unsupported

LIMITS = ("--min-np", "1", "--max-np", "2")


@pytest.fixture
def start(launches, tmp_path):
    """Yield a function that starts an elastic job on the first host."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(TORCH)
    with contextlib.ExitStack() as jobs:

        def begin(hosts, *options):
            return jobs.enter_context(
                ElasticJob(
                    tmp_path,
                    hosts,
                    f"--ssh-arg=-F{launches.access.config}",
                    *LIMITS,
                    *options,
                    prefix=launches.cluster.hosts[0].command([]),
                )
            )

        yield begin
    launches.check_nothing_is_left()


@pytest.mark.long
def test_a_host_is_added_and_the_first_one_is_removed(start):
    job = start("host0:1")
    job.wait_for("batch 0 2 ")
    job.set_hosts("host0:1,host1:1")
    job.wait_for("1 ranks? on host0:1$|2 ranks on host0:1, host1:1")
    job.wait_for(r"begin 0 \d+ size 2 resets \[2\]")
    job.wait_for("batch")
    # From here on, only the second host has commits.
    job.set_hosts("host1:1")
    job.wait_for("1 rank on host1:1")
    job.wait_for(r"begin \d \d+ size 1 resets \[1\]")
    assert job.finish() == 0
    check(job.lines, ranks=1)


@pytest.mark.long
def test_all_hosts_are_replaced_at_once(start):
    job = start("host0:1")
    job.wait_for("batch 0 3 ")
    job.set_hosts("host1:1")
    job.wait_for("host0, which has left the list, takes part with 1 rank until the next commit")
    job.wait_for("2 ranks on host0:1, host1:1")
    assert int(job.wait_for(r"begin 0 (\d+) size 2")[1]) >= 3
    job.wait_for("1 rank on host1:1")
    assert int(job.wait_for(r"begin 0 (\d+) size 1")[1]) >= 4
    assert job.finish() == 0
    check(job.lines, ranks=1)


@pytest.mark.long
def test_a_host_that_is_lost(start, launches):
    """Every process of the first start on the second host is killed, as if the host was reset."""
    job = start("host0:1,host1:1")
    job.wait_for("batch 0 3 ")
    processes = launches.cluster.hosts[1].processes() - launches.servers
    killed = [psutil.Process(pid) for pid in processes]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, timeout=10)
    # Its memory is lost, too. The hosts of these tests share one.
    OwnedFolder(Path("/dev/shm"), PREFIX).remove()
    OwnedFolder(Path(tempfile.gettempdir()), PREFIX).remove()
    job.set_hosts("host0:1")
    job.wait_for("lost host1|rank 1 on host1 failed: killed by signal 9")
    assert int(job.wait_for(r"begin 0 (\d+) size 1")[1]) >= 3
    assert job.finish() == 0
    check(job.lines, ranks=1)


def test_a_new_host_that_cannot_take_part_does_not_interrupt_the_job(start):
    job = start("host0:1")
    job.wait_for("batch 0 2 ")
    job.set_hosts("host0:1,host9:1")
    job.wait_for("host9 cannot take part")
    assert job.finish() == 0
    assert "the hosts have changed" not in job.text
    check(job.lines, ranks=1)


@pytest.mark.long
def test_a_new_host_with_another_version_is_left_out(start, tmp_path):
    info = tmp_path / "other" / "tensorflow_cpu-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow-cpu\nVersion: 0.1\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={info.parent}:$PYTHONPATH exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job = start("host0:1", "--restarts", "1", "--python", str(python))
    job.wait_for("batch 0 2 ")
    job.set_hosts("host0:1,host1:1")
    job.wait_for(r"0\.1 \(host1\)")
    job.wait_for("left out for 600 s if the other hosts are enough, .* failed start: host1")
    assert int(job.wait_for(r"begin 0 (\d+) size 1")[1]) >= 2
    assert job.finish() == 0
    check(job.lines, ranks=1)


@pytest.mark.long
def test_a_host_whose_link_goes_down_and_comes_back(start, launches):
    job = start("host0:1,host1:1", "-x", "HOROVOD_GLOO_TIMEOUT_SECONDS=10")
    job.wait_for("batch 0 3 ")
    with link_down(launches):
        assert int(job.wait_for(r"begin 0 (\d+) size 1", 240)[1]) >= 3
        job.wait_for("batch")
    job.wait_for(r"begin \d \d+ size 2", 120)
    assert job.finish(180) == 0
    check(job.lines, ranks=2)


@pytest.mark.long
def test_a_rank_that_is_killed_on_another_host(start):
    job = start("host0:1,host1:1", "--reset-limit", "1")
    job.wait_for("batch 0 3 ")
    pids = [pid for pid in psutil.pids() if is_rank(pid, "1", job.folder)]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    job.wait_for("rank 1 on host1 failed: killed by signal 9")
    assert int(job.wait_for(r"begin 0 (\d+) size 2 resets \[2\]")[1]) >= 3
    assert job.finish() == 0
    check(job.lines, ranks=2)


def is_rank(pid, rank, folder):
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        is_script = process.cwd() == str(folder) and "train.py" in process.cmdline()
        return is_script and process.environ().get("HOROVOD_RANK") == rank
    return False
