"""Models, data and a reference: n ranks with one batch each, and one process with all batches.

All tensors are on `DEVICE`. Random numbers always come from the CPU's generator and are moved
afterwards, so that a test computes with the same values on every device.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: The device under test: HVDKIT_TEST_DEVICE, such as `cuda`; the CPU by default.
DEVICE = torch.device(os.environ.get("HVDKIT_TEST_DEVICE", "cpu"))

SAMPLES = 6  # per rank and pass


def small_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)
    ).to(DEVICE, dtype)


def batch_of(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64).to(dtype)
    # One rank's data are unlike the others': a rank that is left out, or counted twice, shows.
    return (20 * x - 3 if rank == 1 else x).to(DEVICE)


def whole_batch(hvd, step, dtype=torch.float64):
    return torch.cat([batch_of(rank, step, dtype) for rank in range(hvd.size())])


def loss_of(model, x):
    return (model(x) - x[:, :2].sin()).square().mean()


class Fails(torch.autograd.Function):
    """The identity, whose backward pass raises an error."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ctx.error


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def wrapped(hvd, model, make=sgd, **options):
    """Return a `DistributedOptimizer` for a model."""
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def train_step(hvd, model, optimizer, step):
    """Make a step with this rank's batch; return the loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch_of(hvd.rank(), step, next(model.parameters()).dtype))
    loss.backward()
    optimizer.step()
    return loss


#: How near a model is to that of one process after a few steps in a wire format.
TOLERANCES = {"none": 1e-12, "fp16": 1e-2, "bf16": 1e-1}

#: Relative error of a gradient, to the largest one: one rounding per rank and one of the sum.
ROUNDING = {"none": 1e-12, "fp16": 2**-9, "bf16": 2**-6}

#: A model and a rank -> the loss of the rank's batch; or the number of a batch, for `loss_of`.
Loss = Callable[[Any, int], torch.Tensor] | int


class Twins:
    """A model that all ranks train, and a copy that one process trains with all ranks' batches.

    Args:
        make: parameters -> plain optimizer.
        model: by default maps batches of 5 features to 2.
        parts: model -> modules that have an optimizer each.
        options: for DistributedOptimizer. `bucket_bytes` is small, so there are several buckets.
    """

    def __init__(self, hvd, make=sgd, model=None, parts=lambda model: [model], **options):
        self.hvd = hvd
        self.model = small_model() if model is None else model
        self.reference = copy.deepcopy(self.model)
        self.optimizers = [
            hvd.DistributedOptimizer(
                make(list(part.parameters())),
                part.named_parameters(),
                **{"bucket_bytes": 200, **options},
            )
            for part in parts(self.model)
        ]
        self.plain = [make(list(part.parameters())) for part in parts(self.reference)]
        self.passes = options.get("accumulation_steps", 1)
        self.share = self.passes * (1 if options.get("op") == hvd.Sum else hvd.size())
        self.compression = options.get("compression", "none")
        self.calls = 0

    @property
    def optimizer(self):
        return self.optimizers[0]

    @property
    def sides(self):
        """The model with its optimizers: of the ranks, and of one process."""
        return (self.model, self.optimizers), (self.reference, self.plain)

    @property
    def window_is_whole(self):
        return self.calls % self.passes == 0

    def own_loss(self, loss):
        return self._loss(self.model, loss, self.hvd.rank())

    def _loss(self, model, loss, rank):
        if callable(loss):
            return loss(model, rank)
        return loss_of(model, batch_of(rank, loss, next(model.parameters()).dtype))

    def backward(self, loss, ranks=None):
        """Make a pass on some ranks (default: all), and the same passes in one process."""
        ranks = range(self.hvd.size()) if ranks is None else ranks
        if self.hvd.rank() in ranks:
            self.own_loss(loss).backward()
        self.backward_of_one_process(loss, ranks)

    def backward_of_one_process(self, loss, ranks=None):
        for rank in range(self.hvd.size()) if ranks is None else ranks:
            (self._loss(self.reference, loss, rank) / self.share).backward()

    def step(self, call=lambda optimizer: optimizer.step()):
        """Let each optimizer step. One process steps at the end of a window only."""
        self.calls += 1
        for own, plain in zip(self.optimizers, self.plain, strict=True):
            call(own)
            assert own.stepped == self.window_is_whole
            if self.window_is_whole:
                plain.step()

    def zero_grad(self, **how):
        for own, plain in zip(self.optimizers, self.plain, strict=True):
            own.zero_grad(**how)
            if self.window_is_whole:
                plain.zero_grad(**how)

    def clip(self, norm):
        """Clip the gradients, if the last pass is the last one of its window."""
        found = self.hvd.clip_grad_norm_(self.optimizers, norm)
        whole = (self.calls + 1) % self.passes == 0
        assert (found is not None) == whole
        if whole:
            nn.utils.clip_grad_norm_(self.reference.parameters(), norm)

    def train(self, *losses, ranks=None, clip=None):
        """Call `backward()`, `step()` and `zero_grad()` for each loss."""
        for loss in losses:
            self.backward(loss, ranks)
            if clip is not None:
                self.clip(clip)
            self.step()
            self.zero_grad()

    def adopt(self):
        """Give the single process the ranks' model and state: after an error, or rounding."""
        self.reference.load_state_dict(self.model.state_dict())
        for own, plain in zip(self.optimizers, self.plain, strict=True):
            plain.load_state_dict(copy.deepcopy(own.state_dict()))
            plain.zero_grad()
        self.calls = 0

    def check(self, tolerance=None):
        """Check that the model is the same on all ranks, and near that of one process."""
        if tolerance is None:
            tolerance = TOLERANCES[self.compression]
        assert_close(self.model, self.reference, tolerance)
        assert_same_on_all_ranks(self.hvd, self.model)

    def distance(self, before):
        """Return the distance to the single process, relative to how far it has moved."""
        moved = relative_distance(before, self.reference)
        return relative_distance(self.model, self.reference) / moved

    def check_gradients(self):
        """Check that gradients have the same bits on all ranks, and are near one process's."""
        held = [q.grad for q in self.reference.parameters() if q.grad is not None]
        largest = max(float(g.to_dense().abs().max()) for g in held)
        bound = 8 * self.hvd.size() * ROUNDING[self.compression] * largest
        own = []
        pairs = zip(self.model.named_parameters(), self.reference.parameters(), strict=True)
        for (name, p), q in pairs:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense()
            expected = torch.zeros_like(q) if q.grad is None else q.grad.to_dense()
            worst = float((gradient - expected).abs().max())
            assert worst <= bound, f"gradient of {name} is off by {worst}, bound {bound}"
            own.append(gradient.double().reshape(-1))
        everyone = self.hvd.allgather(torch.cat(own)[None], name="gradients")
        assert all(torch.equal(everyone[0], other) for other in everyone)


