"""The HTTP server through which the Gloo ranks of one job find each other.

Ranks with hvdkit's engine exchange their addresses mesh by mesh (`hvdkit.mesh`), and show the job's
key. Other engines use the protocol of Horovod's C++ `HTTPStore`: GET, PUT and DELETE of /scope/key.
What they store there is kept apart, so a stranger cannot lead ranks that have the key astray.
"""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from hvdkit.mesh import GLOBAL_SCOPE, Incomplete, Meshes, Place

#: Has the job's key, in the environment of its ranks.
KEY = "HVDKIT_RENDEZVOUS_KEY"

# Followed by size.attempt.rank.scope.
_MESH_PREFIX = "/mesh/"

#: Bytes. A rank's value has an address of some 140 bytes for every other rank.
_LARGEST_VALUE = 64_000_000
#: Bytes of all values together that are stored without the key.
_LARGEST_STORE = 1_000_000_000
#: Seconds from the begin to the end of a request.
_REQUEST_SECONDS = 60.0
#: Seconds that a rank may wait for the others.
_LONGEST_WAIT = 7 * 24 * 3600.0
#: Connections at once, besides two for each rank.
_OTHER_CONNECTIONS = 256
_CUT_SECONDS = 5.0


class _Handler(BaseHTTPRequestHandler):
    """Answers to ranks: /mesh/… to those that have the key, /scope/key to all."""

    timeout = 10  # seconds without a byte after which a connection is dropped
    server: _Server

    def do_GET(self) -> None:
        if self._is_of_mesh():
            self._get_of_mesh()
            return
        with self.server.lock:
            value = self.server.values.get(self.path)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._answer(HTTPStatus.LENGTH_REQUIRED)
            return
        if int(length) > _LARGEST_VALUE:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        if not self._is_of_mesh():
            self._store(int(length))
        elif (place := self._place()) is not None:
            value = self.rfile.read(int(length))
            # Else the client has gone amid its value.
            if len(value) == int(length):
                self._put_of_mesh(place, value)

    def _store(self, length: int) -> None:
        """Keep the value of one who does not show the key, within the memory for all."""
        if not self.server.reserve(len(self.path) + length):
            self._answer(HTTPStatus.INSUFFICIENT_STORAGE)
            return
        value = self.rfile.read(length)
        if len(value) < length:
            self.server.release(len(self.path) + length)
            return
        self.server.store(self.path, value)
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        # Each rank deletes its own key once all have connected, so that a later init on the same
        # server cannot read the addresses of this one.
        self.server.remove(self.path)
        self._answer(HTTPStatus.OK)

    def _is_of_mesh(self) -> bool:
        return self.server.key is not None and self.path.startswith(_MESH_PREFIX)

    def _put_of_mesh(self, place: Place, value: bytes) -> None:
        try:
            self.server.meshes.put(place, value)
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, str(error).encode())
        else:
            self._answer(HTTPStatus.OK)

    def _get_of_mesh(self) -> None:
        place = self._place()
        if place is None:
            return
        milliseconds = urlsplit(self.path).query
        seconds = int(milliseconds) / 1000 if _is_number(milliseconds, 18) else 0.0
        seconds = min(seconds, _LONGEST_WAIT)
        self.server.allow(self.connection, seconds + _REQUEST_SECONDS)
        try:
            addresses = self.server.meshes.get(place, seconds)
        except LookupError:
            self._answer(HTTPStatus.GONE, b"the server does not know this rank's addresses")
        except Incomplete as error:
            self._answer(HTTPStatus.REQUEST_TIMEOUT, str(error).encode())
        else:
            self.connection.settimeout(_REQUEST_SECONDS)
            self._answer(HTTPStatus.OK, addresses)
            self.server.meshes.left(place)

    def _place(self) -> Place | None:
        """Return the place that the path names, for one who has the key; else answer."""
        given = self.headers.get("Authorization", "").encode("latin-1", errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):
            self._discard()
            self._answer(HTTPStatus.FORBIDDEN, f"this is not the job's key ({KEY})".encode())
            return None
        named = urlsplit(self.path).path.removeprefix(_MESH_PREFIX)
        size, attempt, rank, scope = (named.split(".", 3) + [""] * 3)[:4]
        if not (_is_number(size) and _is_number(rank) and int(size) > 1 and attempt and scope):
            self._discard()
            self._answer(HTTPStatus.BAD_REQUEST)
            return None
        return Place(scope, int(size), int(rank), attempt)

    def _discard(self) -> None:
        """Read the body. A client that is still sending would not read the answer."""
        left = int(self.headers.get("Content-Length", "0"))
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Send the status alone, without a date and the server's name."""
        self.send_response_only(code, message)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: ranks poll for keys, a line each time would drown their own output."""


def _is_number(text: str, digits: int = 9) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits


def _hang_up(connections: Iterable[socket.socket]) -> None:
    """Let what reads or writes there end at once; the connection's thread closes it."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    """Serves ranks, and bounds what a stranger can take: connections, their length, memory."""

    daemon_threads = True  # the process may end while ranks wait; `cut` ends them otherwise
    request_queue_size = 4096  # all ranks of a job connect at once

    def __init__(self, address: str, port: int, key: str | None, size: int) -> None:
        self.lock = threading.Lock()
        self._most = _OTHER_CONNECTIONS + 2 * size
        self._stored = 0
        self.key = key
        self.meshes = Meshes()
        self.values: dict[str, bytes] = {}
        self.seen: set[int] = set()
        # Of each open connection, when it is cut.
        self._open: dict[Any, float] = {}
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking a name server for this machine's name as HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            full = len(self._open) >= self._most
            if not full:
                self._open[request] = time.monotonic() + _REQUEST_SECONDS
        if full:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections that have taken too long, which a client keeps alive byte by byte."""
        now = time.monotonic()
        with self.lock:
            late = [request for request, end in self._open.items() if end < now]
        _hang_up(late)
        self.meshes.forget()

    def cut(self) -> None:
        """End all connections, and wait a moment until their threads have ended."""
        deadline = time.monotonic() + _CUT_SECONDS
        while time.monotonic() < deadline:
            with self.lock:
                left = list(self._open)
            if not left:
                return
            _hang_up(left)
            time.sleep(0.005)

    def allow(self, request: Any, seconds: float) -> None:
        """Let a connection stay open for so long from now on."""
        with self.lock:
            self._open[request] = time.monotonic() + seconds

    def reserve(self, length: int) -> bool:
        """Reserve memory for a value and its path; return whether there is enough."""
        with self.lock:
            fits = self._stored + length <= _LARGEST_STORE
            if fits:
                self._stored += length
        return fits

    def release(self, length: int) -> None:
        """Give back what was reserved."""
        with self.lock:
            self._stored -= length

    def store(self, path: str, value: bytes) -> None:
        """Keep a value for which memory was reserved."""
        self.remove(path)
        rank = path.removeprefix(f"/{GLOBAL_SCOPE}/")
        with self.lock:
            self.values[path] = value
            if _is_number(rank, 6):
                self.seen.add(int(rank))

    def remove(self, path: str) -> None:
        """Forget a value."""
        with self.lock:
            value = self.values.pop(path, None)
            if value is not None:
                self._stored -= len(path) + len(value)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that has gone is its own affair."""


