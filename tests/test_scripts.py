"""The checks of scripts before a download or a build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


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
