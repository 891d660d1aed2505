import json
import subprocess
import sys

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch import output_folder

RUN = ("run", "-np", "2", "--output-dir", "logs")
RAISES = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(20)
try:
    [][0]
except IndexError as error:
    raise ValueError("shard 17\\nis bad") from error
"""


def run(tmp_path, code):
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", *RUN, sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_start_has_a_folder(tmp_path):
    for text in ("first", "second"):
        assert run(tmp_path, f"print('{text}')").returncode == 0
    logs = tmp_path / "logs"
    folders = sorted(path for path in logs.iterdir() if not path.is_symlink())
    assert [(folder / "rank.1.log").read_text() for folder in folders] == ["first\n", "second\n"]
    assert (logs / "latest").resolve() == folders[1]
    assert sorted(path.name for path in folders[1].iterdir()) == ["rank.0.log", "rank.1.log"]


def test_starts_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder.time, "strftime", lambda *_: "now")
    made = [output_folder.make(tmp_path).name for _ in range(3)]
    assert made == ["now", "now-2", "now-3"]


def test_the_failure_is_written(tmp_path):
    assert run(tmp_path, RAISES).returncode == 1
    error = json.loads((tmp_path / "logs" / "latest" / "error.json").read_text())
    assert (error["rank"], error["host"], error["status"]) == (1, "localhost", 1)
    assert error["signal"] is None
    assert error["exception"] == "ValueError: shard 17"
    assert error["traceback"][0] == "Traceback (most recent call last):"
    assert error["traceback"][-2:] == error["last_lines"][-2:] == ["ValueError: shard 17", "is bad"]


def test_a_signal_is_named(tmp_path):
    code = "import os, signal; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGSEGV)"
    run(tmp_path, code)
    error = json.loads((tmp_path / "logs" / "latest" / "error.json").read_text())
    assert (error["rank"], error["status"], error["signal"]) == (1, None, "SIGSEGV")
    assert (error["exception"], error["traceback"]) == (None, [])


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir .*file/logs: Not a directory"):
        output_folder.make(tmp_path / "file" / "logs")
