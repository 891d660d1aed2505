"""`hvd.Monitor` on real ranks: sections, counters, accumulation, uneven ends, resume."""

import time

import pytest
import torch

from hvdkit.errors import UsageError
from hvdkit.monitor import metrics
from hvdkit.runtime.counters import counters
from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import (
    DEVICE,
    batch_of,
    loss_of,
    sgd,
    small_model,
    train_step,
    wrapped,
)
from tests.unit.monitor.simulated import Kept

# Seconds, much longer than a step on a busy machine.
SLEEP = 0.1


def loop(hvd, loggers, steps=6, every=3, slow=(), monitor_options=(), **options):
    """Train with a monitor; `slow` are sections in which rank 1 sleeps in each step."""
    model = small_model(torch.float32)
    plain = sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)

    def data():
        for step in range(steps):
            if hvd.rank() == 1 and "data" in slow:
                time.sleep(SLEEP)
            yield step

    with hvd.Monitor(loggers, every=every, **dict(monitor_options)) as monitor:
        for step in monitor.batches(data()):
            optimizer.zero_grad()
            x = batch_of(hvd.rank(), step, torch.float32)
            loss = loss_of(model, x)
            if hvd.rank() == 1 and "forward" in slow:
                time.sleep(SLEEP)
            loss.backward()
            optimizer.step()
            if "before monitor.step" in slow:
                time.sleep(SLEEP)
            monitor.step({"loss": loss, "rank": hvd.rank()}, samples=len(x))
            if "after monitor.step" in slow:
                time.sleep(SLEEP)
    return monitor


def test_records_of_a_loop(hvd):
    kept = Kept()
    loop(hvd, [kept], slow=["data"])
    if hvd.rank() != 0:
        assert not kept.records
        return
    assert [record.step for record in kept.records] == [3, 6]
    record = kept.records[1]
    found = record.metrics
    assert record.samples == 3 * 6 * hvd.size()
    assert found["rank"].by_rank == {rank: float(rank) for rank in range(hvd.size())}
    assert found["loss"].by_rank.keys() == set(range(hvd.size()))
    assert found[metrics.DATA].by_rank[1] >= SLEEP
    assert found[metrics.LR].mean == pytest.approx(0.05)
    assert found[metrics.RSS].min > 1e7
    assert found[metrics.SAMPLES].mean > 0
    for rank in range(hvd.size()):
        sections = [found[name].by_rank[rank] for name in metrics.SECTIONS]
        assert all(seconds >= 0 for seconds in sections)
        # All sections together are the step, except for what `monitor.step` itself needs.
        assert sum(sections) <= found[metrics.STEP].by_rank[rank] * 1.05 + 1e-3
        assert sum(sections) >= found[metrics.STEP].by_rank[rank] * 0.5


@pytest.mark.parametrize("section", ["data", "forward"])
def test_other_ranks_wait_for_the_slow_one_in_communication(hvd, section):
    kept = Kept()
    loop(hvd, [kept], steps=6, slow=[section])
    if hvd.rank() == 0:
        found = kept.records[1].metrics
        assert found[f"time/{section}"].by_rank[1] >= SLEEP
        waited = dict(found[metrics.COMMUNICATION].by_rank)
        slow = waited.pop(1)
        assert min(waited.values()) > SLEEP / 2
        assert min(waited.values()) > slow


@pytest.mark.parametrize(
    ("place", "every"), [("before monitor.step", 3), ("after monitor.step", 1)]
)
def test_what_follows_a_step_is_not_the_forward_pass(hvd, place, every):
    """A validation or a sleep, for example."""
    kept = Kept()
    loop(hvd, [kept], steps=6, every=every, slow=[place])
    if hvd.rank() == 0:
        found = kept.records[-1].metrics
        assert found[metrics.OTHER].min >= SLEEP * 0.95
        assert found[metrics.FORWARD].max < SLEEP / 2
        step = found[metrics.STEP].by_rank[0]
        assert sum(found[name].by_rank[0] for name in metrics.SECTIONS) <= step * 1.05 + 1e-3


def test_a_validation_between_epochs_is_not_the_forward_pass(hvd):
    kept = Kept()
    model = torch.nn.Linear(4, 1).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    with hvd.Monitor([kept], every=4) as monitor:
        for _ in range(2):
            for _ in monitor.batches(range(2)):
                model(torch.ones(2, 4, device=DEVICE)).sum().backward()
                optimizer.step()
                monitor.step()
            time.sleep(SLEEP)
        time.sleep(SLEEP)
    if hvd.rank() == 0:
        found = kept.records[0].metrics
        assert (
            SLEEP * 0.95
            <= found[metrics.OTHER].min * 4
            <= found[metrics.OTHER].max * 4
            < SLEEP * 1.9
        )
        assert found[metrics.FORWARD].max * 4 < SLEEP / 2


@pytest.mark.parametrize(("compression", "size"), [("none", 4.0), ("bf16", 2.0), ("fp16", 2.0)])
def test_payload_bytes(hvd, compression, size):
    kept = Kept()
    counters.wire_formats.clear()  # of earlier tests in this process
    loop(hvd, [kept], steps=6, compression=compression, check_interval=0)
    numbers = sum(p.numel() for p in small_model().parameters())
    if hvd.rank() == 0:
        assert kept.records[1].metrics[metrics.PAYLOAD].by_rank == pytest.approx(
            dict.fromkeys(range(hvd.size()), size * numbers)
        )
        assert kept.runs[0].wire_formats == (compression,)


