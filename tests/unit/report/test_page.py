"""The page of one run says what its records say, whatever they are."""

import json
import math
import os
import random
import re
import socket
from dataclasses import replace

import psutil
import pytest

from hvdkit.faults import start_folders
from hvdkit.monitor.records import Slowest
from hvdkit.report.gathering import gather
from hvdkit.report.series import MOST_GROUPS, Point, reduced
from hvdkit.system.plain_files import Budget
from tests.unit.report.runs import BEGAN, Page, record, report, typical, write_metrics, write_start

pytest.importorskip("matplotlib")


def page_of(folder, *arguments):
    assert report(folder, *arguments) == 0
    return Page(folder / "report.html")


def test_the_values_of_the_page_are_those_of_the_file(tmp_path):
    draw = random.Random(3)
    records = [
        record(step, ranks=3, loss=[draw.gauss(0, 10) for _ in range(3)], lr=draw.random() * 1e-5)
        for step in range(10, 200, 10)
    ]
    write_metrics(tmp_path / "metrics.jsonl", records, ranks=3)
    page = page_of(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "lr"):
        found = [line["metrics"][name] for line in lines if line["type"] == "record"]
        first, last, low, high, bad = page.rows[name]
        assert (first, last) == (found[0]["mean"], found[-1]["mean"])
        assert low == min(each["min"] for each in found)
        assert high == max(each["max"] for each in found)
        assert bad == 0


def test_a_typical_run(tmp_path):
    records = [typical(step, loss=100 / step) for step in range(10, 110, 10)]
    write_metrics(tmp_path / "run" / "metrics.jsonl", records)
    write_start(tmp_path / "logs", BEGAN)
    page = page_of(tmp_path)
    assert "Training run: python train.py" in page.text
    assert page.rows["command"] == ["python train.py (in /root/job)"]
    assert page.rows["hosts"] == ["host0 (2 ranks)"]
    assert page.rows["versions"] == [
        "hvdkit 0.1.0, Python 3.11.7, Horovod 0.28.1+hvdkit.12, torch 2.13.0"
    ]
    for sentence in (
        "The job succeeded.",
        "100 steps are reported, in 10 reports.",
        "loss fell from 10 at step 10 to 1 at step 100.",
        "The throughput has the median 1,055 samples/s",
        "The largest part of a step is exposed communication: 50 % of the time",
        "Rank 1 was the slowest in 100 % of the reports, mostly because of data.",
        "slowest rank of a report took longer than the median rank, by 20 % of the time of a",
        "Each rank gave 2 MB of encoded gradients to collectives per step, and 200 MB in all 100",
        "The wire format is fp16.",
        "No sum of gradients overflowed in float16.",
    ):
        assert sentence in page.text
    # Seconds, and shares of a step.
    assert page.rows["data"][:2] == [pytest.approx(0.006), pytest.approx(0.12)]
    assert page.rows["other"][0] == pytest.approx(0.0, abs=1e-12)
    own, low, high, waited, slowest = page.rows["rank 1"]
    assert (own, low, high, waited) == (pytest.approx(0.03), *[pytest.approx(0.03)] * 2, 0.02)
    assert slowest == 1.0


def test_a_loss_that_does_not_change(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [typical(step, loss=2.0) for step in (10, 20, 30)])
    assert "loss is 2 at step 10 and again at step 30." in page_of(tmp_path).text


def test_the_page_is_alone_and_has_no_scripts(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [typical(step) for step in (10, 20, 30)])
    page = page_of(tmp_path)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "src"
        assert not name.endswith("href") or value.startswith("#")
    assert "default-src 'none'" in page.content
    assert "@import" not in page.content
    assert not re.findall(r"url\((?!#)", page.content)
    ids = re.findall(r'\bid="([^"]*)"', page.content)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', page.content)) <= set(ids)


HOSTILE = "<script>alert(1)</script><img src=x onerror='x()'> & \" $x^ ]]> --> #010010"


def test_texts_of_many_megabytes(tmp_path):
    text = "<x>" * 1_000_000
    write_metrics(tmp_path / "metrics.jsonl", [typical(10)])
    error = {"rank": 1, "host": "h", "status": 1, "signal": None, "exception": text,
             "traceback": [], "last_lines": [text]}  # fmt: skip
    for number in range(3):
        began = BEGAN + 200 * number
        write_start(tmp_path / "logs", began, error=error, status=1, failed=True, reason=text)
    assert "The job failed: <x><x>" in page_of(tmp_path).text
    assert (tmp_path / "report.html").stat().st_size < 2_000_000


