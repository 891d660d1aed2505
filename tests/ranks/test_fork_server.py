"""Forks behave like the processes that they replace, and a fork that is left running is found."""

import signal
import sys

import psutil
import pytest

from hvdkit.ranks import RankCommand, RanksFailed, start_ranks
from tests.conftest import _left, _new_children
from tests.ranks import fork_server
from tests.unit.test_ranks import running

CODE = """
import os, sys
print("loaded", "colorsys" in sys.modules, sys.argv, __name__, os.getcwd(), sorted(os.environ))
"""


@pytest.fixture
def light(monkeypatch):
    """A server that imports little."""
    monkeypatch.setitem(fork_server.MODULES, "light", ["colorsys"])
    yield
    fork_server._servers.pop("light").stop()


def start(*command, cwd=None, **env):
    with fork_server.forked("light"):
        return start_ranks([RankCommand([sys.executable, *command], env)] * 2, cwd=cwd)


def test_a_fork_has_the_command_environment_and_folder_of_a_rank(light, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CODE)
    for command, argv in [(("-c", CODE), "-c"), ((str(script),), str(script))]:
        for result in start(*command, "x", cwd=tmp_path, MINE="1").wait(30):
            told = f"loaded True {[argv, 'x']} __main__ {tmp_path} ['HVDKIT_RANK_GROUP', 'MINE']\n"
            assert result.output == told


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('bad')", 1, "bad"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import signal; signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(print, 'at exit'); 1 / 0", 1, "at exit"),
    ],
)
def test_the_end_of_a_fork(light, code, status, output):
    with pytest.raises(RanksFailed) as caught:
        start("-c", code).wait(30)
    for result in caught.value.results:
        assert result.exit_status == status
        assert output in result.output


def test_a_fork_that_is_left_running_is_found(light):
    before = set(psutil.pids())
    with start("-c", "import time; time.sleep(60)") as group:
        started = {process.pid for process in group._group.started}
        assert {child.pid for child in _new_children(before)} == started
    assert not _left(lambda: _new_children(before))


def test_a_process_that_a_fork_has_started_ends_with_its_job(light):
    """Also in another session."""
    code = "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    with start("-c", code + "print(p.pid, flush=True); p.wait()") as group:
        while not all(group.output(rank) for rank in range(2)):
            assert group.running()
        pids = [int(group.output(rank)) for rank in range(2)]
        assert all(map(running, pids))
    assert not any(map(running, pids))
