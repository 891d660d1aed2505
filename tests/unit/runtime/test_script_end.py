"""The report that a script makes an orderly end, from real processes with the launcher's hook."""

import pytest

from tests.unit.launch.test_python_hook import run

_CODE = """
import concurrent.futures.thread, os, sys, threading, time
from hvdkit.runtime.script_end import note_end_with

def wait_for_note():
    deadline = time.monotonic() + 10
    while not [name for name in os.listdir(os.environ["HVDKIT_RECORD_DIR"]) if "end" in name]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("found")

try:
    note_end_with(85)
    note_end_with(75)
    raise SystemExit(75)
finally:
    """


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=wait_for_note).start()",
        "concurrent.futures.ThreadPoolExecutor().submit(wait_for_note)",
    ],
)
def test_the_end_is_reported_before_python_waits(tmp_path, code):
    status, output, report = run(tmp_path, _CODE + code)
    assert (status, output, report["status"]) == (75, "found\n", 75)


@pytest.mark.parametrize(
    ("code", "status", "reported"),
    [
        ("raise ValueError", 1, None),
        # The child process ends as a script does, but only the rank reports.
        ("os.fork() and os._exit(3)", 3, None),
        ("pass", 75, 75),
    ],
)
def test_other_ends(tmp_path, code, status, reported):
    found = run(tmp_path, _CODE + code)
    assert found[0] == status
    assert (found[2] or {}).get("status") == reported


def test_a_folder_that_does_not_exist_any_more(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    code = "__import__('shutil').rmtree(os.environ['HVDKIT_RECORD_DIR'])"
    assert run(folder, _CODE + code) == (75, "", None)
