"""`hvdkit bench step` with real ranks."""

import json
import os
import signal
import sys

import pytest

from hvdkit.bench.step import table
from hvdkit.bench.step.command import check_consistency
from hvdkit.bench.step.variants import Variant
from hvdkit.errors import HvdkitError
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.unit.bench.commands import ENVIRONMENT, bench, processes, start
from tests.unit.launch.commands import execute

SMALL = ("step", "-np", "2", "--model", "many-small", "--turns", "2")


@pytest.fixture(autouse=True)
def engine():
    skip_where_unsupported(Configuration("torch", "gloo", 2))


def rows_of(path):
    return {row["variant"]: row for row in json.loads(path.read_text())["rows"]}


def test_steps_with_and_without_reduction(tmp_path):
    path = tmp_path / "run.json"
    names = "hvdkit-gloo-fp32,single"
    done = bench(*SMALL, "--variants", names, "--link", "1Gbit/s", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = rows_of(path)
    assert {name: row["ranks"] for name, row in rows.items()} == {
        "hvdkit-gloo-fp32": 2,
        "single": 1,
    }
    for row in rows.values():
        assert (row["parameters"], row["bytes"]) == (1000, 2_112_000)
        assert len(row["turns"]) == 2
        assert row["peak"] > 100e6
    for text in ("exposed ms", "efficiency", "limit ms", "2(n-1)/n", "many-small, torch"):
        assert text in done.stdout
    # A file of this benchmark is the profile of a prediction.
    predicted = ("scale", "--ranks", "2,8", "--step", str(path), "--bandwidth", "1Gbit/s")
    done = bench(*predicted)
    assert done.returncode == 0, done.stderr
    assert "many-small, predicted with 2 ranks per host" in done.stdout
    assert "hvdkit-gloo-fp32" in done.stdout


def a_row(variant, turns, wire="fp32", ranks=2):
    return {
        "model": "m",
        "variant": variant,
        "wire": wire,
        "ranks": ranks,
        "samples": ranks,
        "bytes": 1000,
        "turns": turns,
        "cpu": turns,
        "idle": 0.0,
        "peak": 1e6,
    }


def test_derived_columns():
    rows = [
        a_row("hvdkit-gloo-fp16", [0.3, 0.5, 0.4], "fp16"),
        a_row("alone", [0.2, 0.3, 0.2], ""),
        a_row("single", [0.1, 0.25, 0.1], "", 1),
    ]
    found, alone, single = table.columns(rows, rate=1000.0)
    assert found["exposed_ms"] == pytest.approx(200)
    assert found["efficiency"] == pytest.approx(1 / 3)
    assert found["samples_per_second"] == pytest.approx(5)
    # A ring of two ranks sends the 500 bytes of float16 once.
    assert found["limit_ms"] == pytest.approx(500)
    assert found["median_per_limit"] == pytest.approx(0.8)
    assert (alone["exposed_ms"], alone["limit_ms"], single["efficiency"]) == (None, None, None)


def norms(**of_variants):
    names = {"hvdkit": "fp32", "ddp": "fp16", "stock": "int8", "alone": ""}
    return {Variant("torch", name, "gloo", names[name]): of for name, of in of_variants.items()}


def test_variants_that_compute_other_gradients_are_an_error():
    check_consistency(norms(hvdkit=[1.0, 1.0], ddp=[1.001, 1.001], alone=[2, 3], stock=[4, 4]))
    with pytest.raises(HvdkitError, match="ddp-gloo-fp16 computes other gradients than hvdkit"):
        check_consistency(norms(hvdkit=[1.0, 1.0], ddp=[1.0, 1.1]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "lenet"], "--models has 'lenet'; expected some of resnet50"),
        (["--accumulate", "2", "--framework", "keras"], "--accumulate needs --framework torch"),
        (["--accumulate", "0"], "--accumulate is 0"),
        (["--batch-size", "-1"], "--batch-size is -1"),
        (["--link", "4"], "--link is '4'"),
        (["--bucket-mb", "0"], "--bucket-mb is 0"),
        (["--bucket-mb", "nan"], "--bucket-mb is nan"),
        (["--before", "/tmp"], "--before: there is no hvdkit in /tmp"),
        (["--variants", "before-gloo-fp32"], "--before is not given"),
        (["--variants", "stock-gloo-fp32"], "--stock is not given"),
        (["--part", "backward", "--framework", "keras"], "--part is backward with"),
        (["--json", "/gone/run.json"], "no file can be written to /gone"),
    ],
)
def test_wrong_arguments_are_status_2(arguments, expected, capsys):
    from hvdkit import cli

    assert cli.main(["bench", *SMALL, *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.long
def test_ctrl_c_keeps_the_complete_turns(tmp_path):
    path = tmp_path / "run.json"
    arguments = ["step", "--model", "many-small", "--turns", "100000", "--variants"]
    with start(str(tmp_path), *arguments, "hvdkit-gloo-fp32,alone", "--json", str(path)) as job:
        try:
            for line in job.stderr:
                if "turn 5 of" in line:
                    break
            job.send_signal(signal.SIGINT)
            output, error = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 130
    assert "of 100000 turns were measured; they are in" in error
    assert "exposed ms" in output
    assert len(rows_of(path)["alone"]["turns"]) >= 5
    assert not processes(str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("part", ["step", "backward"])
def test_all_variants_of_torch(tmp_path, part):
    path = tmp_path / "run.json"
    names = "hvdkit-gloo-*,flat-*,engine-gloo-*,ddp-*,keras-*,alone,single"
    done = bench(*SMALL, "--part", part, "--variants", names, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert {"hvdkit-gloo-int8", "ddp-gloo-powersgd", "keras-gloo-fp16"} <= set(rows_of(path))


@pytest.mark.long
def test_accumulation(tmp_path):
    path = tmp_path / "run.json"
    names = "hvdkit-gloo-fp32,engine-gloo-fp32,ddp-gloo-fp32,alone"
    done = bench(*SMALL, "--accumulate", "3", "--variants", names, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert {row["samples"] for row in rows_of(path).values()} == {6}


@pytest.mark.long
@pytest.mark.parametrize("model", ["resnet50", "transformer", "vgg16", "one-huge"])
def test_all_models_of_torch(model):
    arguments = ["step", "--model", model, "--turns", "1", "--variants", "hvdkit-gloo-fp32,alone"]
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "model", "names"),
    [
        ("tensorflow", "many-small", "hvdkit-gloo-fp32,hvdkit-gloo-int8,engine-*,alone"),
        ("tensorflow", "one-huge", "hvdkit-gloo-fp32,strategy-gloo-fp32,alone"),
        ("tensorflow", "transformer", "hvdkit-gloo-fp32,alone"),
        ("tensorflow", "vgg16", "alone,single"),
        ("keras", "many-small", "hvdkit-gloo-fp32,hvdkit-gloo-fp16,bare-gloo-fp32,alone"),
        ("keras", "resnet50", "hvdkit-gloo-fp32,alone"),
    ],
)
def test_tensorflow_and_keras(framework, model, names):
    skip_where_unsupported(Configuration("tensorflow", "gloo", 2))
    arguments = ["step", "--framework", framework, "--model", model, "--turns", "2"]
    done = bench(*arguments, "--variants", names)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("probe", ["python-cost", "memory", "checks"])
def test_probes(probe):
    names = "hvdkit-gloo-fp32" if probe == "checks" else "hvdkit-gloo-fp32,ddp-gloo-fp32"
    script = REPOSITORY / "scripts" / "bench_costs"
    command = [sys.executable, str(script), probe, "--variants", names]
    done = execute(command, env=os.environ | ENVIRONMENT, cwd=REPOSITORY, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(f"{name}, 2" in done.stdout for name in names.split(","))


@pytest.mark.long
def test_another_checkout(tmp_path):
    """The other hvdkit is measured by this one's benchmark."""
    from pathlib import Path
    from shutil import copytree, ignore_patterns

    import hvdkit

    source = Path(hvdkit.__file__).parent
    copytree(source, tmp_path / "hvdkit", ignore=ignore_patterns("bench", "launch", "__pycache__"))
    names = "hvdkit-gloo-fp32,before-gloo-fp32"
    done = bench(*SMALL, "--before", str(tmp_path), "--variants", names)
    assert done.returncode == 0, done.stderr
    assert "hvdkit-gloo-fp32 / before-gloo-fp32" in done.stdout
