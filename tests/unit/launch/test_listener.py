import contextlib
import errno
import os
import socket
import threading
import time

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import messages
from hvdkit.launch.control.listener import AgentListener, Listener
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.launchers.external import agents_started_by
from hvdkit.system.sealed import Refused, SealedConnection, WrongKey, introduce
from tests.unit.launch.commands import wait_until


@pytest.fixture
def listener():
    listener = AgentListener("127.0.0.1", 2)
    yield listener
    listener.close()


def token(listener):
    return listener.variables()[messages.TOKEN_VARIABLE]


def connected(listener, rank, given=""):
    """Connect as the agent of `rank`, with the token or another one."""
    connection = socket.create_connection(listener.address, timeout=20)
    try:
        return introduce(connection, (given or token(listener)).encode(), {"rank": rank}, 20)
    except BaseException:
        connection.close()
        raise


def accepted_rank(listener, rank):
    """Connect as the agent of `rank`; return the rank that the listener accepts."""
    with connected(listener, rank):
        accepted, connection = listener.accept()
        connection.close()
        return accepted


def test_an_agent_that_does_not_know_the_token(listener):
    with pytest.raises(WrongKey):
        connected(listener, 1, "0" * 32)
    assert listener.accept() is None


@pytest.mark.parametrize(
    ("silence", "expected"), [(6.0, [6000, 2, 2, 3]), (1e9, [2147483647, 32767, 32767, 3])]
)
def test_the_connection_of_a_host_that_does_not_answer_ends(silence, expected):
    """`silence` is in seconds, and one of the system's options in milliseconds."""
    listener = AgentListener("127.0.0.1", 1, silence=silence)
    try:
        with connected(listener, 0):
            _, accepted = listener.accept()
            with accepted:
                names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
                options = [getattr(socket, name) for name in names]
                values = [accepted.socket.getsockopt(socket.IPPROTO_TCP, each) for each in options]
                assert values == expected
                assert accepted.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    finally:
        listener.close()


def test_an_agent_is_accepted_while_strangers_hold_many_connections(listener):
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(listener.address, timeout=5))
        assert accepted_rank(listener, 1) == 1


def test_strangers_of_one_host_displace_no_agent_of_another(listener):
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(
            socket.create_connection(listener.address, timeout=20, source_address=("127.0.0.2", 0))
        )
        for _ in range(200):
            stack.enter_context(socket.create_connection(listener.address, timeout=5))
        wait_until(lambda: len(listener._checked) == listener._most)
        introduce(agent, token(listener).encode(), {"rank": 1}, 20)
        rank, connection = listener.accept()
        stack.enter_context(connection)
        assert rank == 1


def permit_no_threads(patched):
    def start(thread):
        raise RuntimeError("can't start new thread")

    patched.setattr(threading.Thread, "start", start)


def permit_no_files(patched):
    def accept(server):
        raise OSError(errno.EMFILE, "Too many open files")

    patched.setattr(socket.socket, "accept", accept)


@pytest.mark.parametrize("forbid", [permit_no_threads, permit_no_files])
def test_agents_are_accepted_after_an_error_of_the_system(listener, monkeypatch, forbid):
    with monkeypatch.context() as patched:
        forbid(patched)
        for _ in range(3):  # the call that waits for the first one is not patched
            with socket.create_connection(listener.address, timeout=5):
                assert listener.accept() is None
        threads = forbid is permit_no_threads
        assert ("may start no more processes and threads" in listener.problem) == threads
    assert accepted_rank(listener, 1) == 1


def test_an_agent_whose_connection_is_closed_while_it_authenticates():
    """The caller registers the agent, finds that it is lost, and permits it to connect again."""
    server = socket.create_server(("127.0.0.1", 0))
    begun, may_end = threading.Event(), threading.Event()

    def authenticate(connection):
        if begun.is_set():
            connection.recv(1)
            return None
        begun.set()
        may_end.wait(20)
        return "agent", SealedConnection(connection, b"key", listens=True)

    listener = Listener(server, 0, authenticate)
    try:
        with contextlib.ExitStack() as stack:
            agent = stack.enter_context(socket.create_connection(server.getsockname(), timeout=20))
            assert begun.wait(20)
            for _ in range(64):
                stack.enter_context(socket.create_connection(server.getsockname(), timeout=20))
            assert agent.recv(1) == b""
            may_end.set()
            name, connection = wait_until(listener.accept)
            with connection:
                assert (name, connection.read(1)) == ("agent", b"")
    finally:
        may_end.set()
        listener.close()


