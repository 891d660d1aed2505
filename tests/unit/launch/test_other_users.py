"""Processes of a rank that its agent may not signal, as with sudo.

Here the agent is root without the capability CAP_KILL, and the processes belong to another user.
"""

import ctypes
import os
import signal
from contextlib import contextmanager

import pytest

from tests.unit.launch.commands import output_of, wait_until
from tests.unit.launch.test_agent import launched, wait_until_gone

OTHER = 65534
SLEEP = ["sleep", "60"]
_PR_CAPBSET_DROP, _CAP_KILL = 24, 5

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
_libc = ctypes.CDLL(None, use_errno=True)

#: Start a process of the other user, and print its number.
CHILD = f"import subprocess; print(subprocess.Popen({SLEEP}, user={OTHER}, stdout=-3).pid)"
#: Become a process of the other user, and print its number.
RANK = f"import os, time; os.setuid({OTHER}); print(os.getpid(), flush=True); time.sleep(60)"
GROUP = """
import os, pathlib, sys, time
from hvdkit.errors import HvdkitError
from hvdkit.launch.agent import keeper

keeper.ORPHAN_GRACE = 0.2
group = keeper.KeptGroup()
"""


def give_up_kill():
    # A program that root starts then has no CAP_KILL.
    if _libc.prctl(_PR_CAPBSET_DROP, _CAP_KILL):
        raise OSError(ctypes.get_errno(), "prctl")


@contextmanager
def killed_at_the_end(pid):
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)


def run(code):
    """Run code that may not signal the other user's processes. Return its output."""
    return output_of(GROUP + code, preexec_fn=give_up_kill)


def test_a_rank_that_leaves_a_process_of_another_user():
    with launched(preexec_fn=give_up_kill) as agent:
        agent.start(CHILD)
        with killed_at_the_end(int(agent.line())):
            assert agent.receive("ended")["status"] == 0
            agent.send("end", grace=0.2)
            agent.receive("done")
            assert agent.process.wait(timeout=600) == 0


def test_a_signal_to_a_rank_of_another_user():
    code = f"import os, time; os.setuid({OTHER}); print(flush=True); time.sleep(1); os._exit(3)"
    with launched(preexec_fn=give_up_kill) as agent:
        agent.start(code)
        agent.line()
        agent.send("signal", number=signal.SIGTERM)
        assert agent.receive("ended")["status"] == 3


def test_a_rank_of_another_user_that_does_not_end():
    output = run(
        f"""
process = group.start([sys.executable, "-c", {RANK!r}], os.environ, stdout=-1)
process.stdout.readline()
print(process.pid)
try:
    for _ in group.terminate(0.1, 0.1):
        time.sleep(0.02)
except HvdkitError as error:
    print(error)
"""
    )
    pid, error = output.splitlines()
    with killed_at_the_end(int(pid)):
        assert f"processes [{pid}] of a group" in error
        assert "this user may not signal them" in error


FOLDER = """
from hvdkit.faults.record_folder import RecordFolder
import tempfile
tempfile.tempdir = {folder!r}
folder = RecordFolder().path
"""


def wait_until_empty(folder):
    wait_until(lambda: not any(folder.iterdir()))


def test_the_keepers_end_the_other_processes_and_delete_the_folders(tmp_path):
    output = run(
        FOLDER.format(folder=str(tmp_path))
        + f"""
other = group.start({SLEEP}, os.environ, stderr=None)
rank = group.start([sys.executable, "-c", {CHILD!r}], os.environ, stdout=-1)
print(other.pid, rank.stdout.readline().decode(), flush=True)
os._exit(0)
"""
    )
    other, left = map(int, output.split())
    with killed_at_the_end(left):
        wait_until_gone(other)
        wait_until_empty(tmp_path)


def test_the_keeper_of_a_rank_of_another_user_deletes_the_folders(tmp_path):
    output = run(
        FOLDER.format(folder=str(tmp_path))
        + f"""
rank = group.start([sys.executable, "-c", {RANK!r}], os.environ, stdout=-1)
print(rank.stdout.readline().decode(), flush=True)
os._exit(0)
"""
    )
    with killed_at_the_end(int(output)):
        wait_until_empty(tmp_path)
