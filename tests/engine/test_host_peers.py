"""Connect many ranks of one host."""

import resource
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from hvdkit.engine import patches
from hvdkit.engine.toolchain import find_compiler

DRIVER = Path(__file__).with_name("host_peers_driver.cc")


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """The driver, with the headers under the names that they have in Horovod's tree."""
    folder = tmp_path_factory.mktemp("host_peers")
    (patch,) = (each for each in patches.series() if each.name == "shared-memory")
    for path, content in patch.adds.items():
        (folder / Path(path).name).write_text(content)
    sources = resources.files("hvdkit.engine").joinpath("sources")
    built = folder / "host_peers_driver"
    paths = [f"-I{folder}", f"-I{sources}", str(DRIVER), "-o", str(built)]
    done = subprocess.run(
        [find_compiler().path, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return built


def test_more_ranks_than_files_that_may_be_sent_at_once(driver):
    """Files that are being sent count for all processes of the user together, and the soft limit of
    open files holds for them. root has no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 2000:
        pytest.skip(f"the hard limit of open files is {hard}")
    done = subprocess.run(
        [driver, "24", "128", "2000"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)
