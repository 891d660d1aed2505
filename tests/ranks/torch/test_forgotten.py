"""Scripts that lack a line, or have two lines in another order, are right or not silent.

A script is right if it ends with the weights of the complete script, to the last bit, on every
rank. It is not silent if each rank raises an error, or a rank logs a warning.
"""

import contextlib
import itertools
import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvdkit.agreement import same_data
from tests.logs import recorded
from tests.ranks.folders import shared_folder

SAMPLES = 96

#: Name -> line, of a script with Horovod's functions that loads a file on rank 0.
LOADS_ON_RANK_0 = {
    "model": "model = make_model()",
    "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "load": "if hvd.rank() == 0: model.load_state_dict(saved['model'])",
    "load optimizer": "if hvd.rank() == 0: optimizer.load_state_dict(saved['optimizer'])",
    "wrap": "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
    "broadcast": "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    "broadcast state": "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
    "sampler": "sampler = hvd.DistributedSampler(dataset)",
    "loader": "loader = DataLoader(dataset, batch_size=8, sampler=sampler)",
    "train": """
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
""",
}

#: The same with a checkpointer, which resumes from a folder.
RESUMES = {
    "model": "model = make_model()",
    "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "wrap": "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
    "broadcast": "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    "broadcast state": "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
    "sampler": "sampler = hvd.ResumableSampler(dataset, batch_size=8)",
    "loader": "loader = DataLoader(dataset, batch_size=8, sampler=sampler)",
    "checkpointer": """
checkpointer = hvd.Checkpointer(folder, model=model, optimizer=optimizer, data=sampler)
opened.append(checkpointer)
""",
    "restore": "checkpointer.restore()",
    "train": """
step = 6
for epoch in range(sampler.epoch, 4):
    for x, y in sampler.batches(loader):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        step += 1
""",
    "save": "checkpointer.save(step)",
}

SCRIPTS = {"loads on rank 0": LOADS_ON_RANK_0, "resumes": RESUMES}

#: Script -> forgotten text, text instead of it, and the text of the error or the warning; None if
#: the script is right.
FORGOTTEN = {
    "loads on rank 0": [
        (LOADS_ON_RANK_0["wrap"], "", r"not wrapped.*hvd\.DistributedOptimizer\("),
        (LOADS_ON_RANK_0["broadcast"], "", r"Call hvd\.broadcast_parameters\("),
        (
            LOADS_ON_RANK_0["broadcast state"],
            "",
            r"broadcast the optimizer's state of one rank \(hvd\.broadcast_optimizer_state",
        ),
        (
            ", sampler=sampler",
            "",
            r"ranks 0, 1 computed the same gradients.*DataLoader\(dataset, sampler=sampler",
        ),
        (
            "sampler=sampler",
            "shuffle=True",
            r"nothing has iterated.*DataLoader\(dataset, sampler=sampler",
        ),
        (
            "Sampler(dataset)",
            "Sampler(dataset, seed=hvd.rank())",
            r"different seeds .* rank 0: seed 0; rank 1: seed 1.*Pass the same seed=",
        ),
        ("sampler.set_epoch(epoch)", "pass", r"Call sampler\.set_epoch\(epoch\)"),
        (", model.named_parameters()", "", None),
    ],
    "resumes": [
        (RESUMES["wrap"], "", r"not wrapped.*hvd\.DistributedOptimizer\("),
        (RESUMES["broadcast"], "", None),
        (RESUMES["broadcast state"], "", None),
        (", sampler=sampler", "", "create it with sampler=S"),
        ("sampler.batches(loader)", "loader", r"`for batch in sampler\.batches\(loader\)`"),
        (RESUMES["restore"], "", r"restore\(\)"),
    ],
}


def make_model(hvd):
    torch.manual_seed(10 + hvd.rank())
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (SAMPLES,), generator=generator),
    )


def prepare(hvd, folder):
    """Write what the scripts load: a file on rank 0, and a checkpoint."""
    model = make_model(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer)
    sampler = hvd.ResumableSampler(data(), batch_size=8)
    batches = sampler.batches(DataLoader(data(), batch_size=8, sampler=sampler))
    for x, y in itertools.islice(batches, 3):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    with hvd.Checkpointer(folder, model=model, optimizer=optimizer, data=sampler) as checkpointer:
        checkpointer.save(6)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def run(hvd, folder, saved, lines):
    """Run a script; return the final weights of all ranks, and what each rank was told."""
    from hvdkit.torch import unwrapped

    unwrapped._warned.clear()
    same_data.seeds.clear()
    opened = []
    space = {
        "hvd": hvd,
        "torch": torch,
        "DataLoader": DataLoader,
        "dataset": data(),
        "make_model": lambda: make_model(hvd),
        "loss_of": loss_of,
        "saved": saved,
        "folder": folder,
        "opened": opened,
    }
    with recorded("hvdkit") as log:
        try:
            exec("\n".join(lines), space)
            told = ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    for checkpointer in opened:
        checkpointer.abandon()
    weights = None if told else [p.tolist() for p in space["model"].parameters()]
    return hvd.allgather_object((weights, told, warnings_in(log)))


