"""A Lightning Trainer on two hosts: over ssh, over MPI, and after Ctrl-C on another size."""

import importlib.util
import sys

import pytest

from tests.hosts.launches import BOTH
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

pytestmark = pytest.mark.long

#: Arguments: the folder for checkpoints, the batch of a rank, and the epoch that never ends.
SCRIPT = """
import sys, time
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from hvdkit.lightning import HvdkitStrategy

folder, batch, endless = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, index):
        if self.current_epoch == endless:
            print("waits", flush=True)
            time.sleep(60)
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

L.seed_everything(3)
inputs = torch.randn(48, 3)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
saved = L.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
trainer = L.Trainer(
    strategy=HvdkitStrategy(), accelerator="cpu", precision="64-true", max_epochs=4,
    logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[saved],
)
model = Model()
trainer.fit(model, DataLoader(data, batch), ckpt_path="last")
print(trainer.world_size, trainer.global_step, "%.12f" % model.net.weight.sum().item())
"""


@pytest.fixture
def command(tmp_path):
    """Return a function that returns the command of a rank."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("no lightning here")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def make(name, ranks, endless=-1):
        return (sys.executable, str(script), str(tmp_path / name), str(8 // ranks), str(endless))

    return make


def results(done):
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return [line[-3:] for line in lines if len(line) >= 3 and line[-3] in ("1", "2")]


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_two_hosts_give_the_weights_of_one_process(launches, command, launcher):
    skip_where_unsupported(Configuration("torch", launcher, 2))
    (one,) = results(launches.run("-np", "1", *command("one", 1)))
    assert one[:2] == ["1", "24"]
    both = results(launches.run("--launcher", launcher, *BOTH, *command("two", 2)))
    assert both == [both[0]] * 2
    assert both[0][:2] == ["2", "24"]
    assert float(both[0][2]) == pytest.approx(float(one[2]), abs=1e-9)
