"""The code of docs/recipes.md on several ranks."""

import contextlib
import functools
import io
import re
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.ranks.rank_pool import REPOSITORY, Configuration, start_ranks_of
from tests.ranks.torch.oracle import assert_same_on_all_ranks


@functools.cache
def recipes():
    """Return the Python blocks of the page, by the comment that each begins with."""
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```python\n# ([^\n]*)\n(.*?)^```", page, re.M | re.S))


def follow(recipe, hvd, **names):
    """Execute a recipe; return the names that it defines, and what it printed."""
    names |= {
        "hvd": hvd,
        "torch": torch,
        "nn": nn,
        "functional": functional,
        "time": time,
        "Subset": Subset,
        "DataLoader": DataLoader,
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(recipes()[recipe], names)
    return names, printed.getvalue()


def start_as_script(recipe, folder, ranks):
    script = folder / "train.py"
    script.write_text(recipes()[recipe], encoding="utf-8")
    job = start_ranks_of(Configuration("torch", "gloo", ranks), [sys.executable, str(script)])
    return [result.output for result in job.wait(timeout=120)]


def classifier(hvd):
    torch.manual_seed(hvd.rank())
    return nn.Linear(4, 4), nn.Linear(4, 3), torch.randn(8, 4), torch.randint(0, 3, (8,))


def test_metrics_are_those_of_one_process(hvd):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs, targets = torch.randn(101, 4), torch.randint(0, 3, (101,))
    names, _ = follow("validation", hvd, model=model, dataset=TensorDataset(inputs, targets))
    outputs = model(inputs)
    assert names["loss"] == pytest.approx(functional.cross_entropy(outputs, targets).item(), 1e-5)
    assert names["accuracy"] == (outputs.argmax(dim=1) == targets).sum().item() / 101


def test_several_models(hvd):
    encoder, head, inputs, targets = classifier(hvd)
    names, _ = follow("several models", hvd, encoder=encoder, head=head)
    functional.cross_entropy(head(encoder(inputs)), targets).backward()
    names["optimizer"].step()
    assert_same_on_all_ranks(hvd, names["models"])


def test_several_optimizers(hvd):
    encoder, head, inputs, targets = classifier(hvd)
    follow("several optimizers", hvd, encoder=encoder, head=head, inputs=inputs, targets=targets)
    assert_same_on_all_ranks(hvd, nn.Sequential(encoder, head))


def test_a_contrastive_loss(hvd):
    n, rank = hvd.size(), hvd.rank()
    torch.manual_seed(0)
    images, texts = torch.randn(2, 3 * n, 4)

    def model():
        torch.manual_seed(1)
        return nn.Linear(4, 2)

    own = slice(3 * rank, 3 * rank + 3)
    trained = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=0.1))
    optimizer.zero_grad()
    follow(
        "contrastive",
        hvd,
        model=lambda rows: (trained(images[rows]), trained(texts[rows])),
        batch=own,
    )
    alone = model()
    logits = alone(images) @ alone(texts).T / 0.1
    functional.cross_entropy(logits, torch.arange(3 * n)).backward()
    for p, q in zip(trained.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 1000.0])
def test_private_gradients(hvd, noise):
    n, rank, max_norm = hvd.size(), hvd.rank(), 0.5
    torch.manual_seed(0)
    inputs, targets = torch.randn(4 * n, 200), torch.randint(0, 50, (4 * n,))
    model = nn.Linear(200, 50)
    own = slice(4 * rank, 4 * rank + 4)
    alone = nn.Linear(200, 50)
    alone.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    follow(
        "private",
        hvd,
        model=model,
        optimizer=optimizer,
        batches=[(inputs[own], targets[own])],
        batch_size=4,
        max_norm=max_norm,
        noise_multiplier=noise,
        seed=5,
    )
    assert_same_on_all_ranks(hvd, model)
    exact = [torch.zeros_like(p) for p in alone.parameters()]
    for x, y in zip(inputs, targets, strict=True):
        loss = functional.cross_entropy(alone(x[None]), y[None])
        gradients = torch.autograd.grad(loss, list(alone.parameters()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        assert norm > max_norm
        for total, g in zip(exact, gradients, strict=True):
            total += g * (max_norm / norm) / (4 * n)
    weight = model.weight.grad - exact[0]
    if noise:
        # 10,000 numbers give their deviation within about 1 %.
        assert weight.std().item() == pytest.approx(noise * max_norm / (4 * n), rel=0.04)
    else:
        torch.testing.assert_close(model.weight.grad, exact[0])
        torch.testing.assert_close(model.bias.grad, exact[1])


def test_compiled_blocks(hvd):
    model = nn.Linear(4, 1)
    block = nn.Linear(4, 4)
    # The recipe compiles; the compiler itself is PyTorch's, and takes many seconds.
    block.compile = functools.partial(block.compile, backend="eager")
    model = nn.Sequential(block, model)
    model.blocks = [block]
    batches = [torch.randn(8, 4) for _ in range(2)]
    _, printed = follow("compile", hvd, model=model, batches=batches)
    assert_same_on_all_ranks(hvd, model)
    assert len(printed.splitlines()) == (2 if hvd.rank() == 0 else 0)


def test_a_scheduler_steps_once_in_a_window(hvd):
    torch.manual_seed(0)
    batches = [torch.randn(8, 4) for _ in range(10)]
    names, _ = follow("scheduler", hvd, model=nn.Linear(4, 1), batches=batches)
    assert names["scheduler"].last_epoch == 5
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_the_warm_up_schedule(hvd):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    _, printed = follow("warm-up", hvd, optimizer=optimizer, train=lambda step: None)
    if hvd.rank() == 0:
        assert printed.splitlines()[1] == f"step 1: lr {0.1 * hvd.size():.3f}"
        assert printed.splitlines()[9].startswith("step 9: lr ")


@pytest.mark.long
def test_process_sets(tmp_path):
    outputs = start_as_script("process sets", tmp_path, 4)
    sets = ["[0, 1]: sum 1, grad 0.50"] * 2 + ["[2, 3]: sum 5, grad 2.50"] * 2
    assert outputs == [f"rank {rank}, set {line}\n" for rank, line in enumerate(sets)]
