"""Loss scaling on real ranks: all ranks make or skip the same step."""

import copy
import math

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.ranks.torch.oracle import (
    DEVICE,
    Twins,
    adamw,
    assert_close,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    on_all_ranks,
    relative_distance,
    sgd,
    small_model,
)

if not hasattr(torch.amp, "GradScaler"):
    pytest.skip("torch before 2.3 scales losses on GPUs only", allow_module_level=True)

pytestmark = pytest.mark.device

SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}

OPTIMIZERS = {
    "sgd": sgd,
    "adamw": adamw,
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}

OVERFLOWS = (2, 5)  # steps, or windows, in which one rank has no finite loss


def overflowing(loss, number, passes=1):
    return (
        loss * math.inf if number in [step * passes + passes // 2 for step in OVERFLOWS] else loss
    )


def reference_with(make, steps, clip=None, passes=1, size=1, scaler_settings=SETTINGS):
    """Train one process with torch's scaler; return the model and the scale after each step."""
    model = small_model()
    optimizer = make(list(model.parameters()))
    scaler = torch.amp.GradScaler(DEVICE.type, **scaler_settings)
    scales = []
    for step in range(steps):
        for number in range(passes * step, passes * (step + 1)):
            x = torch.cat([batch_of(rank, number) for rank in range(size)])
            loss = overflowing(loss_of(model, x), number, passes)
            scaler.scale(loss / passes).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return model, scales


def own_loss(hvd, model, number, passes=1):
    """Return a loss whose gradient overflows on the last rank only."""
    loss = loss_of(model, batch_of(hvd.rank(), number))
    return overflowing(loss, number, passes) if hvd.rank() == hvd.size() - 1 else loss


def hvds_scaler(hvd, optimizer, scaler, model, clip):
    if clip is not None:
        scaler.unscale_(optimizer)
        hvd.clip_grad_norm_(optimizer, clip)
    scaler.step(optimizer)


def torchs_clipping(hvd, optimizer, scaler, model, clip):
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)


def horovods_ceremony(hvd, optimizer, scaler, model, clip):
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


WAYS = {"hvd": hvds_scaler, "torch": torchs_clipping, "horovod": horovods_ceremony}


#: All pairs of a way and the other arguments, except some with kinds of optimizers.
CASES = [
    ("adamw", "hvd", "hvd", 0.1, "none"),
    ("adamw", "torch", "hvd", None, "none"),
    ("adamw", "horovod", "torch", 0.1, "none"),
    ("sgd fused", "hvd", "torch", None, "none"),
    ("sgd fused", "torch", "torch", 0.1, "none"),
    ("sgd fused", "horovod", "hvd", None, "none"),
    ("sgd", "hvd", "torch", 0.1, "none"),
    ("adamw fused", "hvd", "hvd", None, "none"),
    ("sgd", "torch", "hvd", 1.0, "fp16"),
    ("sgd", "torch", "torch", 1.0, "bf16"),
]


@pytest.mark.parametrize(("kind", "way", "scalers", "clip", "compression"), CASES)
def test_all_ranks_skip_where_one_overflows(hvd, kind, scalers, way, clip, compression):
    reference, expected = reference_with(OPTIMIZERS[kind], 10, clip, size=hvd.size())
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        model.named_parameters(),
        bucket_bytes=400,
        compression=compression,
    )
    scaler = (hvd if scalers == "hvd" else torch.amp).GradScaler(DEVICE.type, **SETTINGS)
    for step in range(10):
        before = copy.deepcopy(model)
        scaler.scale(own_loss(hvd, model, step)).backward()
        WAYS[way](hvd, optimizer, scaler, model, clip)
        scaler.update()
        assert not optimizer.gradients_wait()
        optimizer.zero_grad()
        if step in OVERFLOWS:
            assert_close(model, before, 0)
        assert optimizer.stepped == (step not in OVERFLOWS)
        assert on_all_ranks(hvd, scaler.get_scale()) == [expected[step]] * hvd.size()
    bound = {"none": 1e-11, "fp16": 2**-7, "bf16": 2**-4}[compression]
    moved = relative_distance(small_model(), reference)
    assert relative_distance(model, reference) < bound * moved
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize(("kind", "clip"), [("adamw", 0.1), ("sgd fused", None)])
def test_with_accumulation(hvd, kind, clip):
    reference, expected = reference_with(OPTIMIZERS[kind], 8, clip, passes=3, size=hvd.size())
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()), accumulation_steps=3, bucket_bytes=400
    )
    scaler = hvd.GradScaler(DEVICE.type, **SETTINGS)
    stepped, scales = [], []
    for number in range(24):
        scaler.scale(own_loss(hvd, model, number, passes=3)).backward()
        hvds_scaler(hvd, optimizer, scaler, model, clip)
        scaler.update()
        optimizer.zero_grad()
        stepped.append(optimizer.stepped)
        scales.append(scaler.get_scale())
    assert stepped == [k % 3 == 2 and k // 3 not in OVERFLOWS for k in range(24)]
    assert scales[2::3] == expected
    # The scale is that of the whole window.
    assert all(scales[k] == scales[k - 1] for k in range(24) if k % 3 != 2 and k)
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


def test_a_window_cut_short_that_overflows(hvd):
    model = small_model()
    before = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), accumulation_steps=3)
    scaler = hvd.GradScaler(DEVICE.type, **SETTINGS)

    def step():
        scaler.step(optimizer)
        scaler.update()

    for k in range(2):
        loss = loss_of(model, batch_of(hvd.rank(), k))
        scaler.scale(loss * math.inf if hvd.rank() == hvd.size() - 1 else loss).backward()
        step()
    assert optimizer.flush(step)
    assert not optimizer.stepped
    optimizer.zero_grad()
    assert scaler.get_scale() == SETTINGS["init_scale"] / 2
    assert_close(model, before, 0)
    # The next window is a whole one, and steps.
    for k in range(3):
        scaler.scale(loss_of(model, batch_of(hvd.rank(), k))).backward()
        step()
        assert optimizer.stepped == (k == 2)
        optimizer.zero_grad()


