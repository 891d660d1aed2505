"""`hvdkit why` on folders that a job has left."""

import contextlib
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from hvdkit.core.recorder import FOLDER_VARIABLE, Recorder
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults import command
from hvdkit.faults.command import inspect_live, why
from hvdkit.faults.record_folder import PREFIX, RecordFolder

RECORD = {
    "version": 1,
    "limit": 0,
    "rank": 0,
    "size": 2,
    "host": "host0",
    "pid": 7,
    "reason": "error",
    "time": 100.5,
    "error": "failed: Connection closed by peer\nsecond line",
    "failed": "allreduce.loss",
    "groups": {"0": [0, 1]},
    "labels": {},
    "calls": {"allreduce.loss": 3},
    "open": [],
    "done": [
        {"name": "allreduce.loss", "call": 3, "operation": 0, "set": 0, "dtype": 7, "bytes": 4,
         "enqueued": 99.0, "ended": 100.0}
    ],
    "stacks": "",
}  # fmt: skip
ERROR = {
    "rank": 1,
    "host": "host1",
    "status": None,
    "signal": "SIGKILL",
    "exception": None,
    "traceback": [],
    "last_lines": ["step 3"],
}


@pytest.fixture
def start(tmp_path):
    """The folder of one start, as `--output-dir` has it."""
    folder = tmp_path / "20261124-100000"
    (folder / "records").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(folder.name)
    return folder


def test_the_failure_of_one_rank_and_the_errors_of_the_others(tmp_path, start):
    (start / "error.json").write_text(json.dumps(ERROR))
    (start / "records" / "rank-0.json").write_text(json.dumps(RECORD))
    text = why(tmp_path)
    assert text.startswith(
        "Rank 1 on host1 failed first: SIGKILL. Its last line of output: step 3\n\n"
    )
    assert (
        "Rank 0 on host0: the allreduce 'loss', 4 bytes of float32, call 3 failed: Connection "
        "closed by peer"
    ) in text
    assert "rank 0  collective" in text
    assert why(start) == text


def test_the_probable_cause_of_a_signal(tmp_path, start):
    (start / "error.json").write_text(json.dumps(ERROR | {"hint": "probably by the kernel"}))
    assert why(tmp_path).startswith(
        "Rank 1 on host1 failed first: SIGKILL, probably by the kernel."
    )


def test_an_exception_before_a_signal_may_be_a_caught_one(tmp_path, start):
    (start / "error.json").write_text(json.dumps(ERROR | {"exception": "OSError: reset"}))
    assert why(tmp_path) == (
        "Rank 1 on host1 failed first: SIGKILL. Earlier, the rank had written a traceback: "
        "OSError: reset"
    )


def test_an_error_of_many_ranks_is_one_line(start):
    for rank in range(20):
        record = json.dumps(RECORD | {"rank": rank, "size": 20})
        (start / "records" / f"rank-{rank}.json").write_text(record)
    text = why(start)
    line = "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: the allreduce 'loss', 4 bytes of float32"
    assert line in text
    assert text.count("Connection closed by peer") == 1


def test_a_hang_after_an_error_that_the_script_has_caught(start):
    call = {"name": "allreduce.loss", "operation": 0, "set": 0, "dtype": 7, "bytes": 4}
    waits = [call | {"call": 4, "enqueued": 100.2, "ended": None}]
    calls = {"0": {"allreduce.loss": 4}}
    records = [
        RECORD | {"reason": "stall", "open": waits, "calls": calls},
        RECORD | {"reason": "request", "rank": 1},
    ]
    for rank, record in enumerate(records):
        (start / "records" / f"rank-{rank}.json").write_text(json.dumps(record))
    assert "Rank 1 on host0 has not called it" in why(start)


def test_possible_causes_instead_of_a_lost_peer(start):
    content = ERROR | {"possible_causes": "Rank 0 had ended without an error"}
    (start / "error.json").write_text(json.dumps(content | {"exception": "HorovodInternalError"}))
    assert why(start).startswith(
        "Rank 1 on host1 failed: SIGKILL. Rank 0 had ended without an error"
    )


