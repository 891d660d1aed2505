"""A node whose output is not read for a while, as with `less`."""

import signal
import subprocess
import sys
import time

from tests.unit.launch.commands import started_command

# `hvdkit run` that waits a second for its reader after a signal, where it usually waits for ten.
RUN = """
import sys
from hvdkit.launch.control import readers
readers._SOON_SECONDS = 1.0
from hvdkit.cli import main
sys.exit(main(["run", *sys.argv[1:]]))
"""
# Rank 1 writes more than the pipe and the agent take. Both ranks save on SIGTERM.
CODE = """
import os, signal, time
rank = int(os.environ["HOROVOD_RANK"])
def stop(*_):
    open(f"stopped-{rank}", "w").close()
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    print("x" * 99 * rank, flush=True) if rank else time.sleep(1)
"""


def test_the_node_answers_and_forwards_signals(tmp_path):
    # The job loses a node whose agent does not answer for about 4 s.
    options = ("--nodes", "2", "-np", "2", "--restarts", "1", "--host-timeout", "2")
    run = (sys.executable, "-c", RUN, *options, "--rdzv-file", tmp_path / "job", "--node-rank")
    command = (sys.executable, "-c", CODE)
    with (
        started_command(*run, 0, *command, stdout=subprocess.DEVNULL, cwd=tmp_path) as first,
        started_command(*run, 1, *command, cwd=tmp_path) as second,
    ):
        assert second.stdout.readline() == "[1] up\n"
        time.sleep(6)
        assert (first.poll(), second.poll()) == (None, None)
        second.send_signal(signal.SIGTERM)
        assert (first.wait(timeout=600), second.wait(timeout=600)) == (75, 75)
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-0", "stopped-1"}
