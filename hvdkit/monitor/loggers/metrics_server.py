"""A small HTTP server for metrics: one thread, few connections, and a deadline for each.

It runs in a process that trains, and anyone who reaches its port may connect. Nothing that a client
does uses more threads, descriptors or memory than the limits below.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

#: The most open connections. With one more, the oldest one is closed.
MOST_CONNECTIONS = 8
#: Seconds from the beginning of a connection to the last byte of the answer.
SECONDS = 5.0
#: The longest request, in bytes.
LONGEST_REQUEST = 16_384

# Seconds between two looks at the connections. Many fast clients must not slow the training.
_PAUSE_SECONDS = 0.02
# After an error of the system, such as too many open files, the seconds before the next attempt.
_RETRY_SECONDS = 1.0
_READ_BYTES = 4096
# Connections that the system keeps until they are accepted. With too few, clients try again only
# after a second.
_BACKLOG = 64

_log = logging.getLogger("hvdkit.monitor")

#: Given the value of the header Accept in lower case, returns the body and its type.
Render = Callable[[str], tuple[bytes, str]]


class _Client:
    """A connection.

    Attributes:
        deadline: when it is closed (`time.monotonic`).
        request: the bytes that it has sent.
        answer: the bytes that it has not received yet; None before the whole request.
    """

    def __init__(self) -> None:
        self.deadline = time.monotonic() + SECONDS
        self.request = b""
        self.answer: bytes | None = None


class MetricsServer:
    """Serve the same text at each path, until `close`.

    Args:
        address: the address to listen at.
        port: the port; 0 for a free one.
        render: returns the text. Called in the server's thread. If it raises, the answer is an
            error.

    Attributes:
        port: the port.

    Raises:
        OSError: this host does not have the address, or the port is in use.
        RuntimeError: this process may start no more threads.
    """

    def __init__(self, address: str, port: int, render: Render) -> None:
        self._render = render
        family, _, _, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.create_server(
            place,
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        # In the order in which they have connected.
        self._clients: dict[socket.socket, _Client] = {}
        self._warned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdkit-metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            pause = _PAUSE_SECONDS
            try:
                self._step()
            except Exception as error:  # no more descriptors, for example
                pause = _RETRY_SECONDS
                self._warn(error)
            self._closed.wait(pause)
        for connection in list(self._clients):
            self._drop(connection)
        self._listener.close()

    def _warn(self, error: Exception) -> None:
        if not self._warned:  # clients could make it happen all the time
            self._warned = True
            _log.warning("the server of metrics has failed, and tries again: %r", error)

    def _step(self) -> None:
        """Wait a moment for events, and handle them."""
        # poll(2) needs no descriptor of its own.
        with selectors.PollSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for connection, client in self._clients.items():
                waits_for = selectors.EVENT_READ if client.answer is None else selectors.EVENT_WRITE
                selector.register(connection, waits_for)
            ready = [key.fileobj for key, _ in selector.select(_RETRY_SECONDS / 4)]
        for connection in list(self._clients):
            if connection in ready:
                self._serve(connection)
            elif self._clients[connection].deadline < time.monotonic():
                self._drop(connection)
        if self._listener in ready:
            self._accept()

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            connection.setblocking(False)
            if len(self._clients) >= MOST_CONNECTIONS:
                self._drop(next(iter(self._clients)))
            self._clients[connection] = _Client()
            self._serve(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._clients[connection]
        with suppress(OSError):
            # A forked process may have the descriptor, too.
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Read what a client has sent, and write as much as it takes."""
        client = self._clients[connection]
        try:
            if client.answer is None:
                data = connection.recv(_READ_BYTES)
                client.request += data
                if not data:
                    client.answer = b""
                elif _is_whole(client.request) or len(client.request) > LONGEST_REQUEST:
                    client.answer = self._answer(client.request)
            if client.answer:
                client.answer = client.answer[connection.send(client.answer) :]
        except BlockingIOError:
            pass
        except OSError:  # the client has disconnected
            client.answer = b""
        except Exception as error:  # the other clients must be served
            client.answer = b""
            self._warn(error)
        if client.answer == b"" or client.deadline < time.monotonic():
            # Data of the client that were not read would make the system discard the answer.
            with suppress(OSError):
                connection.recv(LONGEST_REQUEST)
            self._drop(connection)

    def _answer(self, request: bytes) -> bytes:
        lines = request.decode("latin-1").splitlines()
        words = lines[0].split() if lines else []
        body, kind = b"", "text/plain; charset=utf-8"
        if not _is_whole(request):
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        elif len(words) != 3 or not words[2].startswith("HTTP/"):
            status = HTTPStatus.BAD_REQUEST
        elif words[0] not in ("GET", "HEAD"):
            status = HTTPStatus.METHOD_NOT_ALLOWED
        else:
            headers = dict(line.lower().partition(":")[::2] for line in lines[1:])
            try:
                body, kind = self._render(headers.get("accept", "").strip())
                status = HTTPStatus.OK
            except Exception as error:
                self._warn(error)
                status = HTTPStatus.INTERNAL_SERVER_ERROR
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode("latin-1") + (b"" if words[:1] == ["HEAD"] else body)


def _is_whole(request: bytes) -> bool:
    return b"\r\n\r\n" in request or b"\n\n" in request
