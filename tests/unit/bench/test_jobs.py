"""Jobs: their ranks execute commands, stop between turns, and end in any case."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdkit.bench.control import TOKEN_VARIABLE
from hvdkit.bench.jobs import Job, JobPlan
from hvdkit.bench.places import ThisMachine
from hvdkit.bench.turns import in_turns
from hvdkit.errors import HvdkitError
from tests.unit.bench.commands import MARK, processes

_SECONDS = 20
REPOSITORY = Path(__file__).parents[3]


def job_of(tmp_path, name="one", size=2, **spec):
    plan = JobPlan(
        name, "tests.unit.bench.counting_rank", "gloo", size, spec, env={MARK: str(tmp_path)}
    )
    return Job(plan, ThisMachine(size=size), tmp_path)


@pytest.fixture(autouse=True)
def _tests_are_found(monkeypatch):
    # Ranks import nothing from the current folder.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@pytest.fixture
def job(tmp_path):
    made = job_of(tmp_path)
    made.start()
    made.resume()
    yield made
    made.close()


def wait_until(condition):
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_answer_in_the_order_of_ranks(job):
    assert [fact["rank"] for fact in job.facts] == [0, 1]
    assert {fact["host"] for fact in job.facts} == {socket.gethostname()}
    job.ask("sum", number=3)
    answers = job.ask("sum", number=4)
    assert [(answer["rank"], answer["count"]) for answer in answers] == [(0, 7), (1, 7)]
    assert job.finish() > 1e6


def test_ranks_are_stopped_between_their_turns(job):
    with job.turn():
        ranks = [psutil.Process(answer["pid"]) for answer in job.ask("sum", number=0)]
    wait_until(lambda: all(rank.status() == psutil.STATUS_STOPPED for rank in ranks))
    job.resume()
    job.ask("sum", number=0)
    assert all(rank.status() != psutil.STATUS_STOPPED for rank in ranks)
    assert job.idle_share() < 0.5
    assert job.unshared_memory() > 1e6


def test_jobs_work_in_turns(tmp_path):
    jobs = [job_of(tmp_path, name) for name in ("one", "two")]
    try:
        for each in jobs:
            each.start()
        found = list(in_turns(jobs, 3, lambda j: j.ask("sum", number=1)[0]["count"]))
        assert sorted((turn, j.name, count) for turn, j, count in found) == [
            (turn, name, turn + 1) for turn in range(3) for name in ("one", "two")
        ]
        for each in jobs:
            each.finish()
    finally:
        for each in jobs:
            each.close()


def test_the_output_of_a_rank_that_ends_is_in_the_error(job):
    with pytest.raises(
        HvdkitError, match=r"one did not answer to 'fail'(.|\n)*exit status 3(.|\n)*last words"
    ):
        job.ask("fail")


def test_a_rank_that_is_killed_while_it_is_stopped(job):
    with job.turn():
        pid = job.ask("sum", number=0)[1]["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HvdkitError, match="rank 1 .killed by signal 9"):  # noqa: PT012
        job.resume()
        job.ask("sum", number=0)


def test_ranks_that_cannot_be_built(tmp_path):
    broken = job_of(tmp_path, broken=True)
    try:
        with pytest.raises(HvdkitError, match="this rank cannot be built"):
            broken.start()
    finally:
        broken.close()
    assert not processes(str(tmp_path))


@pytest.mark.parametrize("stopped", [True, False])
def test_no_rank_outlives_a_runner_that_is_killed(tmp_path, stopped):
    code = (
        "import pathlib, sys, time; from tests.unit.bench.test_jobs import job_of;"
        f"job = job_of(pathlib.Path({str(tmp_path)!r})); job.start();"
        f"None if {stopped} else job.resume(); print('ready', flush=True); time.sleep(60)"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert runner.stdout.readline() == "ready\n"
        assert len(processes(str(tmp_path))) == 4  # two ranks and their guards
    finally:
        runner.kill()
        runner.communicate(timeout=_SECONDS)
    wait_until(lambda: not processes(str(tmp_path)))


def test_a_stranger_is_not_taken_for_a_rank(tmp_path):
    from hvdkit.bench.control import GUARD, RANK, connect
    from hvdkit.bench.rank_listener import RankListener

    control = RankListener(["127.0.0.1"], 1)
    try:
        with socket.create_connection(("127.0.0.1", control.spec["port"])) as stranger:
            stranger.sendall(b"wrong rank 0\n")
            stranger.settimeout(_SECONDS)
            assert stranger.recv(100).startswith(b"hvdkit-sealed")  # the greeting
            assert stranger.recv(1) == b""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN_VARIABLE, control.environment[TOKEN_VARIABLE])
            own = [connect(control.spec, role, 0) for role in (RANK, GUARD)]
        accepted = control.accept(_SECONDS, lambda: True)
        for peer in (*own, *accepted[0], *accepted[1]):
            peer.close()
    finally:
        control.close()
