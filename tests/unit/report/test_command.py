"""The command line of `hvdkit report`: places, choices and errors."""

import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.checkpoint.store import Store
from tests.unit.report.runs import BEGAN, Page, record, report, typical, write_metrics, write_start

pytest.importorskip("matplotlib")


def error_of(capsys, *arguments):
    assert report(*arguments) == 2
    return capsys.readouterr().err


def test_an_empty_a_foreign_and_a_missing_folder(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    foreign = tmp_path / "foreign"
    (foreign / "20200101-000000").mkdir(parents=True)
    (foreign / "data.jsonl").write_text('{"text": "start"}\n')
    (foreign / "start").write_text("x")
    for folder in (tmp_path / "empty", foreign):
        assert "has no records of a training: expected a file of" in error_of(capsys, folder)
        assert not (folder / "report.html").exists()
    assert "expected the folder of a run" in error_of(capsys, tmp_path / "missing")
    assert "is not a file of hvdkit.monitor.JSONLLogger" in error_of(capsys, foreign / "data.jsonl")


def test_several_files_need_a_choice(tmp_path, capsys):
    for name in ("a", "b"):
        write_metrics(tmp_path / name / "metrics.jsonl", [record(10, loss=1.0)])
    text = error_of(capsys, tmp_path)
    assert "has 2 metrics files: " in text
    assert "choose with --metrics" in text
    chosen = tmp_path / "b" / "metrics.jsonl"
    assert report(tmp_path, "--metrics", chosen, "--out", tmp_path / "x" / "b.html") == 0
    assert (tmp_path / "x" / "b.html").exists()
    assert report(chosen) == 0
    assert (tmp_path / "b" / "report.html").exists()


def test_a_configuration_of_matplotlib_in_the_current_folder_is_not_read(tmp_path):
    """Others may write there."""
    write_metrics(tmp_path / "run" / "metrics.jsonl", [record(10, loss=1.0)])
    (tmp_path / "matplotlibrc").write_text("figure.subplot.left: 0.95\n")
    command = [Path(sys.executable).with_name("hvdkit"), "report", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "wrote run/report.html\n"), done.stderr


def test_records_in_other_places(tmp_path, capsys):
    write_metrics(tmp_path / "run" / "numbers", [record(10, loss=1.0)])
    write_start(tmp_path / "logs", BEGAN)
    with Store(tmp_path / "saved").open_for_writing():
        pass
    places = ("--metrics", tmp_path / "run" / "numbers", "--checkpoints", tmp_path / "saved")
    assert report(tmp_path / "logs", *places) == 0
    page = Page(tmp_path / "logs" / "report.html")
    assert page.rows["loss"][0] == 1.0
    assert "There is no complete checkpoint in" in page.text
    run = tmp_path / "run" / "numbers"
    assert "--logs is" in error_of(capsys, run, "--logs", tmp_path / "run")
    assert "--metrics is" in error_of(capsys, tmp_path, "--metrics", tmp_path / "logs")
    assert "--checkpoints is" in error_of(capsys, run, "--checkpoints", tmp_path / "no")


def test_a_damaged_checkpoint_is_named(tmp_path):
    with Store(tmp_path / "saved").open_for_writing():
        pass
    folder = tmp_path / "saved" / "step-000000000020"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    write_metrics(tmp_path / "metrics.jsonl", [record(20, loss=1.0)])
    assert report(tmp_path) == 0
    page = Page(tmp_path / "report.html")
    assert page.rows["step 20"][-1].startswith("not good: ")


def test_pictures(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", [typical(step, **{"../x": 1.0}) for step in (10, 20)])
    assert report(tmp_path, "--png", tmp_path / "png") == 0
    names = {path.name for path in (tmp_path / "png").iterdir()}
    assert {"loss.png", "lr.png", "ranks.png", "time-sections.png", "x.png"} <= names
    for path in (tmp_path / "png").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    assert len(names) == Page(tmp_path / "report.html").content.count("<svg")


def test_wrong_arguments(tmp_path, capsys):
    write_metrics(tmp_path / "metrics.jsonl", [record(10, loss=1.0)])
    assert "add --compare" in error_of(capsys, tmp_path, tmp_path)
    assert "expected at least two" in error_of(capsys, tmp_path, "--compare")
    both = (tmp_path, tmp_path, "--compare")
    assert "--logs was given with --compare" in error_of(capsys, *both, "--logs", tmp_path)
    assert "expected at most" in error_of(capsys, *[tmp_path] * 9, "--compare")
    (tmp_path / "file").touch()
    assert report(tmp_path, "--out", tmp_path / "file" / "page.html") == 1
    assert "Choose another file with --out" in capsys.readouterr().err
    assert report(tmp_path, "--png", tmp_path / "file") == 1
    assert "--png" in capsys.readouterr().err


def test_a_newer_file(tmp_path, capsys):
    (tmp_path / "m.jsonl").write_text(json.dumps({"type": "start", "version": 99}) + "\n")
    assert report(tmp_path) == 1
    assert "update hvdkit" in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    write_metrics(tmp_path / "metrics.jsonl", [record(10, loss=1.0)])
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert report(tmp_path) == 1
    assert "pip install 'hvdkit[plot]'" in capsys.readouterr().err


def test_links_are_not_followed(tmp_path):
    write_metrics(tmp_path / "a" / "metrics.jsonl", [record(10, loss=1.0)])
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "again.jsonl").symlink_to("metrics.jsonl")
    assert report(tmp_path / "a") == 0
