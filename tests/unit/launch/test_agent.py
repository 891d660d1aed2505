"""An agent, with the test as its launcher."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvdkit.launch.control import messages
from hvdkit.mpi import segments
from hvdkit.runtime.recorder import FOLDER_VARIABLE
from hvdkit.system.sealed import greet
from tests.unit.launch.commands import execute, wait_until

RANK = [sys.executable, "-c"]
#: The variables with the folders of a rank.
FOLDERS = (FOLDER_VARIABLE, segments.VARIABLES[0])
#: A rank without a terminal, on all CPUs.
PLAIN = {"terminal": False, "cpus": []}


class Launched:
    """A running agent, and messages to and from it."""

    def __init__(self, process):
        self.process = process
        # Whether the agent is told that its output was handled.
        self.acknowledges = True
        assert process.stdout.readline() == messages.GREETING

    def send(self, kind, **fields):
        self.process.stdin.write(messages.encode(kind, **fields))
        self.process.stdin.flush()

    def receive(self, *kinds):
        """Return the next message of one of `kinds`."""
        for line in self.process.stdout:
            message = messages.decode(line)
            if self.acknowledges and message["kind"] in messages.COUNTED:
                with contextlib.suppress(BrokenPipeError):  # the agent has ended
                    self.send("read", bytes=len(line))
            if message["kind"] in kinds:
                return message
        raise AssertionError(f"the agent ended without {kinds}")

    def line(self):
        """Return the next line of the rank, which may arrive in pieces."""
        text = ""
        while not text.endswith("\n"):
            text += self.receive("output")["text"]
        return text

    def start(self, *code, **defaults):
        self.prepare(*code)
        self.start_prepared(**defaults)

    def prepare(self, *code, **task):
        self.send("task", command=[*RANK, *code], directory="/", path=None, files=[], **task)
        assert self.receive("hello")["problems"] == []

    def start_prepared(self, **defaults):
        rank = {"rank": 5, "env": {"GIVEN": "1"}, "defaults": defaults} | PLAIN
        self.send("start", ranks=[rank], size=6)


@contextmanager
def launched(code="from hvdkit.launch.agent.main import main; main()", **options):
    """Context with a running agent.

    Args:
        code: its Python code.
        options: further arguments of `subprocess.Popen`.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"HOROVOD_RANK": "99", "OWN": "mine"},
        start_new_session=True,
        **options,
    )
    try:
        yield Launched(process)
    finally:
        process.kill()
        process.wait(timeout=600)
        process.stdin.close()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def agent(request):
    """Return an agent. The parameter is its Python code."""
    with launched(*([request.param] if hasattr(request, "param") else [])) as started:
        yield started


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids):
    wait_until(lambda: not any(map(running, pids)))


#: The code of a rank with a child process in another session. It prints both numbers.
WITH_CHILD = (
    "import os, subprocess, time;"
    "child = subprocess.Popen(['sleep', '60'], start_new_session=True);"
    "print(os.getpid(), child.pid, flush=True); time.sleep(60)"
)


def test_a_rank_gets_its_environment_without_rank_variables_of_another_job(agent):
    names = "('GIVEN', 'OWN', 'OTHER', 'HOROVOD_RANK')"
    agent.start(f"import os; print(*map(os.environ.get, {names}))", OWN="default", OTHER="default")
    assert agent.line() == "1 mine default None\n"
    assert agent.receive("ended") == {"kind": "ended", "rank": 5, "status": 0}
    agent.receive("done")
    assert agent.process.wait(timeout=600) == 0


# Output and messages


def test_an_agent_sends_little_output_before_the_launcher_has_handled_it(agent):
    """Otherwise the end of a rank waits in the network behind the output of another rank."""
    agent.acknowledges = False
    agent.start("import os\nwhile True: os.write(1, b'\\n' * 65536)")

    def unread():
        """Return the bytes of output that arrive until none arrives."""
        size, quiet_until = 0, time.monotonic() + 1
        while time.monotonic() < quiet_until:
            agent.send("heartbeat")
            message = agent.receive("output", "alive")
            if message["kind"] == "output":
                size += len(messages.encode(**message))
                quiet_until = time.monotonic() + 1
                assert size < 10 * messages.WINDOW
            else:
                time.sleep(0.05)
        return size

    first = unread()
    assert first >= messages.WINDOW
    agent.send("read", bytes=first)
    assert unread() >= messages.WINDOW
    # These messages do not wait for the launcher.
    agent.send("end", grace=0)
    assert agent.receive("exited")["status"] == -signal.SIGTERM
    agent.receive("ended")
    agent.receive("done")


