"""The keepers between an agent and its ranks."""

import contextlib
import os
import signal
import sys

import psutil

from tests.unit.launch import escaping
from tests.unit.launch.commands import execute, wait_until
from tests.unit.launch.test_agent import RANK, WITH_CHILD, launched, running, wait_until_gone

GROUP = """
import os, signal, subprocess, sys, time
from hvdkit.launch.agent import keeper

keeper.ORPHAN_GRACE = 0.2
group = keeper.KeptGroup()
"""
SLEEP = ["sleep", "60"]


def run(code):
    """Run code with a group. Return its output. An alarm may end it."""
    return execute([sys.executable, "-c", GROUP + code], timeout=30).stdout


def test_a_stopped_keeper_reports_the_end_of_its_rank():
    with launched() as agent:
        agent.start("import time; print('up', flush=True); time.sleep(0.5); raise SystemExit(3)")
        agent.line()
        keeper_of(agent).suspend()
        assert agent.receive("ended")["status"] == 3


def test_a_stopped_keeper_ends_its_rank_with_the_agent():
    with launched() as agent:
        agent.start(WITH_CHILD)
        pids = [int(pid) for pid in agent.line().split()]
        keeper = keeper_of(agent)
        agent.process.send_signal(signal.SIGSTOP)  # it would continue the keeper
        keeper.suspend()
    wait_until_gone(*pids, keeper.pid)


def keeper_of(agent):
    (keeper,) = psutil.Process(agent.process.pid).children()
    return keeper


def test_a_keeper_that_starts_does_not_keep_other_ranks():
    """The program of its rank may be in a file system that hangs."""
    output = run(
        f"""
first = group.start({SLEEP}, os.environ, stdout=-3, stderr=-3)
print(first.pid, flush=True)
keeper._Keeper.start = lambda *_: (os.closerange(0, 3), time.sleep(25))
signal.alarm(1)
group.start({SLEEP}, os.environ)
"""
    )
    wait_until_gone(int(output))


def test_a_process_that_inherits_descriptors():
    output = run(
        """
read_end, write_end = os.pipe()
code = f"import os; os.write({write_end}, b'given'); print(os.path.exists('/dev/fd/{read_end}'))"
with open(os.devnull) as null:
    group.start([sys.executable, "-c", code], os.environ, stdin=null, pass_fds=[write_end]).wait(9)
print(os.read(read_end, 9).decode())
"""
    )
    assert output.split() == ["False", "given"]


NODE = """
import ctypes, io, subprocess, sys
from hvdkit.launch.launchers.nodes.node_agent import NodeAgent

ctypes.CDLL(None).prctl(36, 1)  # as the first process of a container, it gets all orphans
waits = "until test -e go; do sleep 0.1; done"
subprocess.Popen(["sh", "-c", waits + "; exec sleep 60 & echo $! > new; mv new pid"])
overrides = {{"command": [sys.executable, "-c", {code!r}], "directory": "/", "path": None}}
NodeAgent(io.FileIO(0), io.FileIO(1, "wb"), overrides).run()
"""


def test_an_agent_that_a_user_has_started_ends_the_orphans_of_its_ranks_only(tmp_path):
    """The shell command `services & exec hvdkit run --nodes` makes such an agent."""
    with launched(NODE.format(code=WITH_CHILD), cwd=tmp_path) as agent:
        agent.start(WITH_CHILD)
        ranks = [int(pid) for pid in agent.line().split()]
        (tmp_path / "go").touch()
        wait_until((tmp_path / "pid").exists)
        service = psutil.Process(int((tmp_path / "pid").read_text()))
        try:
            wait_until(lambda: service.ppid() == agent.process.pid)
            psutil.Process(ranks[0]).parent().kill()
            assert agent.receive("ended")["status"] == -signal.SIGKILL
            agent.receive("done")
            wait_until_gone(*ranks)
            assert running(service.pid)
        finally:
            service.kill()


def test_an_agent_that_a_user_has_started_ends_a_daemon_of_a_killed_keeper(tmp_path):
    """The daemon has no environment, session and parent that tell the job."""
    arguments = [escaping.__file__, str(tmp_path / "left"), "stay"]
    code = (
        f"import runpy, sys; sys.argv = {arguments}; runpy.run_path(sys.argv[0], None, '__main__')"
    )
    overrides = {"command": [*RANK, code], "directory": "/", "path": None}
    node = (
        f"import io; from hvdkit.launch.launchers.nodes.node_agent import NodeAgent; "
        f"NodeAgent(io.FileIO(0), io.FileIO(1, 'wb'), {overrides}).run()"
    )
    with launched(node) as agent:
        agent.start(code)
        agent.line()
        (left,) = tmp_path.glob("left.*")
        try:
            keeper_of(agent).kill()
            agent.receive("done")
            wait_until_gone(int(left.suffix[1:]))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(left.suffix[1:]), signal.SIGKILL)


def test_a_signal_to_a_new_keeper_does_not_run_the_handlers_of_its_parent():
    output = run(
        """
fork = os.fork

def signalled_fork():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = signalled_fork
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"handled\\n"))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
code = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
assert group.start([sys.executable, "-c", code], os.environ).wait(9) == 0
"""
    )
    # The rank has the signal mask of the parent.
    assert output == f"{int(signal.SIGUSR1)}\n"