class RendezvousServer:
    """The server through which the Gloo ranks of one job find each other.

    Args:
        address: the address of this machine to listen on; ranks must be able to reach it.
        port: where to listen; 0 takes a free one.
        key: what ranks show for the quick exchange; default a new one, None where there is none.
        size: the number of the job's ranks, which bounds the number of connections.

    Attributes:
        address: where it listens.
        port: likewise.
        key: the key of the job, for `gloo_environment`.

    Example:
        with RendezvousServer("10.0.0.1") as server:
            print(server.port)
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        key: str | None = "",
        size: int = 64,
    ) -> None:
        self.address = address
        self.key = secrets.token_hex(16) if key == "" else key
        self._server = _Server(address, port, self.key, size)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name=f"hvdkit-rendezvous-{self.port}",
            daemon=True,
        )
        self._thread.start()

    def registered(self) -> set[int]:
        """Return the ranks that have come to the job's first mesh, and have shown the key."""
        return self._server.meshes.registered()

    def without_key(self) -> set[int]:
        """Return the ranks that have come without the key, or strangers that say that they are."""
        with self._server.lock:
            return set(self._server.seen)

    def close(self) -> None:
        """Stop serving and free the port. May be called again."""
        if self._thread.is_alive():
            self._server.meshes.close()
            self._server.shutdown()
            self._thread.join()
            self._server.cut()
            self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def gloo_environment(
    rank: int,
    size: int,
    rendezvous_address: str,
    rendezvous_port: int,
    interface: str = "lo",
    hostname: str = "localhost",
    local_rank: int | None = None,
    local_size: int | None = None,
    cross_rank: int = 0,
    cross_size: int = 1,
    key: str | None = None,
) -> dict[str, str]:
    """Return the variables that tell a process its place in a Gloo job of `size` ranks.

    Without `local_rank` and `local_size` all ranks are taken to be on one host. `key` is the
    server's.
    """
    place = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "HOROVOD_LOCAL_SIZE": str(size if local_size is None else local_size),
        "HOROVOD_CROSS_RANK": str(cross_rank),
        "HOROVOD_CROSS_SIZE": str(cross_size),
        "HOROVOD_HOSTNAME": hostname,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous_port),
    }
    return place if key is None else place | {KEY: key}


def main() -> None:
    """`python -m hvdkit.rendezvous ADDRESS PORT`: serve ranks that are started by hand.

    They show a key where the environment has one (HVDKIT_RENDEZVOUS_KEY).
    """
    address, port = sys.argv[1:]
    with RendezvousServer(address, int(port), os.environ.get(KEY), size=1024):
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
