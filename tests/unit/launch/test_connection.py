"""The launcher's connection to an agent."""

import contextlib
import io
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import hvdkit
from hvdkit.launch.control import connection as connection_module
from hvdkit.launch.control import messages, process_connection
from hvdkit.launch.control.agent_pool import AgentPool, unfitness
from hvdkit.launch.control.connection import Connection, Event
from hvdkit.launch.control.process_connection import ProcessConnection
from hvdkit.launch.control.questions import Questions
from hvdkit.launch.control.socket_connection import SocketConnection
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.system.sealed import SealedConnection
from tests.unit.launch.commands import wait_until


class PipeConnection(Connection):
    """A connection over two pipes. The test has the ends of the agent."""

    def __init__(self):
        self.agent_reads, send_fd = os.pipe()
        receive_fd, self.agent_writes = os.pipe()
        self.fd = send_fd
        self.events = queue.Queue()
        sent = io.FileIO(send_fd, "wb", closefd=False)
        super().__init__(Host("h", 1), sent, os.fdopen(receive_fd, "rb"), self.events)

    def _close_input(self):
        os.close(self.fd)


@contextmanager
def a_connection():
    connection = PipeConnection()
    try:
        yield connection
    finally:
        connection.disconnect()
        os.close(connection.agent_reads)
        os.close(connection.agent_writes)
        connection._reader.join(timeout=600)
        connection._writer.join(timeout=600)
        connection._received.close()


def sent(connection, count=-1):
    """Return the messages that an agent has got: the first ones, or all until the end."""
    with os.fdopen(os.dup(connection.agent_reads), "rb") as stream:
        lines = stream.readlines() if count < 0 else [stream.readline() for _ in range(count)]
    return [messages.decode(line) for line in lines]


def received(connection, output):
    """Return the kinds of the messages in an agent's output, and the first of them."""
    os.write(connection.agent_writes, output)
    os.close(connection.agent_writes)
    found = [connection.events.get(timeout=600).message]
    while found[-1]["kind"] != "lost":
        found.append(connection.events.get(timeout=600).message)
    connection.agent_writes = os.open(os.devnull, os.O_WRONLY)
    return [message["kind"] for message in found], found[0]


def test_a_greeting_after_text_without_a_line_end():
    with a_connection() as connection:
        output = b"Welcome\nhi" + messages.GREETING + messages.encode("hello")
        assert received(connection, output)[0] == ["hello", "lost"]


@pytest.mark.parametrize("line", [b"hi", b"5", b"\xff", b"{}", b"[" * 10_000])
def test_a_line_that_is_not_a_message(line):
    with a_connection() as connection:
        output = messages.GREETING + line + b"\n" + messages.encode("done")
        kinds, first = received(connection, output)
    assert kinds == ["failed", "done", "lost"]
    assert f"contains {line[:80]!r}"[:-1] in first["reason"]
    assert "expected a message of the agent" in first["reason"]


def test_an_agent_that_does_not_read_does_not_delay_the_launcher():
    long = "x" * 1_000_000  # more than the pipe holds
    with a_connection() as connection:
        sending = threading.Thread(target=connection.send, args=["task"], kwargs={"text": long})
        sending.start()
        sending.join(timeout=30)
        is_delayed = sending.is_alive()
        connection.send("end")
        kinds = [message["kind"] for message in sent(connection, 2)]
        sending.join(timeout=30)
    assert not is_delayed
    assert kinds == ["task", "end"]


def test_the_last_message_is_sent_before_the_input_is_closed():
    long = "x" * 1_000_000
    with a_connection() as connection:
        connection.send("outcome", text=long)
        connection.disconnect()
        connection.send("task")
        assert sent(connection) == [{"kind": "outcome", "text": long}]


