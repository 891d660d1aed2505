"""`hvdkit why` on folders that a job has left."""

import contextlib
import json
import math
import random
import re
import signal
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults import command
from hvdkit.faults.command import inspect_live, why
from hvdkit.faults.record_folder import PREFIX, RecordFolder
from hvdkit.runtime.recorder import FOLDER_VARIABLE, Recorder
from tests.unit.launch.commands import hvdkit, wait_until

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
    "calls": {"0": {"allreduce.loss": 3}},
    "offset": time.time() - time.monotonic(),
    "machine": "",
    "open": [],
    "done": [
        {"name": "allreduce.loss", "call": 3, "operation": 0, "set": 0, "dtype": 7, "bytes": 4,
         "enqueued": 99.0, "ended": 100.0}
    ],
    "stacks": "",
}  # fmt: skip
START = {
    "version": 1, "command": ["python", "train.py"], "directory": "/", "launcher": "host0 1 1.00",
    "versions": {}, "began": 90.0, "hosts": {"host0": 1, "host1": 1}, "failed": True, "reason": "",
    "status": 1, "ended": 102.0, "saved": False, "hosts_changed": False, "verdict": False,
    "network": "",
}  # fmt: skip
KILLED = "rank 1 on host1 failed: killed by signal 9 (Killed)."


@pytest.fixture
def start(tmp_path):
    """The folder of one start, as `--output-dir` has it."""
    folder = tmp_path / "20261124-100000"
    (folder / "records").mkdir(parents=True)
    (tmp_path / "latest").symlink_to(folder.name)
    return folder


#: Rank 0 waits for call 3.
WAITS = {"error": "", "failed": "", "open": [RECORD["done"][0] | {"ended": None}], "done": []}


def write(start, *records, **description):
    """Write changed records, one for each rank, and a changed description of the start."""
    if description:
        (start / "start.json").write_text(json.dumps(START | description))
    for rank, record in enumerate(records):
        content = json.dumps(RECORD | {"rank": rank} | record)
        (start / "records" / f"rank-{rank}.json").write_text(content)


def test_the_failure_of_one_rank_and_the_errors_of_the_others(tmp_path, start):
    write(start, {}, reason=KILLED, network="a - b")
    text = why(tmp_path)
    assert text.startswith(
        f"The job failed: {KILLED}\n\n"
        "After the failure, connections between the hosts failed: a - b."
    )
    assert (
        "Rank 0 on host0: the allreduce 'loss', 4 bytes of float32, call 3 failed: Connection "
        "closed by peer"
    ) in text
    assert "rank 0  collective" in text
    assert why(start) == text
    # The events say more than the description.
    replayed = why(start, replayed=lambda folder: f"of {folder.name}")
    assert replayed.startswith(f"The job failed: of {start.name}\n\n")


def test_an_error_of_many_ranks_is_one_line(start):
    write(start, *[{"size": 20}] * 20)
    text = why(start)
    line = "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more: the allreduce 'loss', 4 bytes of float32"
    assert line in text
    assert text.count("Connection closed by peer") == 1


def test_a_hang_after_an_error_that_the_script_has_caught(start):
    waits = [RECORD["done"][0] | {"call": 4, "enqueued": 100.2, "ended": None}]
    calls = {"0": {"allreduce.loss": 4}}
    write(start, {"reason": "stall", "open": waits, "calls": calls}, {"reason": "request"})
    assert "Rank 1 on host0 has not called it" in why(start)


def test_a_copy_without_the_link_to_the_newest_start(tmp_path, start):
    other = tmp_path / "20261123-100000"
    other.mkdir()
    (other / "start.json").write_text("{}")
    write(start, reason=KILLED)
    (tmp_path / "latest").unlink()
    assert why(tmp_path) == f"The job failed: {KILLED}"


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("earlier", [(), ("", "-2", "-9", "-10")])
def test_the_newest_start_without_a_description(tmp_path, earlier, link):
    """The disk was full."""
    folders = [tmp_path / f"20261124-100000{number}" for number in earlier]
    for folder in folders:
        folder.mkdir()
        (folder / "start.json").write_text(json.dumps(START | {"reason": folder.name}))
    newest = tmp_path / "20261124-100001"
    newest.mkdir()
    if link:
        (tmp_path / "latest").symlink_to(newest.name)
    note = f"The newest start, {newest.name}, has no description (start.json): was the disk full?"
    if folders:
        assert why(tmp_path) == (
            f"{note} The start {folders[-1].name}:\n\nThe job failed: {folders[-1].name}"
        )
    else:
        with pytest.raises(UsageError, match=re.escape(note)):
            why(tmp_path)


