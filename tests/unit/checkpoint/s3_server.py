"""A real S3 server, and a proxy in front of it that simulates faults of networks and servers."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

BUCKET = "checkpoints"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    # Do not use this machine's own settings.
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


def free_port():
    """Return a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def running(log):
    """Run moto's server with the bucket. Yields its address."""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env=os.environ | {"HVDKIT_TEST_SERVER": "s3"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("PUT", f"/{BUCKET}")
                assert connection.getresponse().status == 200
                connection.close()
                break
            except OSError:
                assert time.monotonic() < deadline, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=30)


class Proxy(ThreadingHTTPServer):
    """Forward requests to a server, or simulate a fault.

    Attributes:
        seen: the requests so far: method and path.
        act: called for each request with its number, counted from 1, its method and its path.
            Returns None to forward it, or a fault:
            "500", "503": reply with this status.
            "501": reply with this status if the request has the header If-None-Match.
            "cut": close the connection.
            "lost": forward the request, and close the connection without a reply.
            "stale": send the first reply to this request again.
            "unconditional": forward the request without the header If-None-Match.
    """

    daemon_threads = True

    def __init__(self, server):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(server).netloc
        self.seen = []
        self.act = lambda number, method, path: None
        self.answers = {}
        self._connections = set()
        self._guard = threading.Lock()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def number(self, method, path):
        with self._guard:
            self.seen.append((method, path))
            return len(self.seen)

    def process_request(self, request, client_address):
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self._connections.discard(request)
        super().shutdown_request(request)

    def cut_all(self):
        """Close the connections that clients keep open."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        """Log nothing: killed clients close their connections."""


_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please wait.</Message></Error>"
_FAILED = b"<Error><Code>InternalError</Code><Message>We had a problem.</Message></Error>"

_NOT_IMPLEMENTED = (
    b"<Error><Code>NotImplemented</Code><Message>A header you provided implies functionality "
    b"that is not implemented</Message></Error>"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _pass_on(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        number = self.server.number(self.command, self.path)
        what = self.server.act(number, self.command, self.path)
        if what == "cut":
            self._cut()
            return
        if what in ("500", "503"):
            self._answer(int(what), [], _FAILED if what == "500" else _SLOW_DOWN)
            return
        if what == "stale" and self.path in self.server.answers:
            self._answer(*self.server.answers[self.path])
            return
        if what == "501" and "If-None-Match" in self.headers:
            self._answer(501, [], _NOT_IMPLEMENTED)
            return
        if what == "unconditional":
            del self.headers["If-None-Match"]
        connection = http.client.HTTPConnection(self.server.behind, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
        headers["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if what == "lost":
            self._cut()
            return
        if what == "stale":
            self.server.answers[self.path] = response.status, response.getheaders(), content
        self._answer(response.status, response.getheaders(), content)

    def _chunks(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return b""
        found = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(found)

    def _answer(self, status, headers, content):
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _cut(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *arguments):
        """Print nothing."""

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on


@contextlib.contextmanager
def proxy(server):
    """Run a proxy in front of the server at this address."""
    with Proxy(server) as made:
        thread = threading.Thread(target=made.serve_forever, name="s3-proxy")
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()
            made.cut_all()