def test_ranks_with_the_same_error_are_all_named(start):
    content = ERROR | {"status": 1, "signal": None, "suspects": [1, 0]}
    (start / "error.json").write_text(json.dumps(content | {"exception": "ValueError: bad"}))
    assert why(start) == ("Ranks 0, 1 failed with the same error: exit status 1. ValueError: bad")


def test_a_copy_without_the_link_to_the_newest_start(tmp_path, start):
    for folder in (start, tmp_path / "20261123-100000"):
        folder.mkdir(exist_ok=True)
        (folder / "start.json").write_text("{}")
    (start / "error.json").write_text(json.dumps(ERROR))
    (tmp_path / "latest").unlink()
    assert why(tmp_path) == "Rank 1 on host1 failed first: SIGKILL. Its last line of output: step 3"


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("earlier", [(), ("", "-2", "-9", "-10")])
def test_the_newest_start_without_a_description(tmp_path, earlier, link):
    """The disk was full."""
    folders = [tmp_path / f"20261124-100000{number}" for number in earlier]
    for folder in folders:
        folder.mkdir()
        (folder / "start.json").write_text("{}")
        (folder / "error.json").write_text(json.dumps(ERROR | {"last_lines": [folder.name]}))
    newest = tmp_path / "20261124-100001"
    newest.mkdir()
    if link:
        (tmp_path / "latest").symlink_to(newest.name)
    note = f"The newest start, {newest.name}, has no description (start.json): was the disk full?"
    if folders:
        assert why(tmp_path) == (
            f"{note} The start {folders[-1].name}:\n\nRank 1 on host1 failed first: SIGKILL. "
            f"Its last line of output: {folders[-1].name}"
        )
    else:
        with pytest.raises(UsageError, match=re.escape(note)):
            why(tmp_path)


def test_a_lost_host_is_named(tmp_path, start):
    content = {"failed": True, "reason": "lost host1: its agent has not answered for 30 s"}
    (start / "start.json").write_text(json.dumps(content))
    assert why(tmp_path) == f"The job failed: {content['reason']}"
    (start / "error.json").write_text(json.dumps(ERROR))
    assert why(tmp_path).startswith("Rank 1 on host1 failed first: SIGKILL.")


def test_the_records_of_a_job_that_succeeded(start):
    content = {"failed": False, "reason": "", "status": 0}
    (start / "start.json").write_text(json.dumps(content))
    with pytest.raises(UsageError):
        why(start)
    (start / "records" / "rank-0.json").write_text(json.dumps(RECORD | {"error": ""}))
    assert why(start).startswith("The job succeeded. The ranks wrote these records earlier")


@pytest.mark.parametrize(
    ("ended", "verdict", "expected"),
    [(140.0, False, True), (102.0, False, False), (140.0, True, False)],
)
def test_the_records_of_a_stall_long_before_a_failure(start, ended, verdict, expected):
    content = {"failed": True, "reason": "", "status": 1, "verdict": verdict, "ended": ended}
    (start / "start.json").write_text(json.dumps(content))
    (start / "error.json").write_text(json.dumps(ERROR))
    waits = RECORD | {"error": "", "failed": "", "open": RECORD["done"], "done": []}
    (start / "records" / "rank-0.json").write_text(json.dumps(waits))
    line = "\n\nThe ranks wrote these records 40 s before the end of the job:\n\nRank 0 has waited"
    assert (line in why(start)) == expected


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_has_continued_since_its_record(start, waits):
    """Rank 1 has completed a call after the record of rank 0, which waits in an earlier one."""
    call = RECORD["done"][0]
    earlier = call | {"call": 2, "enqueued": 80.0, "ended": None}
    records = [
        {"time": 90.0, "open": [earlier], "done": [], "calls": {"allreduce.loss": 2}},
        {"rank": 1, "open": [call | {"name": "x", "call": 1, "ended": None}] if waits else []},
    ]
    for rank, record in enumerate(records):
        text = json.dumps(RECORD | {"error": "", "failed": ""} | record)
        (start / "records" / f"rank-{rank}.json").write_text(text)
    text = why(start)
    assert "did not report" not in text
    unknown = "Rank 0 has not called it, or has called it without a new record."
    assert (unknown if waits else "Rank 0 has continued since its last record.") in text


