"""Another user of node 1 passes the handshake on to node 0, and then sends messages of their own.

So does a user who listens at an address that the two machines have in common, such as 127.0.0.1.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

OTHER = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

#: Listen, print the port, pass on what the two nodes say until node 0 has accepted, and start a
#: rank that imports a module of this user.
RELAY = f"""
import encodings.idna, json, os, socket, sys
# After the imports, because the other user may not be able to read these files.
os.setgid({OTHER}); os.setuid({OTHER})
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
node_1, _ = server.accept()
node_0 = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
way = [node_0.makefile("rwb"), node_1.makefile("rwb")]
for _ in range(3):
    way[1].write(way[0].readline())
    way[1].flush()
    way.reverse()
rank = dict(rank=1, env=dict(PYTHONPATH=sys.argv[2]), defaults=dict(), terminal=False, cpus=[])
task = dict(kind="task", command=["python", "-c", "pass"], directory="/", path=None, files=[])
for message in (task, dict(kind="start", ranks=[rank], size=2)):
    node_1.sendall(json.dumps(message).encode() + b"\\n")
print("sent", flush=True)
while node_1.recv(65536):
    pass
print("ended", flush=True)
"""
THEIR_CODE = "import os, pathlib; pathlib.Path({marker!r}).write_text(str(os.getuid()))"


@pytest.fixture
def start():
    """Start a process. It ends with the test."""
    with contextlib.ExitStack() as stack:

        def begin(*command, **options):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
            )
            stack.callback(process.communicate, timeout=30)
            stack.callback(process.kill)
            return process

        yield begin


def test_messages_of_a_relay_are_refused(start, tmp_path):
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o755)
    tmp_path.chmod(0o755)
    theirs, marker = tmp_path / "theirs", tmp_path / "marker"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(THEIR_CODE.format(marker=str(marker)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    relay = start(sys.executable, "-c", RELAY, str(port), str(theirs))

    def node(number, port):
        options = ["--nodes", "2", "--node-rank", str(number), "--rdzv", f"127.0.0.1:{port}"]
        run = [sys.executable, "-m", "hvdkit", "run", *options, "--start-timeout", "20"]
        env = os.environ | {"HVDKIT_JOB_KEY": "0123456789abcdef"}
        return start(*run, sys.executable, "-c", "pass", env=env)

    relayed = int(relay.stdout.readline())
    first = node(0, port)
    while True:  # until node 0 listens
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
    second = node(1, relayed)
    assert relay.stdout.readline() == "sent\n", relay.stderr.read()
    deadline = time.monotonic() + 30
    while second.poll() is None and not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marker.exists()
    _, said = second.communicate(timeout=600)
    assert second.returncode == 1
    assert "come from another process than that which has proven to know the job's key" in said
    assert "lost node 0" in said
    assert first.poll() is None or first.returncode == 1
