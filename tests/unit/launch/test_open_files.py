"""The limit on open files."""

import pytest

from tests.unit.launch.commands import execute, output_of
from tests.unit.launch.test_command import HVDKIT_RUN

CODE = """
import resource, subprocess, sys
from hvdkit.launch.agent import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
print(open_files.hard_limit(), open_files.raise_limit(int(sys.argv[1])), flush=True)
print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
subprocess.run(["sh", "-c", "ulimit -n"])
"""
NODE_0 = """
import contextlib, pathlib, resource, sys
from hvdkit.errors import HvdkitError
from hvdkit.launch.launchers.nodes.gathering import Nodes
from hvdkit.launch.launchers.nodes.settings import NodeSettings
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.hosts.ssh import Ssh
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 5000))
node = NodeSettings(500, 0, 1, None, pathlib.Path(sys.argv[1]), b"", timeout=0.1)
with contextlib.suppress(HvdkitError), Nodes(node, Settings(Ssh(), sys.executable)):
    pass
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("needed", "soft"), [(50, 100), (150, 150), (1000, 200)])
def test_the_soft_limit_is_raised_to_the_needed_number(needed, soft):
    expected = [f"200 {soft}", f"({soft}, 200)", str(soft)]
    assert output_of(CODE, needed).splitlines() == expected


def test_node_0_raises_its_limit_before_the_nodes_connect(tmp_path):
    assert int(output_of(NODE_0, tmp_path / "job")) >= 4 * 500


@pytest.mark.parametrize(
    ("limits", "of_a_rank", "warning"),
    [
        ("256:5000", "1030", ""),
        ("200:200", "200", "this process can open 200 files, but a job of 2 ranks may need 524"),
    ],
)
def test_ranks_get_a_higher_limit_than_the_shell(limits, of_a_rank, warning):
    limited = ["prlimit", f"--nofile={limits}", *HVDKIT_RUN, "-np", "2"]
    done = execute([*limited, "sh", "-c", "ulimit -n"])
    assert sorted(done.stdout.splitlines()) == [f"[0] {of_a_rank}", f"[1] {of_a_rank}"]
    assert warning in done.stderr