#: Write more than a pipe usually holds, and end.
WRITE = "fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20); os.write(1, bytes(range(256)) * 3500); "
#: The same in a process that ends after its parent, the rank.
LATE = "signal.signal(15, signal.SIG_IGN); os.fork() and os._exit(3); time.sleep(1); "


@pytest.mark.parametrize(("code", "end"), [(WRITE, "ended"), (LATE + WRITE, "done")])
def test_no_output_is_lost(agent, code, end):
    agent.start(f"import fcntl, os, signal, time; {code} os._exit(3)")
    found = b""
    while (message := agent.receive("output", end))["kind"] == "output":
        found += messages.as_bytes(message["text"])
    assert found == bytes(range(256)) * 3500
    assert message.get("status", 3) == 3


def test_the_report_of_a_rank_is_sent_although_the_process_crashes_at_once(agent):
    """The agent looks for reports once a second."""
    agent.start(
        "import atexit, os, sys; from hvdkit.runtime.script_end import note_end_with;"
        "atexit.register(os.abort); note_end_with(75); raise SystemExit(75)"
    )
    found = [agent.receive("report", "ended") for _ in range(2)]
    assert [message["kind"] for message in found] == ["report", "ended"]
    assert found[0]["report"]["status"] == 75
    assert found[1]["status"] == -signal.SIGABRT


#: An agent on a host whose memory was full a moment ago.
FULL = """
from hvdkit.launch.agent.main import main
from hvdkit.launch.agent.memory_kills import MemoryKills
MemoryKills.explain = lambda _: "probably memory"
main()
"""


@pytest.mark.parametrize("agent", [FULL], indirect=True)
@pytest.mark.parametrize(("code", "hint"), [("137", "probably memory"), ("1", None)])
def test_the_probable_cause_of_sigkill_is_sent(agent, code, hint):
    agent.start(f"raise SystemExit({code})")
    assert agent.receive("ended").get("hint") == hint


def test_an_agent_whose_output_is_not_read_still_notices_the_end_of_its_input(agent, tmp_path):
    agent.start(
        "import os, time; os.set_blocking(1, False); os.write(2, b'%d\\n' % os.getpid())\n"
        "while True:\n"
        "  try: os.write(1, bytes(9999))\n"
        f"  except BlockingIOError: open('{tmp_path}/full', 'w'); time.sleep(0.1)"
    )
    pid = int(agent.line())
    wait_until((tmp_path / "full").exists)
    agent.process.stdin.close()
    wait_until_gone(pid)


# The start


#: An agent whose user may start no more processes and threads.
LIMITED = """
import concurrent.futures.thread, email.parser, os, resource  # another user may not read modules
from hvdkit.launch.agent import inspection
from hvdkit.launch.agent.main import main
if os.geteuid() == 0:  # the limit does not hold for root
    os.setgid(12347)
    os.setuid(12347)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
main()
"""


@pytest.mark.parametrize("agent", [LIMITED], indirect=True)
def test_a_limit_of_processes_is_named(agent):
    limit = "may start no more processes and threads"
    agent.send("task", command=["true"], directory="/", path=None, files=[])
    agent.receive("hello")
    for question, arguments in (
        ("listen", {"address": "127.0.0.1"}),
        ("connect", {"targets": {"other": ["127.0.0.1", 1, 0]}}),
    ):
        agent.send("ask", question=question, arguments=arguments)
        assert limit in agent.receive("failed")["reason"]
    agent.start_prepared()
    assert f"{limit} there (`ulimit -u`: 1" in agent.receive("failed")["reason"]
    agent.receive("done")


def test_an_agent_stays_after_a_start_that_failed(agent):
    """A node of `--nodes` could not join the job again."""
    agent.send("task", command=["/no/program"], directory="/", path=None, files=[], stay=True)
    agent.receive("hello")
    agent.start_prepared()
    assert "cannot start '/no/program'" in agent.receive("failed")["reason"]
    assert agent.receive("done")["stays"]
    agent.prepare("print('up')", stay=True)
    agent.start_prepared()
    assert agent.line() == "up\n"
    assert agent.receive("ended")["status"] == 0


