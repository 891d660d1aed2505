"""The file of a JSONLLogger, also after crashes, restarts and full disks."""

import json
import math
import os
import subprocess
import sys

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.monitor import JSONLLogger, Run, read
from hvdkit.monitor.metrics import METRICS
from tests.unit.monitor.simulated import RUN, record


def write(path, *records, run=RUN):
    logger = JSONLLogger(path)
    logger.open()
    logger.begin(run)
    for each in records:
        logger.log(each)
    logger.close()


def steps(path):
    return [each.step for each in read(path).records]


def test_a_history_has_what_was_written(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    first = record(10, loss=[1.5, 2.5])
    second = record(20, loss=[math.nan, 2.0], other=[math.inf, -math.inf])
    write(path, first, second)
    history = read(path)
    assert history.runs == [RUN]
    assert history.records[0] == first
    loss, other = (history.records[1].metrics[name] for name in ("loss", "other"))
    assert (loss.mean, loss.min, loss.max, loss.nonfinite) == (2.0, 2.0, 2.0, [0])
    assert loss.by_rank[1] == 2.0
    assert (other.mean, other.nonfinite) == (None, [0, 1])
    assert history.units == {name: metric.unit for name, metric in METRICS.items()}
    assert history.skipped == 0


def test_each_line_is_standard_json(tmp_path):
    write(tmp_path / "m.jsonl", record(1, loss=[math.nan, math.inf]))

    def refuse(constant):
        raise AssertionError(constant)

    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("ranks", [1, 64, 65])
def test_values_of_each_rank_are_in_small_jobs_only(tmp_path, ranks):
    write(tmp_path / "m.jsonl", record(1, ranks=tuple(range(ranks))))
    (found,) = read(tmp_path / "m.jsonl").records
    assert len(found.metrics["time/step"].by_rank) == (64 if ranks == 64 else 0)


def test_a_restart_replaces_the_records_after_its_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, record(10), record(20), record(30))
    write(path, record(25, 5), record(35), run=Run(20, 2000.0, [0], 10, "torch"))
    history = read(path)
    assert steps(path) == [10, 20, 25, 35]
    assert [run.step for run in history.runs] == [0, 20]
    assert [each.step for each in history.void] == [30]


def test_a_line_cut_at_any_byte_is_survived_and_appended_to(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write(whole, record(10), record(20))
    content = whole.read_bytes()
    begin = content[:-1].rindex(b"\n") + 1
    path = tmp_path / "m.jsonl"
    for end in [*range(begin, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:end])
        complete = end == len(content) - 1  # only the newline is missing
        cut = begin < end and not complete
        assert steps(path) == ([10, 20] if complete else [10])
        write(path, record(20), record(30), run=Run(10, 0.0, [0, 1], 10, "torch"))
        history = read(path)
        assert [each.step for each in history.records] == [10, 20, 30]
        assert history.skipped == cut


def test_a_full_disk_loses_records_but_not_the_file(tmp_path):
    code = """
import resource, signal, sys
from hvdkit.monitor import JSONLLogger
from tests.unit.monitor.simulated import RUN, record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logger = JSONLLogger(sys.argv[1])
logger.open()
logger.begin(RUN)
logger.log(record(10))
size = __import__("os").path.getsize(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (size + 100, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        logger.log(record(20))
    except OSError as error:
        print("OSError", error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
logger.log(record(30))
logger.close()
"""
    path = tmp_path / "m.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.count("OSError") == 2, done.stderr
    history = read(path)
    assert [each.step for each in history.records] == [10, 30]
    assert history.skipped == 0


def test_two_writers_are_refused(tmp_path):
    first, second = JSONLLogger(tmp_path / "m.jsonl"), JSONLLogger(tmp_path / "m.jsonl")
    first.open()
    with pytest.raises(HvdkitError, match="another Monitor, writes to .*m.jsonl"):
        second.open()
    first.close()
    second.open()
    second.close()


@pytest.mark.parametrize("how", ["flock", "record lock"])
def test_a_process_that_may_only_read_the_file_cannot_keep_a_job_out(tmp_path, how):
    path = tmp_path / "m.jsonl"
    path.touch()
    code = "import fcntl, sys; f = open(sys.argv[1]); "
    code += "fcntl.flock(f, fcntl.LOCK_EX)" if how == "flock" else "fcntl.lockf(f, fcntl.LOCK_SH)"
    code += "; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout.readline() == b"\n"
        write(path, record(1))
        reader.communicate()
    assert steps(path) == [1]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        JSONLLogger(tmp_path / "file" / "m.jsonl").open()


def test_a_newer_file_is_refused_and_unknown_lines_are_ignored(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, record(10))
    with path.open("a") as file:
        file.write('{"type":"future"}\nnot json\n[1]\n{"type":"record","step":"x"}\n\n')
    assert steps(path) == [10]
    assert read(path).skipped == 3
    with path.open("a") as file:
        file.write('{"type":"start","version":2}\n')
    with pytest.raises(HvdkitError, match="has version 2 of the format, and this hvdkit reads"):
        read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_another_user_has_put_there_is_not_written_to(tmp_path, kind):
    """A link may lead to any file of this user. A pipe sends the records to the other user."""
    own, path = tmp_path / "own", tmp_path / "m.jsonl"
    own.write_text("old")
    path.symlink_to(own) if kind == "link" else os.mkfifo(path)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"{kind} of another user"):
        write(path, record(1))
    assert own.read_text() == "old"


def test_an_own_link_to_the_file(tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to("m.jsonl")
    write(link, record(1))
    assert steps(tmp_path / "m.jsonl") == [1]
