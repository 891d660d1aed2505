"""A rank that makes all others wait is named."""

import time

import pytest
import torch

from hvdkit.training import stragglers
from tests.logs import recorded
from tests.ranks.torch.oracle import batch_of, loss_of, sgd, small_model, wrapped

# Much longer than a step on a busy machine.
SECONDS = 0.2


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SECONDS)
        return gradient


def averaged_loss(hvd, loss):
    return hvd.allreduce(loss.detach(), name="averaged loss")


def barrier(hvd, loss):
    hvd.barrier()
    return loss


@pytest.mark.parametrize(
    ("where", "collective"),
    [
        ("backward", None),
        ("data and forward", averaged_loss),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("data and forward", None),
                ("data and forward", barrier),
                ("backward", barrier),
            ]
        ),
    ],
)
def test_a_slow_rank_is_named(hvd, where, collective):
    """`collective` is one that the script calls in each step, in which the other ranks wait."""
    model = small_model()
    optimizer = wrapped(hvd, model, check_interval=10)
    with pytest.MonkeyPatch.context() as patch, recorded("hvdkit") as log:
        patch.setattr(stragglers, "_PERSISTENT_SECONDS", 0.0)
        for step in range(45):
            # The first report includes times of earlier tests.
            slow = hvd.rank() == 1 and 10 < step <= 40
            optimizer.zero_grad()
            if slow and where == "data and forward":
                time.sleep(SECONDS)
            hidden = model[0](batch_of(hvd.rank(), step))
            hidden = SlowBackward.apply(hidden) if slow and where == "backward" else hidden
            loss = model[1:](hidden).square().mean()
            if collective is not None and where == "data and forward":
                collective(hvd, loss)
            loss.backward()
            optimizer.step()
            if collective is not None:
                collective(hvd, loss)
            time.sleep(0.01 if step > 10 else 0.08)
    lines = [record.getMessage() for record in log]
    if hvd.rank() != 1:
        # On a busy machine, another rank may be slow, too.
        return
    (line,) = lines
    assert line.startswith("rank 1 on host ")
    assert f"The largest difference is in {where}." in line


def test_no_rank_is_named_for_waiting_at_join(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), check_interval=5)
    with recorded("hvdkit") as log:
        for step in range(10 if hvd.rank() else 40):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            optimizer.step()
            time.sleep(0.02)
        hvd.join()
    assert not log