def test_nobody_stays_connected_after_the_end():
    """An agent starts ranks after that, which is safe only without threads, also slow ones."""
    began = threading.Event()

    def authenticate(connection):
        began.set()
        connection.recv(1)
        time.sleep(1.2)

    server = socket.create_server(("127.0.0.1", 0))
    before = threading.active_count()
    listener = Listener(server, 0, authenticate)
    with socket.create_connection(server.getsockname(), timeout=20) as stranger:
        assert began.wait(20)
        listener.close()
        assert threading.active_count() == before
        assert stranger.recv(1) == b""


def test_a_rank_out_of_range(listener):
    with pytest.raises(Refused, match="it is rank 2 of 2"):
        connected(listener, 2)
    assert listener.accept() is None


@pytest.mark.parametrize("data", [b"", b"wrong 1\n", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 500])
def test_strangers_are_refused(listener, data):
    with socket.create_connection(listener.address, timeout=5) as connection:
        with contextlib.suppress(OSError):  # the listener may have refused it already
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        assert listener.accept() is None


@contextlib.contextmanager
def mpirun(listener, code, size=1, timeout=10.0, name="mpirun", host="localhost", **options):
    """Context with the agents that a shell with this code starts; it stands for mpirun or srun.

    Yield them.
    """
    plan = make_plan(["true"], "/", [Host(host, size)], size)
    command = (name, ["sh", "-c", code], dict(os.environ))
    with agents_started_by(*command, listener, plan, timeout, **options) as agents:
        yield agents


@pytest.mark.long
def test_agents_get_heartbeats_while_others_are_missing(listener, monkeypatch):
    """Otherwise agents would take the launcher for lost after LOST_SECONDS."""
    monkeypatch.setattr(messages, "HEARTBEAT_SECONDS", 0.05)
    with connected(listener, 0) as connection:
        with (
            pytest.raises(HvdkitError, match="rank 1 on localhost did not connect within 1.5"),
            mpirun(listener, "sleep 3", size=2, timeout=1.5),
        ):
            pytest.fail("not all agents are connected")
        assert connection.read(10_000).count(b'"heartbeat"') >= 3


def test_a_step_that_waits_for_another_step_of_the_allocation(listener):
    error = r"no other step uses the allocation \(`squeue --steps`"
    with (
        pytest.raises(StartError, match=error) as caught,
        mpirun(listener, "sleep 3", timeout=0.5, name="srun"),
    ):
        pytest.fail("no agent is connected")
    assert caught.value.hosts == ["localhost"]


@pytest.mark.parametrize(
    ("holds", "explained", "shown"),
    [(True, True, False), (True, False, True), (False, True, True)],
)
def test_messages_of_mpirun_after_the_end_of_an_agent(listener, holds, explained, shown, said):
    """Those of srun, with `holds` False, may tell that a process used too much memory."""
    with (
        connected(listener, 0) as connection,
        mpirun(listener, "sleep 0.5; echo late", holds=holds) as agents,
    ):
        agents.external.explained = explained
        connection.close()
        (lost,) = agents.connections
        assert "check whether the process or mpirun was killed" in lost.explain()
        lost._error = OSError(errno.EHOSTUNREACH, "No route to host")
        assert lost.explain().startswith("the host does not answer")
    assert said == (["mpirun: late"] if shown else [])


@pytest.mark.parametrize(
    ("name", "expected", "is_lost"),
    [
        ("localhost", "the host does not answer; check its network, and whether it was", True),
        ("localhost.lab", "mpirun has lost a host, and has ended its agents; check the", False),
    ],
)
def test_a_host_that_the_ssh_of_mpirun_has_lost(listener, name, expected, is_lost):
    line = f"Timeout, server {name} not responding."
    with (
        connected(listener, 0) as connection,
        mpirun(listener, f"echo '{line}'; sleep 1", host="me@localhost") as agents,
    ):
        (lost,) = agents.connections
        connection.close()
        wait_until(lost._lost_line)
        assert lost.explain().startswith(expected)
        assert lost.explain().endswith(f"(mpirun: {line})")
        assert lost.lost_host() == is_lost


def test_messages_of_mpirun_after_a_signal_during_the_start(listener, said):
    """Agents that start after the signal cannot connect. mpirun would describe this at length."""
    plan = make_plan(["true"], "/", [Host("localhost", 1)], 1)
    ready = "echo before; sleep 1; kill -INT $PPID; sleep 1; echo 'agent 0 has failed'"
    command = ("mpirun", ["sh", "-c", ready], dict(os.environ))
    with (
        pytest.raises(KeyboardInterrupt),
        agents_started_by(*command, listener, plan, 10, holds=True),
    ):
        pytest.fail("no agent has connected")
    assert said == ["mpirun: before"]
