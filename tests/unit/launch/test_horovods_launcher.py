"""Horovod's own launcher, as hvdkit starts it, and another user of its host."""

import base64
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ranks.rank_pool import REPOSITORY

pytest.importorskip("horovod.runner.gloo_run")

OTHER = 65534
SECONDS = 60
#: An address of this machine, not of loopback; "" for none.
OWN_ADDRESS = next(
    (
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ),
    "",
)
#: Start the server of an elastic job on the loopback interface. Print its port, and what ranks
#: register.
SERVE = """
from hvdkit.launch.horovods_launcher import protect
protect()
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer
from horovod.runner.util import network
class Driver:
    def register_worker_server(self, *what):
        print(*what, flush=True)
network.get_driver_ip(["lo"])
print(RendezvousServer().start(create_rendezvous_handler(Driver())), flush=True)
input()
"""
#: Send a request as a user to an address, from another one if it is given. Print the status.
ASK = f"""
import encodings.idna, http.client, os, sys
user, port, method, address, *source = sys.argv[1:]
if int(user) != os.geteuid():
    os.setgid(int(user)); os.setuid(int(user))
source = (source[0], 0) if source else None
line = http.client.HTTPConnection(address, int(port), timeout={SECONDS}, source_address=source)
line.request(method, "/worker_addresses/host:0", body=sys.stdin.buffer.read())
print(line.getresponse().status)
"""
#: Print the command line of a rank.
COMMAND = """
import os, sys
from types import SimpleNamespace
from hvdkit.launch.horovods_launcher import protect
protect()
from horovod.runner import gloo_run
numbers = dict.fromkeys(["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"], 0)
slot = SimpleNamespace(hostname=sys.argv[1], **numbers)
print(gloo_run._slot_info_to_command_fn("python x.py", os.environ | {"OF_JOB": "1"})(slot))
"""


def python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, timeout=SECONDS, check=False, **options
    )


def call_of(module, name, argument):
    """Return a pickle that calls a function."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, argument)]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


@pytest.fixture
def server():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.communicate("\n", timeout=SECONDS)


def ask(port, method, data=b"", user=None, address="127.0.0.1", source=()):
    user = os.geteuid() if user is None else user
    return python(ASK, str(user), port, method, address, *source, input=data)


def most_memory(pid):
    """Return the most memory that a process has had, in bytes."""
    facts = Path(f"/proc/{pid}/status").read_text()
    return int(facts.partition("VmHWM:")[2].split()[0]) * 1024


def registered(secret):
    """Return what a rank sends to register, and what the server then prints."""
    addresses = {"lo": [("127.0.0.1", 7)]}
    return base64.b64encode(pickle.dumps((addresses, secret))), f"host 0 {addresses} {secret}\n"


def test_pickles_run_no_code(server, tmp_path):
    port = server.stdout.readline().strip()
    made = tmp_path / "made"
    for module, name in (
        ("posix", "mkdir"),
        ("horovod.runner.launch", "os.mkdir"),
        ("horovod.runner.common.util.network", "BasicService"),
    ):
        data = base64.b64encode(call_of(module, name, str(made)))
        assert b"RemoteDisconnected" in ask(port, "PUT", data).stderr
    assert not made.exists()
    # A rank's address and secret reach the launcher, and no one else.
    data, shown = registered(b"secret")
    assert ask(port, "PUT", data).stdout == b"200\n"
    assert server.stdout.readline() == shown
    assert ask(port, "GET").stdout == b"404\n"
    before = most_memory(server.pid)
    # None gets the number 2**26, which would take 1 GB.
    ask(port, "PUT", base64.b64encode(b"\x80\x04Nr\0\0\0\x04."))
    assert most_memory(server.pid) < before + 64e6


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_other_users_of_the_machine_get_no_answer(server):
    port = server.stdout.readline().strip()
    data, _ = registered(b"stranger")
    for source in ("127.0.0.1", "127.0.0.9"):
        assert ask(port, "PUT", data, OTHER, source=[source]).stdout == b""
    # No user has a connection that was closed at once.
    code = f"""
import encodings.idna, os, socket
os.setuid({OTHER})
for linger in range(2):
    line = socket.create_connection(("127.0.0.1", {port}))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([linger, 0, 0, 0, 0, 0, 0, 0]))
    line.sendall(b"PUT /worker_addresses/host:0 HTTP/1.0\\r\\nContent-Length: {len(data)}"
                 b"\\r\\n\\r\\n" + {data!r})
    line.close()
"""
    assert python(code).returncode == 0
    data, shown = registered(b"secret")
    assert ask(port, "PUT", data).stdout == b"200\n"
    assert server.stdout.readline() == shown


@pytest.mark.skipif(not OWN_ADDRESS, reason="this machine has no network")
def test_only_the_address_of_the_ranks_is_answered(server):
    port = server.stdout.readline().strip()
    assert ask(port, "GET", address="127.0.0.1").stdout == b"404\n"
    assert ask(port, "GET", address=OWN_ADDRESS).stdout == b""


@pytest.mark.parametrize(("host", "names"), [("127.0.0.1", "OF_JOB"), ("192.0.2.1", "OF_JOB HERE")])
def test_command_lines_have_no_secrets(host, names):
    env = os.environ | {"MY_API_KEY": "secret-value", "HERE": "1"}
    done = python(COMMAND, host, env=env, text=True)
    words = done.stdout.split()
    assert words[-2:] == ["python", "x.py"], done.stderr
    assert "secret-value" not in done.stdout
    shown = {word.partition("=")[0] for word in words} & {"OF_JOB", "HERE", "MY_API_KEY"}
    assert shown == set(names.split())
