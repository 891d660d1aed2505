import contextlib
import http.client

import pytest

from hvdkit.launch import gloo
from hvdkit.rendezvous import RendezvousServer


def put(server, path, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with contextlib.closing(http.client.HTTPConnection(server.address, server.port)) as line:
        line.request("PUT", path, b"address", headers)
        assert line.getresponse().status == 200


@pytest.mark.parametrize(
    ("engines", "counted"), [([6, 6], {1}), ([7, 6], {1}), ([6, 5], {0, 1}), ([0], {0, 1})]
)
def test_ranks_without_the_key_count_if_an_engine_cannot_send_it(engines, counted):
    facts = {number: {"engine": engine} for number, engine in enumerate(engines)}
    with RendezvousServer() as server:
        ranks = gloo.registered_ranks(server, 2, facts, pytest.fail)
        put(server, "/mesh/2.abc.1.global", server.key)
        put(server, "/global/0")
        put(server, "/global/77")  # of a stranger
        assert ranks() == counted


def test_an_engine_that_is_slow_to_start_many_ranks_is_named_once():
    said = []
    with RendezvousServer() as server:
        ranks = gloo.registered_ranks(server, 32, {"host": {"engine": 5}}, said.append)
        put(server, "/global/3")
        assert ranks() == ranks() == {3}
    assert [text.partition(":")[0] for text in said] == [
        "the engine of rank 3 asks for the addresses of 32 ranks one by one, which takes long"
    ]
