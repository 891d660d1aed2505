"""Output of a process without buffers, whose writes signals interrupt."""

import os
import subprocess
import sys

import pytest

_LINES, _LENGTH = 40, 200_000

_PRINTS = f"""
import os, signal, sys, threading, time
from hvdkit.runtime.standard_streams import write_whole_output

signal.signal(signal.SIGUSR2, lambda *_: None)
write_whole_output()
write_whole_output()
ended = threading.Event()

def interrupt():
    while not ended.wait(0.002):
        os.kill(os.getpid(), signal.SIGUSR2)

thread = threading.Thread(target=interrupt)
thread.start()
stream = getattr(sys, sys.argv[1])
for number in range({_LINES}):
    print(str(number % 10) * {_LENGTH}, file=stream)
stream.buffer.write(b"bytes")
ended.set()
thread.join()
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_signal_in_a_write_to_a_full_pipe_loses_nothing(stream, blocking):
    receiving, sending = os.pipe()
    os.set_blocking(sending, blocking)
    command = [sys.executable, "-u", "-c", _PRINTS, stream]
    with subprocess.Popen(command, **{stream: sending}) as job:
        os.close(sending)
        with os.fdopen(receiving, "rb") as file:
            output = file.read()
        assert job.wait(60) == 0
    lines = [str(number % 10) * _LENGTH for number in range(_LINES)]
    assert output.decode() == "\n".join([*lines, "bytes"])
