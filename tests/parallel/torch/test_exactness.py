"""Compare n ranks with one batch each and one process with all batches, after 20 steps."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from tests.parallel.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    relative_distance,
    small_model,
    trained,
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
    ("kind", "passes", "clip"),
    [
        ("sgd", 1, None),
        ("adamw", 1, 0.1),
        ("sgd", 3, 0.1),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("adamw", 1, None), ("sgd", 1, 0.1), ("adamw", 3, 0.1)]
        ),
    ],
)
def test_float64(hvd, kind, passes, clip):
    model, reference = trained(
        hvd, OPTIMIZERS[kind], passes=passes, clip=clip, steps=20, bucket_bytes=400
    )
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


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
    model, reference = trained(hvd, ALGORITHMS[algorithm], bucket_bytes=400)
    # The ranks' means and the whole batch's are rounded differently. Adadelta and RMSprop divide
    # by roots of what is near 0 at first, which magnifies that.
    assert_close(model, reference, 1e-10 if algorithm in ("adadelta", "rmsprop") else 1e-12)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_float32(hvd, kind, passes):
    model, reference = trained(
        hvd, OPTIMIZERS[kind], model=small_model(torch.float32), passes=passes, bucket_bytes=400
    )
    assert relative_distance(model, reference) < 1e-5
    assert_same_on_all_ranks(hvd, model)


def test_muon(hvd):
    if not hasattr(optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 2, bias=False))
    before = copy.deepcopy(model.to(DEVICE, torch.float64))
    model, reference = trained(hvd, partial(optim.Muon, lr=0.02), model=model, bucket_bytes=400)
    # It rounds the momentum to bfloat16, so a difference in the last bit of a float64 is mostly
    # none, but may become one of 2^-8.
    moved = relative_distance(before, reference)
    assert relative_distance(model, reference) < 2**-6 * moved
    assert_same_on_all_ranks(hvd, model)


def test_one_group_of_parameters_for_each_layer(hvd):
    def make(parameters):
        return optim.AdamW(
            [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "weight_decay": 0}],
            lr=0.002,
        )

    model, reference = trained(hvd, make)
    assert_close(model, reference)


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
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("sgd", False, 3),
                ("sgd", True, 1),
                ("sparse adam", False, 3),
                ("adagrad", False, 1),
            ]
        ),
    ],
)
def test_sparse_embedding(hvd, kind, as_dense, passes):
    torch.manual_seed(0)
    model = nn.Embedding(12, 3, sparse=True).to(DEVICE, torch.float64)
    target = torch.randn(12, 3, dtype=torch.float64).to(DEVICE)
    reference = copy.deepcopy(model)
    if as_dense:
        reference.sparse = False
    make = EMBEDDING_OPTIMIZERS[kind]
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        accumulation_steps=passes,
        sparse_as_dense=as_dense,
    )
    plain = make(reference.parameters())

    def loss(m, words):
        return (m(words) - target[words]).square().sum(dim=1).mean()

    for step in range(20 // passes):
        for k in range(passes * step, passes * (step + 1)):
            loss(model, words_of(hvd.rank(), k)).backward()
            optimizer.step()
            optimizer.zero_grad()
            everyones = torch.cat([words_of(rank, k) for rank in range(hvd.size())])
            (loss(reference, everyones) / passes).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)
    # PyTorch's SGD adds sparse momenta on a GPU in any order.
    if DEVICE.type == "cpu" or kind != "momentum":
        assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("kind", ["momentum", "adagrad", "adam"])
def test_rows_that_ranks_share_are_as_in_a_dense_gradient(hvd, kind):
    """All ranks use all rows, and some twice, so that a row is not counted for each rank."""
    torch.manual_seed(0)
    model = nn.Embedding(4, 3, sparse=True).to(DEVICE, torch.float64)
    reference = copy.deepcopy(model)
    reference.sparse = False
    sparse, dense = {
        "momentum": (lambda p: optim.SGD(p, 0.1, momentum=0.9),) * 2,
        "adagrad": (lambda p: optim.Adagrad(p, 0.1),) * 2,
        "adam": (lambda p: optim.SparseAdam(list(p), 0.1), lambda p: optim.Adam(p, 0.1)),
    }[kind]
    optimizer = hvd.DistributedOptimizer(sparse(model.parameters()))
    plain = dense(reference.parameters())
    words = torch.tensor([0, 1, 2, 3, 1, 1], device=DEVICE)
    for step in range(4):
        optimizer.zero_grad()
        (model(words) - step - hvd.rank()).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(hvd.size()):
            ((reference(words) - step - rank).square().mean() / hvd.size()).backward()
        plain.step()
    assert_close(model, reference, 1e-5 if kind == "adam" else 1e-12)


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
    model = TextModel()
    reference = copy.deepcopy(model)
    before = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.3), compression=compression
    )
    plain = optim.SGD(reference.parameters(), lr=0.3)
    for step in range(20):
        optimizer.zero_grad()
        model(words_of(hvd.rank(), step)).square().mean().backward()
        optimizer.step()
        assert model.embedding.weight.grad.is_sparse
        plain.zero_grad()
        everyones = torch.cat([words_of(rank, step) for rank in range(hvd.size())])
        reference(everyones).square().mean().backward()
        plain.step()
    bound = {"none": 1e-12, "fp16": 2**-8, "bf16": 2**-5}[compression]
    assert relative_distance(model, reference) <= bound * relative_distance(before, reference)
    assert_same_on_all_ranks(hvd, model)


# Relative to how far the weights have moved. A wire of u = 2^-11 (float16) or 2^-8 (bfloat16)
# changes no step by more than a few u of the ranks' mean magnitudes, which rank 1's larger
# gradients dominate; test_compression.py has the bound for a single step.
WIRES = {"none": 1e-12, "fp16": 2**-7, "bf16": 2**-4}


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, 1), (torch.float64, 3)], ids=str)
@pytest.mark.parametrize(
    "compression", [pytest.param("none", marks=pytest.mark.long), "fp16", "bf16"]
)
def test_wire_formats(hvd, compression, dtype, passes):
    model = small_model(dtype)
    before = copy.deepcopy(model)
    model, reference = trained(
        hvd,
        OPTIMIZERS["sgd"],
        model=model,
        passes=passes,
        clip=1.0,
        compression=compression,
        bucket_bytes=400,
    )
    bound = max(WIRES[compression], 1e-5 if dtype == torch.float32 else 0.0)
    assert relative_distance(model, reference) < bound * relative_distance(before, reference)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize(
    ("cut", "clip"),
    [
        (1, 0.1),
        (2, None),
        *(pytest.param(*each, marks=pytest.mark.long) for each in [(1, None), (2, 0.1)]),
    ],
)
def test_windows_that_are_cut_short(hvd, cut, clip):
    """The last accumulation window of each epoch has `cut` of three passes."""
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), accumulation_steps=3, bucket_bytes=400
    )
    plain = OPTIMIZERS["adamw"](reference.parameters())

    def clipped_step():
        if clip is not None:
            hvd.clip_grad_norm_(optimizer, clip)
        optimizer.step()

    number = 0
    for _ in range(5):
        for passes in (3, 3, cut):
            for _ in range(passes):
                loss_of(model, batch_of(hvd.rank(), number)).backward()
                clipped_step()
                optimizer.zero_grad()
                for rank in range(hvd.size()):
                    share = passes * hvd.size()
                    (loss_of(reference, batch_of(rank, number)) / share).backward()
                number += 1
            if clip is not None:
                nn.utils.clip_grad_norm_(reference.parameters(), clip)
            plain.step()
            plain.zero_grad()
        assert not optimizer.stepped
        assert optimizer.flush(clipped_step)
        assert optimizer.stepped
        optimizer.zero_grad()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)
