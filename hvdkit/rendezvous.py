"""How the Gloo ranks of one job find each other: a small key-value server.

Horovod's launcher has one of its own, in a package that loads much else; this one speaks the same
protocol, which Horovod's C++ `HTTPStore` defines: GET, PUT and DELETE of /scope/key.
"""

import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Self

#: Where each rank of a job puts its address first of all, under its rank.
_GLOBAL_SCOPE = "/global/"

#: Bytes. A rank's value has an address of some 140 bytes for every other rank.
_LARGEST_VALUE = 64_000_000
#: Seconds from the begin to the end of a request.
_REQUEST_SECONDS = 60.0
_MOST_CONNECTIONS = 4096


class _KeyValueHandler(BaseHTTPRequestHandler):
    """GET, PUT and DELETE of /scope/key, as Horovod's C++ HTTPStore asks for them."""

    timeout = 10  # seconds without a byte after which a connection is dropped
    server: "_KeyValueServer"

    def do_GET(self) -> None:
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
        value = self.rfile.read(int(length))
        if len(value) < int(length):
            return  # the client has gone amid its value
        with self.server.lock:
            self.server.values[self.path] = value
            self.server.seen.add(self.path)
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        # Each rank deletes its own key once all have connected, so that a later init on the same
        # server cannot read the addresses of this one.
        with self.server.lock:
            self.server.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: ranks poll for keys, a line each time would drown their own output."""


class _KeyValueServer(ThreadingHTTPServer):
    """Serves ranks, and bounds what a stranger can take: connections, their length, memory."""

    daemon_threads = False  # server_close then joins the handlers: no thread is left behind
    request_queue_size = 1024  # all ranks of a job connect at once

    def __init__(self, address: str, port: int) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self.seen: set[str] = set()
        # Of each open connection, when it began.
        self._open: dict[Any, float] = {}
        super().__init__((address, port), _KeyValueHandler)

    def server_bind(self) -> None:
        """Bind, without asking a name server for this machine's name as HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            full = len(self._open) >= _MOST_CONNECTIONS
            if not full:
                self._open[request] = time.monotonic()
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
        oldest = time.monotonic() - _REQUEST_SECONDS
        with self.lock:
            late = [request for request, began in self._open.items() if began < oldest]
        for request in late:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that has gone is its own affair."""


class RendezvousServer:
    """The key-value server through which the Gloo ranks of one job find each other.

    Args:
        address: the address of this machine to listen on; ranks must be able to reach it.
        port: where to listen; 0 takes a free one.

    Example:
        with RendezvousServer("10.0.0.1") as server:
            print(server.port)
    """

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        self.address = address
        self._server = _KeyValueServer(address, port)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name=f"hvdkit-rendezvous-{self.port}",
            daemon=True,
        )
        self._thread.start()

    def registered(self) -> set[int]:
        """The ranks that have come to the job's first meeting."""
        with self._server.lock:
            paths = set(self._server.seen)
        keys = (path.removeprefix(_GLOBAL_SCOPE) for path in paths)
        return {int(key) for key in keys if key.isascii() and key.isdigit()}

    def close(self) -> None:
        """Stop serving and free the port. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
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
) -> dict[str, str]:
    """The variables that tell a process its place in a Gloo job of `size` ranks.

    Without `local_rank` and `local_size` all ranks are taken to be on one host.
    """
    return {
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


def main() -> None:
    """`python -m hvdkit.rendezvous ADDRESS PORT`: serve ranks that are started by hand."""
    address, port = sys.argv[1:]
    with RendezvousServer(address, int(port)):
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
