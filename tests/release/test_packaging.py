"""The wheel is complete, and works after `pip install` in an empty environment."""

import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from hvdkit.engine import patches

REPOSITORY = Path(__file__).parents[2]


def run(*command, **options):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # From a copy, because a build leaves files beside the sources.
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = run("git", "ls-files", "-z", cwd=REPOSITORY).split("\0")
    for name in filter(None, tracked):
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(made), str(source))
    (found,) = made.iterdir()
    return found


@pytest.mark.long
def test_the_wheel_has_all_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        described = Parser().parsestr(archive.read(metadata).decode())
    tracked = run("git", "ls-files", "hvdkit", cwd=REPOSITORY).split()
    assert set(tracked) <= names
    assert not [name for name in names if name.startswith(("tests", "scripts"))]
    assert described["Author"] == "hvdkit developers"
    assert {"License-File", "Requires-Python", "Keywords", "Summary"} <= set(described.keys())
    assert "Programming Language :: Python :: 3.13" in described.get_all("Classifier")


@pytest.mark.long
def test_it_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(wheel), cwd=tmp_path)
    hvdkit = str(tmp_path / "env" / "bin" / "hvdkit")
    assert "build" in run(hvdkit, "--help", cwd=tmp_path)
    assert sorted(run(hvdkit, "run", "-np", "2", "echo", "up", cwd=tmp_path).splitlines()) == [
        "[0] up",
        "[1] up",
    ]
    assert f"{len(patches.series())} patches for Horovod" in run(
        hvdkit, "build", "--list-patches", cwd=tmp_path
    )
