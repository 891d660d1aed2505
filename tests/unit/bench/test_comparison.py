"""Comparisons mark changes beyond the noise of both runs only."""

import argparse
import json
import random

import pytest

from hvdkit.bench import comparison, results
from hvdkit.bench.allreduce import table
from hvdkit.console.tables import Console
from hvdkit.errors import HvdkitError, UsageError

TURNS = 5


def run_of(milliseconds, seed, noise=0.05, turns=TURNS):
    draw = random.Random(seed)
    rows = []
    for i, middle in enumerate(milliseconds):
        calls = [[middle * draw.uniform(1 - noise, 1 + noise) / 1e3] * 2 for _ in range(turns)]
        named = {"variant": f"v{i}", "dtype": "float32", "op": "sum", "wire": "none"}
        rows.append(named | {"bytes": 1024, "turns": calls, "wrong": 0})
    return results.Results("allreduce", results.conditions(ranks=2), rows=rows, complete=True)


def marks(before, now):
    changes = comparison.compare(before, now, table.key, table.turn_medians)
    return [change.mark for change in changes]


def test_noise_is_rarely_marked():
    found = [
        mark
        for seed in range(20)
        for mark in marks(run_of([10] * 20, 2 * seed), run_of([10] * 20, 2 * seed + 1))
    ]
    assert found.count("") > 0.97 * len(found)


def test_changes_beyond_the_noise_are_marked():
    before, now = run_of([10, 10, 10], 0), run_of([12, 8, 10.2], 1)
    assert marks(before, now) == ["slower", "faster", ""]


def test_only_marked_changes_are_shown(capsys):
    before, now = run_of([10, 10], 0), run_of([12, 10], 1)
    before.complete = False
    now.conditions["cores"] = 64
    changes = comparison.compare(before, now, table.key, table.turn_medians)
    comparison.show(before, now, changes, Console(soft_wrap=True))
    shown = capsys.readouterr().out
    assert "1 of 2 results changed beyond the noise" in shown
    assert "v0 float32 sum none 1 KiB" in shown
    assert "v1" not in shown
    assert "cores was" in shown
    assert "The earlier run ended early" in shown


def test_few_turns_are_not_enough_to_mark_anything():
    assert marks(run_of([10], 0, turns=3), run_of([20], 1, turns=3)) == [""]


def test_results_that_only_one_run_has_are_ignored():
    assert marks(run_of([10], 0), run_of([10, 20], 1)) == [""]


def options(**files):
    return argparse.Namespace(json=files.get("json"), csv=files.get("csv"))


def test_results_are_the_same_after_reading_them(tmp_path):
    path = tmp_path / "run.json"
    made = run_of([1, 2], 0)
    made.save(options(json=path), list)
    assert results.load(path, "allreduce", "--compare") == made
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"format": 1}', "null", '{"format": 1, "x": 2}']
)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="damaged .*, or no file"):
        results.load(path, "allreduce", "--compare")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conditions", None),
        ("rows", [None]),
        *[("rows", [{"turns": turns}]) for turns in (None, [], [[]], [[0]], [["x"]], [[1e999]])],
        *[("rows", [{"bytes": size}]) for size in ("x", 10**400)],
    ],
)
def test_a_file_that_cannot_be_compared_is_refused_before_the_measurement(tmp_path, name, value):
    path = tmp_path / "run.json"
    made = run_of([1], 0)
    made.save(options(json=path), list)
    assert comparison.earlier(path, "allreduce", table.key, table.turn_medians) == made
    content = json.loads(path.read_text())
    if name == "rows" and value[0] is not None:
        value = [content["rows"][0] | value[0]]
    path.write_text(json.dumps(content | {name: value}))
    with pytest.raises(UsageError, match="--compare .*run.json is damaged"):
        comparison.earlier(path, "allreduce", table.key, table.turn_medians)


def test_a_file_of_another_benchmark_is_refused(tmp_path):
    path = tmp_path / "run.json"
    run_of([1], 0).save(options(json=path), list)
    with pytest.raises(UsageError, match="is of `hvdkit bench allreduce`"):
        results.load(path, "step", "--compare")
    with pytest.raises(UsageError, match="cannot be read"):
        results.load(tmp_path / "gone.json", "step", "--compare")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(HvdkitError, match="cannot write"):
        run_of([1], 0).save(options(json=tmp_path / "gone" / "run.json"), list)
