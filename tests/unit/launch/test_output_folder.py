import json
import math
import os
import sys
from dataclasses import replace

import pytest

from hvdkit.errors import RESUMABLE, HvdkitError, UsageError
from hvdkit.faults import start_folders
from hvdkit.faults.command import why
from hvdkit.launch.control import output_folder
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.ending.failure import Failure
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from tests.unit.launch.commands import hvdkit, started, wait_until

PLAN = make_plan(["true"], "/", [Host("localhost", 1)], 1)
RUN = ("run", "--output-dir", "logs", "-np")
RAISES = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(20)
try:
    [][0]
except IndexError as error:
    raise ValueError("shard 17\\nis bad") from error
"""


def run(tmp_path, code, ranks=2, **options):
    return hvdkit(*RUN, str(ranks), sys.executable, "-c", code, cwd=tmp_path, **options)


def test_the_link_to_the_newest_start_has_a_name_before_that_nobody_can_foresee(tmp_path):
    (tmp_path / f".latest.{os.getpid()}").mkdir()
    folder = output_folder.make(tmp_path)
    assert (tmp_path / "latest").resolve() == folder


def test_each_start_has_a_folder(tmp_path):
    for text in ("first", "second"):
        assert run(tmp_path, f"print('{text}')").returncode == 0
    logs = tmp_path / "logs"
    folders = sorted(path for path in logs.iterdir() if not path.is_symlink())
    assert [(folder / "rank.1.log").read_text() for folder in folders] == ["first\n", "second\n"]
    assert (logs / "latest").resolve() == folders[1]
    names = ["events.jsonl", "rank.0.log", "rank.1.log", "start.json"]
    assert sorted(path.name for path in folders[1].iterdir()) == names
    first, second = (start_folders.parse((folder / "start.json").read_text()) for folder in folders)
    assert second.command == (sys.executable, "-c", "print('second')")
    assert (second.directory, second.hosts, second.ranks) == (str(tmp_path), {"localhost": 2}, 2)
    assert (second.status, second.failed, second.reason, second.running) == (0, False, "", False)
    assert first.launcher != second.launcher
    assert first.began < first.ended < second.began < second.ended


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("trap", [["ln", "-s", "{own}"], ["mkfifo", "-m", "666"]])
def test_a_link_or_a_pipe_of_another_user_in_the_folder_of_a_start(tmp_path, trap):
    own = tmp_path / "own"
    own.write_text("old")
    code = f"""
import os, subprocess
folder = os.path.realpath("logs/latest")
os.chmod(folder, 0o777)
trap = [word.format(own={str(own)!r}) for word in {trap}]
subprocess.run([*trap, "events.jsonl"], cwd=folder, user=65534, group=65534, check=True)
"""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o711)
    assert run(tmp_path, code, ranks=1, timeout=120).returncode == 0
    assert own.read_text() == "old"


@pytest.mark.parametrize("restarts", [("--restarts", "1"), ("--elastic",)])
def test_a_restart_continues_without_its_folder(tmp_path, restarts):
    logs, marker = tmp_path / "logs", tmp_path / "again"
    code = f"""
import pathlib, shutil, sys
if pathlib.Path({str(marker)!r}).exists():
    sys.exit(print("second"))