def assert_same_on_all_ranks(hvd, model):
    everyone = hvd.allgather(flat(model)[None], name="weights")
    assert all(torch.equal(everyone[0], other) for other in everyone)


def assert_close(model, reference, tolerance=1e-12):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def relative_distance(model, reference):
    """Return |model - reference| / |reference|, as Euclidean norms over all parameters."""
    return float((flat(model) - flat(reference)).norm() / flat(reference).norm())


def assert_trains_alike(hvd, model, reference, before, tolerance):
    """Check a model that the ranks have trained against one that a process has trained alone.

    Args:
        before: the weights before the training, in one vector.
        tolerance: the largest error, relative to the distance that training moves the weights.
    """
    own, expected = flat(model), flat(reference)
    moved = (expected - before).norm()
    assert moved > 0.01, "the training does not move the weights"
    error = (own - expected).norm() / moved
    assert error < tolerance, f"error {error}"
    assert_same_on_all_ranks(hvd, model)


def flat(model):
    """Return all parameters in one vector."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def on_all_ranks(hvd, value):
    """Return every rank's `value`."""
    return hvd.allgather_object(value, name="on all ranks")


def assert_raised_on_all_ranks(hvd, caught):
    """Return the error's message after checking that it is the same on every rank."""
    message = str(caught.value)
    assert on_all_ranks(hvd, message) == [message] * hvd.size()
    return message


def gradient_maker(parameters, gradients):
    """Return a loss whose gradients are exactly the given tensors."""
    return sum((p * g.detach()).sum() for p, g in zip(parameters, gradients, strict=True))
