"""Horovod's own launcher, as hvdkit starts it, and another user of its host."""

import base64
import os
import pickle
import subprocess
import sys

import pytest

from tests.ranks.rank_pool import REPOSITORY

pytest.importorskip("horovod.runner.gloo_run")

OTHER = 65534
SECONDS = 60
#: Start the server of an elastic job. Print its port, and what ranks register.
SERVE = """
from hvdkit.launch.horovods_launcher import protect
protect()
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer
class Driver:
    def register_worker_server(self, *what):
        print(*what, flush=True)
print(RendezvousServer().start(create_rendezvous_handler(Driver())), flush=True)
input()
"""
#: Send a request as another user, if this is root.
ASK = f"""
import encodings.idna, http.client, os, sys
if os.geteuid() == 0:
    os.setgid({OTHER}); os.setuid({OTHER})
line = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout={SECONDS})
line.request(sys.argv[2], "/worker_addresses/host:0", body=sys.stdin.buffer.read())
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


def test_pickles_of_other_users_run_no_code(server, tmp_path):
    port = server.stdout.readline().strip()
    made = tmp_path / "made"
    for module, name in (
        ("posix", "mkdir"),
        ("horovod.runner.launch", "os.mkdir"),
        ("horovod.runner.common.util.network", "BasicService"),
    ):
        data = base64.b64encode(call_of(module, name, str(made)))
        assert b"RemoteDisconnected" in python(ASK, port, "PUT", input=data).stderr
    assert not made.exists()
    # A rank's address and secret reach the launcher, and no one else.
    data = base64.b64encode(pickle.dumps(({"lo": [("127.0.0.1", 7)]}, b"secret")))
    assert python(ASK, port, "PUT", input=data).stdout == b"200\n"
    assert server.stdout.readline() == "host 0 {'lo': [('127.0.0.1', 7)]} b'secret'\n"
    assert python(ASK, port, "GET").stdout == b"404\n"


@pytest.mark.parametrize(("host", "names"), [("127.0.0.1", "OF_JOB"), ("192.0.2.1", "OF_JOB HERE")])
def test_command_lines_have_no_secrets(host, names):
    env = os.environ | {"MY_API_KEY": "secret-value", "HERE": "1"}
    done = python(COMMAND, host, env=env, text=True)
    words = done.stdout.split()
    assert words[-2:] == ["python", "x.py"], done.stderr
    assert "secret-value" not in done.stdout
    shown = {word.partition("=")[0] for word in words} & {"OF_JOB", "HERE", "MY_API_KEY"}
    assert shown == set(names.split())
