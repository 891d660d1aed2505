"""Horovod's timeline as events of a trace."""

import json
import tracemalloc

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.profiling import timeline

START = 1_700_000_000_000_000  # microseconds


def written(tmp_path, *more, cut=0):
    """Write a timeline as Horovod does, without the last `cut` characters."""
    content = [
        {"name": "process_name", "ph": "M", "pid": 0,
         "args": {"start_time_since_epoch_in_micros": START}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.x"}},
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 100, "pid": 1},
        {"ph": "X", "name": "0", "ts": 101, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 150, "pid": 1},
        {"ph": "B", "name": "ALLREDUCE", "ts": 150, "pid": 1},
        {"ph": "B", "name": "HOST_ALLREDUCE", "ts": 160, "pid": 1},
        {"ph": "E", "ts": 190, "pid": 1},
        {"ph": "E", "ts": 200, "pid": 1},
        *more,
    ]  # fmt: skip
    path = tmp_path / "timeline.json"
    text = "[\n" + ",\n".join(map(json.dumps, content)) + "]"
    path.write_text(text[: len(text) - cut])
    return path


def spans_of(path, begin=0, end=10_000):
    found = timeline.read(path, 0, begin * 1000, end * 1000, START * 1000)
    return [
        (e["name"], e["tid"], e["ts"] // 1000, e["dur"] // 1000) for e in found if e["ph"] == "X"
    ]


def test_phases_of_a_collective(tmp_path):
    assert spans_of(written(tmp_path)) == [
        ("NEGOTIATE_ALLREDUCE", 1, 100, 50),
        ("HOST_ALLREDUCE", 1, 160, 30),
        ("ALLREDUCE", 1, 150, 50),
    ]


def test_only_the_recorded_time(tmp_path):
    assert [name for name, *_ in spans_of(written(tmp_path), begin=155)] == ["HOST_ALLREDUCE"]


def test_a_file_that_horovod_is_writing(tmp_path):
    path = written(tmp_path, {"ph": "B", "name": "ALLREDUCE", "ts": 300, "pid": 1}, cut=12)
    assert len(spans_of(path)) == 3


def test_a_timeline_of_any_length_in_little_memory(tmp_path):
    other = ({"ph": "X", "name": "n" * 1000, "ts": number, "pid": 1} for number in range(30_000))
    path = written(tmp_path, *other)
    assert path.stat().st_size > 30_000_000
    tracemalloc.start()
    try:
        assert len(spans_of(path)) == 3
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["", "[]", "[{}]", "{", '[{"args": 3}]', "[" * 100_000, "[" + "1" * 3_000_000]
)
def test_a_file_that_is_no_timeline(tmp_path, text):
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(HvdkitError, match=r"timeline.json is not a timeline of Horovod"):
        timeline.read(path, 0, 0, 1, 0)


def test_a_missing_file(tmp_path):
    with pytest.raises(HvdkitError, match="No such file"):
        timeline.read(tmp_path / "none", 0, 0, 1, 0)
