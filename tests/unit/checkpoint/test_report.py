"""The output and exit statuses of `hvdkit checkpoint`."""

import os
import re
import time
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.report import size_text
from hvdkit.checkpoint.store import Store
from tests.unit.checkpoint.material import forge, save, snapshot, step_folder

# tests/unit/checkpoint/test_store.py tests the stores themselves.
pytestmark = pytest.mark.long_with("s3")


@pytest.fixture
def store(place):
    made = Store(str(place), keep_last=None)
    with made.open_for_writing() as writer:
        for step, loss in {100: 0.5, 200: 0.25, 300: 0.75}.items():
            writer.write(snapshot(step, {"loss": loss}, epoch=step // 100))
    return made


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = cli.main(["checkpoint", *map(str, arguments)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    return call


def damage(store, step):
    (step_folder(store, step) / "model.safetensors").write_bytes(b"x")


def rot(store, step):
    """Damage a step so that only a check of all its content finds it."""
    path = step_folder(store, step) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_is_a_table_of_steps(store, run):
    damage(store, 300)
    status, out, _ = run("ls", store.location)
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["step", "epoch", "size", "age", "metrics", "state"]
    assert lines[1][:2] == ["100", "1"]
    assert lines[1][-3:] == ["loss", "0.5", "complete"]
    assert lines[3][-1] == "damaged"
    assert re.search(r"step-000000000300\S* is damaged: model.safetensors: it has 1 bytes", out)


def test_ls_names_what_was_quarantined(store, run):
    rot(store, 300)
    with store.newest_good() as opened:
        assert opened.manifest.step == 200
    (name,) = store.quarantined()
    assert run("ls", store.location)[1].endswith(f"{name} is damaged and in quarantine\n")


def test_ls_of_a_folder_without_steps(tmp_path, run):
    assert run("ls", tmp_path) == (0, f"no steps in {tmp_path}\n", "")


def test_ls_of_a_step(tmp_path, run):
    save(tmp_path, 1)
    out = run("ls", tmp_path / "step-000000000001")[1]
    assert "this is a step; give its parent folder" in out


def test_an_impossible_age_is_not_shown(tmp_path, run, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 4e9)
    save(tmp_path, 1)
    monkeypatch.undo()
    assert run("ls", tmp_path)[1].splitlines()[1].split()[-3:] == ["?", "-", "complete"]


def test_show_prints_all_of_a_step(store, run):
    status, out, _ = run("show", store.location)
    assert status == 0
    assert "step     300" in out
    status, out, _ = run("show", store.location, 200)
    assert status == 0
    for said in (
        "step     200",
        "epoch    2",
        "2 ranks; hvdkit 0, python 3",
        "metrics  loss 0.25",
        "state    good",
        "model                5 tensors, 44 numbers, 161 B (BF16, BOOL, F32, I64)",
        "loop                 no tensors",
        "optimizer.safetensors",
    ):
        assert said in out


def test_show_passes_over_a_damaged_step_and_changes_nothing(store, run, caplog):
    rot(store, 300)
    status, out, _ = run("show", store.location)
    assert status == 0
    assert "step     200" in out
    assert "step 300 in" in caplog.text
    assert "it was skipped" in caplog.text
    assert store.quarantined() == []
    status, _, err = run("show", store.location, 300)
    assert status == 1
    assert "step 300 in" in err
    assert "is damaged (model.safetensors: its content is not what was written" in err


def test_verify_reads_all_again(store, run):
    status, out, _ = run("verify", store.location)
    assert status == 0
    assert out.splitlines()[-1] == "3 good, 0 damaged"
    rot(store, 200)
    status, out, _ = run("verify", store.location)
    assert status == 1
    assert re.search(
        r"step-000000000200\S*: damaged\n    model.safetensors: its content is not", out
    )
    assert out.splitlines()[-1] == "2 good, 1 damaged"
    assert run("verify", store.location, 100)[0] == 0
    assert run("verify", store.location, 200)[0] == 1
    assert store.quarantined() == []


def test_verify_continues_after_a_step_that_cannot_be_read(tmp_path, run, monkeypatch):
    store = save(tmp_path, 100, 200, 300)
    verify_entry = Store.verify_entry

    def refused(self, entry, progress=None):
        if entry.step == 200:
            raise CheckpointError("cannot read it: Permission denied")
        return verify_entry(self, entry, progress)

    monkeypatch.setattr(Store, "verify_entry", refused)
    status, out, _ = run("verify", store.location)
    assert status == 1
    assert re.search(r"step-000000000200\S*: not read: cannot read it", out)
    assert out.splitlines()[-1] == "2 good, 0 damaged, 1 not read"


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path, run):
    with Store(tmp_path).open_for_writing() as writer:
        path = Path(writer.write(snapshot(1, {"\x1b]0;title\x07": 1.0})))
    assert "\ufffd]0;title\ufffd 1" in run("ls", tmp_path)[1]
    assert "\ufffd]0;title\ufffd 1" in run("show", tmp_path)[1]
    forge(path, edit=lambda fields: fields["files"].update({"\x1b[2J": {}}))
    for _, out, err in (run("ls", tmp_path), run("verify", tmp_path), run("show", tmp_path)):
        assert "\x1b" not in out + err


def test_prune_keeps_the_newest_and_the_best(store, run):
    status, out, _ = run("prune", store.location, "-n", 1, "--keep-best", "loss:min", "--dry-run")
    assert status == 0
    assert re.search(r"would delete step-000000000100\S* \(", out)
    assert "1 would be deleted, " in out
    assert len(store.steps()) == 3
    status, out, _ = run("prune", store.location, "--keep-last", 1, "--keep-best", "loss:min")
    assert status == 0
    assert re.search(r"deleting step-000000000100\S* \(", out)
    assert [info.step for info in store.steps()] == [200, 300]


def test_prune_never_deletes_the_last_good_step(store, run, caplog):
    rot(store, 300)
    damage(store, 200)
    status, out, _ = run("prune", store.location, "-n", 1)
    assert status == 0
    assert "0 deleted" in out
    assert "step 300 in" in caplog.text
    assert "not counted as kept" in caplog.text
    assert store.verify(100) == []


def test_prune_deletes_quarantined_steps_on_request(store, run):
    rot(store, 300)
    with store.newest_good() as opened:
        assert opened.manifest.step == 200
    status, out, _ = run("prune", store.location)
    assert status == 0
    assert "--damaged deletes quarantined steps" in out
    assert store.quarantined()
    status, out, _ = run("prune", store.location, "--damaged")
    assert status == 0
    assert re.search("deleting .*step-000000000300", out)
    assert store.quarantined() == []


def test_prune_deletes_older_runs_on_request(store, run):
    assert "run" not in run("ls", store.location)[1]
    with store.open_for_writing(new_run=True) as writer:
        writer.write(snapshot(5))
    damage(store, 200)
    assert run("ls", store.location)[1].splitlines()[0].split()[-1] == "run"
    assert "step     5" in run("show", store.location)[1]
    assert "step     300" in run("show", store.location, "--run", 1)[1]
    status, out, _ = run("prune", store.location, "-n", 1)
    assert status == 0
    assert "0 deleted, 0 B; --older-runs deletes steps of older runs" in out
    status, out, _ = run("prune", store.location, "-n", 1, "--older-runs")
    assert status == 0
    assert [entry.step for entry in store.entries()] == [5]


def test_prune_leaves_the_folder_of_a_live_training_alone(store, run):
    with store.open_for_writing():
        status, _, err = run("prune", store.location, "-n", 1)
    assert status == 1
    assert "open for writing" in err
    assert len(store.steps()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "/gone"], "there is no folder /gone; expected a folder of checkpoints"),
        (["show", "/gone"], "there is no folder /gone"),
        (["verify", "/gone"], "there is no folder /gone"),
        (["prune", "/gone"], "there is no folder /gone"),
        (["export", "/gone", "x.pt"], "there is no folder /gone"),
        (["show", "FOLDER", "7"], "there is no step 7 in"),
        (["verify", "FOLDER", "7"], "there is no step 7 in"),
        (["export", "FOLDER", "x.pt", "--step", "7"], "there is no step 7 in"),
        (["prune", "FOLDER", "-n", "0"], "-n is 0; expected 1 or more"),
        (["prune", "FOLDER", "--keep-best", "loss"], "--keep-best is 'loss'; expected METRIC"),
        (["prune", "FOLDER", "--keep-best", "los:min"], "expected a metric of the steps: loss"),
        (["show", "FOLDER", "--run", "7"], "300 of run 1"),
        (["export", "FOLDER", "model.onnx"], "model.onnx; expected *.pt or *.pth (PyTorch's"),
        (["show", "EMPTY"], "there are no steps in "),
        (["verify", "EMPTY"], "there are no steps in "),
    ],
)
def test_wrong_arguments_are_status_2(store, tmp_path, run, arguments, said):
    (tmp_path / "empty").mkdir()
    places = {"FOLDER": store.location, "EMPTY": tmp_path / "empty"}
    status, _, err = run(*(places.get(a, a) for a in arguments))
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1
    assert len(store.steps()) == 3


@pytest.mark.parametrize("action", ["ls", "show", "verify", "prune", "export"])
def test_every_action_has_help_with_an_example(action, capsys):
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", action, "--help"])
    assert f"example:\n  hvdkit checkpoint {action}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5 * 10**9, "5.0 GB")],
)
def test_sizes_are_in_units_of_a_thousand(size, text):
    assert size_text(size) == text


def test_a_terminal_shows_a_bar(store, monkeypatch):
    from rich.console import Console

    from hvdkit.checkpoint import report

    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=100)
        with console.capture() as captured:
            assert report.verify(store, None, console)
    assert "verifying" in captured.get()
    assert "3 good, 0 damaged" in captured.get()
