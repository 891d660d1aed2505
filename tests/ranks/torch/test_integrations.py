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
    "fsdp": ["lightning"],
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


_DDP = """
import torch
import torch.distributed as dist
import hvdkit.torch.distributed

def batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, generator=generator), torch.ones(1)) for _ in range(32)]

torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
"""
_ENDS = {
    "lightning": """
import lightning as L
from lightning.pytorch.strategies import DDPStrategy

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
strategy = DDPStrategy(process_group_backend="hvd")
trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(batches(), 4))
""",
    "accelerate": """
from accelerate import Accelerator

dist.init_process_group("hvd")
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(batches(), 4)
net, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loader
)
for x, y in loader:
    accelerator.backward((net(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
""",
    "transformers": """
import tempfile
from transformers import Trainer, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def forward(self, x, labels):
        return {"loss": (self.net(x) - labels).square().mean()}

dist.init_process_group("hvd")
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, max_steps=4, save_strategy="no", report_to="none"
)
Trainer(Net(), args, train_dataset=[{"x": x, "labels": y} for x, y in batches()]).train()
""",
}
_PRINT = """
print("rank", dist.get_rank(), dist.get_backend(), model.weight.detach().numpy().tobytes().hex())
"""


@pytest.mark.long
@pytest.mark.parametrize("name", _ENDS)
def test_ddp_of_a_library_over_the_backend(tmp_path, name):
    if find_spec(name) is None:
        pytest.skip(f"no {name} here")
    weights = []
    for backend in ("hvd", "gloo"):
        script = (_DDP + _ENDS[name] + _PRINT).replace('"hvd"', f'"{backend}"')
        result = run(tmp_path, script)
        assert result.returncode == 0, result.stdout + result.stderr
        lines = [line.split()[1:] for line in result.stdout.splitlines() if "] rank" in line]
        assert sorted(line[1:3] for line in lines) == [["0", backend], ["1", backend]]
        weights += [line[3] for line in lines]
    assert len(set(weights)) == 1