UNFINISHED = "The job has not ended, or `hvdkit run` was killed. "
RUNS = {"failed": False, "status": None, "ended": None}
SUCCEEDED = {"failed": False, "status": 0}


EARLIER = "The job succeeded. The ranks wrote these records earlier:\n\nRank 0"
LONG_BEFORE = "The ranks wrote these records 40 s before the end of the job:"
LIVE = f"{UNFINISHED}On a host of a running job, `hvdkit inspect --live` shows "
STALLED, OWN = "Rank 0 has waited", "Rank 0 on host0: the allreduce 'loss'"


@pytest.mark.parametrize(
    ("description", "record", "begins"),
    [
        (SUCCEEDED, WAITS, EARLIER),
        # The stall was long before the failure.
        ({"ended": 140.0}, WAITS, LONG_BEFORE),
        ({"ended": 102.0}, WAITS, STALLED),
        ({"ended": 140.0, "verdict": True}, WAITS, STALLED),
        (RUNS, None, f"{UNFINISHED}No rank has reported a problem."),
        # The stall may have ended long ago.
        (RUNS, WAITS, LIVE),
        ({"reason": "Rank 0 waits.", "verdict": True}, {}, OWN),
        ({"reason": "ended by SIGINT", "failed": False}, {}, OWN),
        ({"hosts": "damaged"}, {}, OWN),
        ({"reason": "Rank 0 has waited.", "verdict": True}, None, "The job failed: Rank 0 has w"),
        ({"hosts": {"a": 1, "b": 1}}, WAITS, STALLED),
    ],
)
def test_the_end_of_a_start(start, description, record, begins):
    write(start, *[] if record is None else [record], **description)
    text = why(start)
    assert text.startswith(begins)
    if description is RUNS and record:
        assert re.search(r"The ranks wrote these records [\d,]+ s ago:\n\nRank 0 has waited", text)


def test_a_job_that_succeeded_without_records(start):
    write(start, **SUCCEEDED)
    with pytest.raises(UsageError, match="neither records nor the failure of a rank"):
        why(start)


def test_the_host_of_a_stopped_rank_is_named(tmp_path, start):
    write(start, WAITS, hosts={"a": 1, "b": 1})
    (start / "records" / "states.json").write_text(json.dumps({"1": "stopped"}))
    assert "Rank 1 on b has not called it: the process is stopped" in why(tmp_path)


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_has_continued_since_its_record(start, waits):
    """Rank 1 has completed a call after the record of rank 0, which waits in an earlier one."""
    call, other = RECORD["done"][0], {"error": "", "failed": ""}
    earlier = WAITS | {"time": 90.0, "calls": {"0": {"allreduce.loss": 2}}}
    earlier["open"] = [call | {"call": 2, "enqueued": 80.0, "ended": None}]
    own = {"open": [call | {"name": "x", "call": 1, "ended": None}]} if waits else {}
    write(start, earlier, other | own)
    text = why(start)
    assert "did not report" not in text
    unknown = "Rank 0 has not called it, or has called it without a new record."
    assert (unknown if waits else "Rank 0 has continued since its last record.") in text


def test_a_rank_that_waits_for_the_network_is_not_blamed(tmp_path, start):
    """Call 3 has ended on rank 0 only, which has then made call 4."""

    def waits(number):
        call = RECORD["done"][0] | {"call": number, "enqueued": 96.0 + number, "ended": None}
        calls = {"0": {"allreduce.loss": number}}
        return WAITS | {"time": 160.0, "open": [call], "calls": calls}

    write(start, waits(4), waits(3))
    text = why(tmp_path)
    assert "All ranks have called it: the network or a rank does not transfer its data (4 b" in text
    assert "has not called it" not in text


