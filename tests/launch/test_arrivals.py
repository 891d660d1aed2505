import contextlib
import os
import socket
import time

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch import messages
from hvdkit.launch.agents import Agents
from hvdkit.launch.arrivals import Door, Starter, let_in
from hvdkit.launch.hosts import Host
from hvdkit.launch.plan import make_plan


@pytest.fixture
def door():
    opened = Door("127.0.0.1", 2)
    yield opened
    opened.close()


def token(door):
    return door.variables()[messages.TOKEN_VARIABLE]


def knock(door, said):
    with socket.create_connection(door.at, timeout=5) as line:
        with contextlib.suppress(OSError):  # the door may close as soon as it has read enough
            line.sendall(said)
            line.shutdown(socket.SHUT_WR)
        found = door.accept()
        if found is not None:
            found[1].close()
        return found and found[0]


def test_who_has_the_token_comes_in(door):
    assert knock(door, f"{token(door)} 1\n".encode()) == 1


def test_who_says_nothing_is_not_waited_for(door):
    with socket.create_connection(door.at, timeout=5) as silent:
        silent.sendall(token(door).encode())  # and no more
        began = time.monotonic()
        assert knock(door, f"{token(door)} 0\n".encode()) == 0
        assert time.monotonic() - began < 4


def test_a_rank_that_the_job_does_not_have(door):
    assert knock(door, f"{token(door)} 2\n".encode()) is None


@pytest.mark.parametrize("said", [b"", b"wrong 1\n", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 500])
def test_nobody_else_does(door, said):
    assert knock(door, said) is None


def test_agents_hear_of_the_launcher_while_others_are_missing(door, monkeypatch):
    """An agent that hears of the launcher waits longer than LOST_SECONDS."""
    monkeypatch.setattr(messages, "ALIVE_SECONDS", 0.05)
    plan = make_plan(["true"], "/", [Host("localhost", 2)], 2)
    running = Starter("sleep", ["sleep", "3"], dict(os.environ), print)
    try:
        with Agents() as agents, socket.create_connection(door.at, timeout=5) as line:
            line.sendall(f"{token(door)} 0\n".encode())
            with pytest.raises(HvdkitError, match="rank 1 on localhost did not come up within 1.5"):
                let_in(agents, door, running, plan, timeout=1.5)
            assert line.recv(10_000).count(b'"alive"') >= 3
    finally:
        running.end()