def test_a_launcher_that_was_killed(start):
    content = {"failed": False, "reason": "", "status": None, "ended": None}
    (start / "start.json").write_text(json.dumps(content))
    assert why(start).startswith("The job has not ended, or `hvdkit run` was killed.")
    (start / "error.json").write_text(json.dumps(ERROR))
    assert why(start).startswith("Rank 1 on host1 failed first")


def test_the_records_of_a_job_that_runs(start):
    """The stall may have ended long ago."""
    content = {"failed": False, "reason": "", "status": None, "ended": None}
    (start / "start.json").write_text(json.dumps(content))
    waits = {"error": "", "failed": "", "open": RECORD["done"], "time": time.time() - 7200.0}
    (start / "records" / "rank-0.json").write_text(json.dumps(RECORD | waits | {"done": []}))
    assert re.match(
        "The job has not ended, or `hvdkit run` was killed. On a host of a running job, `hvdkit "
        r"inspect --live` shows the present state\. The ranks wrote these records 7,20\d s ago:\n\n"
        "Rank 0 has waited",
        why(start),
    )


@pytest.mark.parametrize(
    "content",
    [
        {"failed": True, "reason": "Ranks 0, 1 have waited 61 s.", "verdict": True},
        {"failed": False, "reason": "ended by SIGINT"},
        {"failed": True},
        [],
    ],
)
def test_starts_without_another_cause(tmp_path, start, content):
    (start / "start.json").write_text(json.dumps(content))
    (start / "records" / "rank-0.json").write_text(json.dumps(RECORD))
    assert why(tmp_path).startswith("Rank 0 on host0: the allreduce 'loss'")


def test_a_verdict_whose_records_are_missing(tmp_path, start):
    content = {"failed": True, "reason": "Rank 0 has waited 61 s.", "verdict": True}
    (start / "start.json").write_text(json.dumps(content))
    assert why(tmp_path) == "The job failed: Rank 0 has waited 61 s."


def test_the_host_of_a_stopped_rank_is_named(tmp_path, start):
    call = RECORD["done"][0] | {"ended": None}
    waits = RECORD | {"error": "", "failed": "", "open": [call], "done": []}
    (start / "start.json").write_text(
        json.dumps({"failed": True, "verdict": True, "reason": "", "hosts": {"a": 1, "b": 1}})
    )
    (start / "records" / "rank-0.json").write_text(json.dumps(waits))
    (start / "records" / "states.json").write_text(json.dumps({"1": "stopped"}))
    assert "Rank 1 on b has not called it: the process is stopped" in why(tmp_path)


def test_a_rank_that_waits_for_the_network_is_not_blamed(tmp_path, start):
    """Call 3 has ended on rank 0 only, which has then made call 4."""
    waits = RECORD | {"time": 160.0, "error": "", "failed": "", "done": []}
    for rank, number in [(0, 4), (1, 3)]:
        call = RECORD["done"][0] | {"call": number, "enqueued": 96.0 + number, "ended": None}
        own = waits | {"rank": rank, "open": [call], "calls": {"allreduce.loss": number}}
        (start / "records" / f"rank-{rank}.json").write_text(json.dumps(own))
    text = why(tmp_path)
    assert "All ranks have called it: the network or a rank does not transfer its data (4 b" in text
    assert "has not called it" not in text