@pytest.mark.parametrize("zeroes", ["model", "optimizer", "model in place"])
def test_after_a_skipped_step_of_torchs_scaler_a_new_window_begins(hvd, zeroes):
    twins = Twins(hvd, backward_passes_per_step=2)
    scaler = torch.amp.GradScaler(DEVICE.type, **SETTINGS)
    in_place = {"set_to_none": False} if "in place" in zeroes else {}
    for step in range(4):
        for batch in (2 * step, 2 * step + 1):
            overflows = step == 1 and hvd.rank() == 0
            scaler.scale(twins.own_loss(batch) * (math.inf if overflows else 1)).backward()
            twins.backward_of_one_process(batch)
        scaler.step(twins.optimizer)
        scaler.update()
        (twins.optimizer if zeroes == "optimizer" else twins.model).zero_grad(**in_place)
        if step != 1:
            twins.plain[0].step()
        twins.plain[0].zero_grad()
    twins.check()


@pytest.mark.parametrize("scalers", ["hvd", "torch"])
def test_two_optimizers_with_one_scaler(hvd, scalers):
    pair = [Twins(hvd, sgd), Twins(hvd, adamw)]
    scaler = (hvd if scalers == "hvd" else torch.amp).GradScaler(DEVICE.type, **SETTINGS)
    for step in range(4):
        for i, twins in enumerate(pair):
            # The second one overflows once, and only it skips.
            skip = i == 1 and step == 1
            skip_here = skip and hvd.rank() == hvd.size() - 1
            scaler.scale(twins.own_loss(step) * (math.inf if skip_here else 1)).backward()
            scaler.step(twins.optimizer)
            twins.optimizer.zero_grad()
            if not skip:
                twins.backward_of_one_process(step)
                twins.plain[0].step()
                twins.plain[0].zero_grad()
        scaler.update()
    for twins in pair:
        twins.check()


def test_after_join_all_ranks_need_the_state_of_one_scaler(hvd):
    # A rank with fewer batches updates its scale less often:
    # https://github.com/pytorch/pytorch/issues/90057
    batches = [3 + 2 * rank for rank in range(hvd.size())]
    reference = small_model()
    plain = sgd(reference.parameters())
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=4)

    def train(epoch, number):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch_of(hvd.rank(), 100 * epoch + number))).backward()
        scaler.step(optimizer)
        scaler.update()

    for epoch in range(3):
        for number in range(batches[hvd.rank()]):
            train(epoch, number)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        for number in range(max(batches)):
            plain.zero_grad()
            present = [rank for rank in range(hvd.size()) if number < batches[rank]]
            losses = [loss_of(reference, batch_of(rank, 100 * epoch + number)) for rank in present]
            (sum(losses) / hvd.size()).backward()
            plain.step()
        assert_close(model, reference)
        with pytest.raises(RankMismatchError, match="the state of a GradScaler") as caught:
            train(epoch, 0)
        assert_raised_on_all_ranks(hvd, caught)
        assert_close(model, reference)
        scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=last))


def test_a_scaler_that_is_disabled(hvd):
    twins = Twins(hvd)
    for scalers in (hvd, torch.amp):
        scaler = scalers.GradScaler(DEVICE.type, enabled=False)
        scaler.scale(twins.own_loss(0)).backward()
        twins.backward_of_one_process(0)
        scaler.unscale_(twins.optimizer)
        twins.clip(0.1)
        scaler.step(twins.optimizer)
        scaler.update()
        twins.plain[0].step()
        twins.optimizer.zero_grad()
        twins.plain[0].zero_grad()
    twins.check()


def test_scalers_work_with_plain_optimizers(hvd):
    results = []
    for scalers in (hvd, torch.amp):
        scaler = scalers.GradScaler(DEVICE.type, **SETTINGS)
        model = small_model()
        optimizer = sgd(model.parameters())
        for step in range(4):
            loss = overflowing(loss_of(model, batch_of(0, step)), step)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((model, scaler.get_scale()))
    assert results[0][1] == results[1][1] == SETTINGS["init_scale"] / 2
    assert_close(results[0][0], results[1][0], 0)


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_torchs_scaler_does_not_go_with_accumulation(hvd, call):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), accumulation_steps=3)
    scaler = torch.amp.GradScaler(DEVICE.type, **SETTINGS)
    scaler.scale(loss_of(model, batch_of(hvd.rank(), 0))).backward()
    with pytest.raises(UsageError, match=r"use hvd\.GradScaler") as caught:
        getattr(scaler, call)(optimizer)
    assert_raised_on_all_ranks(hvd, caught)
