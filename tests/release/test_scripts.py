"""Scripts: their checks before a download or a build, and the tables of benchmarks."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def check_build_tools(cache, **env):
    code = 'root="$PWD"; source scripts/environment.sh; check_build_tools && echo complete'
    return subprocess.run(
        ["bash", "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"HVDKIT_CACHE_DIR": str(cache), "PYTHON": sys.executable} | env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def interpreter_without_headers(tmp_path):
    found = tmp_path / "python"
    found.write_text(f"#!/bin/sh\necho {tmp_path}/include\n")
    found.chmod(0o755)
    return str(found)


def test_a_missing_compiler_is_reported_first(tmp_path):
    done = check_build_tools(tmp_path, CXX="no-such-compiler")
    assert done.returncode == 1
    assert "needs a C++ compiler, and there is no no-such-compiler here" in done.stderr


def test_missing_headers_are_reported_first(tmp_path, interpreter_without_headers):
    # Any existing program can stand for the compiler, because it is not run.
    done = check_build_tools(tmp_path, PYTHON=interpreter_without_headers, CXX="true")
    assert done.returncode == 1
    assert f"there is no {tmp_path}/include/Python.h" in done.stderr


def test_an_engine_in_the_cache_needs_no_compiler(tmp_path):
    (tmp_path / "wheels" / "some-key").mkdir(parents=True)
    assert check_build_tools(tmp_path, CXX="no-such-compiler").stdout == "complete\n"


@pytest.mark.long
def test_a_torchvision_that_does_not_load_is_removed(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / ".venv"], timeout=60, check=True)
    (site,) = (tmp_path / ".venv").glob("lib/python*/site-packages")
    package, info = site / "torchvision", site / "torchvision-0.1.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    (info / "RECORD").write_text(
        "".join(f"{each},,\n" for each in ("torchvision/__init__.py", f"{info.name}/METADATA"))
    )
    code = f'root="{tmp_path}"; source scripts/environment.sh; remove_broken_torchvision'
    for text, said in (("", ""), ("raise RuntimeError", "removed torchvision, which does not")):
        (package / "__init__.py").write_text(text)
        done = subprocess.run(
            ["bash", "-euc", code], cwd=REPOSITORY, capture_output=True, timeout=60, check=True
        )
        assert done.stdout.decode().startswith(said)
        assert (package / "__init__.py").exists() == (not said)


def write_benchmarks(folder, **result):
    """Write the page of a folder with one result."""
    name = "one-host-two-ranks"
    rows = [
        {
            "variant": f"{optimizer}-gloo-fp32",
            "optimizer": optimizer,
            "wire": "fp32",
            "ranks": 2,
            "bytes": 1e8,
            "turns": turns,
            "cpu": [0.2],
        }
        for optimizer, turns in (("hvdkit", [0.2, 0.3, 0.4]), ("ddp", [0.4, 0.4, 0.4]))
    ]
    conditions = {
        "date": "2026-11-25T00:00:00+00:00",
        "engines": {"installed": "0.28.1"},
        "versions": {"torch": "2.13.0"},
        "cores": 2,
    }
    content = {"complete": True, "rows": rows, "conditions": conditions} | result
    (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / f"{name}.command").write_text(json.dumps(["step", "--turns", "3"]))
    page = folder / "page.md"
    page.write_text(f"before\n<!-- {name} -->\nold\n<!-- end -->\nafter\n")
    command = [sys.executable, "scripts/benchmarks", "--write", folder, "--page", page]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    return done, page.read_text()


def test_tables_of_benchmarks_are_written_from_results(tmp_path):
    done, page = write_benchmarks(tmp_path)
    assert done.returncode == 0, done.stderr
    assert page.startswith("before\n<!-- one-host-two-ranks -->\n")
    assert page.endswith("\n<!-- end -->\nafter\n")
    assert "old" not in page
    assert "$ hvdkit bench step --turns 3" in page
    assert "with hvdkit's engine 0.28.1 and PyTorch 2.13.0, on 2 cores." in page
    assert "| hvdkit, fp32 | 300.0 | 250.0 - 350.0 | 200.0 |" in page
    # Of the ratios 0.5, 0.75 and 1.
    assert "| hvdkit fp32 / DDP fp32 | 0.75 | 0.62 - 0.88 |" in page


def test_an_interrupted_benchmark_is_not_written(tmp_path):
    done, page = write_benchmarks(tmp_path, complete=False)
    assert done.returncode == 1
    assert "one-host-two-ranks.json is of a run that was interrupted: measure again" in done.stderr
    assert "old" in page


def test_the_table_of_results_compares_hvdkit_with_others():
    rows = [
        {"variant": f"{optimizer}-gloo-{wire}", "optimizer": optimizer, "wire": wire, "turns": [1]}
        for optimizer in ("hvdkit", "ddp", "stock")
        for wire in ("fp32", "fp16")
    ]
    script = runpy.run_path(str(REPOSITORY / "scripts" / "benchmarks"))
    table = script["results_of"]({"one-host-two-ranks": {"rows": rows}})
    pairs = [line.split(" | ")[1] for line in table.splitlines()[2:]]
    assert sorted(pairs) == [
        "hvdkit fp16 / DDP fp16 hook",
        "hvdkit fp16 / stock Horovod fp16",
        "hvdkit fp32 / DDP fp32",
        "hvdkit fp32 / stock Horovod fp32",
    ]
