"""`p.grad` belongs to whoever holds it; see held_gradients.py."""

from dataclasses import asdict

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tests.ranks.torch.held_gradients import ACTIONS, OPTIMIZERS, Setting, run_sequence
from tests.searching import search_settings

_STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 10**6)), min_size=1, max_size=15
)
_SETTINGS = st.builds(
    Setting,
    compression=st.sampled_from(["none", "none", "fp16", "bf16", "int8"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    bucket_bytes=st.sampled_from([2000, 10**6]),
    passes=st.sampled_from([1, 1, 3]),
    counts=st.sampled_from([True, True, True, False]),
    mixed=st.booleans(),
)


def sequence(hvd, setting, actions):
    run_sequence(hvd, Setting(**setting), actions)


def test_sequences(rank_pool, request):
    @search_settings(1500 if request.config.getoption("--long") else 15)
    @given(_SETTINGS, _STEPS)
    def run(setting, actions):
        rank_pool.start()
        rank_pool.run(__name__, "sequence", {"setting": asdict(setting), "actions": actions})

    run()


def test_gradients_in_one_tensor_of_the_script_count_their_changes_together(hvd):
    setting = Setting("fp16", bucket_bytes=2000, passes=3)
    run_sequence(hvd, setting, [("train", 0), ("own_buffer", 0)])


@pytest.mark.parametrize("keep", ["gradient", "view", "array"])
def test_a_kept_gradient_keeps_no_other_memory(hvd, keep):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    kept, values, sizes = [], [], []
    for step in range(5):
        (model(torch.randn(4, 100) + hvd.rank()).square().mean()).backward()
        optimizer.step()
        gradient = model[0].bias.grad
        kept.append({"gradient": gradient, "view": gradient[:9]}.get(keep, gradient.numpy()))
        values.append(gradient.clone())
        if step:
            sizes.append({p.grad.untyped_storage().nbytes() // 4 for p in model.parameters()})
        del gradient
        optimizer.zero_grad()
    assert sizes == [{p.numel() for p in model.parameters()}] * 4
    for tensor, value in zip(kept, values, strict=True):
        assert torch.equal(torch.as_tensor(tensor), value[: len(tensor)])
    assert torch.equal(values[-1], hvd.broadcast(values[-1], 0, name="kept"))


def test_gradients_that_nobody_keeps_stay_in_their_bucket(hvd):
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(4):
        for _ in range(1 + step):  # the sum of several passes
            model(torch.randn(4, 10)).square().mean().backward()
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        memory = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        assert len(memory) == 1
        optimizer.zero_grad()
