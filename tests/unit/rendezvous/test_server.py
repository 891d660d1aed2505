import contextlib
import http.client
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from hvdkit.engine.describe import installed
from hvdkit.engine.toolchain import find_compiler
from hvdkit.launch.control.controller import place_variables
from hvdkit.launch.control.network import LOOPBACK
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.hosts.hosts import Host
from hvdkit.ranks import RankCommand, start_ranks
from hvdkit.rendezvous import server as rendezvous
from hvdkit.rendezvous import store
from hvdkit.rendezvous.server import RendezvousServer, gloo_environment
from hvdkit.system.processes import without_rank_variables

DRIVER = Path(__file__).parents[1] / "engine" / "mesh_rendezvous_driver.cc"


def request(server, method, path, body=None, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection(server.address, server.port, timeout=5)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_rendezvous_server_keeps_values_under_scope_and_key():
    with RendezvousServer(stores_without_key=True) as server:
        assert request(server, "GET", "/global/0") == (404, b"")
        assert request(server, "PUT", "/global/0", b"\x00address\xff") == (200, b"")
        assert request(server, "PUT", "/local/0", b"other") == (200, b"")
        assert request(server, "GET", "/global/0") == (200, b"\x00address\xff")
        assert request(server, "DELETE", "/global/0") == (200, b"")
        assert request(server, "GET", "/global/0") == (404, b"")
        assert request(server, "GET", "/local/0") == (200, b"other")


def raw(server, data):
    """Send these bytes; return all bytes of the answer."""
    with socket.create_connection((server.address, server.port), timeout=5) as line:
        line.sendall(data)
        with contextlib.suppress(OSError):  # the server may have closed the connection
            line.shutdown(socket.SHUT_WR)
        return line.makefile("rb").read()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"PUT /global/1 HTTP/1.0\r\n\r\n", b"411"),
        (b"PUT /global/1 HTTP/1.0\r\nContent-Length: -5\r\n\r\nhello", b"411"),
        (b"PUT /global/1 HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"PUT /global/1 HTTP/1.0\r\nContent-Length: 9\r\n\r\nhello", b""),
        (b"POST / HTTP/1.0\r\n\r\n", b"501"),
        (b"\xff" * 70_000, b"414"),
        (b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 101 + b"\r\n", b"431"),
        (b"GET / HTTP/1.0\r\n" + b"A: " + b"b" * 33_000 + b"\r\n\r\n", b"431"),
        (b"PUT /mesh/a HTTP/1.0\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"413"),
        (b"GET /mesh/a HTTP/1.0\r\nContent-Length: many\r\n\r\n", b"403"),
        # A digit of Unicode that is not a number of a rank.
        (b"PUT /global/\xb2 HTTP/1.0\r\nContent-Length: 1\r\n\r\nx", b"200"),
        (b"PUT /mesh/2.a.0.global HTTP/1.0\r\nContent-Length: 9\r\n\r\nhello", b"403"),
    ],
)
def test_strangers_do_not_disturb_the_ranks(data, status, capfd):
    with RendezvousServer(stores_without_key=True) as server:
        assert status in raw(server, data).partition(b"\r\n")[0]
        assert server.without_key() == set()
        assert request(server, "PUT", "/global/0", b"address") == (200, b"")
        assert server.without_key() == {0}
        assert server.registered() == set()
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_takes_too_long_is_closed(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REQUEST_SECONDS", 0.2)
    with RendezvousServer() as server:
        with socket.create_connection((server.address, server.port), timeout=5) as line:
            line.sendall(b"GET /gl")
            assert line.recv(1) == b""
        assert request(server, "GET", "/global/0") == (404, b"")


def test_the_number_of_connections_is_limited(monkeypatch):
    monkeypatch.setattr(rendezvous, "_OTHER_CONNECTIONS", 0)
    with RendezvousServer(size=1) as server:
        held = [socket.create_connection((server.address, server.port)) for _ in range(3)]
        # The oldest is closed, so that a rank can connect.
        held[0].settimeout(5)
        assert held[0].recv(1) == b""
        for line in held:
            line.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                assert request(server, "GET", "/global/0") == (404, b"")
                break
            except OSError:
                continue  # the server may not yet have noticed the closed connections


def test_a_rank_registers_while_strangers_fill_the_server(monkeypatch):
    monkeypatch.setattr(rendezvous, "_OTHER_CONNECTIONS", 4)
    with RendezvousServer(size=2) as server:
        address = (server.address, server.port)
        held = [socket.create_connection(address) for _ in range(30)]
        assert request(server, "PUT", "/mesh/2.a.0.global", b"of 0", server.key) == (200, b"")
        held += [socket.create_connection(address) for _ in range(30)]
        assert server.registered() == {0}
        for line in held:
            line.close()


def test_a_server_of_ranks_with_the_key_stores_nothing_without_it():
    with RendezvousServer() as server:
        assert request(server, "PUT", "/global/0", b"a stranger's") == (200, b"")
        assert request(server, "GET", "/global/0") == (404, b"")
        assert server.without_key() == set()


def test_no_name_is_looked_up(monkeypatch):
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
    assert rendezvous.KEY not in env
    assert gloo_environment(0, 1, "10.0.0.1", 99, key="secret")[rendezvous.KEY] == "secret"


# The exchange per mesh


def test_two_ranks_exchange_addresses():
    with RendezvousServer() as server:
        for rank, value in ((0, b"of 0"), (1, b"of 1")):
            path = f"/mesh/2.abc.{rank}.global"
            assert request(server, "PUT", path, value, server.key) == (200, b"")
        assert server.registered() == {0, 1}
        assert server.without_key() == set()
        for rank, value in ((0, b"of 1"), (1, b"of 0")):
            path = f"/mesh/2.abc.{rank}.global?1000"
            assert request(server, "GET", path, key=server.key) == (200, value)


@pytest.mark.parametrize("key", [None, "", "0" * 32, "\xff"])
def test_a_rank_without_the_key_cannot_join_a_mesh(key):
    with RendezvousServer(stores_without_key=True) as server:
        status, data = request(server, "PUT", "/mesh/2.abc.0.global", b"mine", key)
        assert (status, data) == (403, b"this is not the job's key (HVDKIT_RENDEZVOUS_KEY)")
        assert server.registered() == set()
        # The protocol without a key does not let the rank join either.
        assert request(server, "PUT", "/global/0", b"mine") == (200, b"")
        assert server.without_key() == {0}
        request(server, "PUT", "/mesh/2.abc.1.global", b"of 1", server.key)
        status, data = request(server, "GET", "/mesh/2.abc.1.global?10", key=server.key)
        assert status == 408
        assert data.startswith(b"rank 0 of 2 did not join the mesh 'global' within 0.01 s")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/mesh/", 400),
        ("PUT", "/mesh/2.abc.0", 400),
        ("PUT", "/mesh/1.abc.0.global", 400),
        ("PUT", "/mesh/2.abc.2.global", 400),
        ("PUT", "/mesh/2.abc.-1.global", 400),
        ("PUT", "/mesh/99999999999.abc.1.global", 400),
        ("GET", "/mesh/2.abc.0.global?1", 410),
        ("GET", "/mesh/2.abc.0.global?soon", 410),
    ],
)
def test_bad_requests_for_a_mesh(method, path, status):
    with RendezvousServer() as server:
        assert request(server, method, path, b"x", server.key)[0] == status