def warnings_in(log):
    """Return the warnings, but that of a rank that other work of the host has made slow.

    The times of earlier tests of this process count, too.
    """
    return [
        record.getMessage()
        for record in log
        if record.levelno >= logging.WARNING and "is slow:" not in record.getMessage()
    ]


@contextlib.contextmanager
def prepared(hvd, tmp_path):
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        yield folder, prepare(hvd, folder)


def is_right(ranks, expected):
    return all(weights == expected[0][0] for weights, _, _ in ranks)


@pytest.mark.parametrize(
    ("script", "number"), [(name, k) for name, rows in FORGOTTEN.items() for k in range(len(rows))]
)
def test_a_missing_line_is_named(hvd, tmp_path, script, number):
    old, new, text = FORGOTTEN[script][number]
    lines = list(SCRIPTS[script].values())
    with prepared(hvd, tmp_path) as (folder, saved):
        expected = run(hvd, folder, saved, lines)
    assert not any(told or logged for _, told, logged in expected), expected
    with prepared(hvd, tmp_path) as (folder, saved):
        ranks = run(hvd, folder, saved, [line.replace(old, new) for line in lines])
    if text is None:
        assert is_right(ranks, expected), ranks
        return
    failed = [told for _, told, _ in ranks]
    assert all(failed) or not any(failed), failed
    # Errors are raised on all ranks, and warnings are logged on rank 0.
    assert any(re.search(text, each) for each in [failed[0], *ranks[0][2]]), ranks


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_lines_in_another_order(hvd, tmp_path, script):
    """Two neighbours; with --long (see below), any two lines."""
    names = list(SCRIPTS[script])
    check_swaps(hvd, tmp_path, script, itertools.pairwise(names))


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_any_two_lines_in_another_order(hvd, tmp_path, script):
    # If only rank 0 raises an error, the job ends, but the ranks of a test would wait for rank 0.
    only_on_rank_0 = {"model", "optimizer"} if SCRIPTS[script] is LOADS_ON_RANK_0 else set()
    pairs = itertools.combinations(SCRIPTS[script], 2)
    check_swaps(hvd, tmp_path, script, [p for p in pairs if not only_on_rank_0 & {*p}])


def check_swaps(hvd, tmp_path, script, pairs):
    with prepared(hvd, tmp_path) as (folder, saved):
        expected = run(hvd, folder, saved, list(SCRIPTS[script].values()))
    for one, other in pairs:
        if (one, other) == ("restore", "train"):
            continue  # a restore after training goes back to the checkpoint, as it should
        lines = dict(SCRIPTS[script])
        lines[one], lines[other] = lines[other], lines[one]
        with prepared(hvd, tmp_path) as (folder, saved):
            ranks = run(hvd, folder, saved, list(lines.values()))
        failed = [told for _, told, _ in ranks]
        assert all(failed) or not any(failed), (one, other, failed)
        loud = all(failed) or ranks[0][2]
        assert loud or is_right(ranks, expected), (one, other, ranks)


def test_a_sampler_with_an_order_of_its_own_causes_no_warning(hvd):
    class Own(hvd.DistributedSampler):
        def __iter__(self):
            return iter(range(self.rank, SAMPLES, self.num_replicas))

    sampler = Own(data())
    model = make_model(hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    with recorded("hvdkit") as log:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data(), batch_size=24, sampler=sampler):
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
    warned = warnings_in(log)
    assert not warned, warned


def test_gradients_that_overflow_in_the_first_passes_are_not_the_same_data(hvd):
    model = nn.Linear(5, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    with recorded("hvdkit") as log:
        for step in range(12):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * step + hvd.rank()))
            (model(x).square().mean() * (float("nan") if step < 3 else 1)).backward()
            if step >= 3:
                optimizer.step()
            optimizer.zero_grad()
    warned = warnings_in(log)
    assert not warned, warned
