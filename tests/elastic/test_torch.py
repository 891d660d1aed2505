"""Elastic training with PyTorch on one host: sequences of events at random times.

To reproduce a failure, call `run_sequence` with the seed and the number of events.
"""

import contextlib
import os
import random
import re
import signal
import time

import psutil
import pytest

from tests.elastic.jobs import PAUSE, ElasticJob
from tests.elastic.training import TORCH, check
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

OPTIONS = ("--min-np", "1", "--max-np", "3", "--restarts", "20")


@pytest.fixture
def folder(tmp_path):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(TORCH)
    return tmp_path


def processes(job, wanted):
    """Return the processes of a job whose command line and environment satisfy `wanted`."""
    found = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if wanted(process.cmdline(), process.environ()):
                found.append(process)
    return found


def ranks(job):
    found = processes(job, lambda command, env: "train.py" in command and "HOROVOD_RANK" in env)
    return sorted(found, key=lambda process: int(process.environ()["HOROVOD_RANK"]))


def agents(job):
    return processes(job, lambda command, _: "hvdkit.launch.agent.main" in command)


def kill_one(found, draw):
    if found:
        with contextlib.suppress(psutil.Error):
            draw.choice(found).kill()


def act(job, event, slots, draw):
    """Cause one event. Return the slots of the host afterwards."""
    if event == "remove":
        slots = max(1, slots - 1)
        job.set_hosts(f"localhost:{slots}")
    elif event == "add":
        slots = min(3, slots + 1)
        job.set_hosts(f"localhost:{slots}")
    elif event == "kill a rank":
        kill_one(ranks(job), draw)
    elif event == "kill an agent":
        # That of the ranks, or that of the commits.
        kill_one(agents(job), draw)
    return slots


def run_sequence(folder, events, draw, env=None):
    """Run a job of two ranks with `events`, and check what it has trained."""
    slots = 2
    with ElasticJob(folder, f"localhost:{slots}", *OPTIONS, env=env) as job:
        for event in events:
            for _ in range(draw.randint(1, 3)):
                job.wait_for(r"] batch \d")
            # At any time of a batch or a commit.
            time.sleep(draw.random() * PAUSE)
            slots = act(job, event, slots, draw)
        status = job.finish(180)
        assert status == 0, job.text
        last = [line for line in job.lines if re.search(r"\d ranks? on localhost", line)][-1]
        size = int(re.search(r"(\d) ranks?", last)[1])
        return job, check(job.lines, ranks=size)


def test_a_rank_is_killed_while_the_hosts_change(folder):
    with ElasticJob(folder, "localhost:2", "--min-np", "1") as job:
        job.wait_for("batch 0 2 ")
        job.set_hosts("localhost:1")
        job.wait_for("the hosts have changed: the ranks start again")
        batch = int(job.wait_for(r"begin 0 (\d+) size 1 resets \[1\]")[1])
        assert batch >= 2
        for _ in range(2):  # the second commit waits until the first one is stored
            pid = int(job.wait_for(r"batch \d \d+ (\d+)")[1])
        job.set_hosts("localhost:2")
        os.kill(pid, signal.SIGKILL)
        job.wait_for("rank 0 on localhost failed: killed by signal 9")
        job.wait_for(r"begin \d \d+ size 2 resets \[2\]")
        assert job.finish() == 0, job.text
        trained = check(job.lines, ranks=2)
    assert {len(batch) for _, batch in trained} >= {4, 8}


def test_the_only_host_with_a_commit_is_left_out_after_it_was_copied(folder):
    hosts = "localhost:2,127.0.0.1:2"
    with ElasticJob(folder, hosts, "--min-np", "1", "--max-np", "2") as job:
        for _ in range(2):
            job.wait_for(r"] batch \d")
            pid = int(job.wait_for(r"] batch \d \d+ (\d+)")[1])
            os.kill(pid, signal.SIGKILL)
            job.wait_for("rank . on localhost failed: killed by signal 9")
        job.wait_for("localhost, which would be left out, takes part with 1 rank until the next")
        job.wait_for(r"2 ranks on localhost:1, 127.0.0.1:1")
        assert int(job.wait_for(r"begin 0 (\d+) size 2")[1]) >= 2
        job.wait_for(r"2 ranks on 127.0.0.1:2")
        assert job.finish() == 0, job.text
        check(job.lines, ranks=2)
        assert "starts from its beginning" not in job.text


def test_a_slow_discovery_script_delays_no_restart(folder):
    with ElasticJob(folder, "localhost:1,127.0.0.1:1", "--min-np", "1") as job:
        job.wait_for("batch 0 2 ")
        job.set_script("#!/bin/sh\nsleep 20\ncat hosts.txt\n")
        time.sleep(2)
        pid = int(job.wait_for(r"] batch \d \d+ (\d+)")[1])
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        job.wait_for("2 ranks on localhost:1, 127.0.0.1:1")
        assert time.monotonic() < began + 15
        assert job.finish() == 0, job.text
        assert "cannot take part" not in job.text


@pytest.mark.long
@pytest.mark.parametrize("commits", ["always", "rarely"])
@pytest.mark.parametrize("seed", range(6))
def test_sequences_of_events(folder, seed, commits):
    draw = random.Random(seed)
    kinds = ["remove", "add", "kill a rank", "kill an agent"]
    run_sequence(folder, [draw.choice(kinds) for _ in range(6)], draw, {"COMMITS": commits})
