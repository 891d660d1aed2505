"""Waits for the readers of standard output and error."""

import os
import signal
import threading
import time

import pytest

from hvdkit.launch.control import readers
from hvdkit.system import signals


@pytest.fixture(autouse=True)
def without_limit():
    yield
    readers.wait()
    signals.forget_noted()


def test_a_reader_may_pause_after_the_limit():
    """Ranks may save for minutes after a signal."""
    source, target = os.pipe()
    found = []

    def read():
        with open(source, "rb", buffering=0) as file:
            while data := file.read(65536):
                found.append(data)
                time.sleep(0.3)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    readers.give_up_at(time.monotonic(), shortest=20.0)
    with open(target, "wb", buffering=0):
        readers.write(target, bytes(300_000))
    reader.join(20)
    assert sum(map(len, found)) == 300_000


@pytest.mark.parametrize("open_ends", [os.pipe, os.openpty])
@pytest.mark.parametrize("late", [False, True], ids=["signal", "signal after the end of the ranks"])
def test_a_wait_ends_at_the_limit(open_ends, late, monkeypatch):
    ends = open_ends()
    monkeypatch.setattr(readers, "_SOON_SECONDS", 0.5)
    monkeypatch.setattr(readers, "_PAUSE_SECONDS", 0.1)
    if late:
        signals.begin_to_note()
        signals.note(signal.SIGTERM)
    else:
        readers.give_up_soon()
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the write has no limit"))
    signal.alarm(20)
    try:
        with pytest.raises(TimeoutError, match="its reader does not read"):
            readers.write(ends[1], 10_000 * b"a line of some length\n")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for end in ends:
            os.close(end)
