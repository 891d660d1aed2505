"""The rendezvous server: the HTTP server through which the Gloo ranks of a job find each other.

Ranks with hvdkit's engine exchange their addresses per mesh (`hvdkit.rendezvous.mesh`), and send
the job's key. Other engines use the protocol of Horovod's C++ `HTTPStore`: GET, PUT and DELETE of
/scope/key, without a key. The two stores are separate, so a stranger cannot misdirect ranks that
have the key. If all engines of a job send the key, nothing is stored and nothing is read without
it.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from socketserver import TCPServer
from typing import Any, Self, cast
from urllib.parse import urlsplit

from hvdkit.rendezvous.mesh import IncompleteMesh, Meshes, MeshMember
from hvdkit.rendezvous.store import Store

#: The environment variable with the job's key.
KEY = "HVDKIT_RENDEZVOUS_KEY"
#: The first revision of the engine (the Horovod of `hvdkit build`) that sends the key.
KEY_REVISION = 6

# The beginning of the path of a request for a mesh: /mesh/size.attempt.rank.scope.
_MESH_PREFIX = "/mesh/"

#: The limit of one value, in bytes. A rank sends about 150 bytes for every other rank.
_LARGEST_VALUE = 64_000_000
#: The limit of all headers of a request together, in bytes.
_LARGEST_HEAD = 32_768
#: The longest duration of a request, in seconds, if it does not wait for other ranks.
_REQUEST_SECONDS = 60.0
#: The longest time that a rank may wait for other ranks, in seconds.
_LONGEST_WAIT = 7 * 24 * 3600.0
#: The limit of open connections, in addition to two for each rank.
_OTHER_CONNECTIONS = 256
_THREADS_PER_CONNECTION = 4
_CLOSE_SECONDS = 5.0


class _Handler(BaseHTTPRequestHandler):
    """Answer requests of ranks: /mesh/… with the key, /scope/key without."""

    timeout = 10  # seconds without a byte before a connection is dropped
    server: _Server

    def parse_request(self) -> bool:
        """Parse the headers of a request, up to a limit for all of them together."""
        body = self.rfile
        self.rfile = cast(BufferedIOBase, _Head(body))
        try:
            return super().parse_request()
        finally:
            self.rfile = body

    def do_GET(self) -> None:
        if self._is_of_mesh():
            self._get_of_mesh()
            return
        value = self.server.store.get(self.path)
        self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._answer(HTTPStatus.LENGTH_REQUIRED)
            return
        if not _is_number(length, 15) or int(length) > _LARGEST_VALUE:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        if not self._is_of_mesh():
            self._store(int(length))
        elif (member := self._member()) is not None:
            value = self.rfile.read(int(length))
            # A shorter value: the client has disconnected.
            if len(value) == int(length):
                self._put_of_mesh(member, value)

    def _store(self, length: int) -> None:
        """Store a value without the key, if the memory for such values suffices."""
        if not self.server.stores_without_key:
            # Horovod's elastic ranks store an address and a secret. hvdkit does not read them, and
            # strangers must not read them.
            self._discard()
            self._answer(HTTPStatus.OK)
            return
        if not self.server.store.reserve(self.path, length):
            self._answer(HTTPStatus.INSUFFICIENT_STORAGE)
            return
        value = self.rfile.read(length)
        if len(value) < length:
            self.server.store.release(self.path, length)
            return
        self.server.store.put(self.path, value)
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        # A rank deletes its key after all have connected. Otherwise a later init on the same server
        # would read old addresses.
        self.server.store.remove(self.path)
        self._answer(HTTPStatus.OK)

    def _is_of_mesh(self) -> bool:
        return self.server.key is not None and self.path.startswith(_MESH_PREFIX)

    def _put_of_mesh(self, member: MeshMember, value: bytes) -> None:
        try:
            self.server.meshes.put(member, value)
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, str(error).encode())
        else:
            self._answer(HTTPStatus.OK)

    def _get_of_mesh(self) -> None:
        member = self._member()
        if member is None:
            return
        milliseconds = urlsplit(self.path).query
        seconds = int(milliseconds) / 1000 if _is_number(milliseconds, 18) else 0.0
        seconds = min(seconds, _LONGEST_WAIT)
        self.server.allow(self.connection, seconds + _REQUEST_SECONDS)
        try:
            addresses = self.server.meshes.get(member, seconds)
        except LookupError:
            self._answer(HTTPStatus.GONE, b"the server does not know this rank's addresses")
        except IncompleteMesh as error:
            self._answer(HTTPStatus.REQUEST_TIMEOUT, str(error).encode())
        else:
            self.connection.settimeout(_REQUEST_SECONDS)
            self._answer(HTTPStatus.OK, addresses)
            self.server.meshes.mark_answered(member)

    def _member(self) -> MeshMember | None:
        """Return the member in the path. If it or the key is wrong, send an error, return None."""
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
        return MeshMember(scope, int(size), int(rank), attempt)

    def _discard(self) -> None:
        """Read the body, because a client reads no answer before it has sent the body."""
        length = self.headers.get("Content-Length", "")
        left = int(length) if _is_number(length, 15) else 0
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_response(self, code: int, message: str | None = None) -> None:
        """Send the status without a date and the server's name."""
        self.send_response_only(code, message)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: ranks poll, and a line for each request would hide their output."""


class _Head:
    """The headers of a request, of which at most `_LARGEST_HEAD` bytes can be read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = _LARGEST_HEAD

    def readline(self, longest: int) -> bytes:
        """Read a line.

        Raises:
            HTTPException: the lines are too long. The server then answers with status 431.
        """
        line: bytes = self._stream.readline(min(longest, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise HTTPException(f"more than {_LARGEST_HEAD} bytes of headers")
        return line


def _is_number(text: str, digits: int = 9) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits


def _shut_down(connections: Iterable[socket.socket]) -> None:
    """Interrupt reads and writes. The threads of the connections close them."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    """Serve ranks. Limit the connections, their duration, and the values without the key."""

    daemon_threads = True  # the process may exit while ranks wait
    request_queue_size = 4096  # all ranks of a job connect at once

    def __init__(
        self, address: str, port: int, key: str | None, size: int, stores_without_key: bool
    ) -> None:
        self._lock = threading.Lock()
        self.stores_without_key = stores_without_key
        self._most = _OTHER_CONNECTIONS + 2 * size
        self.key = key
        self.meshes = Meshes()
        self.store = Store()
        # The deadline of each open connection.
        self._open: dict[Any, float] = {}
        # The threads of connections, including those that were closed a moment ago.
        self._running = 0
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Bind without a DNS query for this machine's name, which HTTPServer would make."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = self._running >= _THREADS_PER_CONNECTION * self._most
            if not full:
                self._running += 1
                if len(self._open) >= self._most:
                    # Close the slowest request. Ranks that wait for other ranks have later
                    # deadlines.
                    slowest = min(self._open, key=self._open.__getitem__)
                    del self._open[slowest]
                    _shut_down([slowest])
                self._open[request] = time.monotonic() + _REQUEST_SECONDS
        if full:
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            self._running -= 1
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections after their deadline, also those that send a byte now and then."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, end in self._open.items() if end < now]
        _shut_down(late)
        self.meshes.forget()

    def close_connections(self) -> None:
        """Close all connections, and wait a moment for their threads."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                left = list(self._open)
            if not left:
                return
            _shut_down(left)
            time.sleep(0.005)

    def allow(self, request: Any, seconds: float) -> None:
        """Set a connection's deadline to `seconds` from now."""
        with self._lock:
            if request in self._open:
                self._open[request] = time.monotonic() + seconds

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client may disconnect at any time."""


class RendezvousServer:
    """The server through which the Gloo ranks of one job find each other.

    Args:
        address: the address of this machine to listen on; ranks must be able to reach it.
        port: the port to listen on; 0 takes a free one.
        key: the key that ranks with hvdkit's engine must send. Default: a new key. None: the server
            has Horovod's protocol only, so it keeps all values.
        size: the number of the job's ranks, which limits the number of connections.
        stores_without_key: keep values for engines that send no key, before `KEY_REVISION`. Anyone
            can read and replace them.

    Attributes:
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
        stores_without_key: bool = False,
    ) -> None:
        self.address = address
        self.key = secrets.token_hex(16) if key == "" else key
        stores = stores_without_key or key is None
        self._server = _Server(address, port, self.key, size, stores)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name=f"hvdkit-rendezvous-{self.port}",
            daemon=True,
        )
        self._thread.start()

    def registered(self) -> set[int]:
        """Return the ranks that have joined the mesh of all ranks, with the key."""
        return self._server.meshes.registered()

    def without_key(self) -> set[int]:
        """Return the ranks that have registered without the key. They may be strangers."""
        return self._server.store.ranks

    def close(self) -> None:
        """Stop serving and free the port. May be called again."""
        if self._thread.is_alive():
            self._server.meshes.close()
            self._server.shutdown()
            self._thread.join()
            self._server.close_connections()
            self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
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
    """Return the environment variables of a rank in a Gloo job of `size` ranks.

    Args:
        rendezvous_address: the address of the `RendezvousServer`.
        rendezvous_port: its port.
        interface: the network interface of the rank.
        hostname: the name of the rank's host.
        local_rank: the rank on its host; None if all ranks are on one host.
        local_size: the number of ranks on this host; None if all ranks are on one host.
        cross_rank: the number of the host.
        cross_size: the number of hosts.
        key: the key of the `RendezvousServer`; None if it has none.
    """
    variables = {
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
    return variables if key is None else variables | {KEY: key}
