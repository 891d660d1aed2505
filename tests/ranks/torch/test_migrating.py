"""The code of docs/migrating.md and of sections that it links, compared with DDP or one process."""

import functools
import io
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.ranks.folders import shared_folder
from tests.ranks.rank_pool import REPOSITORY
from tests.ranks.torch.oracle import (
    adamw,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
    whole_batch,
    wrapped,
)


@functools.cache
def guide(page="migrating.md"):
    return (REPOSITORY / "docs" / page).read_text(encoding="utf-8")


def code(name, page="migrating.md"):
    """Return the Python block of a guide that begins with the comment `name`."""
    (block,) = re.findall(rf"```python\n# {re.escape(name)}\n(.*?)```", guide(page), re.S)
    return block


def scripts(number):
    """Return the script before and after a diff of the guide."""
    lines = re.findall(r"```diff\n(.*?)```", guide(), re.S)[number].splitlines()
    return tuple(
        "\n".join(line[1:] for line in lines if line[:1] != leave_out) for leave_out in "+-"
    )


def table():
    """Return the rows of the table of DDP's lines: code of DDP, code of hvdkit."""
    rows = guide().partition("| DDP |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[re.findall("`([^`]+)`", cell) for cell in row.split("|")[1:3]] for row in rows]


def test_every_line_of_the_table_runs(hvd):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    names = {
        "hvd": hvd,
        "torch": torch,
        "wrapped": wrapped,
        "model": model,
        "optimizer": sgd(model.parameters()),
        "dataset": range(4 * hvd.size()),
        "x": torch.ones(2, 3),
        "totals": torch.ones(3),
        "path": io.BytesIO(),
    }
    lines = {line for _, ours in table() for line in ours}
    for line in sorted(lines - {"hvdkit run", "block.compile()"}):  # of PyTorch, and slow
        if re.fullmatch(r"\w+=\S+", line):  # an argument
            line = f"wrapped(hvd, torch.nn.Linear(5, 4), {line})"
        exec(f"{line} pass" if line.endswith(":") else line, names)
    assert names["totals"].tolist() == [hvd.size()] * 3
    hvd.barrier()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()

    def forward(self, x):
        return self.layers(x)


def run_script(script, rank, **names):
    torch.manual_seed(rank)
    names |= {"Model": Model}
    exec(script, names)
    return names


# Ends without the interpreter's shutdown: a thread of the freed process group that asks for the
# interpreter then, aborts the process ("terminate called without an active exception").
DDP_PROCESS = """
import os
import sys
import torch
from tests.ranks.torch.test_migrating import Model
rank, path, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(rank)
dataset = torch.utils.data.TensorDataset(*torch.load(f"{path}.data"))
exec(script, {"Model": Model, "dataset": dataset, "path": path})
sys.stderr.flush()
os._exit(0)
"""


def run_with_ddp(hvd, script, samples, path):
    """Run a script of torch.distributed on as many ranks, each in a process of its own.

    In the process of a rank, freeing DDP's process group can wait for a thread that needs the
    interpreter, which waits for the group.
    """
    port = 0
    if hvd.rank() == 0:
        torch.save((samples[:, :5], samples[:, 5:]), f"{path}.data")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(hvd.broadcast_object(port, root_rank=0)),
        "RANK": str(hvd.rank()),
        "LOCAL_RANK": str(hvd.local_rank()),
        "WORLD_SIZE": str(hvd.size()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-c", DDP_PROCESS, str(hvd.rank()), path, script]
    answer = subprocess.run(
        command, env=os.environ | told, cwd=REPOSITORY, capture_output=True, text=True, timeout=90
    )
    assert answer.returncode == 0, answer.stderr


def test_the_script_for_ddp_before_and_after(hvd):
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(8 * hvd.size() * 3 - 5, 7, generator=generator, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(samples[:, :5], samples[:, 5:])
    before, after = scripts(1)
    with shared_folder(hvd) as folder:
        run_with_ddp(hvd, before, samples, f"{folder}/ddp")
        model = run_script(after, hvd.rank(), dataset=dataset, path=f"{folder}/hvdkit")["model"]
        assert_same_on_all_ranks(hvd, model)
        hvd.barrier()
        for name, value in torch.load(f"{folder}/ddp").items():
            torch.testing.assert_close(torch.load(f"{folder}/hvdkit")[name], value)
            torch.testing.assert_close(model.state_dict()[name], value)


def test_the_script_for_horovod_before_and_after(hvd):
    loader = [(batch_of(hvd.rank(), step), torch.arange(6) % 2) for step in range(4)]
    before, after = scripts(0)
    assert "import horovod.torch as hvd" in before
    models = [
        run_script(script.replace("import horovod.torch", "import hvdkit.torch"), 0, loader=loader)[
            "model"
        ]
        for script in (before, after)
    ]
    assert_close(*models, 0)
    assert_same_on_all_ranks(hvd, models[1])


def train_in_one_process(hvd, steps, make=sgd):
    """Train a model with the mean gradient of all ranks; `steps` has functions model -> loss."""
    reference = small_model()
    plain = make(reference.parameters())
    for losses in steps:
        plain.zero_grad()
        for loss in losses:
            loss(reference).backward()
        plain.step()
    return reference


@pytest.mark.parametrize("reductions", [1, 2])
def test_several_passes(hvd, reductions):
    script = code("several passes, one reduction", "synchronizer.md")
    assert "with hvd.no_sync(optimizer):" in script
    if reductions == 2:
        script = script.replace("with hvd.no_sync(optimizer):", "if True:")
    model = small_model()
    optimizer = wrapped(hvd, model)
    for step in range(3):
        first, second = (batch_of(hvd.rank(), 2 * step + k) for k in range(2))
        exec(script, {**globals(), **locals()})
    steps = [
        [lambda m, k=k: loss_of(m, whole_batch(hvd, k)) for k in (2 * step, 2 * step + 1)]
        for step in range(3)
    ]
    assert_close(model, train_in_one_process(hvd, steps))
    assert_same_on_all_ranks(hvd, model)


def test_uneven_data(hvd):
    n = hvd.size()
    model = small_model()
    optimizer = wrapped(hvd, model, adamw)
    batches = [batch_of(hvd.rank(), step) for step in range(2 + hvd.rank())]
    script, _, _ = code("join", "recipes.md").partition("print(")
    script = script.replace("model(inputs).square().mean()", "loss_of(model, inputs)")
    exec(script, {**globals(), **locals()})
    steps = [
        [lambda m, r=r, k=k: loss_of(m, batch_of(r, k)) / n for r in range(n) if k < 2 + r]
        for k in range(1 + n)
    ]
    assert_close(model, train_in_one_process(hvd, steps, adamw))
    assert_same_on_all_ranks(hvd, model)


def gan():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    discriminator = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return generator, discriminator


def criterion(scores, real):
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_gan(hvd, frozen):
    script = code("GAN")
    if not frozen:  # the lines that are optional
        script, removed = re.subn(r"^    discriminator\.requires_grad_.*\n", "", script, flags=re.M)
        assert removed == 2

    def batches_of(ranks):
        for step in range(4):
            real = torch.cat([batch_of(rank, step) for rank in ranks])
            yield real, real[:, :3].sin()

    # Only the optimizers and the data differ.
    models = []
    for together in (True, False):
        generator, discriminator = gan()
        names = {"generator": generator, "discriminator": discriminator, "criterion": criterion}
        names["optimizer_g"] = adamw(generator.parameters())
        names["optimizer_d"] = adamw(discriminator.parameters())
        names["batches"] = batches_of(range(hvd.size()))
        if together:
            names["optimizer_g"] = wrapped(hvd, generator, adamw)
            names["optimizer_d"] = wrapped(hvd, discriminator, adamw)
            names["batches"] = batches_of([hvd.rank()])
        exec(script, names)
        models.append(nn.ModuleList([generator, discriminator]))
    # Adam divides by the root of squares that begin at zero.
    assert_close(*models, 1e-9)
    assert_same_on_all_ranks(hvd, models[0])