#: An agent that deletes its folders slowly.
SLOW = """
import time
from hvdkit.launch.agent.main import main
from hvdkit.system.owned_folders import OwnedFolder

def slowly(folder):
    time.sleep(0.5)
    remove(folder)

remove, OwnedFolder.remove = OwnedFolder.remove, slowly
main()
"""


@pytest.mark.parametrize("agent", [SLOW], indirect=True)
@pytest.mark.parametrize("stays", [False, True])
def test_nothing_of_the_ranks_is_left_once_an_agent_has_said_so(agent, stays):
    agent.prepare(f"import os; print(*map(os.environ.get, {FOLDERS}))", stay=stays)
    agent.start_prepared()
    folders = [Path(text) for text in agent.line().split()]
    assert all(folder.is_dir() for folder in folders)
    agent.receive("done")
    assert not any(folder.exists() for folder in folders)


def test_an_agent_of_mpirun_waits_for_the_launcher_after_its_rank_has_failed():
    """If it ended, mpirun would end the other ranks at once, which have errors to report."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdkit.launch.agent.main"],
            env=os.environ
            | {messages.ADDRESS_VARIABLE: f"127.0.0.1:{server.getsockname()[1]}"}
            | {messages.TOKEN_VARIABLE: "secret", "OMPI_COMM_WORLD_RANK": "5"},
        )
        connection, _ = server.accept()
        with process, connection:
            hello = greet(connection, b"secret")
            assert (hello.known, hello.fields["rank"]) == (True, 5)
            sealed = hello.accept()
            file = io.BufferedRWPair(sealed, sealed)
            agent = Launched(SimpleNamespace(stdin=file, stdout=file))
            agent.start("import sys; sys.exit(3)")
            assert agent.receive("ended")["status"] == 3
            agent.receive("done")
            agent.send("heartbeat")
            agent.receive("alive")
            assert process.poll() is None
            connection.shutdown(socket.SHUT_WR)
            assert process.wait(timeout=600) == 0


def test_an_agent_that_cannot_connect_says_so_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    own = {messages.ADDRESS_VARIABLE: address, messages.TOKEN_VARIABLE: "t", "PMI_RANK": "3"}
    env = {k: v for k, v in os.environ.items() if k != "OMPI_COMM_WORLD_RANK"} | own
    done = execute([sys.executable, "-m", "hvdkit.launch.agent.main"], env=env)
    said = f"rank 3 cannot connect to the launcher at {address}: Connection refused\n"
    assert (done.returncode, done.stderr) == (1, said)


# Signals, and requests to end. `test_escaping.py` has the processes that ranks leave.


#: An agent that waits only a moment after SIGTERM before it sends SIGKILL.
IMPATIENT = """
from hvdkit.launch.agent import agent
from hvdkit.launch.agent.main import main
agent.ORPHAN_GRACE = 0.2
main()
"""


@pytest.mark.parametrize("agent", [IMPATIENT], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_launcher_decides_how_long_ranks_may_save_after_the_agent_gets_a_signal(agent, number):
    agent.prepare(
        "import signal, subprocess, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(2)\n"
        "    sys.exit(75 if child.poll() is None else 1)\n"
        "signal.signal(15, save)\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)",
        stay=True,
    )
    agent.start_prepared()
    assert agent.line() == "up\n"
    agent.process.send_signal(number)
    assert agent.receive("signalled", "ended") == {"kind": "signalled", "number": number}
    assert agent.receive("ended")["status"] == 75
    assert not agent.receive("done")["stays"]
    assert agent.process.wait(timeout=600) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_batch_systems_signal_is_forwarded_to_the_rank(agent, number):
    """Slurm sends SIGUSR2 to all processes of a step, for scripts that handle it."""
    code = (
        "import signal, sys, time; handle = lambda *_: sys.exit(75);"
        "[signal.signal(n, handle) for n in (2, 10, 12, 15)]; print('up', flush=True);"
        f"time.sleep({0.5 if number == signal.SIGUSR2 else 60}); sys.exit(3)"
    )
    task = {"command": [*RANK, code], "directory": "/", "path": None, "files": []}
    agent.send("task", **task, forward_signals=True)
    agent.send("start", ranks=[{"rank": 5, "env": {}, "defaults": {}} | PLAIN], size=6)
    assert agent.line() == "up\n"
    agent.process.send_signal(number)
    assert agent.receive("ended")["status"] == (3 if number == signal.SIGUSR2 else 75)


def test_a_signal_is_sent_to_the_rank_only(agent):
    agent.start(
        "import signal, subprocess, sys;"
        "signal.signal(2, lambda *_: sys.exit(child.poll() is None and 75));"
        "child = subprocess.Popen(['sleep', '60']); print('up', flush=True); signal.pause()"
    )
    agent.line()
    agent.send("signal", number=signal.SIGINT)
    assert agent.receive("ended")["status"] == 75


def test_nothing_is_left_of_an_agent_that_is_killed(agent):
    """The keepers of its ranks end all processes, and remove its folder."""
    agent.start(WITH_CHILD.replace("os.getpid()", "os.environ['HVDKIT_RECORD_DIR'], os.getpid()"))
    folder, *pids = agent.line().split()
    assert Path(folder).exists()
    agent.process.kill()
    wait_until_gone(*map(int, pids))
    wait_until(lambda: not Path(folder).exists())


def test_a_stopped_rank_ends_without_waiting_for_the_grace(agent):
    agent.start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    os.kill(int(agent.line()), signal.SIGSTOP)
    agent.send("end", grace=300)
    assert agent.receive("ended")["status"] == -signal.SIGTERM


def test_further_requests_shorten_the_grace_and_do_not_extend_it(agent):
    """For a user who presses Ctrl-C again and again."""
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    agent.start(
        f"import os, signal, time; {ignored}; print(os.getpid(), flush=True); time.sleep(60)"
    )
    rank = int(agent.line())
    agent.send("end", grace=300)
    deadline = time.monotonic() + 10
    while running(rank):
        assert time.monotonic() < deadline
        agent.send("end", grace=1.0)
        time.sleep(0.3)
    assert agent.receive("ended")["status"] == -signal.SIGKILL


@pytest.mark.parametrize("stopped", [False, True])
def test_an_agent_that_has_ended_has_no_keeper(agent, stopped):
    agent.start("import time; print('up', flush=True); time.sleep(0.2)")
    agent.line()
    (keeper,) = psutil.Process(agent.process.pid).children()
    if stopped:
        agent.receive("ended")
        keeper.suspend()
    agent.receive("done")
    agent.process.wait(timeout=600)
    wait_until_gone(keeper.pid)


STUCK = """
from hvdkit.errors import HvdkitError
from hvdkit.launch.agent.main import main
from hvdkit.system.processes import ProcessGroup

