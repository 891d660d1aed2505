import http.client
import socket
import time

import pytest

from hvdkit import rendezvous
from hvdkit.rendezvous import RendezvousServer, gloo_environment


def request(server, method, path, body=None):
    connection = http.client.HTTPConnection(server.address, server.port, timeout=5)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_rendezvous_server_keeps_values_under_scope_and_key():
    with RendezvousServer() as server:
        assert request(server, "GET", "/global/0") == (404, b"")
        assert request(server, "PUT", "/global/0", b"\x00address\xff") == (200, b"")
        assert request(server, "PUT", "/local/0", b"other") == (200, b"")
        assert request(server, "GET", "/global/0") == (200, b"\x00address\xff")
        assert request(server, "DELETE", "/global/0") == (200, b"")
        assert request(server, "GET", "/global/0") == (404, b"")
        assert request(server, "GET", "/local/0") == (200, b"other")


def raw(server, said):
    """What the server answers to these bytes, until it closes the connection."""
    with socket.create_connection((server.address, server.port), timeout=5) as line:
        line.sendall(said)
        line.shutdown(socket.SHUT_WR)
        return line.makefile("rb").read()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"PUT /global/1 HTTP/1.0\r\n\r\n", b"411"),
        (b"PUT /global/1 HTTP/1.0\r\nContent-Length: -5\r\n\r\nhello", b"411"),
        (b"PUT /global/1 HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"PUT /global/1 HTTP/1.0\r\nContent-Length: 9\r\n\r\nhello", b""),
        (b"POST / HTTP/1.0\r\n\r\n", b"501"),
        (b"\xff" * 70_000, b"414"),
        # Digits, but none that number ranks.
        (b"PUT /global/\xb2 HTTP/1.0\r\nContent-Length: 1\r\n\r\nx", b"200"),
    ],
)
def test_strangers_do_not_disturb_the_ranks(said, status, capfd):
    with RendezvousServer() as server:
        assert status in raw(server, said).partition(b"\r\n")[0]
        assert server.registered() == set()
        assert request(server, "PUT", "/global/0", b"address") == (200, b"")
        assert server.registered() == {0}
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_takes_too_long_is_cut(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REQUEST_SECONDS", 0.2)
    with RendezvousServer() as server:
        with socket.create_connection((server.address, server.port), timeout=5) as line:
            line.sendall(b"GET /gl")
            assert line.recv(1) == b""
        assert request(server, "GET", "/global/0") == (404, b"")


def test_there_is_an_end_to_connections(monkeypatch):
    monkeypatch.setattr(rendezvous, "_MOST_CONNECTIONS", 2)
    with RendezvousServer() as server:
        held = [socket.create_connection((server.address, server.port)) for _ in range(3)]
        held[2].settimeout(5)
        assert held[2].recv(1) == b""
        for line in held:
            line.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                assert request(server, "GET", "/global/0") == (404, b"")
                break
            except OSError:
                continue  # the server has not seen yet that the others are gone


def test_no_name_server_is_asked(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda name="": pytest.fail("asked for a name"))
    RendezvousServer().close()


def test_rendezvous_server_frees_its_port():
    with RendezvousServer() as server:
        request(server, "GET", "/a/b")
    with pytest.raises(ConnectionRefusedError):
        request(server, "GET", "/a/b")


def test_gloo_environment_of_a_rank_on_the_second_of_two_hosts():
    env = gloo_environment(
        3, 4, "10.0.0.1", 99, "eth0", "b", local_rank=1, local_size=2, cross_rank=1, cross_size=2
    )
    assert env["HOROVOD_RANK"] == "3"
    assert env["HOROVOD_LOCAL_RANK"] == "1"
    assert env["HOROVOD_CROSS_SIZE"] == "2"
    assert env["HOROVOD_GLOO_IFACE"] == "eth0"
    assert env["HOROVOD_HOSTNAME"] == "b"
    assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert env["HOROVOD_CONTROLLER"] == "gloo"
