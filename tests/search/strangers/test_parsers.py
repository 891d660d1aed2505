"""Requests of strangers to the parsers of a launcher, drawn by Hypothesis."""

import contextlib
import json
import random
import re
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdkit.launch.control.listener import AgentListener
from hvdkit.launch.launchers.nodes.handshake import Authenticator
from hvdkit.launch.launchers.nodes.settings import NodeSettings
from hvdkit.rendezvous.server import RendezvousServer
from tests.search.strangers.attacks import ATTACKS

#: Bytes that a client may send: any, a valid request with changes, or lines of requests.
_WORDS = st.sampled_from(
    [b"GET", b"PUT", b"DELETE", b" ", b"/mesh/", b"/global/0", b"2.a.0.global", b"?", b"\r\n",
     b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9", b"Content-Length: ", b"Authorization: Bearer ", b"-1",
     b"0", b"5", b"99999999999999999999", b"\x00", b"\xff", b"a" * 70_000, b"hello", b":"]
)  # fmt: skip
SENT = st.one_of(
    st.binary(max_size=200),
    st.lists(_WORDS, max_size=20).map(b"".join),
    st.builds(
        lambda seed, name: ATTACKS[name](random.Random(seed)),
        st.integers(0, 1 << 32),
        st.sampled_from(["mutated request", "half a request", "wrong key"]),
    ),
)
_PLAIN = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def exchange(address, data):
    """Send bytes, end the stream, and return the answer."""
    with socket.create_connection(address, timeout=10) as line:
        with contextlib.suppress(OSError):  # the other end may close early
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := line.recv(65_536):
                answer += piece
    return answer


@pytest.fixture(scope="module")
def server():
    with RendezvousServer() as server:
        # The addresses of a rank, which no answer may contain.
        exchange(
            (server.address, server.port),
            f"PUT /mesh/2.mine.1.global HTTP/1.0\r\nAuthorization: Bearer {server.key}\r\n"
            "Content-Length: 6\r\n\r\nsecret".encode(),
        )
        assert server.registered() == {1}
        yield server


@_PLAIN
@given(data=SENT)
def test_the_rendezvous_gives_nothing_to_strangers(server, data):
    answer = exchange((server.address, server.port), data)
    assert b"secret" not in answer
    assert server.key.encode() not in answer
    assert server.registered() == {1}
    assert not server.without_key()


def test_the_rendezvous_still_serves_its_ranks(server):
    """After all that the test above has sent."""
    path = f"HTTP/1.0\r\nAuthorization: Bearer {server.key}\r\n"
    address = server.address, server.port
    put = f"PUT /mesh/2.other.0.global {path}Content-Length: 5\r\n\r\nother"
    assert b" 400 " in exchange(address, put.encode()).partition(b"\r\n")[0]
    put = f"PUT /mesh/2.other.0.global {path}Content-Length: 6\r\n\r\nothers"
    assert b" 200 " in exchange(address, put.encode()).partition(b"\r\n")[0]
    get = f"GET /mesh/2.mine.1.global?1000 {path}\r\n"
    assert exchange(address, get.encode()).endswith(b"\r\n\r\nothers")


@pytest.fixture(scope="module")
def listener():
    listener = AgentListener("127.0.0.1", 2)
    yield listener
    listener.close()


@_PLAIN
@given(data=SENT)
def test_the_listener_accepts_no_stranger(listener, data):
    answer = exchange(listener.address, data)
    assert re.fullmatch(rb"(hvdkit-sealed-1 \w{32}\n)?(another key\n)?", answer)
    assert listener._accepted.empty()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
_FIELDS = ["nonce", "number", "nodes", "size", "hostname", "slots", "machine"]


@_PLAIN
@given(
    line=st.one_of(
        SENT,
        st.fixed_dictionaries(dict.fromkeys(_FIELDS, _JSON)).map(
            lambda d: b"0 " + json.dumps(d).encode()
        ),
        st.integers(1, 4000).map(lambda depth: b"0 " + b"[" * depth),
    )
)
def test_node_0_accepts_no_stranger(line):
    node_0 = NodeSettings(
        nodes=2, node=0, slots=1, address=("localhost", 1), file=None, key=b"k" * 16, size=2,
        timeout=5,
    )  # fmt: skip
    authenticator = Authenticator(node_0, b"k" * 16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(line[:60_000] + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        assert authenticator.authenticate(ours) is None
        ours.shutdown(socket.SHUT_WR)
        said = theirs.recv(65_536)
    assert b"k" * 16 not in said
    assert re.fullmatch(rb"hvdkit-sealed-1 \w{32}\n(another key\n)?", said)
