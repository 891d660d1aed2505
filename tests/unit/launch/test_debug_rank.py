"""`hvdkit run --debug-rank` in a pseudo-terminal."""

import os
import pty
import select
import subprocess
import sys
import time

from tests.unit.launch.commands import python, run

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
        words = ("run", "-np", "2", "--debug-rank", "1", sys.executable, "-c", CODE)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), child_end)
        job = subprocess.Popen([sys.executable, "-m", "hvdkit", *words], **streams)
        os.close(child_end)
        read_until(terminal, b"(Pdb) ")
        os.write(terminal, b"p answer * 2\n")
        read_until(terminal, b"84")
        os.write(terminal, b"continue\n")
        read_until(terminal, b"your name? ")
        os.write(terminal, b"Ada\n")
        said = read_until(terminal, b"hello Ada True")
        assert b"ranks running" not in said
        assert job.wait(timeout=600) == 0
    finally:
        os.close(terminal)
        job.kill()
        job.wait(timeout=600)


def test_input_from_a_pipe():
    code = "import os; os.environ['RANK'] == '0' and print(input(), input())"
    words = ("-np", "2", "--debug-rank", "0", sys.executable, "-c", code)
    done = run(*words, input="one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "one two\n"), done.stderr


def test_a_rank_without_a_terminal_says_how_to_get_one():
    done = run("-np", "2", *python("input() if rank else time.sleep(60)"))
    assert done.returncode == 1
    assert "`hvdkit run --debug-rank 1` connects rank 1 to the terminal" in done.stderr