def test_overflows_of_float16(hvd):
    kept = Kept()
    model = torch.nn.Linear(4, 1, bias=False).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), compression="fp16"
    )
    with hvd.Monitor([kept], every=4) as monitor:
        for factor in (1.0, 1.0, 1e6, 1.0):
            optimizer.zero_grad()
            (model(torch.ones(1, 4, device=DEVICE)) * factor).sum().backward()
            optimizer.step()
            monitor.step()
    if hvd.rank() == 0:
        assert kept.records[0].metrics[metrics.OVERFLOWS].by_rank == dict.fromkeys(
            range(hvd.size()), 1.0
        )


@pytest.mark.parametrize("how", ["clip", "argument"])
def test_the_gradient_norm(hvd, how):
    kept = Kept()
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    norms = []
    with hvd.Monitor([kept], every=2, grad_norm=how == "argument") as monitor:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            gradients = [p.grad.norm() for p in model.parameters()]
            norms.append(float(torch.stack(gradients).norm()))
            if how == "clip":
                hvd.clip_grad_norm_(optimizer, 1e-3)
            optimizer.step()
            monitor.step()
    if hvd.rank() == 0:
        found = [record.metrics[metrics.GRAD_NORM].mean for record in kept.records]
        assert found == pytest.approx([norms[1], norms[3]], rel=1e-5)


def test_skipped_steps_and_the_loss_scale(hvd):
    kept = Kept()
    model = small_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    scaler = hvd.GradScaler(DEVICE.type, init_scale=1024.0)
    with hvd.Monitor([kept], every=3) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), step, torch.float32))
            if step == 1 and hvd.rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
    if hvd.rank() == 0:
        found = kept.records[0].metrics
        assert found[metrics.SKIPPED].max == 1.0
        assert found[metrics.LOSS_SCALE].max == 512.0


def test_accumulation_logs_each_pass(hvd):
    kept = Kept()
    model = small_model()
    optimizer = wrapped(hvd, model, accumulation_steps=3)
    with hvd.Monitor([kept], every=2) as monitor:
        for number in range(12):
            train_step(hvd, model, optimizer, number)
            monitor.log({"pass": number}, samples=6)
            if optimizer.stepped:
                monitor.step()
    if hvd.rank() == 0:
        assert [record.step for record in kept.records] == [2, 4]
        assert [record.samples for record in kept.records] == [36 * hvd.size()] * 2
        assert [record.metrics["pass"].mean for record in kept.records] == [2.5, 8.5]


def test_a_process_set(hvd):
    kept = Kept()
    some = hvd.add_process_set(list(range(1, hvd.size())))
    try:
        if hvd.rank() == 0:
            with pytest.raises(UsageError, match="does not belong to process_set"):
                hvd.Monitor([kept], process_set=some)
            return
        model = small_model()
        optimizer = wrapped(hvd, model, process_set=some)
        with hvd.Monitor([kept], every=1, process_set=some) as monitor:
            for step in range(3):
                monitor.step({"loss": train_step(hvd, model, optimizer, step)})
        if hvd.rank() == 1:
            assert [list(r.ranks) for r in kept.records] == [list(range(1, hvd.size()))] * 3
    finally:
        hvd.remove_process_set(some)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("torch.zeros(2)", r"shape \[2\] and dtype torch.float32: expected one real number"),
        ("torch.zeros((), dtype=torch.complex64)", "expected one real number"),
        ("None", "is None, a NoneType: expected a number"),
    ],
)
def test_values_that_are_no_numbers(hvd, make, text):
    value = eval(make)
    monitor = hvd.Monitor([Kept()])
    with pytest.raises(UsageError, match=text):
        monitor.log({"loss": value})
    monitor.abandon()


def test_a_logged_tensor_may_change_later(hvd):
    kept = Kept()
    total = torch.zeros((), device=DEVICE, requires_grad=False)
    with hvd.Monitor([kept], every=2) as monitor:
        for _ in range(2):
            total += 1
            monitor.step({"total": total, "flag": True})
    if hvd.rank() == 0:
        assert kept.records[0].metrics["total"].mean == 1.5
        assert kept.records[0].metrics["flag"].mean == 1.0


def test_time_in_checkpoints(hvd):
    kept = Kept()
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(folder, model=model, optimizer=optimizer, every_steps=1) as checkpointer,
        hvd.Monitor([kept], every=3) as monitor,
    ):
        for step in range(3):
            train_step(hvd, model, optimizer, step)
            checkpointer.maybe_save(step + 1)
            monitor.step()
    if hvd.rank() == 0:
        assert kept.records[0].metrics[metrics.CHECKPOINT].min > 0


def test_waiting_for_a_slow_rank_in_a_checkpointer_is_communication(hvd):
    kept = Kept()
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(folder, model=model, optimizer=optimizer, every_steps=99) as checkpointer,
        hvd.Monitor([kept], every=2) as monitor,
    ):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            if hvd.rank() == 1:
                time.sleep(SLEEP)
            optimizer.step()
            checkpointer.maybe_save(step + 1)
            monitor.step()
    if hvd.rank() != 0:
        return
    for record in kept.records[1:]:
        # Without `monitor.batches`, there is no time/other.
        sections = [name for name in metrics.SECTIONS if name != metrics.OTHER]
        found = {name: record.metrics[name].by_rank for name in (metrics.STEP, *sections)}
        assert (record.slowest.rank, record.slowest.section) == (1, metrics.UPDATE)
        assert found[metrics.COMMUNICATION][0] > SLEEP / 2
        for rank, seconds in found[metrics.STEP].items():
            assert sum(found[name][rank] for name in sections) <= seconds * 1.05 + 1e-3