def test_inspect_combines_the_folders_of_one_job(tmp_path, monkeypatch):
    """Over MPI and in Slurm, each rank has a folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [RecordFolder(job) for job in ("host0:1", "host0:1", "host0:2", "")]
    for rank, folder in enumerate(folders):
        (folder.path / f"rank-{rank}.stacks").touch()
        content = RECORD | {"rank": rank, "size": 4, "time": time.time() + 1}
        (folder.path / f"rank-{rank}.json").write_text(json.dumps(content))
    try:
        text = inspect_live()
    finally:
        for folder in folders:
            folder.remove()
    titles = re.findall(r"(.*) answered on this host", text)
    assert sorted(titles) == ["1 of 4 ranks", "1 of 4 ranks", "2 of 4 ranks"]


@pytest.mark.parametrize(
    ("waited", "called", "expected"),
    [
        # Of a job that makes progress, the record of rank 1 is a little later.
        (0.01, {"seconds": 0.02, "ended": 0.01}, "No collective has waited 5 s"),
        (0.01, {"seconds": 0.02}, "No collective has waited 5 s"),
        (0.01, None, "No collective has waited 5 s"),
        # Rank 1 was late, and has just come.
        (90.0, {"seconds": 0.02}, "No collective has waited 5 s"),
        (90.0, {"seconds": 0.02, "ended": 0.01}, "No collective has waited 5 s"),
        (90.0, None, "Rank 1 on host0 has not called it"),
        (90.0, {"seconds": 80.0}, "All ranks have called it: the network"),
    ],
)
def test_inspect_gives_a_verdict_on_long_waits_only(tmp_path, waited, called, expected):
    folder = tmp_path / f"{PREFIX}x"
    folder.mkdir()
    now = time.time() + 1
    call = RECORD["done"][0]
    records = [
        {"open": [call | {"enqueued": now - waited, "ended": None}]},
        {"rank": 1, "calls": {}, "time": now + 0.1},
    ]
    if called is not None:
        ended = called.get("ended")
        call = call | {"enqueued": now + 0.1 - called["seconds"]}
        call["ended"] = ended and now + 0.1 - ended
        records[1] |= {"calls": RECORD["calls"], "done" if ended else "open": [call]}
    for rank, record in enumerate(records):
        (folder / f"rank-{rank}.stacks").touch()
        content = RECORD | {"error": "", "failed": "", "done": [], "time": now} | record
        (folder / f"rank-{rank}.json").write_text(json.dumps(content))
    text = inspect_live(folder=tmp_path)
    assert expected in text
    assert ("network" in text) == ("network" in expected)


@pytest.mark.parametrize("group", [[0, 1, 2, 3], [2, 3]])
@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        ({2: 90.0, 3: None}, "Rank 3 on host0 has not called it: the stack"),
        ({2: 90.0}, "Rank 3 has not called it, and did not report its state"),
        ({2: 90.0, 3: 80.0}, ""),
        ({2: 90.0, 3: 0.02}, "No collective has waited 5 s since the last rank on this host"),
        ({2: None, 3: None}, "No rank on this host waits for a collective"),
    ],
)
def test_inspect_of_a_job_on_several_hosts(tmp_path, monkeypatch, waited, expected, group):
    """Ranks 2 and 3 are on this host."""
    monkeypatch.setattr(command, "_ANSWER_SECONDS", 0.2)
    folder = tmp_path / f"{PREFIX}x"
    folder.mkdir()
    now = time.time() + 1
    for rank in (2, 3):
        (folder / f"rank-{rank}.stacks").touch()
    for rank, seconds in waited.items():
        record = RECORD | {"rank": rank, "size": 4, "error": "", "failed": "", "time": now}
        record |= {"groups": {"0": [0, 1, 2, 3], "1": group}, "calls": {}, "done": []}
        if seconds is not None:
            call = RECORD["done"][0] | {"set": 1, "enqueued": now - seconds, "ended": None}
            record |= {"open": [call], "calls": {"1": {"allreduce.loss": 3}}}
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))
    is_complete = len(group) == 2
    expected = expected or f"All ranks{'' if is_complete else ' on this host'} have called it"
    text = inspect_live(folder=tmp_path)
    lines = text.split("\n\n")[1].splitlines()
    assert any(line.startswith(expected) for line in lines), text
    assert lines[-1] == (
        "Ranks 0, 1 are on other hosts, or have ended. Run `hvdkit inspect --live` on the other "
        "hosts, too."
    )
    assert "Rank 0" not in text
    assert "Rank 1" not in text


def test_inspect_waits_for_a_record_that_was_made_after_the_request(tmp_path):
    """The file of an earlier record may be written after the request."""
    folder = tmp_path / f"{PREFIX}x"
    folder.mkdir()
    (folder / "rank-0.stacks").touch()

    def write(moment):
        (folder / "new").write_text(json.dumps(RECORD | {"time": moment}))
        (folder / "new").rename(folder / "rank-0.json")

    def rank():
        while not (folder / "request").exists():
            time.sleep(0.01)
        write(RECORD["time"])
        time.sleep(0.3)
        write(time.time())

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    assert inspect_live(folder=tmp_path).startswith("1 of 2 ranks answered on this host.")
    thread.join(timeout=10)


def test_inspect_of_a_job_whose_ranks_do_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "_ANSWER_SECONDS", 0.2)
    folder = RecordFolder()
    for rank in range(2):
        (folder.path / f"rank-{rank}.stacks").touch()
    # This process was killed.
    abandoned = tmp_path / f"{PREFIX}abandoned"
    abandoned.mkdir()
    for name in ("lock", "rank-0.stacks"):
        (abandoned / name).touch()
    try:
        assert re.findall(r"(.*) of a job on this host did not answer", inspect_live()) == [
            "2 ranks"
        ]
    finally:
        folder.remove()
    with pytest.raises(UsageError, match="there are no ranks of `hvdkit run` on this host"):
        inspect_live()


def test_inspect_of_a_rank_whose_script_handles_the_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "_ANSWER_SECONDS", 0.2)
    folder = RecordFolder()
    engine = SimpleNamespace(horovod_hvdkit_write_records=lambda *_: None)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        Recorder(engine).watch(1, 2, 0.0, {FOLDER_VARIABLE: str(folder.path)})
        assert inspect_live().startswith("1 rank of a job on this host did not answer.")
    finally:
        signal.signal(signal.SIGUSR2, before)
        folder.remove()


def test_a_folder_without_anything(tmp_path):
    with pytest.raises(UsageError, match="neither records nor the failure of a rank"):
        why(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not a record of a rank"),
        (json.dumps(RECORD | {"version": 9}), "has version 9"),
        (json.dumps(RECORD | {"rank": 1}), "has the record of rank 1; expected that of rank 0"),
        (json.dumps(RECORD | {"size": math.inf}), "not a record of a rank"),
        (json.dumps(RECORD | {"groups": {"0": ["a"]}}), "not a record of a rank"),
        (json.dumps(RECORD | {"time": math.nan}), "nan s is not a time"),
        (json.dumps(RECORD | {"offset": 1e300}), "1e[+]300 s is not a time"),
    ],
)
def test_a_file_that_is_not_a_record(start, content, expected):
    path = start / "records" / "rank-0.json"
    path.write_text(content)
    with pytest.raises(HvdkitError, match=expected) as caught:
        why(start)
    assert str(path) in str(caught.value)


def test_the_command_line(tmp_path):
    words = [sys.executable, "-m", "hvdkit", "why", str(tmp_path / "missing")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    problem = f"cannot read {tmp_path / 'missing'}: No such file or directory. Expected a folder"
    assert done.stderr.startswith(f"hvdkit why: {problem}")


def a_call(draw):
    return {
        "name": draw.choice("ab"), "call": draw.randrange(4), "operation": draw.choice([0, 3, 99]),
        "set": draw.choice([0, 1, 5]), "dtype": draw.choice([7, 99]), "bytes": draw.choice([0, 4]),
        "enqueued": draw.uniform(0, 100), "ended": draw.choice([None, 50.0]),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(100))
def test_records_that_do_not_fit_together(start, seed):
    """Random records of different jobs, and cut files, raise no error but `HvdkitError`."""
    draw = random.Random(seed)
    for rank in draw.sample(range(5), draw.choice([1, 2, 3])):
        record = RECORD | {
            "rank": rank, "size": draw.choice([1, 2, 3, 4]),
            "error": draw.choice(["", "failed: x"]),
            "groups": draw.choice([{}, {"0": []}, {"1": [0, 2]}, {"5": [9]}]),
            "open": [a_call(draw) for _ in range(draw.randrange(3))],
            "done": [a_call(draw) for _ in range(draw.randrange(3))],
        }  # fmt: skip
        text = json.dumps(record).encode()
        damaged = text[: draw.randrange(len(text))] + b"\xff" if draw.random() < 0.1 else text
        (start / "records" / f"rank-{rank}.json").write_bytes(damaged)
    with contextlib.suppress(HvdkitError):
        assert why(start)