def terminate(*_):
    raise HvdkitError("processes [7] did not end")
    yield

ProcessGroup.terminate = terminate
main()
"""


@pytest.mark.parametrize("agent", [STUCK], indirect=True)
def test_a_process_that_sigkill_does_not_end_is_reported(agent):
    agent.start("import os; print(os.environ['HVDKIT_RECORD_DIR'])")
    folder = Path(agent.line().strip())
    assert agent.receive("failed", "done")["reason"] == "processes [7] did not end"
    assert agent.process.wait(timeout=600) == 0
    assert not folder.exists()


def test_an_agent_that_is_busy_does_not_take_its_launcher_for_lost(agent):
    agent.prepare("print('started', flush=True); input()", lost_after=1.5)
    agent.send("ask", question="listen", arguments={"address": "127.0.0.1"})
    target = {"address": "127.0.0.1", "port": agent.receive("answer")["answer"], "seconds": 3}
    agent.send("ask", question="send", arguments=target)
    assert agent.receive("answer")["answer"] > 0
    agent.send("heartbeat")
    agent.start_prepared()
    assert agent.line() == "started\n"


def test_an_agent_says_why_it_ends_without_messages(agent):
    agent.prepare("", lost_after=0.5)
    assert agent.process.wait(timeout=600) == 0
    assert agent.process.stderr.read() == b"no message from the launcher for 0.5 s\n"