def test_a_signal_handler_that_sends_while_messages_are_sent():
    with a_connection() as connection:
        previous = signal.signal(signal.SIGALRM, lambda *_: connection.send("signal", number=15))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for _ in range(300):
                connection.send("task", text="x" * 100)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        connection.disconnect()
        kinds = [message["kind"] for message in sent(connection)]
    assert kinds.count("task") == 300
    assert set(kinds) <= {"task", "signal"}


def test_an_agent_that_does_not_read_does_not_delay_the_heartbeats_of_others():
    with a_connection() as stopped, a_connection() as other:
        os.set_blocking(stopped.fd, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(stopped.fd, bytes(4096))
        os.set_blocking(stopped.fd, True)
        pool = AgentPool(silence=0.5)
        pool.connections = [other]
        pool.unused = [stopped]
        heartbeats = messages.encode("heartbeat") * 5
        with pool:
            found = b""
            while len(found) < len(heartbeats):
                if not select.select([other.agent_reads], [], [], 30)[0]:
                    break
                found += os.read(other.agent_reads, 1000)
            pool.connections, pool.unused = [], []
            os.read(stopped.agent_reads, 65536)  # with the defect, the pool waits for this
        assert found.startswith(heartbeats)


def test_an_agent_that_does_not_answer_for_some_time(monkeypatch):
    monkeypatch.setattr(connection_module, "_SILENCE_SECONDS", 0.2)
    with a_connection() as connection:

        def answer():
            before = connection.silent_since
            os.write(connection.agent_writes, messages.encode("alive"))
            wait_until(lambda: connection.silent_since != before)

        # No answer is expected before the greeting.
        connection.send_heartbeat()
        time.sleep(0.3)
        assert connection.silence(time.monotonic()) is None
        os.write(connection.agent_writes, messages.GREETING)
        answer()
        connection.send_heartbeat()
        answer()
        assert connection.silence(time.monotonic()) is None
        current = None
        while current is None:
            # Not sent while the thread has not written the one before.
            connection.send_heartbeat()
            time.sleep(0.3)
            current = connection.silence(time.monotonic())
        assert current.seconds >= 0.2
        assert current.ended_at == float("inf")
        answer()
        last = connection.silence(time.monotonic())
        assert last.seconds >= current.seconds
        assert last.ended_at <= time.monotonic()


def test_an_agent_gets_to_know_how_much_of_its_output_was_handled():
    output = messages.encode("output", rank=0, stream="stdout", text="x" * 1000)
    with a_connection() as connection:
        pool = AgentPool(silence=30)
        connection._events = pool.events
        os.write(connection.agent_writes, messages.GREETING + output + messages.encode("done"))
        kinds = [pool.next_event(timeout=600).message["kind"] for _ in range(2)]
        connection.disconnect()
        answers = sent(connection)
    assert kinds == ["output", "done"]
    assert answers == [{"kind": "read", "bytes": len(output)}]


def test_events_of_idle_agents_do_not_end_a_wait():
    with a_connection() as used, a_connection() as idle:
        pool = AgentPool(silence=30)
        pool.connections, pool.unused = [used], [idle]
        pool.events.put(Event(idle, {"kind": "lost"}))
        answer = Event(used, {"kind": "answer", "answer": 5})
        timer = threading.Timer(0.5, pool.events.put, [answer])
        timer.start()
        assert Questions(pool, timeout=30).all("free_port", {}) == {used.host: 5}
        timer.join()


def test_an_agent_that_is_killed_before_the_launcher_uses_its_connection():
    events = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        # The connection is reset.
        agent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        agent.close()
    connection = SocketConnection(Host("h", 1), SealedConnection(accepted, b"key", True), events)
    assert events.get(timeout=600).message == {"kind": "lost"}
    connection.close(timeout=1)


def test_an_agent_that_sigkill_does_not_end_does_not_block(monkeypatch):
    """A process that waits for a disk or a GPU does not end after SIGKILL."""
    monkeypatch.setattr(process_connection, "agent_command", lambda *_: ["sleep", "60"])
    connection = ProcessConnection(Host("localhost", 1), True, Ssh(), "python", queue.Queue())
    with monkeypatch.context() as patched:
        patched.setattr(process_connection, "kill_group", lambda _: None)
        began = time.monotonic()
        connection.close(timeout=0.1)
        assert time.monotonic() - began < 10
    connection.cut()
    connection.close(timeout=5)


def explained(monkeypatch, code):
    """Return the explanation of the end of an ssh. A shell with `code` simulates it."""
    monkeypatch.setattr(process_connection, "agent_command", lambda *_: ["sh", "-c", code])
    events = queue.Queue()
    connection = ProcessConnection(Host("h", 1), False, Ssh(), "python", events)
    try:
        with contextlib.suppress(queue.Empty):
            events.get(timeout=2)
        return connection.explain()
    finally:
        connection.cut()
        connection.close(timeout=5)


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (255, "Timeout, server h not responding.", "the host does not answer; check its network"),
        (255, "Connection to h closed by remote host.", "the ssh connection has ended; check the"),
        (255, "", "its agent was killed there, for example because the memory of the host"),
        (-9, "", "its ssh on this machine was killed by signal 9 (Killed); check what killed it"),
        (1, "RuntimeError: x", "its agent ended with status 1: RuntimeError: x"),
        (0, "got SIGTERM", "its agent ended with status 0: got SIGTERM"),
        (None, "", "its agent has not ended; check whether the process is stopped"),
    ],
)  # fmt: skip
def test_the_end_of_an_agent_that_had_started_is_not_explained_as_a_login(
    monkeypatch, status, said, expected
):
    end = "sleep 30" if status is None else f"exit {status}" if status >= 0 else f"kill {status} $$"
    code = f"printf '{messages.GREETING.decode()}'; echo '{said}' >&2; {end}"
    text = explained(monkeypatch, code)
    assert text.startswith(expected)
    assert "by hand" not in text