def test_what_is_left_out_of_a_large_folder(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [typical(step) for step in (10, 20)])
    for number in range(2):
        write_start(tmp_path / "logs", BEGAN + 200 * number)
    run = gather(tmp_path, budget=Budget(0))
    assert (run.history.records, run.starts) == ([], [])
    assert any(f"Not read, or not to the end: {tmp_path}/metrics.jsonl, " in n for n in run.notes)
    assert len(gather(tmp_path).starts) == 2


def test_names_with_html_in_them(tmp_path):
    folder = tmp_path / "a<b>&\"'"
    name, loss = f"{HOSTILE}", f"_loss {HOSTILE}"
    values = {name: [1.0, 2.0], loss: 3.0}
    write_metrics(folder / "metrics.jsonl", [typical(step, **values) for step in (10, 20)])
    error = {"rank": 1, "host": HOSTILE, "status": 1, "signal": None, "exception": HOSTILE,
             "traceback": [], "last_lines": [HOSTILE]}  # fmt: skip
    write_start(
        folder / "logs", BEGAN, error=error, status=1, failed=True, reason=HOSTILE,
        command=("python", HOSTILE), hosts={HOSTILE: 2},
    )  # fmt: skip
    page = page_of(folder)
    assert not page.tags & {"script", "img", "b"}
    assert all(not key.startswith("on") for key, _ in page.attributes)
    assert page.rows[name][:2] == [1.5, 1.5]
    assert f"The job failed: {HOSTILE}" in page.text
    assert page.rows["hosts"] == [f"{HOSTILE} (2 ranks)"]
    # Comparisons have the names of runs within pictures.
    assert report(folder, folder, "--compare", "--out", tmp_path / "c.html") == 0
    compared = Page(tmp_path / "c.html")
    assert not compared.tags & {"script", "img", "b"}
    assert f"{folder.name} (2)" in compared.text


def test_a_file_that_is_cut_at_any_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [record(10, loss=1.0), record(20, loss=2.0), record(30, loss=3.0)])
    content = path.read_bytes()
    begin = content[:-1].rindex(b"\n") + 1
    for end in (begin, begin + 1, len(content) - 2):
        path.write_bytes(content[:end])
        page = page_of(tmp_path)
        assert page.rows["loss"][:2] == [1.0, 2.0]
        assert ("1 line of metrics.jsonl could not be read" in page.text) == (end > begin)


def test_lines_of_others(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [record(10, loss=1.0), record(20, loss=2.0)])
    others = ('{"type":"record"}', "[1]", "null", "{", '{"type":"record","step":"x","metrics":5}')
    path.write_text("\n".join([path.read_text().rstrip(), *others, "\x00", ""]))
    page = page_of(tmp_path)
    assert page.rows["loss"][:2] == [1.0, 2.0]
    assert "6 lines of metrics.jsonl could not be read" in page.text


def test_values_that_are_not_finite(tmp_path):
    losses = [2.0, [math.nan, 1.0], [math.inf, math.nan], 0.5]
    records = [record(10 * k, loss=loss) for k, loss in enumerate(losses, 1)]
    write_metrics(tmp_path / "metrics.jsonl", records)
    page = page_of(tmp_path)
    assert "loss is NaN or infinite in 2 of 4 reports, first at step 20 on rank 0." in page.text
    assert page.rows["loss"] == [2.0, 0.5, 0.5, 2.0, 2.0]
    assert "NaN or infinite" in page.content[page.content.index("<svg") :]
    only = tmp_path / "only"
    write_metrics(only / "metrics.jsonl", [record(10, loss=math.nan), record(20, loss=math.nan)])
    assert page_of(only).rows["loss"] == [None, None, None, None, 2.0]


def test_restarts_that_repeat_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [typical(step) for step in (10, 20, 30, 40)])
    resumed = [typical(step, at=BEGAN + 200 + step) for step in (30, 40, 50)]
    write_metrics(path, resumed, step=20)
    reason = "rank 1 on host0 failed: killed by signal 9 (Killed)."
    write_start(tmp_path / "logs", BEGAN, failed=True, status=137, reason=reason, error={
        "rank": 1, "host": "host0", "status": None, "signal": "SIGKILL", "exception": None,
        "traceback": [], "last_lines": ["step 41"],
    })  # fmt: skip
    write_start(tmp_path / "logs", BEGAN + 150)
    page = page_of(tmp_path)
    for sentence in (
        "50 steps are reported, in 5 reports; the training has resumed once.",
        "The job was started twice, and 1 start failed.",
        f"Start 1: {reason}",
        "2 reports of 20 steps (1.0 s of training) are void",
        f"The job failed: {reason}",
    ):
        assert sentence in page.text
    assert page.rows["start 1"][-2:] == ["0", reason]
    assert page.rows["start 2"][-2:] == ["20", "succeeded"]


