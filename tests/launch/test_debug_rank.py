"""`hvdkit run --debug-rank` in a pseudo-terminal."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest

RUN = (sys.executable, "-m", "hvdkit", "run", "-np", "2")
CODE = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    answer = 42
    breakpoint()
    name = input("your name? ")
    print("hello", name, sys.stdin.isatty(), flush=True)
else:
    print("rank", rank, os.environ["HOROVOD_STALL_CHECK_DISABLE"], sys.stdin.read() == "")
"""


def read_until(terminal, words, seconds=30):
    deadline = time.monotonic() + seconds
    said = b""
    while words not in said:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, said
        said += os.read(terminal, 1000)
    return said


def test_a_breakpoint_in_one_rank():
    terminal, child_end = pty.openpty()
    try:
        job = subprocess.Popen(
            [*RUN, "--debug-rank", "1", sys.executable, "-c", CODE],
            stdin=child_end,
            stdout=child_end,
            stderr=child_end,
        )
        os.close(child_end)
        read_until(terminal, b"(Pdb) ")
        os.write(terminal, b"p answer * 2\n")
        read_until(terminal, b"84")
        os.write(terminal, b"continue\n")
        read_until(terminal, b"your name? ")
        os.write(terminal, b"Ada\n")
        said = read_until(terminal, b"hello Ada True")
        assert b"ranks running" not in said
        assert job.wait(timeout=20) == 0
    finally:
        os.close(terminal)
        job.kill()
        job.wait(timeout=10)


def test_input_from_a_pipe():
    code = "import os; os.environ['RANK'] == '0' and print(input(), input())"
    done = subprocess.run(
        [*RUN, "--debug-rank", "0", sys.executable, "-c", code],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "one two\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--debug-rank", "2"], "--debug-rank is 2; the ranks are 0 to 1"),
        (["--debug-rank", "0", "--launcher", "mpi"], "--launcher gloo"),
        (["--debug-rank", "1", "-H", "localhost:1,192.0.2.1:1"], "runs on 192.0.2.1"),
    ],
)
def test_invalid_debug_ranks(arguments, words):
    done = subprocess.run(
        [*RUN, *arguments, "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