def test_a_rank_may_wait_longer_than_a_request_takes(monkeypatch):
    monkeypatch.setattr(rendezvous, "_REQUEST_SECONDS", 0.3)
    with RendezvousServer() as server:
        request(server, "PUT", "/mesh/2.abc.0.global", b"x", server.key)
        assert request(server, "GET", "/mesh/2.abc.0.global?1500", key=server.key)[0] == 408


def test_strangers_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(store, "_MOST_BYTES", 2000)
    with RendezvousServer(stores_without_key=True) as server:
        assert request(server, "PUT", "/a/0", b"x" * 90) == (200, b"")
        assert request(server, "PUT", "/a/0", b"y" * 90) == (200, b"")
        assert request(server, "PUT", "/a/1", b"x" * 90) == (200, b"")
        assert request(server, "PUT", "/a/2", b"x" * 400)[0] == 507
        for number in range(60):  # each entry takes memory, too
            status = request(server, "PUT", f"/a/{number}", b"")[0]
        assert status == 507
        for number in range(60):
            request(server, "DELETE", f"/a/{number}")
        assert request(server, "PUT", "/a/1", b"x" * 1400) == (200, b"")


def test_a_slow_client_does_not_keep_the_server_from_closing():
    with RendezvousServer() as server:
        line = socket.create_connection((server.address, server.port), timeout=5)
        line.sendall(b"PUT /a/0 HTTP/1.0\r\nContent-Length: 1000\r\n\r\nx")
        request(server, "PUT", "/mesh/2.abc.0.global", b"x", server.key)
        waiting = socket.create_connection((server.address, server.port), timeout=5)
        key = f"Authorization: Bearer {server.key}\r\n"
        waiting.sendall(f"GET /mesh/2.abc.0.global?60000 HTTP/1.0\r\n{key}\r\n".encode())
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() < began + 8  # the connection alone would be dropped after 10 s
    assert not [t for t in threading.enumerate() if "process_request" in t.name]
    line.close()
    waiting.close()


