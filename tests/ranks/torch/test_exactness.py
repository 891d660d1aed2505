"""Compare n ranks with one batch each and one process with all batches, after 20 steps."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from tests.ranks.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    Twins,
    assert_close,
    assert_same_on_all_ranks,
    relative_distance,
    small_model,
)

pytestmark = pytest.mark.device

ALGORITHMS = {
    "sgd foreach": partial(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "sgd fused": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "adam maximize": partial(optim.Adam, lr=1e-3, maximize=True),
    "adamw foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": partial(optim.Adagrad, lr=0.05),
    "adagrad fused": partial(optim.Adagrad, lr=0.05, fused=True),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.02),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.005, centered=True, momentum=0.5),
    "rprop": partial(optim.Rprop, lr=0.01),
}
if hasattr(optim, "Adafactor"):
    ALGORITHMS["adafactor"] = partial(optim.Adafactor, lr=0.02)
# One for each way of computing a step, and of keeping state.
FEW = ("sgd foreach", "sgd fused", "adamw foreach", "adamw tensor lr", "adagrad", "rprop")


@pytest.mark.parametrize(
    "algorithm",
    [*FEW, *(pytest.param(a, marks=pytest.mark.long) for a in ALGORITHMS if a not in FEW)],
)
def test_every_optimizer_of_torch(hvd, algorithm):
    # Some optimizers check their parameters' device in the constructor, others in the first step.
    parameter = nn.Parameter(torch.zeros(1, device=DEVICE))
    parameter.grad = torch.zeros_like(parameter)
    try:
        ALGORITHMS[algorithm]([parameter]).step()
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"not in torch {torch.__version__}: {error}")
    twins = Twins(hvd, ALGORITHMS[algorithm])
    twins.train(*range(20))
    # The ranks' means and the whole batch's are rounded differently. Adadelta and RMSprop divide
    # by roots of what is near 0 at first, which magnifies that.
    twins.check(1e-10 if algorithm in ("adadelta", "rmsprop") else 1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_float32(hvd, kind):
    twins = Twins(hvd, OPTIMIZERS[kind], small_model(torch.float32), accumulation_steps=3)
    twins.train(*range(60))
    assert relative_distance(twins.model, twins.reference) < 1e-5
    assert_same_on_all_ranks(hvd, twins.model)


def test_muon(hvd):
    if not hasattr(optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 2, bias=False))
    before = copy.deepcopy(model.to(DEVICE, torch.float64))
    twins = Twins(hvd, partial(optim.Muon, lr=0.02), model)
    twins.train(*range(20))
    # It rounds the momentum to bfloat16, so a difference in the last bit of a float64 is mostly
    # none, but may become one of 2^-8.
    assert twins.distance(before) < 2**-6
    assert_same_on_all_ranks(hvd, model)


EMBEDDING_OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.5),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "sparse adam": partial(optim.SparseAdam, lr=0.05),
    "adagrad": partial(optim.Adagrad, lr=0.1),
}


def words_of(rank, step):
    """Return rows: some on one rank only, one on all ranks, and one twice."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(0, 12, (5,), generator=generator)
    return torch.cat([words, torch.tensor([11, 11, rank])]).to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "as_dense", "passes"),
    [
        ("sgd", False, 1),
        ("momentum", False, 3),
        ("momentum", True, 3),
        ("sparse adam", False, 1),
        ("adagrad", False, 1),
    ],
)
def test_sparse_embedding(hvd, kind, as_dense, passes):
    torch.manual_seed(0)
    model = nn.Embedding(12, 3, sparse=True).to(DEVICE, torch.float64)
    target = torch.randn(12, 3, dtype=torch.float64).to(DEVICE)
    make = EMBEDDING_OPTIMIZERS[kind]
    twins = Twins(hvd, make, model, accumulation_steps=passes, sparse_as_dense=as_dense)
    twins.reference.sparse = not as_dense

    def loss(number, m, rank):
        words = words_of(rank, number)
        return (m(words) - target[words]).square().sum(dim=1).mean()

    twins.train(*(partial(loss, number) for number in range(20 // passes * passes)))
    assert_close(model, twins.reference)
    # PyTorch's SGD adds sparse momenta on a GPU in any order.
    if DEVICE.type == "cpu" or kind != "momentum":
        assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize(
    ("kind", "as_dense"), [("momentum", False), ("adagrad", False), ("adam", False), ("adam", True)]
)
def test_rows_that_ranks_share_are_as_in_a_dense_gradient(hvd, kind, as_dense):
    """All ranks use all rows, and some twice, so that a row is not counted for each rank.

    SparseAdam gets sparse gradients, also if they are reduced as dense ones.
    """
    torch.manual_seed(0)
    model = nn.Embedding(4, 3, sparse=True).to(DEVICE, torch.float64)
    makes = {
        "momentum": [partial(optim.SGD, lr=0.1, momentum=0.9)] * 2,
        "adagrad": [partial(optim.Adagrad, lr=0.1)] * 2,
        "adam": [partial(optim.SparseAdam, lr=0.1), partial(optim.Adam, lr=0.1)],
    }[kind]
    twins = Twins(hvd, lambda parameters: makes.pop(0)(parameters), model, sparse_as_dense=as_dense)
    twins.reference.sparse = False
    words = torch.tensor([0, 1, 2, 3, 1, 1], device=DEVICE)
    for step in range(4):
        twins.train(lambda m, rank, s=step: (m(words) - s - rank).square().mean())
    twins.check(1e-5 if kind == "adam" else 1e-12)


class TextModel(nn.Module):
    """A sparse embedding between dense layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 5, sparse=True)
        self.head = nn.Linear(5, 2)
        self.to(DEVICE, torch.float64)

    def forward(self, words):
        return self.head(self.embedding(words).tanh())


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_sparse_and_dense_gradients_in_one_model(hvd, compression):
    twins = Twins(hvd, partial(optim.SGD, lr=0.3), TextModel(), compression=compression)
    for step in range(20):
        twins.backward(lambda m, rank, s=step: m(words_of(rank, s)).square().mean())
        assert twins.model.embedding.weight.grad.is_sparse
        twins.step()
        twins.zero_grad()
    bound = {"none": 1e-12, "fp16": 2**-8, "bf16": 2**-5}[compression]
    assert twins.distance(TextModel()) <= bound
    assert_same_on_all_ranks(hvd, twins.model)
