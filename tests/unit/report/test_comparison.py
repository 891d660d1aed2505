"""A comparison has the values of each run, and their differences."""

import contextlib

import pytest

from tests.unit.report.runs import BEGAN, Page, report, typical, write_metrics, write_start

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs: the second one is faster, sends more bytes, and is shorter."""
    tmp_path = tmp_path_factory.mktemp("runs")
    first = [typical(step, loss=100 / step) for step in range(10, 110, 10)]
    second = [
        typical(step, loss=110 / step, throughput__samples_per_sec=2110.0,
                communication__payload_bytes=4e6)
        for step in range(10, 90, 10)
    ]  # fmt: skip
    write_metrics(tmp_path / "a" / "m.jsonl", first)
    write_metrics(tmp_path / "b" / "m.jsonl", second, wire_formats=("none",))
    write_start(tmp_path / "a" / "logs", BEGAN)
    write_start(tmp_path / "b" / "logs", BEGAN, hosts={"host1": 2})
    with contextlib.chdir(tmp_path):
        assert report("a", "b", "--compare") == 0
    return Page(tmp_path / "comparison.html")


def test_the_table_of_differences(runs):
    assert runs.rows["reported steps"] == [100, 80, pytest.approx(-0.2)]
    assert runs.rows["loss, last"] == [1.0, 1.375, pytest.approx(0.375)]
    before, after, change = runs.rows["samples per second, median"]
    assert (before, after, change) == (1055.0, 2110.0, 1.0)
    assert runs.rows["encoded gradients per step"] == [2e6, 4e6, 1.0]
    # A difference to 0 has no percentage.
    assert runs.rows["overflows"] == [0.0, 0.0, None]


def test_the_conclusions(runs):
    for sentence in (
        "Comparison of a and b",
        "a: The job succeeded.",
        "The runs differ in the hosts, the wire format.",
        "At step 80, the last one that all runs have reported, loss is 1.25 in a, 1.375 in b",
        "b makes 100 % more samples per second than a (medians).",
        "A rank of b gives 4 MB to collectives per step, 2 times as much as in a.",
    ):
        assert sentence in runs.text
    assert runs.rows["wire format"] == ["fp16", "none"]
    # Both runs are in each picture of a metric that both have.
    pictures = runs.content.split("<svg")[1:]
    assert len(pictures) >= 12
    assert all(">a</text>" in each and ">b</text>" in each for each in pictures)


def test_runs_without_a_common_step_or_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "a.jsonl", [typical(10)])
    write_metrics(tmp_path / "b.jsonl", [typical(15)])
    write_start(tmp_path / "c" / "logs", BEGAN)
    assert report("a.jsonl", "b.jsonl", "c", "--compare") == 0
    page = Page(tmp_path / "comparison.html")
    assert "No step has a report with loss in all runs" in page.text
    assert page.rows["loss, last"] == [1.0, 1.0, 0.0, None, None]
    assert page.rows["wire format"] == ["fp16", "fp16", "unknown"]
