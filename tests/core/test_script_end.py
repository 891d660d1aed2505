"""The note that a script has ended, from real processes."""

import os
import subprocess
import sys

import pytest

from hvdkit.core.recorder import FOLDER_VARIABLE
from hvdkit.record_files import SCRIPT_ENDED

_CODE = """
import concurrent.futures.thread, os, sys, threading, time
from hvdkit.core.script_end import note_end_with

def wait_for_note():
    deadline = time.monotonic() + 10
    while not os.listdir(os.environ["HVDKIT_RECORD_DIR"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("found")

try:
    note_end_with(85, 2)
    note_end_with(75, 2)
    raise SystemExit(75)
finally:
    """


def end(folder, code):
    """Run a script, and return its status, its output and its notes, with the process "PID"."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE + code],
        env=os.environ | {FOLDER_VARIABLE: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors or "ValueError" in errors
    notes = [path.name.replace(str(process.pid), "PID") for path in folder.glob("*")]
    return process.returncode, output, notes


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=wait_for_note).start()",
        "concurrent.futures.ThreadPoolExecutor().submit(wait_for_note)",
    ],
)
def test_the_note_is_written_before_python_waits(tmp_path, code):
    assert end(tmp_path, code) == (75, "found\n", [SCRIPT_ENDED.format(2, 75, "PID")])


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise ValueError", 1),
        # The child process ends as a script does.
        ("os.fork() and os._exit(3)", 3),
        # The folder does not exist any more.
        ("os.rmdir(os.environ['HVDKIT_RECORD_DIR'])", 75),
    ],
)
def test_other_ends_have_no_note(tmp_path, code, status):
    folder = tmp_path / "records"
    folder.mkdir()
    assert end(folder, code) == (status, "", [])
