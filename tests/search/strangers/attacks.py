"""Attacks of strangers on the ports of a job on this machine: bytes, requests, connections."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

_SECONDS = 2.0
_READ = 65_536
_LOOPBACK = "127.0.0.1"

#: Requests and messages of ranks, agents and nodes, without a valid key.
VALID = [
    b"PUT /mesh/2.%(hex)s.0.global HTTP/1.1\r\nAuthorization: Bearer %(hex)s\r\n"
    b"Content-Length: 140\r\n\r\n" + b"x" * 140,
    b"GET /mesh/2.%(hex)s.1.global?1000 HTTP/1.1\r\nAuthorization: Bearer %(hex)s\r\n\r\n",
    b"PUT /global/0 HTTP/1.0\r\nContent-Length: 20\r\n\r\n" + b"y" * 20,
    b"GET /global/0 HTTP/1.0\r\n\r\n",
    b"DELETE /global/1 HTTP/1.0\r\n\r\n",
    b"%(hex)s 0\n",
    b'{"nonce": "%(hex)s", "proof": "%(hex)s", "node": 1, "nodes": 2, "size": 2, '
    b'"hostname": "x", "slots": 1, "machine": "y"}\n',
    b'{"kind":"start","ranks":[],"size":2}\n',
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93.",  # a pickle
    b"\x01\x00\x00\x00\x00\x00\x00\x00",  # the number of a connection, as Gloo sends it
]


@dataclass
class Strangers:
    """Clients that attack the ports of a job.

    Args:
        ports: the ports on 127.0.0.1.
        seed: of the random choices.

    Attributes:
        counts: attack -> how often.
        answers: the first line of each answer -> how often.
    """

    ports: Sequence[int]
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    answers: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._guard = threading.Lock()

    def attack(self, name: str) -> None:
        """Make one attack, at a random port."""
        with self._guard:
            self.counts[name] += 1
            port = self._draw.choice(self.ports)
            data = self._data(name)
        if name == "slow client":
            self._send_slowly(port, data)
        elif name == "many connections":
            self._connect(port)
        else:
            self._send(port, data)

    def run(self, seconds: float, kinds: Iterable[str] = (), threads: int = 4) -> None:
        """Attack for some seconds, in some threads."""
        names = list(kinds) or [name for name in ATTACKS if name != "many connections"]
        deadline = time.monotonic() + seconds

        def loop(number: int) -> None:
            draw = random.Random(self.seed + number)
            while time.monotonic() < deadline:
                self.attack(draw.choice(names))

        workers = [threading.Thread(target=loop, args=(i,), daemon=True) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def hold(self, count: int, seconds: float) -> int:
        """Open many connections to all ports, hold them, and return how many were accepted."""
        with contextlib.ExitStack() as stack:
            accepted = 0
            for number in range(count):
                port = self.ports[number % len(self.ports)]
                with contextlib.suppress(OSError):
                    line = socket.create_connection((_LOOPBACK, port), timeout=_SECONDS)
                    stack.enter_context(line)
                    accepted += 1
            self.counts["held connections"] += accepted
            time.sleep(seconds)
        return accepted

    def _data(self, name: str) -> bytes:
        return ATTACKS[name](self._draw)

    def _send(self, port: int, data: bytes) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((_LOOPBACK, port), timeout=_SECONDS) as line,
        ):
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            answer = line.recv(_READ)
            with self._guard:
                self.answers[answer.partition(b"\r\n")[0][:80]] += 1

    def _send_slowly(self, port: int, data: bytes) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((_LOOPBACK, port), timeout=_SECONDS) as line,
        ):
            for position in range(min(len(data), 10)):
                line.sendall(data[position : position + 1])
                time.sleep(0.1)

    def _connect(self, port: int) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((_LOOPBACK, port), timeout=_SECONDS).close()


def _request(draw: random.Random) -> bytes:
    text = draw.choice(VALID)
    return text.replace(b"%(hex)s", b"%032x" % draw.getrandbits(128))


def _mutated(draw: random.Random) -> bytes:
    data = bytearray(_request(draw))
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at : at + draw.randint(1, 20)]
                data = data or bytearray(b"x")
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 40))
            case 3:
                data[at:at] = data[at : at + 20] * draw.choice([2, 50, 400])
    return bytes(data)


def _huge_header(draw: random.Random) -> bytes:
    line = b"X-%d: " % draw.randrange(10) + b"a" * draw.choice([100, 60_000, 200_000]) + b"\r\n"
    return b"GET /global/0 HTTP/1.0\r\n" + line * draw.choice([1, 20, 200])


def _half(draw: random.Random) -> bytes:
    data = _request(draw)
    return data[: draw.randrange(len(data))]


#: Attack -> returns what is sent.
ATTACKS: Mapping[str, Callable[[random.Random], bytes]] = {
    "random bytes": lambda draw: draw.randbytes(draw.choice([1, 8, 100, 10_000])),
    "half a request": _half,
    "huge header": _huge_header,
    "wrong key": _request,
    "mutated request": _mutated,
    "slow client": _request,
    "many connections": lambda draw: b"",
}


def ports_of(pids: Iterable[int]) -> dict[int, int]:
    """Return the TCP ports on which these processes listen, and the process of each."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found[connection.laddr.port] = pid
    return found