def test_a_very_long_timeout_is_limited(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LONGEST_WAIT", 0.1)
    with RendezvousServer() as server:
        request(server, "PUT", "/mesh/2.abc.0.global", b"x", server.key)
        status, data = request(server, "GET", f"/mesh/2.abc.0.global?{10**15}", key=server.key)
        assert (status, b"within 0.1 s" in data) == (408, True)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Build a program that runs the engine's client for many ranks."""
    program = tmp_path_factory.mktemp("driver") / "driver"
    flags = ("-O2", "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror")
    subprocess.run([find_compiler().path, *flags, str(DRIVER), "-o", str(program)], check=True)
    return str(program)


def play(driver, server, size, first, last, seconds=30, key=None):
    where = [server.address, str(server.port), key or server.key, "global"]
    return subprocess.Popen(
        [driver, *where, *map(str, (size, first, last, seconds))],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("size", [2, 200, pytest.param(1024, marks=pytest.mark.long)])
def test_many_ranks_get_the_right_addresses(driver, size):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * size + 100)), hard))
    try:
        with RendezvousServer() as server:
            middle = size // 2
            parts = [
                play(driver, server, size, first, last)
                for first, last in ((0, middle), (middle, size))
            ]
            assert [part.communicate(timeout=60)[1] for part in parts] == ["", ""]
            assert [part.returncode for part in parts] == [0, 0]
            assert server.registered() == set(range(size))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_client_reports_errors(driver):
    with RendezvousServer() as server:
        late = play(driver, server, 4, 1, 3, seconds=1)
        other = play(driver, server, 4, 0, 1, key="another")
        assert "rank 0: rendezvous at 127.0.0.1" in (data := other.communicate(timeout=20)[1])
        assert "this is not the job's key" in data
        data = late.communicate(timeout=20)[1].splitlines()
        assert len(data) == 2
        # For the second rank to fail, the first one is missing too.
        assert any("ranks 0, 3 of 4 did not join the mesh 'global'" in line for line in data)
    gone = play(driver, server, 4, 0, 1, seconds=1)
    assert "Connection refused" in gone.communicate(timeout=20)[1]


def test_the_client_waits_for_a_late_server(driver):
    with RendezvousServer() as server:
        pass
    ranks = play(driver, server, 2, 0, 2)
    time.sleep(0.5)
    with RendezvousServer(port=server.port, key=server.key):
        assert ranks.communicate(timeout=20)[1] == ""
    assert ranks.returncode == 0


# With the engine


def needs_the_engine():
    engine = installed()
    if engine is None or "gloo" not in (engine.controllers or ()):
        pytest.skip("no engine with Gloo here: hvdkit build")


