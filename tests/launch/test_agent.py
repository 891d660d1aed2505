"""An agent, spoken to as the launcher does."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hvdkit.launch import agent, messages

RANK = [sys.executable, "-c"]
#: A rank without a terminal, on all CPUs.
PLAIN = {"terminal": False, "cpus": []}


class Spoken:
    """A running agent and both ends of its line."""

    def __init__(self, process):
        self.process = process
        assert process.stdout.readline() == messages.GREETING

    def send(self, kind, **fields):
        self.process.stdin.write(messages.encode(kind, **fields))
        self.process.stdin.flush()

    def hear(self, *kinds):
        """The next message of one of `kinds`."""
        for line in self.process.stdout:
            message = messages.decode(line)
            if message["kind"] in kinds:
                return message
        raise AssertionError(f"the agent went without {kinds}")

    def line(self):
        """The next line that the rank writes, which may come in pieces."""
        said = ""
        while not said.endswith("\n"):
            said += self.hear("output")["text"]
        return said

    def start(self, *code, **defaults):
        self.send("task", command=[*RANK, *code], directory="/", path=None, files=[])
        assert self.hear("hello")["problems"] == []
        rank = {"rank": 5, "env": {"GIVEN": "1"}, "defaults": defaults} | PLAIN
        self.send("start", ranks=[rank], size=6)


@pytest.fixture
def spoken():
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdkit.launch.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"HOROVOD_RANK": "99", "OWN": "mine"},
        start_new_session=True,
    )
    yield Spoken(process)
    process.kill()
    process.wait(timeout=10)
    process.stdin.close()
    process.stdout.close()


def test_a_rank_gets_its_environment_and_no_other_jobs_place(spoken):
    names = "('GIVEN', 'OWN', 'OTHER', 'HOROVOD_RANK')"
    spoken.start(f"import os; print(*map(os.environ.get, {names}))", OWN="default", OTHER="default")
    assert spoken.line() == "1 mine default None\n"
    assert spoken.hear("ended") == {"kind": "ended", "rank": 5, "status": 0}
    spoken.hear("done")
    assert spoken.process.wait(timeout=10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_batch_systems_signal_is_for_the_rank(spoken, number):
    code = (
        "import signal, sys, time;"
        f"signal.signal({int(number)}, lambda *_: sys.exit(75)); print('up', flush=True);"
        "time.sleep(60)"
    )
    task = {"command": [*RANK, code], "directory": "/", "path": None, "files": []}
    spoken.send("task", **task, passes_signals_on=True)
    spoken.send("start", ranks=[{"rank": 5, "env": {}, "defaults": {}} | PLAIN], size=6)
    assert spoken.line() == "up\n"
    spoken.process.send_signal(number)
    assert spoken.hear("ended")["status"] == 75


def test_what_a_rank_writes_arrives_byte_for_byte_before_its_end(spoken):
    spoken.start("import os; os.write(1, bytes(range(256)) * 1000); os._exit(3)")
    data = b""
    while (message := spoken.hear("output", "ended"))["kind"] == "output":
        data += messages.as_bytes(message["text"])
    assert data == bytes(range(256)) * 1000
    assert message["status"] == 3


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids):
    deadline = time.monotonic() + 20
    while any(map(running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


FAMILY = (
    "import os, subprocess, time;"
    "child = subprocess.Popen(['sleep', '60'], start_new_session=True);"
    "print(os.getpid(), child.pid, flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("how", ["input ends", "SIGTERM", "SIGHUP", "end"])
def test_ranks_end_with_what_they_started(spoken, how):
    spoken.start(FAMILY)
    pids = [int(pid) for pid in spoken.line().split()]
    if how == "input ends":
        spoken.process.stdin.close()
    elif how == "end":
        spoken.send("end", grace=5)
    else:
        spoken.process.send_signal(getattr(signal, how))
    wait_until_gone(*pids)
    spoken.process.wait(timeout=10)


def test_the_kernel_ends_the_ranks_of_an_agent_that_is_killed(spoken):
    spoken.start("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    pid = int(spoken.line())
    spoken.process.kill()
    wait_until_gone(pid)


def test_output_that_nobody_takes_does_not_keep_the_agent_from_listening(spoken):
    spoken.start("import os; os.write(2, b'%d\\n' % os.getpid()); os.execvp('yes', ['yes'])")
    pid = int(spoken.line())
    time.sleep(1)  # by now its line is full
    spoken.process.stdin.close()
    wait_until_gone(pid)


def test_a_signal_is_passed_on_to_the_rank_alone(spoken):
    code = (
        "import signal, subprocess, sys;"
        "signal.signal(2, lambda *_: sys.exit(child.poll() is None and 75));"
        "child = subprocess.Popen(['sleep', '60']); print('up', flush=True); signal.pause()"
    )
    spoken.start(code)
    spoken.line()
    spoken.send("signal", number=signal.SIGINT)
    assert spoken.hear("ended")["status"] == 75


@pytest.mark.parametrize(
    ("command", "files", "expected"),
    [
        (["sh"], [], []),
        (["no-such"], [], ["no program 'no-such' on PATH; install it, or give its full path"]),
        (["./run.sh"], [], ["no program './run.sh' on PATH; install it, or give its full path"]),
        (["sh", "x.sh"], ["x.sh"], ["no file x.sh in"]),
    ],
)
def test_why_a_host_cannot_run_a_command(tmp_path, command, files, expected):
    found = agent.problems(command, str(tmp_path), os.environ["PATH"], files)
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_a_directory_that_is_not_there():
    (problem,) = agent.problems(["sh"], "/no/such", None, [])
    assert problem.startswith("no directory /no/such; every host must see the job's files there")


def test_what_a_host_says_of_itself_can_be_sent():
    task = {"command": ["sh"], "directory": "/", "path": None, "files": []}
    found = json.loads(json.dumps(agent.facts(task)))
    assert 1 <= found["cores"] <= os.cpu_count()
    assert found["python"].startswith("3.")
