"""A node whose output is not read for a while, as with `less`."""

import contextlib
import signal
import subprocess
import sys
import time

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
    options = ["--nodes", "2", "-np", "2", "--rdzv-file", str(tmp_path / "job")]
    # The job loses a node whose agent does not answer for about 7 s.
    options += ["--restarts", "1", "--host-timeout", "3"]
    with contextlib.ExitStack() as stack:

        def start(number):
            command = [sys.executable, "-m", "hvdkit", "run", *options, "--node-rank", str(number)]
            job = subprocess.Popen(
                [*command, sys.executable, "-c", CODE],
                stdout=subprocess.PIPE if number else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=tmp_path,
            )
            stack.callback(job.wait, timeout=20)
            stack.callback(job.kill)
            return job

        first, second = start(0), start(1)
        assert second.stdout.readline() == b"[1] up\n"
        time.sleep(10)
        assert (first.poll(), second.poll()) == (None, None)
        second.send_signal(signal.SIGTERM)
        assert first.wait(timeout=20) == 75
        assert second.wait(timeout=20) == 75
    assert {path.name for path in tmp_path.glob("stopped-*")} == {"stopped-0", "stopped-1"}
