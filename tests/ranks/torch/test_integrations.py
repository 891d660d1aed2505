"""The scripts of docs/integrations.md, as `hvdkit run` starts them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported

PACKAGES = {
    "trainer": ["lightning", "torchmetrics"],
    "fabric": ["lightning"],
    "accelerate": ["accelerate"],
    "transformers": ["accelerate", "transformers"],
    "torchmetrics": ["torchmetrics"],
    "webdataset": ["webdataset"],
    "litdata": ["litdata"],
}


def scripts():
    """Return the scripts of the page by name, each with its output."""
    page = (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n# (\w+)\n(.*?)^```\n\n```\n(.*?)^```", page, re.M | re.S)
    return {name: (script, output) for name, script, output in blocks}


def require(name):
    """Skip the test if a package of a script is missing. Some of them change the environment."""
    for package in PACKAGES[name]:
        if find_spec(package) is None:
            pytest.skip(f"no {package} here")


def run(folder, script, ranks=2):
    skip_where_unsupported(Configuration("torch", "gloo", ranks))
    (folder / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "hvdkit", "run", "-np", str(ranks), sys.executable, "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_page_has_all_scripts():
    assert set(scripts()) == set(PACKAGES)


@pytest.mark.long
@pytest.mark.parametrize("name", PACKAGES)
def test_a_script_of_the_page_prints_its_output(tmp_path, name):
    require(name)
    script, output = scripts()[name]
    if name == "litdata":
        prepare(tmp_path)
    result = run(tmp_path, script)
    assert result.returncode == 0, result.stdout + result.stderr
    found = sorted(line for line in result.stdout.splitlines() if re.match(r"\[\d\] rank", line))
    assert words(found) == words(output.splitlines())


def prepare(folder):
    """Run the script of the page that writes data for litdata."""
    page = (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n# prepare\.py[^\n]*\n(.*?)^```", page, re.M | re.S)
    (folder / "prepare.py").write_text(script, encoding="utf-8")
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True, timeout=120)


def words(lines):
    """Return the lines without numbers after the decimal point, which depend on the machine."""
    return [re.sub(r"(?<=\d\.)\d+", "", line) for line in lines]


@pytest.mark.long
def test_a_rank_that_fails_in_a_trainer_ends_the_job(tmp_path):
    require("trainer")
    script = (
        scripts()["trainer"][0]
        .replace(
            "        inputs, targets = batch\n",
            "        inputs, targets = batch\n"
            "        if self.trainer.global_rank == 1 and index == 3:\n"
            "            raise ValueError('no such word')\n",
            1,
        )
        .replace(
            "    logger=False,\n",
            "    logger=False,\n"
            "    callbacks=[L.pytorch.callbacks.OnExceptionCheckpoint('.', 'failed')],\n",
        )
    )
    result = run(tmp_path, script)
    assert result.returncode == 1
    # Rank 0 saves when it notices the failure, and does not wait for rank 1.
    assert (tmp_path / "failed.ckpt").exists(), result.stderr
    assert "rank 1 on localhost failed" in result.stderr
    assert "ValueError: no such word" in result.stderr
