"""Whether the kernel has killed a rank for lack of memory, from files like those of Linux."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvdkit.launch.agent.memory_kills import MemoryKills
from hvdkit.system import cgroups


class Kernel:
    """The files of a rank's cgroup `job/step`. Its parent `job` has the limit."""

    def __init__(self, folder, version, monkeypatch):
        self.version = version
        self.proc = folder / "proc"
        self.job = folder / "cgroup" / ("memory" if version == 1 else "") / "job"
        (self.job / "step").mkdir(parents=True)
        (self.proc / "7").mkdir(parents=True)
        line = "4:memory:/job/step" if version == 1 else "0::/job/step"
        (self.proc / "7/cgroup").write_text(f"{line}\n")
        monkeypatch.setattr(cgroups, "ROOT", folder / "cgroup")
        self.set()

    def set(self, killed=0, reached=0, on_host=0):
        (self.proc / "vmstat").write_text(f"nr_free_pages 5\noom_kill {on_host}\n")
        for place, kills, limit in (
            (self.job, 0, 2_000_000_000),
            (self.job / "step", killed, None),
        ):
            hits = reached if limit else 0
            if self.version == 1:
                (place / "memory.limit_in_bytes").write_text(f"{limit or 9223372036854771712}\n")
                (place / "memory.failcnt").write_text(f"{hits}\n")
                (place / "memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
            else:
                (place / "memory.max").write_text(f"{limit or 'max'}\n")
                (place / "memory.events").write_text(f"max {hits}\noom_kill {kills}\n")


@pytest.fixture(params=[1, 2])
def kernel(request, tmp_path, monkeypatch):
    return Kernel(tmp_path, request.param, monkeypatch)


def test_the_limit_of_the_cgroup_was_reached(kernel):
    kernel.set(killed=3, reached=40, on_host=3)
    found = MemoryKills(7, kernel.proc)
    assert found.explain() == ""
    kernel.set(killed=4, reached=50, on_host=4)
    assert found.explain() == (
        "probably by the kernel, because the memory limit of its cgroup (2.0 GB) was reached"
    )


@pytest.mark.parametrize("killed", [0, 1])
def test_the_memory_of_the_host_was_full(kernel, killed):
    found = MemoryKills(7, kernel.proc)
    kernel.set(killed=killed, on_host=1)
    assert found.explain().startswith("probably by the kernel, because the memory of the host")


def test_a_process_that_was_killed_long_before(kernel, monkeypatch):
    found = MemoryKills(7, kernel.proc)
    kernel.set(killed=1, reached=9, on_host=1)
    began = time.monotonic()
    for seconds in (11, 22):
        assert found.explain() != ""
        monkeypatch.setattr(time, "monotonic", lambda at=began + seconds: at)
        found.look()
    assert found.explain() == ""


def test_no_process_was_killed(kernel, tmp_path):
    found = MemoryKills(7, kernel.proc)
    kernel.set(reached=9)
    assert found.explain() == ""
    # A system without these files.
    assert MemoryKills(7, tmp_path / "none").explain() == ""


@contextmanager
def limited(megabytes):
    """Context with a cgroup of version 1 or 2 that has a memory limit."""
    (parent, *_) = [*cgroups.folders("memory"), Path("/missing")]
    folder = parent / f"hvdkit-test-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(megabytes * 1_000_000))
    except OSError as error:
        pytest.skip(f"this user may not make a cgroup with a limit: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


def test_a_real_kill():
    code = "import sys; sys.stdin.read(1); print(len(b'x' * 500_000_000))"
    with limited(100) as folder:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        try:
            (folder / "cgroup.procs").write_text(str(process.pid))
            found = MemoryKills(process.pid)
            process.communicate(b"x", timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == -9
        assert "the memory limit of its cgroup (0.1 GB) was reached" in found.explain()
