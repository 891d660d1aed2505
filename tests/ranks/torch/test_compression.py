"""Error bounds of each wire format, and users' own compressors."""

from functools import partial

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.engine.describe import installed
from hvdkit.errors import UsageError
from tests.ranks.torch.oracle import (
    DEVICE,
    Twins,
    adamw,
    assert_raised_on_all_ranks,
    gradient_maker,
    sgd,
    small_model,
)

pytestmark = pytest.mark.device

LENGTH = 2000
# Half of the distance between two neighbouring numbers, relative to them.
ROUNDING = {"none": 2**-24, "fp16": 2**-11, "bf16": 2**-8}


def generator_of(rank, step):
    return torch.Generator().manual_seed(7919 * step + rank + 1)


def noise(rank, step, length=LENGTH):
    return torch.randn(length, generator=generator_of(rank, step), dtype=torch.float64)


def mixed(rank, step, _size):
    """Gradients from 1e-14 to 1e4 in one bucket."""
    return noise(rank, step) * torch.logspace(-14, 4, LENGTH, dtype=torch.float64)


def one_at_zero(rank, step, _size):
    return noise(rank, step) * (rank != 0)


def one_at_the_end_of_float16(rank, step, _size):
    return torch.full((LENGTH,), 60000.0, dtype=torch.float64) if rank == 1 else noise(rank, step)


def cancelling(rank, step, size):
    """The sum over the ranks is tiny compared with the terms."""
    big = 1000 * noise(99, step)
    sign = 0 if size % 2 and rank == size - 1 else (-1) ** rank
    return sign * big + 1e-3 * noise(rank, step)


def jumping(rank, step, _size):
    """The magnitude changes by factors of a thousand, so the scale is sometimes wrong."""
    return noise(rank, step) * [1.0, 1e-4, 1e6, 1e6, 1e-7, 1.0][step % 6]


ADVERSARIES = {
    "ordinary": lambda rank, step, size: noise(rank, step),
    "huge": lambda rank, step, size: 1e30 * noise(rank, step),
    "tiny": lambda rank, step, size: 1e-28 * noise(rank, step),
    "mixed": mixed,
    "one rank at zero": one_at_zero,
    "all at zero": lambda rank, step, size: 0 * noise(rank, step),
    "one rank at 60000": one_at_the_end_of_float16,
    "cancelling": cancelling,
    "jumping": jumping,
    "one large value": lambda rank, step, size: torch.cat(
        [noise(rank, step)[1:] * 1e-5, torch.tensor([3e4 * (rank + 1)], dtype=torch.float64)]
    ),
}


def scale_of(optimizer):
    """Return the scale of the only bucket in the next step; None if it is sent in float32."""
    state = optimizer.reducer.gradients.parts[0].synchronizer.state
    known, exponent, *_ = state.codecs[0] if state else (0, 0)
    return 2.0**exponent if known else None


@pytest.mark.parametrize(
    ("compression", "adversary"),
    [
        # On simulated ranks, tests/unit/reduction/test_compression.py has all gradients.
        pytest.param(compression, adversary, marks=() if number % few == 0 else pytest.mark.long)
        for compression, few in [("none", 5), ("fp16", 1), ("bf16", 2)]
        for number, adversary in enumerate(ADVERSARIES)
    ],
)
def test_error_of_the_mean_is_bounded(hvd, compression, adversary):
    parameter = nn.Parameter(torch.zeros(LENGTH, device=DEVICE))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), compression=compression
    )
    n, u = hvd.size(), ROUNDING[compression]
    for step in range(7):
        gradient = ADVERSARIES[adversary](hvd.rank(), step, n).float().to(DEVICE)
        everyone = hvd.allgather(gradient[None], name="own gradients").double()
        scale = scale_of(optimizer) if compression == "fp16" else None
        gradient_maker([parameter], [gradient]).backward()
        optimizer.step()
        optimizer_mean = parameter.grad.double()
        optimizer.zero_grad()
        bound = (n + 1) * u * everyone.abs().mean(dim=0)
        if compression == "fp16":
            bound += n * 2**-25 / scale if scale else 0
        elif compression == "none":
            bound += n * 2**-149
        error = (optimizer_mean - everyone.mean(dim=0)).abs()
        assert (error <= bound).all(), (step, scale, float((error - bound).max()))
        reduced = hvd.allgather(optimizer_mean[None], name="reduced")
        assert all(torch.equal(reduced[0], other) for other in reduced)