def start(server, code, size=2, hosts=(2,), **variables):
    """Start ranks that run `code`, as if on hosts with these numbers of ranks."""
    plan = make_plan(["x"], "/", [Host(f"host{i}", slots) for i, slots in enumerate(hosts)], size)
    base = without_rank_variables(os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    ranks = [
        RankCommand(command, base | place_variables(place, LOOPBACK, size, server) | variables)
        for place in plan.places
    ]
    return start_ranks(ranks)


ALLREDUCE = """
import psutil, torch
import horovod.torch as hvd
for _ in range(2):
    hvd.init()
    peers = [c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    print(hvd.size(), hvd.local_rank(), hvd.cross_rank(), int(total), len(peers), flush=True)
    hvd.shutdown()
"""


def test_each_rank_sends_two_requests_per_mesh(monkeypatch):
    needs_the_engine()
    asked = Counter()
    answer = rendezvous._Handler.send_response

    def counted(self, code, message=None):
        asked[self.command, self.path.partition("?")[0].rpartition(".")[2], int(code)] += 1
        answer(self, code, message)

    monkeypatch.setattr(rendezvous._Handler, "send_response", counted)
    with RendezvousServer() as server:
        group = start(server, ALLREDUCE, size=4, hosts=(2, 2))
        results = group.wait(timeout=120)
    for rank, result in enumerate(results):
        # Connected to three ranks in the mesh of all, and one each by host and by local rank.
        assert result.output.splitlines()[-2:] == [f"4 {rank % 2} {rank // 2} 10 5"] * 2
    scopes = ("global", "local_host0", "local_host1", "cross_0", "cross_1")
    ranks = dict.fromkeys(scopes, 2) | {"global": 4}
    assert asked == {
        (method, scope, 200): 2 * ranks[scope] for method in ("GET", "PUT") for scope in scopes
    }


INIT = """
import horovod.torch as hvd
try:
    hvd.init()
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_a_timeout_raises():
    needs_the_engine()
    with RendezvousServer() as server:
        base = without_rank_variables(os.environ) | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}
        env = base | gloo_environment(0, 2, server.address, server.port, key=server.key)
        done = subprocess.run(
            [sys.executable, "-c", INIT],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ValueError"
    assert "rank 1 of 2 did not join the mesh 'global' within" in done.stderr


def test_an_address_in_an_error_has_the_right_port():
    """Rank 1 gives an address at which nobody listens."""
    needs_the_engine()
    address = struct.pack("=H", socket.AF_INET) + (256).to_bytes(2, "big") + bytes([127, 0, 0, 1])
    address += bytes(120) + b"\xff" * 8 + bytes(16)  # no sequence number, and a cookie
    with RendezvousServer() as server:
        answer = request(server, "PUT", "/mesh/2.abc.1.global", address, server.key)
        assert answer == (200, b"")
        env = without_rank_variables(os.environ)
        env |= gloo_environment(0, 2, server.address, server.port, key=server.key)
        done = subprocess.run(
            [sys.executable, "-c", INIT],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "connect [127.0.0.1]:256: Connection refused" in done.stderr


@pytest.mark.parametrize("key", [None, "of our own job"], ids=["other server", "other key"])
def test_ranks_of_an_engine_without_this_exchange(key):
    """They use Horovod's protocol if the server or the ranks do not support the exchange."""
    needs_the_engine()
    inherited = {} if key is not None else {rendezvous.KEY: "of an outer job"}
    with RendezvousServer(key=key, stores_without_key=True) as server:
        server.key = None  # not given to the ranks
        results = start(server, ALLREDUCE, **inherited).wait(timeout=120)
        assert [r.output.splitlines()[-1].split()[3] for r in results] == ["3", "3"]
        assert server.without_key() == {0, 1}
        assert server.registered() == set()


PROCESS_SETS = """
import torch
import horovod.torch as hvd
some = hvd.ProcessSet(RANKS)
hvd.init(process_sets=[some])
total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some) if some.included() else [0]
print("up", hvd.local_rank(), int(total[0]), flush=True)
hvd.barrier()  # the first rank that shuts down ends the set
hvd.shutdown()
"""


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [
        pytest.param([1, 3, 4, 5], (2, 2, 1, 1), marks=pytest.mark.long),
        ([1, 2, 3], (2, 2)),
    ],
    ids=["two groups with one local rank", "different local ranks in the job"],
)
def test_process_sets_on_several_hosts(ranks, hosts):
    """The ranks with the same local rank in a process set are a mesh of their own."""
    needs_the_engine()
    size = sum(hosts)
    code = PROCESS_SETS.replace("RANKS", str(ranks))
    # Ranks that do not find each other wait for this timeout.
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
    with RendezvousServer() as server:
        results = start(server, code, size=size, hosts=hosts, **env).wait(timeout=180)
    sums = [int(result.output.splitlines()[-1].split()[2]) for result in results]
    assert sums == [len(ranks) if rank in ranks else 0 for rank in range(size)]