shutil.rmtree({str(logs)!r})
pathlib.Path({str(logs)!r}).touch()
pathlib.Path({str(marker)!r}).touch()
sys.exit(3)
"""
    arguments = ("-np", "1", "--output-dir", str(logs), *restarts)
    done = hvdkit("run", *arguments, sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] second\n"
    assert "logs: File exists. The output of this start is not kept" in done.stderr


def test_starts_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder.time, "strftime", lambda *_: "now")
    made = [output_folder.make(tmp_path).name for _ in range(3)]
    assert made == ["now", "now-2", "now-3"]


def test_the_failure_is_written(tmp_path):
    assert run(tmp_path, RAISES).returncode == 1
    error = json.loads((tmp_path / "logs" / "latest" / "error.json").read_text())
    assert (error["rank"], error["host"], error["status"]) == (1, "localhost", 1)
    assert (error["signal"], error["suspects"]) == (None, [1])
    assert error["exception"] == "ValueError: shard 17"
    assert error["traceback"][0] == "Traceback (most recent call last):"
    assert error["traceback"][-2:] == error["last_lines"][-2:] == ["ValueError: shard 17", "is bad"]
    shown = hvdkit("why", "logs", cwd=tmp_path).stdout
    assert shown.startswith("The job failed: rank 1 on localhost failed: exit status 1.")
    assert shown.endswith(" ValueError: shard 17\n")
    start = start_folders.parse((tmp_path / "logs" / "latest" / "start.json").read_text())
    assert (start.status, start.failed) == (1, True)
    assert "rank 1 on localhost failed" in start.reason
    assert "ValueError: shard 17" in start.reason


def test_a_failure_of_no_rank_is_written(tmp_path):
    """A deadlock or a lost host, for example: here, the agent is killed."""
    code = (
        "import psutil, time; "
        "agent = 'hvdkit.launch.agent.main'; "
        "agents = [p for p in psutil.Process().parents() if agent in p.cmdline()]; "
        "agents[-1].kill(); time.sleep(60)"
    )
    assert run(tmp_path, code).returncode == 1
    folder = tmp_path / "logs" / "latest"
    error = json.loads((folder / "error.json").read_text())
    reason = error.pop("reason")
    assert reason.startswith("lost localhost: its agent was killed by signal 9")
    empty = {"suspects": [], "traceback": [], "last_lines": []}
    names = ("rank", "host", "status", "signal", "hint", "possible_causes", "exception")
    assert error == dict.fromkeys(names) | empty
    assert why(folder).startswith("The job failed: lost localhost: its agent was killed")


def test_the_end_of_a_start_that_a_signal_stopped_early_is_written(tmp_path):
    """The signal comes while the agent starts. Ranks run only after that."""
    file = tmp_path / "logs" / "latest" / "start.json"
    with started("-np", "1", "--output-dir", "logs", "sleep", "60", cwd=tmp_path) as job:
        wait_until(file.exists, seconds=60)
        job.terminate()
        assert job.wait(timeout=600) == RESUMABLE
    start = start_folders.parse(file.read_text())
    assert (start.status, start.failed, start.running) == (RESUMABLE, False, False)
    assert start.reason == "ended by SIGTERM"


@pytest.mark.parametrize(
    ("status", "hint", "name", "written"),
    [
        (-9, "", "SIGKILL", None),
        (-9, "probably by the kernel", "SIGKILL", "probably by the kernel"),
        # A signal without a name in Python.
        (-40, "", "SIGRTMIN+6", None),
    ],
)
def test_a_signal_and_its_probable_cause_are_written(tmp_path, status, hint, name, written):
    outcome = Outcome(128 - status, failure=Failure(0, status, hint=hint))
    output_folder.write_error(tmp_path, outcome, PLAN)
    error = json.loads((tmp_path / "error.json").read_text())
    assert (error["signal"], error["hint"]) == (name, written)


def test_a_start_that_still_runs(tmp_path):
    plan = make_plan(["python", "train.py"], str(tmp_path), [Host("host0", 2), Host("host1", 2)], 3)
    begun = start_folders.parse(output_folder.describe_start(plan).to_json())
    assert begun.hosts == {"host0": 2, "host1": 1}
    assert (begun.running, begun.ended, begun.status) == (True, None, None)
    ended = output_folder.describe_end(begun, Outcome(0))
    assert start_folders.parse(ended.to_json()) == ended
    assert ended.running is False
    elsewhere = replace(begun, launcher="another-host 7 1.00")
    assert elsewhere.running is None
    host, pid, _ = begun.launcher.split()
    assert replace(begun, launcher=f"{host} {pid} 1.00").running is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "not the description of a start") for text in ("", "[]", "{}", '{"version": 1}')),
        *((replace(output_folder.describe_start(PLAN), began=time).to_json(), "is not a time")
          for time in (math.nan, 1e300)),
        (replace(output_folder.describe_start(PLAN), launcher="h -5 1.0").to_json(), "number of a"),
        ('{"version": 2}', "Update hvdkit"),
    ],
)  # fmt: skip
def test_a_foreign_description_of_a_start(text, expected):
    with pytest.raises(HvdkitError, match=expected):
        start_folders.parse(text)


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir .*file/logs: Not a directory"):
        output_folder.make(tmp_path / "file" / "logs")