@pytest.fixture
def live(tmp_path, monkeypatch):
    """Return a function that writes the records of ranks that run on this host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "_ANSWER_SECONDS", 0.5)
    folder = tmp_path / f"{PREFIX}x"

    def write_live(records, folder=folder):
        folder.mkdir(exist_ok=True)
        for rank, record in records.items():
            (folder / f"rank-{rank}.stacks").touch()
            if record is not None:
                content = json.dumps(RECORD | {"rank": rank, "time": time.time() + 1} | record)
                (folder / f"rank-{rank}.json").write_text(content)

    return write_live


def test_inspect_combines_the_folders_of_one_job(live):
    """Over MPI and in Slurm, each rank has a folder."""
    folders = [RecordFolder(job) for job in ("host0:1", "host0:1", "host0:2", "")]
    for rank, folder in enumerate(folders):
        live({rank: {"size": 4}}, folder.path)
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
def test_inspect_gives_a_verdict_on_long_waits_only(live, tmp_path, waited, called, expected):
    now = time.time() + 1
    call, quiet = RECORD["done"][0], {"error": "", "failed": "", "done": []}
    other = {"calls": {}, "time": now + 0.1}
    if called is not None:
        ended = called.get("ended")
        made = call | {"enqueued": now + 0.1 - called["seconds"]}
        made["ended"] = ended and now + 0.1 - ended
        other |= {"calls": RECORD["calls"], "done" if ended else "open": [made]}
    waits = {"open": [call | {"enqueued": now - waited, "ended": None}], "time": now}
    live({0: quiet | waits, 1: quiet | other})
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
def test_inspect_of_a_job_on_several_hosts(live, tmp_path, waited, expected, group):
    """Ranks 2 and 3 are on this host."""
    now, records = time.time() + 1, {2: None, 3: None}
    for rank, seconds in waited.items():
        record = {"size": 4, "error": "", "failed": "", "time": now, "calls": {}, "done": []}
        record |= {"groups": {"0": [0, 1, 2, 3], "1": group}}
        if seconds is not None:
            call = RECORD["done"][0] | {"set": 1, "enqueued": now - seconds, "ended": None}
            record |= {"open": [call], "calls": {"1": {"allreduce.loss": 3}}}
        records[rank] = record
    live(records)
    on_this = "" if len(group) == 2 else " on this host"
    text = inspect_live(folder=tmp_path)
    lines = text.split("\n\n")[1].splitlines()
    assert any(line.startswith(expected or f"All ranks{on_this} have") for line in lines), text
    assert lines[-1] == (
        "Ranks 0, 1 are on other hosts, or have ended. Run `hvdkit inspect --live` on the other "
        "hosts, too."
    )
    assert "Rank 0" not in text
    assert "Rank 1" not in text


def test_inspect_waits_for_a_record_that_was_made_after_the_request(live, tmp_path, monkeypatch):
    """The file of an earlier record may be written after the request."""
    monkeypatch.setattr(command, "_ANSWER_SECONDS", 20.0)
    folder = tmp_path / f"{PREFIX}x"
    live({0: None})

    def write_one(moment):
        (folder / "new").write_text(json.dumps(RECORD | {"time": moment}))
        (folder / "new").rename(folder / "rank-0.json")

    def rank():
        wait_until((folder / "request").exists)
        write_one(RECORD["time"])
        time.sleep(0.3)
        write_one(time.time())

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    assert inspect_live(folder=tmp_path).startswith("1 of 2 ranks answered on this host.")
    thread.join(timeout=10)


def test_inspect_of_ranks_that_do_not_answer(live, tmp_path):
    folder = RecordFolder()
    live({0: None, 1: None}, folder.path)
    # This process was killed.
    abandoned = tmp_path / f"{PREFIX}abandoned"
    abandoned.mkdir()
    for name in ("lock", "rank-0.stacks"):
        (abandoned / name).touch()
    try:
        found = re.findall(r"(.*) of a job on this host did not answer", inspect_live())
        assert found == ["2 ranks"]
    finally:
        folder.remove()
    with pytest.raises(UsageError, match="there are no ranks of `hvdkit run` on this host"):
        inspect_live()
    # The script of the rank handles the signal.
    folder = RecordFolder()
    engine = SimpleNamespace(horovod_hvdkit_write_records=lambda *_: None)
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        Recorder(engine).watch(1, 2, 0.0, {FOLDER_VARIABLE: str(folder.path)})
        assert inspect_live().startswith("1 rank of a job on this host did not answer.")
    finally:
        signal.signal(signal.SIGUSR2, before)
        folder.remove()


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
    done = hvdkit("why", tmp_path / "missing")
    assert done.returncode == 1
    problem = f"cannot read {tmp_path / 'missing'}: No such file or directory. Expected a folder"
    assert done.stderr.startswith(f"hvdkit why: {problem}")


def a_call(draw):
    return {
        "name": draw.choice("ab"), "call": draw.randrange(4), "operation": draw.choice([0, 3, 99]),
        "set": draw.choice([0, 1, 5]), "dtype": draw.choice([7, 99]), "bytes": draw.choice([0, 4]),
        "enqueued": draw.uniform(0, 100), "ended": draw.choice([None, 50.0]),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
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
