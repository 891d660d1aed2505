"""Nodes find node 0. `tests/hosts/test_nodes.py` runs jobs on several hosts."""

import json
import os
import socket
import threading
from contextlib import ExitStack, closing, contextmanager

import pytest

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control.listener import Listener
from hvdkit.launch.launchers.nodes import joining
from hvdkit.launch.launchers.nodes.gathering import _check_not_in_use, _write_privately
from hvdkit.launch.launchers.nodes.handshake import Authenticator, NodeInfo, machine
from hvdkit.launch.launchers.nodes.joining import _connected, read_file
from hvdkit.launch.launchers.nodes.settings import NodeSettings

KEY = b"0123456789abcdef"
#: Addresses of this machine: of another program, and of node 0.
FIRST, SECOND = "127.0.0.1", "127.0.0.2"


def settings(file, node):
    return NodeSettings(2, node, 1, None, file, b"", timeout=20.0)


@contextmanager
def node_0(server, file, key):
    with closing(Listener(server, 2, Authenticator(settings(file, 0), key).authenticate)) as node:
        yield node


@contextmanager
def web_server(server, *_):
    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture(params=[web_server, node_0])
def rendezvous(request, tmp_path):
    """Yield the file of a node 0, and its listener. Another program has the same port."""
    file = tmp_path / "job"
    with ExitStack() as stack:
        other = stack.enter_context(socket.create_server((FIRST, 0)))
        port = other.getsockname()[1]
        stack.enter_context(request.param(other, file, b"another key"))
        server = stack.enter_context(socket.create_server((SECOND, port)))
        listener = stack.enter_context(node_0(server, file, KEY))
        content = {"addresses": [FIRST, SECOND], "port": port, "key": KEY.decode()}
        content["machine"] = machine()
        _write_privately(file, json.dumps(content))
        yield file, listener


def test_another_program_at_the_port_of_node_0(rendezvous, said):
    file, listener = rendezvous
    with _connected(settings(file, 1)) as connection:
        node, accepted = listener.accept()
        with accepted:
            assert (node.number, connection.socket.getpeername()[0], said) == (1, SECOND, [])


def test_a_file_in_use_is_not_replaced_if_another_program_has_the_port(rendezvous):
    file, _ = rendezvous
    with pytest.raises(UsageError, match="is in use by another job"):
        _check_not_in_use(settings(file, 0), file)


def test_another_program_does_not_keep_a_file_of_an_earlier_job_in_use(tmp_path):
    """Any user of this machine may listen at the old port, and greet as hvdkit does."""
    file = tmp_path / "job"
    server = socket.create_server((FIRST, 0))
    content = {"addresses": [FIRST], "port": server.getsockname()[1], "key": KEY.decode()}
    _write_privately(file, json.dumps(content | {"machine": machine()}))
    with server, node_0(server, file, b"the key of a stranger"):
        _check_not_in_use(settings(file, 0), file)


@pytest.mark.parametrize("node", [0, 1])
def test_a_pipe_of_another_user_does_not_stop_a_node(tmp_path, node):
    """Others may make a pipe in a shared folder. Opening it waits forever."""
    file = tmp_path / "job"
    os.mkfifo(file)
    if node == 0:
        _check_not_in_use(settings(file, 0), file)
    else:
        with pytest.raises(OSError, match="not a regular file"):
            read_file(file)


def test_a_node_that_does_not_fit_is_refused(tmp_path):
    nodes = Authenticator(settings(tmp_path / "job", 0), KEY)
    for number, count, size, reason in (
        (1, 3, None, "it has --nodes 3, node 0 has --nodes 2"),
        (1, 2, 4, "it has -np 4, node 0 has no -np"),
        (2, 2, None, "it is node 2; expected 1 to 1"),
        (1, 2, None, None),
        (1, 2, None, "there is a node 1 already; give each its own --node-rank"),
    ):
        assert nodes._register(NodeInfo(number, "host1", 1, "x"), count, size) == reason
    nodes.forget(1)
    assert nodes._register(NodeInfo(1, "host1", 1, "x"), 2, None) is None


def test_a_file_that_other_users_may_have_written(tmp_path):
    file = tmp_path / "job"
    _write_privately(file, json.dumps({"addresses": [FIRST], "port": 9, "key": "theirs"}))
    file.chmod(0o644)
    with pytest.raises(HvdkitError, match="with mode 644; expected user 0 and mode 600"):
        read_file(file)


@pytest.mark.parametrize(
    ("where", "expected"),
    [(machine(), ["127.0.0.1", "127.9.9.9", "::1", "192.0.2.1"]), ("another", ["192.0.2.1"])],
)
def test_own_addresses_of_a_node_0_on_another_machine_are_not_used(
    tmp_path, monkeypatch, where, expected
):
    """Another user of this machine may listen there."""
    bridge = "172.17.0.1"
    monkeypatch.setattr(joining, "own_addresses", lambda: {"127.0.0.1", bridge})
    addresses = ["127.0.0.1", "127.9.9.9", "::1", "192.0.2.1", bridge]
    content = {"addresses": addresses, "port": 9, "key": KEY.decode(), "machine": where}
    _write_privately(tmp_path / "job", json.dumps(content))
    found, _ = read_file(tmp_path / "job")
    assert [address for address, _ in found if address != bridge] == expected
    assert ((bridge, 9) in found) == (where == machine())
