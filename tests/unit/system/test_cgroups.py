"""Control groups of a process, in folders like those of Linux."""

import pytest

from hvdkit.system import cgroups

#: The lines of /proc/self/cgroup, and the folder of a mount for "memory".
VERSIONS = {
    1: ("5:cpu,cpuacct:/other\n4:memory:/job/step\n0::/\n", "memory"),
    2: ("0::/job/step\n", ""),
}


@pytest.fixture(params=VERSIONS)
def mount(request, tmp_path, monkeypatch):
    """Return the folder in which the cgroup `job/step` of this process is."""
    lines, name = VERSIONS[request.param]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    return tmp_path / "cgroup" / name


def test_the_cgroups_of_a_process_are_found_from_inside(mount, tmp_path):
    (mount / "job/step").mkdir(parents=True)
    found = cgroups.folders("memory", proc=tmp_path / "proc")
    assert found == [mount / "job/step", mount / "job", mount]


def test_a_container_sees_only_the_cgroup_around_it(mount, tmp_path):
    mount.mkdir(parents=True)
    assert cgroups.folders("memory", proc=tmp_path / "proc") == [mount]


def test_a_process_that_has_ended_has_no_cgroups(tmp_path):
    assert cgroups.folders("memory", 5, tmp_path) == []


def test_numbers_of_a_cgroup(tmp_path):
    (tmp_path / "pids.max").write_text("max\n")
    (tmp_path / "pids.current").write_text("7\n")
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert cgroups.number(tmp_path, "pids.max") is None
    assert cgroups.number(tmp_path, "pids.current") == 7
    assert cgroups.number(tmp_path, "memory.events", "oom_kill") == 2
    assert cgroups.number(tmp_path, "memory.events", "max") is None
    assert cgroups.number(tmp_path, "missing") is None
