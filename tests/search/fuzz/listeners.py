"""The listeners that are fuzzed, and how an own client finds that they still serve."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.search.fuzz.limits import MOST_MEMORY
from tests.search.fuzz.mutations import mutated
from tests.search.strangers.attacks import ATTACKS, VALID
from tests.unit.checkpoint.s3_server import free_port

LOOPBACK = "127.0.0.1"
#: The most seconds in which a listener answers an own client, whatever strangers do.
ANSWER_SECONDS = 5.0
# Python starts within so many seconds, also on a busy machine.
_START_SECONDS = 30.0

#: Requests of Prometheus, in addition to those of ranks, agents and nodes.
SEEDS: Sequence[bytes] = (
    *(each.replace(b"%(hex)s", b"0" * 32) for each in VALID),
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\n\r\n",
    b"GET /metrics?name[]=x HTTP/1.1\r\nAccept: application/openmetrics-text;version=1e9\r\n\r\n",
    b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"PUT /global/0 HTTP/1.0\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    b"[" * 9_000 + b"\n",
    b"9" * 9_000 + b" 0\n",
)


@dataclass(frozen=True)
class Listening:
    """A listener.

    Attributes:
        port: its port, on this machine.
        check: raises an AssertionError or OSError if it does not serve an own client.
    """

    port: int
    check: Callable[[], None]


@contextlib.contextmanager
def rendezvous(folder: Path) -> Iterator[Listening]:
    """The rendezvous of ranks over Gloo."""
    from hvdkit.rendezvous.server import RendezvousServer

    with RendezvousServer() as server:

        def ask(method: str, rank: int, name: str, wait: str = "", value: bytes = b"") -> bytes:
            line = http.client.HTTPConnection(LOOPBACK, server.port, timeout=ANSWER_SECONDS)
            try:
                key = {"Authorization": f"Bearer {server.key}"}
                line.request(method, f"/mesh/2.{name}.{rank}.global{wait}", value, key)
                answer = line.getresponse()
                assert answer.status == 200, answer.status
                return answer.read()
            finally:
                line.close()

        def check() -> None:
            name = secrets.token_hex(4)
            for rank in range(2):
                ask("PUT", rank, name, value=b"rank-%d" % rank)
            assert ask("GET", 1, name, "?1000").endswith(b"rank-0")
            assert server.registered() == {0, 1}

        yield Listening(server.port, check)


@contextlib.contextmanager
def agents(folder: Path) -> Iterator[Listening]:
    """The port of the launcher for the agents of mpirun and srun."""
    from hvdkit.launch.control.listener import AgentListener

    listener = AgentListener(LOOPBACK, 2)

    def check() -> None:
        # A real agent, which connects as mpirun's.
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "hvdkit.launch.agent.main"],
            env={**os.environ, **listener.variables(), "OMPI_COMM_WORLD_RANK": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _START_SECONDS + ANSWER_SECONDS
            while (found := listener.accept()) is None:
                assert time.monotonic() < deadline
            assert found[0] == 1
            found[1].close()
            assert not listener.problem
        finally:
            agent.kill()
            agent.wait(30)

    try:
        yield Listening(listener.address[1], check)
    finally:
        listener.close()


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[Listening]:
    """The metrics of a training."""
    from hvdkit.monitor import PrometheusLogger
    from tests.unit.monitor.simulated import record

    logger = PrometheusLogger(port=0)
    logger.open()
    logger.log(record(loss=(0.5, 0.6)))

    def check() -> None:
        line = http.client.HTTPConnection(LOOPBACK, logger.port, timeout=ANSWER_SECONDS)
        try:
            line.request("GET", "/metrics")
            answer = line.getresponse()
            assert answer.status == 200
            assert b"hvdkit_steps" in answer.read()
        finally:
            line.close()

    try:
        yield Listening(logger.port, check)
    finally:
        logger.close()


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Listening]:
    """Node 0 of `hvdkit run --nodes`. At the end, node 1 joins, and the job succeeds."""
    port, key = free_port(), secrets.token_hex(16)

    def node(number: int) -> subprocess.Popen[bytes]:
        arguments = ["--nodes", "2", "--node-rank", str(number), "--rdzv", f"localhost:{port}"]
        return subprocess.Popen(
            [sys.executable, "-m", "hvdkit", "run", *arguments, "-np", "2", "true"],
            env={**os.environ, "HVDKIT_JOB_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=(folder / f"node-{number}").open("wb"),
            stderr=subprocess.STDOUT,
        )

    first = node(0)
    others: list[subprocess.Popen[bytes]] = []
    try:
        memory = psutil.Process(first.pid).memory_info
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((LOOPBACK, port), timeout=1).close()
                break
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.1)
        before = memory().rss

        def check() -> None:
            assert first.poll() is None, (folder / "node-0").read_text()
            assert memory().rss - before < MOST_MEMORY

        yield Listening(port, check)
        others.append(node(1))
        assert [each.wait(90) for each in (first, *others)] == [0, 0], (
            folder / "node-0"
        ).read_text()
    finally:
        for each in (first, *others):
            each.kill()
            each.wait(30)


#: All listeners, by name.
LISTENERS = {
    "rendezvous": rendezvous,
    "agents": agents,
    "prometheus": prometheus,
    "nodes": nodes,
}


def drawn(draw: random.Random) -> bytes:
    """Return what a stranger sends."""
    if draw.random() < 0.3:
        names = [name for name in ATTACKS if name != "many connections"]
        return ATTACKS[draw.choice(names)](draw)
    return mutated(draw, SEEDS)


def send(port: int, data: bytes, held: list[socket.socket], draw: random.Random) -> None:
    """Send an input: at once or in pieces. Some connections stay open, without an end."""
    with contextlib.suppress(OSError):
        line = socket.create_connection((LOOPBACK, port), timeout=ANSWER_SECONDS)
        line.settimeout(0.05)
        held.append(line)
        with contextlib.suppress(OSError):
            middle = draw.randint(0, len(data))
            line.sendall(data[:middle])
            line.sendall(data[middle:])
            line.shutdown(draw.choice([socket.SHUT_WR, socket.SHUT_RDWR]))
            line.recv(65_536)
    # At most 100 connections are open at a time.
    while held and (len(held) > 100 or draw.random() < 0.9):
        held.pop(draw.randrange(len(held))).close()