def test_bfloat16_is_sent_as_float32_if_horovod_lacks_it(hvd):
    model = nn.Linear(300, 10, bias=False).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), compression="bf16"
    )
    gradient = torch.full((10, 300), 1 + 2**-10, device=DEVICE)  # bfloat16 ends at 2^-7
    gradient_maker([model.weight], [gradient]).backward()
    optimizer.step()
    narrow = "bfloat16" in installed().patches
    expected = torch.ones_like(gradient) if narrow else gradient
    assert torch.equal(model.weight.grad, expected)


def test_horovods_compressors_are_ours(hvd):
    import horovod.torch

    assert hvd.Compression.none is horovod.torch.Compression.none
    assert hvd.Compression.fp16 is horovod.torch.Compression.fp16
    ones = torch.ones(3, device=DEVICE)
    total = hvd.allreduce(ones, name="one tensor", op=hvd.Sum, compression=hvd.Compression.fp16)
    assert total.tolist() == [hvd.size()] * 3
    assert total.dtype == torch.float32
    if "bfloat16" in installed().patches:
        total = hvd.allreduce(ones, name="one tensor", op=hvd.Sum, compression=hvd.Compression.bf16)
        assert (total.tolist(), total.dtype) == ([hvd.size()] * 3, torch.float32)


class Halving:
    """A compressor as users write it for Horovod: static methods and its own context."""

    seen: list = []  # noqa: RUF012

    @staticmethod
    def compress(tensor):
        Halving.seen.append(tuple(tensor.shape))
        return (tensor / 2).double(), {"dtype": tensor.dtype, "shape": tensor.shape}

    @staticmethod
    def decompress(tensor, ctx):
        assert tensor.shape == ctx["shape"]
        return (tensor * 2).to(ctx["dtype"])


class Flat:
    """A compressor that changes the shape, is an instance and has no base class."""

    def compress(self, tensor):
        return tensor.t().reshape(-1), tensor.shape

    def decompress(self, tensor, shape):
        return tensor.view(shape[::-1]).t() if len(shape) == 2 else tensor.view(shape)


@pytest.mark.parametrize(("kind", "passes"), [("class", 1), ("instance", 3), ("subclass", 1)])
def test_a_compressor_of_the_users(hvd, kind, passes):
    class Inheriting(hvd.Compression.fp16):
        """A subclass that a user has changed is not treated like Horovod's class."""

        compress = staticmethod(Halving.compress)
        decompress = staticmethod(Halving.decompress)

    Halving.seen.clear()
    twins = Twins(
        hvd,
        adamw,
        accumulation_steps=passes,
        compression={"class": Halving, "instance": Flat(), "subclass": Inheriting}[kind],
        gradient_predivide_factor=2.0,
    )
    twins.train(*range(5 * passes), clip=1.0)
    twins.check(1e-12)
    if kind != "instance":
        # Tensor by tensor, in their shapes, each once in a step.
        shapes = [tuple(p.shape) for p in twins.model.parameters()]
        assert sorted(Halving.seen) == sorted(shapes * 5)


def test_a_compressor_sees_sparse_gradients_as_rows(hvd):
    torch.manual_seed(0)
    # Word 5 is every rank's; the others are one rank's each.
    model = nn.Embedding(6, 2, sparse=True).to(DEVICE)
    twins = Twins(hvd, partial(torch.optim.SGD, lr=1.0), model, compression=Halving)
    twins.train(lambda m, rank: m(torch.tensor([rank, 5], device=DEVICE)).sum())
    twins.check(1e-6)


@pytest.mark.parametrize("compression", ["fp32", "", 16, None, object(), "class"], ids=str)
def test_an_invalid_compression_is_an_error(hvd, compression):
    if compression == "class":
        compression = hvd.Compression
    with pytest.raises(UsageError, match="compression is"):
        hvd.DistributedOptimizer(sgd(small_model().parameters()), compression=compression)


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize("pair", [("fp16", "bf16"), ("none", Halving)], ids=str)
def test_different_formats_are_an_error_on_every_rank(hvd, pair):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), compression=pair[0] if hvd.rank() == 0 else pair[1]
    )
    loss = model(torch.ones(1, 5, dtype=torch.float64, device=DEVICE)).sum()
    with pytest.raises(RankMismatchError, match=rf"rank 0: compression: {pair[0]}; rank") as caught:
        loss.backward()
    optimizer.zero_grad()
    assert_raised_on_all_ranks(hvd, caught)
