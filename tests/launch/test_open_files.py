import subprocess
import sys

import pytest

CODE = """
import resource, subprocess, sys
from hvdkit.launch import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
print(open_files.hard_limit(), open_files.raise_limit(int(sys.argv[1])))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
subprocess.run(["sh", "-c", "ulimit -n"])
"""


@pytest.mark.parametrize(("needed", "soft"), [(50, 100), (150, 150), (1000, 200)])
def test_the_soft_limit_is_raised_to_the_needed_number(needed, soft):
    done = subprocess.run(
        [sys.executable, "-uc", CODE, str(needed)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.splitlines() == [f"200 {soft}", f"({soft}, 200)", str(soft)]


def test_node_0_raises_its_limit_before_the_nodes_connect(tmp_path):
    code = """
import contextlib, pathlib, resource, sys
from hvdkit.errors import HvdkitError
from hvdkit.launch.nodes.gathering import GatheredNodes
from hvdkit.launch.nodes.settings import NodeSettings
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 5000))
settings = NodeSettings(500, 0, 1, None, pathlib.Path(sys.argv[1]), b"", timeout=0.1)
with contextlib.suppress(HvdkitError), GatheredNodes(settings, print):
    pass
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job")],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert int(done.stdout) >= 4 * 500


def test_ranks_get_a_higher_limit_than_the_shell():
    run = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "sh", "-c", "ulimit -n"]
    done = subprocess.run(
        ["prlimit", "--nofile=256:5000", *run],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 1030", "[1] 1030"]
    done = subprocess.run(
        ["prlimit", "--nofile=200:200", *run],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 200", "[1] 200"]
    assert "this process can open 200 files, but a job of 2 ranks may need 524" in done.stderr