def test_starts_of_other_jobs_are_left_out(tmp_path):
    for before, launcher in ((900, "h 1 1.00"), (50, "h 2 2.00"), (0, "h 2 2.00")):
        write_start(tmp_path / "logs", BEGAN - before, launcher=launcher)
    write_start(tmp_path / "logs", BEGAN + 500, launcher="h 3 3.00", command=("python", "again.py"))
    write_metrics(tmp_path / "metrics.jsonl", [record(10, loss=1.0)])
    page = page_of(tmp_path)
    # The first start of the launcher failed before its first report, perhaps.
    assert page.rows["start 1"][-2:] == ["-", "succeeded"]
    assert page.rows["start 2"][-2:] == ["0", "succeeded"]
    assert "start 4" not in page.rows
    assert "also has 1 start of other jobs" in page.text
    (tmp_path / "metrics.jsonl").unlink()
    page = page_of(tmp_path)
    assert "Training run: python again.py" in page.text
    assert "start 2" not in page.rows


def test_only_the_launcher_has_written_records(tmp_path):
    write_start(tmp_path, BEGAN, status=1, failed=True, reason="rank 0 on host0 failed: boom")
    page = page_of(tmp_path)
    assert "The last start: rank 0 on host0 failed: boom" in page.text
    assert "the page has no metrics" in page.text


def test_folders_of_an_older_hvdkit_without_a_description(tmp_path):
    folder = tmp_path / "20261125-033816"
    folder.mkdir()
    for rank in range(3):
        (folder / f"rank.{rank}.log").touch()
    page = page_of(tmp_path)
    assert page.rows["start 1"][0] == "2026-11-25 03:38:16 UTC"
    assert page.rows["start 1"][2] == "3"
    (folder / "start.json").write_text("{")
    assert "start.json cannot be read: not the description of a start" in page_of(tmp_path).text


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_start(tmp_path, BEGAN)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    real = os.scandir

    def fail(path):
        if os.fspath(path) == str(hidden.resolve()):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", fail)
    assert f"Folders that cannot be read: {hidden.resolve()}." in page_of(tmp_path).text


def test_a_job_that_still_runs(tmp_path):
    process = psutil.Process()
    launcher = f"{socket.gethostname()} {process.pid} {process.create_time():.2f}"
    write_metrics(tmp_path / "metrics.jsonl", [record(10, loss=1.0)])
    folder = write_start(tmp_path, BEGAN, ended=None, status=None, launcher=launcher)
    assert "still runs: this page has what was recorded until now." in page_of(tmp_path).text
    start = start_folders.parse((folder / "start.json").read_text())
    other = start.to_json().replace(socket.gethostname(), "elsewhere")
    (folder / "start.json").write_text(other)
    assert "it still runs, or its launcher was killed" in page_of(tmp_path).text


def test_a_run_that_has_just_begun(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [])
    assert "metrics.jsonl has no records yet" in page_of(tmp_path).text


def test_no_rank_is_blamed_for_chance(tmp_path):
    def even(step):
        slowest = Slowest(step // 10 % 2, 0.0201, 0.02, "time/data")
        return replace(typical(step, time__data=0.001), slowest=slowest)

    write_metrics(tmp_path / "metrics.jsonl", [even(step) for step in range(10, 110, 10)])
    page = page_of(tmp_path)
    assert "No rank was much slower than the others." in page.text
    assert "was the slowest in" not in page.text


def test_thousands_of_reports_keep_their_extremes_and_the_page_small(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [record(step, steps=1, loss=2.0, other=1.0) for step in range(1, 3001)]
    records[1321] = record(1322, steps=1, loss=[2.0, 77.0], other=0.25)
    records[2000] = record(2001, steps=1, loss=math.nan, other=1.0)
    write_metrics(path, records)
    page = page_of(tmp_path)
    assert len(page.content) < 700_000
    assert page.rows["loss"][3] == 77.0
    assert "so no extreme is lost" in page.text
    points = [Point(k, 0.0, float(k == 4321), 0.0, float(k == 4321)) for k in range(8000)]
    kept = reduced(points)
    assert len(kept) <= 3 * MOST_GROUPS
    assert max(point.mean for point in kept) == max(point.high for point in kept) == 1.0
    assert {point.step for point in kept if point.mean == 1.0} == {4321}
    assert (kept[0].step, kept[-1].step) == (0, 7999)
    assert [point.step for point in kept] == sorted(point.step for point in kept)


def test_few_points_are_all_drawn(tmp_path):
    points = [Point(k, 0.0, math.sin(k), 0.0, 1.0) for k in range(2 * MOST_GROUPS)]
    assert reduced(points) == points
