"""Models, data and a reference: n ranks with one batch each, and one process with all batches.

All tensors are on `DEVICE`. Random numbers always come from the CPU's generator and are moved
afterwards, so that a test computes with the same values on every device.
"""

import copy
import os

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


def trained(hvd, make, *, model=None, steps=20, passes=1, clip=None, **options):
    """A model that all ranks train, and a copy that one process trains.

    Args:
        make: parameters -> plain optimizer.
        model: maps batches of 5 features to 2.
        passes: backward passes per step, averaged.
        clip: the largest norm of the gradient.
        options: for DistributedOptimizer.
    """
    model = small_model() if model is None else model
    dtype = next(model.parameters()).dtype
    reference = copy.deepcopy(model)
    reference_optimizer = make(list(reference.parameters()))
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())),
        model.named_parameters(),
        accumulation_steps=passes,
        **options,
    )
    for step in range(steps):
        for k in range(passes * step, passes * (step + 1)):
            loss_of(model, batch_of(hvd.rank(), k, dtype)).backward()
            if clip is not None:
                hvd.clip_grad_norm_(optimizer, clip)
            optimizer.step()
            optimizer.zero_grad()
            (loss_of(reference, whole_batch(hvd, k, dtype)) / passes).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    return model, reference


def step_with_everyones_data(hvd, model, optimizer, step):
    """Make one step of a single process with the batches of all ranks."""
    optimizer.zero_grad()
    loss_of(model, whole_batch(hvd, step)).backward()
    optimizer.step()


def assert_same_on_all_ranks(hvd, model):
    flat = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(flat[None], name="weights")
    assert all(torch.equal(everyone[0], other) for other in everyone)


def assert_close(model, reference, tolerance=1e-12):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def relative_distance(model, reference):
    """Return |model - reference| / |reference|, as Euclidean norms over all parameters."""
    ours = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    theirs = torch.cat([p.detach().double().reshape(-1) for p in reference.parameters()])
    return float((ours - theirs).norm() / theirs.norm())


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
