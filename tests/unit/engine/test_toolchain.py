import collections
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from hvdkit.engine import toolchain
from hvdkit.errors import HvdkitError


def program(folder, name, output, status=0):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_no_compiler_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HvdkitError, match=r"no C\+\+ compiler found.*apt-get install g\+\+"):
        toolchain.find_compiler()


def test_a_missing_compiler_in_cxx_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(HvdkitError, match=r"CXX=g\+\+-99"):
        toolchain.find_compiler()


def test_an_old_gcc_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(program(tmp_path, "g++", "8.5.0")))
    with pytest.raises(HvdkitError, match=r"is gcc 8.5.0.*needs gcc >= 9"):
        toolchain.find_compiler()


def test_a_compiler_that_does_not_run_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(program(tmp_path, "g++", "boom", status=1)))
    with pytest.raises(HvdkitError, match="--version fails"):
        toolchain.find_compiler()


def test_the_compiler_here_is_found(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert toolchain.find_compiler().version


def test_without_cmake_it_comes_from_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "which", lambda name: None)
    assert toolchain.find_cmake().path is None
    old = program(tmp_path, "cmake", "cmake version 3.10.2")
    monkeypatch.setattr(toolchain, "which", lambda name: str(old))
    assert toolchain.find_cmake().path is None
    new = program(tmp_path, "cmake", "cmake version 3.25.1")
    monkeypatch.setattr(toolchain, "which", lambda name: str(new))
    assert toolchain.find_cmake() == toolchain.BuildTool(str(new), "3.25.1")


def test_without_make_ninja_comes_from_the_index(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.find_make().path is None


@pytest.mark.parametrize("version", [(3, 10, 9), (3, 14, 0)])
def test_an_unsupported_python_is_rejected(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(HvdkitError, match=r"is not supported; expected 3\.11 to 3\.13"):
        toolchain.check_python()


def test_missing_python_headers_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(HvdkitError, match=r"Python\.h is missing.*python3-dev"):
        toolchain.check_headers()


def test_jobs_are_bounded_by_memory(monkeypatch):
    Memory = collections.namedtuple("Memory", "total available")
    monkeypatch.setattr(toolchain.os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(9 * 10**9, 9 * 10**9))
    assert toolchain.jobs() == 4
    assert toolchain.jobs(3) == 3
    assert toolchain.jobs(100) == 4
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(10**9, 10**9))
    assert toolchain.jobs() == 1


def test_a_full_disk_is_an_error_before_the_build(tmp_path, monkeypatch):
    Usage = collections.namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**10, 10**10, 10**8))
    with pytest.raises(HvdkitError, match=r"has 0\.1 GB free; a build needs 2 GB.*TMPDIR"):
        toolchain.check_disk(tmp_path / "not" / "there" / "yet")


def test_builds_keep_pythonpath(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/modules/torch")
    assert toolchain.python_path(Path("/tools")) == "/tools:/modules/torch"
    monkeypatch.delenv("PYTHONPATH")
    assert toolchain.python_path(Path("/tools")) == "/tools"