def test_what_a_login_writes_to_standard_output_is_shown(monkeypatch):
    text = explained(monkeypatch, "echo This account is currently not available.; exit 1")
    assert text.startswith("ssh ended with status 1; try `ssh ")
    assert text.endswith("(This account is currently not available.)")


def test_an_agent_that_ends_after_its_answer_cannot_take_part():
    """It got SIGTERM while the launcher waited for another host."""
    with a_connection() as ended, a_connection() as other:
        pool = AgentPool(silence=30)
        pool.connections = [ended, other]
        python = ".".join(map(str, sys.version_info[:3]))
        versions = {"python": python, "hvdkit": hvdkit.__version__}
        hello = {"kind": "hello", "reached_at": None, "problems": [], **versions}
        gone = {"kind": "failed", "reason": "it has ended"}
        for each, message in ((ended, hello), (ended, gone), (other, hello)):
            pool.events.put(Event(each, message))
        facts, problems = pool.collect_facts({}, timeout=30)
        assert [*facts] == [other]
        assert problems == {ended: "it has ended"}


def test_a_host_with_another_python_cannot_take_part():
    facts = {"python": "3.99.0", "hvdkit": hvdkit.__version__, "problems": []}
    assert unfitness(facts)[0].startswith("it has Python 3.99.0, but the launcher has 3.")


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_a_node_has_an_effect_on_a_launcher_that_ignores_it(number, unused):
    """A launcher in the background of a script ignores SIGINT, and under nohup SIGHUP."""
    got = []
    before = [(n, signal.getsignal(n)) for n in (number, signal.SIGTERM)]
    signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda n, _: got.append(n))
    try:
        with a_connection() as connection:
            pool = AgentPool(silence=30)
            # The node may have no ranks, because the job continues without it.
            pool.unused = [connection] if unused else []
            pool.events.put(Event(connection, {"kind": "signal", "number": int(number)}))
            assert pool.next_event(0) is None
    finally:
        for each, handler in before:
            signal.signal(each, handler)
    assert got == [signal.SIGTERM]
