import http.client

import pytest

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
