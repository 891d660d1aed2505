"""Gradients are reduced when `loss.backward()` returns, whatever the script does afterwards.

Each test is a use on real ranks that sequences.py does not draw, compared with one process with
all data.
"""

import copy
import gc
import pkgutil
import sys
from functools import partial

import pytest
import torch
from horovod.torch import mpi_ops
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.consistency import RankMismatchError
from hvdkit.core.step_errors import BackwardFailed, GradientsChanged
from hvdkit.errors import HvdkitError, UsageError
from tests.logs import recorded
from tests.parallel.rank_pool import Configuration, start_ranks_of
from tests.parallel.torch.oracle import (
    DEVICE,
    Fails,
    Twins,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    on_all_ranks,
    sgd,
    small_model,
)


def test_join_inside_a_window_leaks_nothing_into_the_next_epoch(hvd):
    model = nn.Linear(1, 1, bias=False).to(DEVICE, torch.float64)
    nn.init.constant_(model.weight, 0.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), accumulation_steps=2
    )

    def loss(factor):
        return -factor * model(torch.ones(1, 1, dtype=torch.float64, device=DEVICE)).sum()

    # The last rank's epoch ends in the middle of a window.
    last = hvd.rank() == hvd.size() - 1
    for _ in range(3 if last else 2):
        loss(999.0 if last else 0.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    with recorded("hvdkit.torch") as records:
        hvd.join()
    warnings = [record.getMessage() for record in records]
    assert any("hvd.join() dropped gradients" in text for text in warnings) == last
    nn.init.constant_(model.weight, 0.0)
    for k in range(2):
        loss(1.0).backward()
        optimizer.step()
        assert optimizer.stepped == (k == 1)
        optimizer.zero_grad()
    assert model.weight.item() == 1


# Sparse gradients


class Words(nn.Module):
    """An embedding and a head; a pass may leave the embedding out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 2)
        self.to(DEVICE, torch.float64)

    def forward(self, words):
        hidden = self.embedding(words) if words is not None else torch.ones_like(self.head.weight)
        return self.head(hidden).square().mean()


def words_of(rank, step):
    return torch.tensor([rank, rank, step % 8, 7], device=DEVICE)


@pytest.mark.parametrize(
    ("compression", "users", "kind"),
    [("none", "nobody", "sgd"), ("fp16", "rank 0", "sgd"), ("none", "rank 1", "sparse adam")],
)
def test_a_sparse_embedding_used_late(hvd, compression, users, kind):
    """In the first step no rank or one rank uses the embedding."""

    def make(parameters):
        if kind == "sparse adam" and len(parameters) == 1:
            return torch.optim.SparseAdam(parameters, lr=0.1)
        return torch.optim.SGD(parameters, lr=0.1)

    def parts(model):
        return [model] if kind == "sgd" else [model.embedding, model.head]

    twins = Twins(hvd, make, Words(), parts, compression=compression, bucket_bytes=1)

    def loss(step, model, rank):
        return model(words_of(rank, step) if step or users == f"rank {rank}" else None)

    for step in range(4):
        twins.zero_grad()
        twins.backward(partial(loss, step))
        twins.step()
        if step or users != "nobody":
            assert twins.model.embedding.weight.grad.is_sparse
    twins.check()


class Plain(torch.optim.Optimizer):
    """A third-party optimizer whose `zero_grad` and `step` have no arguments."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


def test_an_optimizer_of_a_third_party(hvd):
    twins = Twins(hvd, Plain, accumulation_steps=2)
    twins.train(*range(8))
    twins.check()
    twins.own_loss(7).backward()
    hvd.join()
    assert not twins.optimizer.gradients_wait()


# Loss scaling


def test_a_scaler_for_one_optimizer_that_steps_and_one_that_accumulates(hvd):
    models = [small_model(), small_model()]
    optimizers = [
        hvd.DistributedOptimizer(sgd(m.parameters()), accumulation_steps=k + 1)
        for k, m in enumerate(models)
    ]
    scaler = hvd.GradScaler(DEVICE.type)
    for m, o in zip(models, optimizers, strict=True):
        scaler.scale(loss_of(m, batch_of(hvd.rank(), 0))).backward()
        scaler.step(o)
    with pytest.raises(UsageError, match="use a GradScaler for each") as caught:
        scaler.update()
    assert_raised_on_all_ranks(hvd, caught)


def test_a_fused_optimizer_with_a_scaler_does_not_wait_for_the_device(hvd):
    """`.item()` waits for all of an accelerator's kernels."""
    model = small_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    scaler = hvd.GradScaler(DEVICE.type)

    def step(number):
        scaler.scale(loss_of(model, batch_of(hvd.rank(), number, torch.float32))).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()

    step(0)
    scaler.update()

    def item(self):
        raise AssertionError("a tensor's value was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", item)
        step(1)
    scaler.update()
    assert optimizer.stepped


class Unchanged:
    """A compressor of the user, which reduces gradients one by one."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, _):
        return tensor


@pytest.mark.parametrize(
    ("own", "other", "compression"),
    [
        (torch.bfloat16, torch.float32, "none"),
        (torch.float32, torch.bfloat16, "fp16"),
        (torch.float32, torch.bfloat16, Unchanged),
    ],
)
def test_gradients_of_another_dtype_than_their_parameters(hvd, own, other, compression):
    parameters = [nn.Parameter(torch.ones(5, dtype=own, device=DEVICE)) for _ in range(2)]
    if not hasattr(parameters[0], "grad_dtype"):
        pytest.skip("torch without grad_dtype")
    parameters[0].grad_dtype = other
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0, foreach=False), compression=compression
    )
    for _ in range(2):
        for passes in (1, 2):
            sum(p.float().sum() * (hvd.rank() + 1) for p in parameters).backward()
            for p, dtype in zip(parameters, (other, own), strict=True):
                assert p.grad.dtype == dtype
                assert p.grad.tolist() == [passes * (hvd.size() + 1) / 2] * 5
        optimizer.zero_grad()
        # Rank 0 has no gradient of the first parameter.
        sum(p.float().sum() for p in parameters[min(hvd.rank(), 1) ^ 1 :]).backward()
        assert parameters[0].grad.dtype == other
        assert parameters[0].grad.tolist() == [(hvd.size() - 1) / hvd.size()] * 5
        optimizer.zero_grad()


@pytest.mark.device(ranks=2)
def test_a_sparse_gradient_of_another_dtype_is_missing_on_a_rank(hvd):
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.float64, device=DEVICE))
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("torch without grad_dtype")
    weight.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    for _ in range(2):
        if hvd.rank():
            rows = torch.tensor([[1, 3]], device=DEVICE)
            values = torch.ones(2, 2, dtype=torch.float32, device=DEVICE)
            weight.grad = torch.sparse_coo_tensor(rows, values, (4, 2))
        optimizer.synchronize()
        share = (hvd.size() - 1) / hvd.size()
        assert weight.grad.dtype == torch.float32
        assert weight.grad.to_dense().tolist() == [[0, 0], [share] * 2] * 2
        optimizer.step()
        optimizer.zero_grad()


# Collectives that are left behind


@pytest.mark.parametrize(
    ("where", "compression", "loads"),
    [
        ("after backward", "none", "wrapped"),
        ("no_sync", "fp16", "plain"),
        ("window", "bf16", "plain"),
        ("raised", "none", "wrapped"),
        ("no zero_grad", "fp16", "wrapped"),
    ],
)
def test_loading_a_state_begins_anew_and_leaves_no_collective(hvd, where, compression, loads):
    # Dropped optimizers of other tests may have left one that nobody waits for.
    before = set(mpi_ops._handle_map)
    passes = 2 if where == "window" else 1
    own = []
    twins = Twins(
        hvd,
        lambda ps: own.append(sgd(ps)) or own[-1],
        compression=compression,
        accumulation_steps=passes,
    )
    model, optimizer = twins.model, twins.optimizer
    for step in range(2):
        optimizer.zero_grad()
        twins.own_loss(step).backward()
        optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if where != "no zero_grad":
        optimizer.zero_grad()
    if where == "no_sync":
        with hvd.no_sync(optimizer):
            twins.own_loss(3).backward()
    elif where == "raised":
        handle = model[0].bias.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            twins.own_loss(3).backward()
        handle.remove()
    else:
        twins.own_loss(3).backward()
    model.load_state_dict(saved[0])
    (own[0] if loads == "plain" else optimizer).load_state_dict(saved[1])
    optimizer.rounds.complete_deferred()
    assert set(mpi_ops._handle_map) <= before
    if loads == "wrapped":
        optimizer.zero_grad()
    twins.adopt()
    for k in range(passes):
        twins.backward(4 + k)
        twins.step()
    twins.check()
    optimizer.rounds.complete_deferred()
    assert set(mpi_ops._handle_map) <= before


@pytest.mark.parametrize("kind", ["accumulation_steps", "backward_passes_per_step"])
def test_zeroing_the_model_inside_a_window(hvd, kind):
    twins = Twins(hvd, **{kind: 3})
    mean = kind == "accumulation_steps"
    twins.own_loss(0).backward()
    if mean:
        twins.optimizer.step()
    twins.model.zero_grad()
    advice = {
        "accumulation_steps": r"call optimizer\.zero_grad\(\)",
        "backward_passes_per_step": r"only after optimizer\.step\(\)",
    }
    with pytest.raises(HvdkitError, match=advice[kind]) as caught:
        twins.own_loss(1).backward()
    assert_raised_on_all_ranks(hvd, caught)
    twins.optimizer.zero_grad()
    for k in range(3):
        twins.backward(k)
        if mean or k == 2:
            twins.step()
    twins.check()


def layers(*names):
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(5, 2) for name in names}).to(DEVICE, torch.float64)


@pytest.mark.parametrize("find_unused", [False, True])
def test_other_memory_before_a_pass_that_reaches_an_optimizer_on_some_ranks(hvd, find_unused):
    """The gradients are the same numbers; the pass leaves one of the optimizer's layers out."""
    twins = Twins(
        hvd,
        model=layers("trunk", "first", "second"),
        parts=lambda m: [m["trunk"], nn.ModuleList([m["first"], m["second"]])],
        find_unused_parameters=find_unused,
        bucket_bytes=10**6,
    )

    def loss(k, m, rank):
        x = batch_of(rank, k)
        return (m["trunk"](x) + (m["first"](x) if k == 0 or rank else 0)).square().mean()

    for k in range(2):
        twins.backward(partial(loss, k))
        twins.check_gradients()
        if hvd.rank() == 0:
            for p in twins.model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.clone()
    hvd.clip_grad_norm_(twins.optimizers, 1e9)
    twins.check_gradients()


def test_a_frozen_layer_that_one_rank_has_loaded_is_an_error_in_the_first_pass(hvd):
    """The optimizer does not have the layer, but all gradients are computed with it."""
    model = small_model()
    model[2].requires_grad_(False)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].bias[3] += 1e-6
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(sgd(trained), model.named_parameters())
    with pytest.raises(RankMismatchError, match="'2.bias' on rank") as caught:
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    assert_raised_on_all_ranks(hvd, caught)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad()
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    assert model[2].bias.grad is None


# Re-entrant checkpoints


class Reentrant(nn.Module):
    """Every trainable parameter lies in re-entrant checkpoints."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)])
        self.to(DEVICE, torch.float64)

    def forward(self, x):
        # A re-entrant checkpoint needs an input that requires gradients.
        x = x.clone().requires_grad_()
        first, second, third = self.blocks
        if self.kind == "one":
            return checkpoint(lambda v: third(second(first(v))), x, use_reentrant=True)[:, :2]
        if self.kind == "nested":

            def outer(v):
                inner = checkpoint(lambda w: second(first(w)), v, use_reentrant=True)
                return third(inner)

            return checkpoint(outer, x, use_reentrant=True)[:, :2]
        if self.kind == "nested twice":

            def middle(v):
                return second(checkpoint(first, v, use_reentrant=True))

            def outer(v):
                return third(checkpoint(middle, v, use_reentrant=True))

            return checkpoint(outer, x, use_reentrant=True)[:, :2]
        if self.kind == "side by side":
            y = checkpoint(first, x, use_reentrant=True) + checkpoint(second, x, use_reentrant=True)
            return checkpoint(third, y, use_reentrant=True)[:, :2]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x[:, :2]


REENTRANT = ["one", "several", "side by side", "nested", "nested twice"]


@pytest.mark.parametrize("kind", REENTRANT)
def test_everything_in_reentrant_checkpoints(hvd, kind):
    twins = Twins(hvd, model=Reentrant(kind))
    for step in range(3):
        for k in range(2):
            twins.backward(2 * step + k)
            twins.check_gradients()
        twins.step()
        twins.optimizer.zero_grad()
        twins.adopt()


@pytest.mark.parametrize("first", [1, 2])
def test_a_layer_in_two_reentrant_checkpoints(hvd, first):
    """The layer's gradient arrives twice in a pass, maybe after its bucket has been sent."""

    def loss(model, x, times):
        x = x.clone().requires_grad_()
        for _ in range(times):
            x = checkpoint(model, x, use_reentrant=True)
        return x.square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).to(DEVICE, torch.float64)
    twins = Twins(hvd, model=model, bucket_bytes=1)
    for step in range(4):
        times = 2 if step else first
        if step == 1 and first == 1:
            with pytest.raises(HvdkitError, match=r"reversible.*call optimizer.zero_grad\(\)"):
                loss(model, batch_of(hvd.rank(), step), times).backward()
            twins.optimizer.zero_grad()
        # The earlier passes have shown which gradients arrive several times.
        twins.train(lambda m, rank, s=step, times=times: loss(m, batch_of(rank, s), times))
    twins.check()


def test_names_that_scripts_for_horovod_use(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    assert hvd.mpi_ops.allreduce_async_ is hvd.allreduce_async_
    assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
    assert hvd.mpi_lib_v2 is mpi_ops.mpi_lib


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_distributed_sampler_without_torchs_process_group(hvd, drop_last, count):
    data = TensorDataset(torch.arange(count))
    sampler = hvd.DistributedSampler(data, drop_last=drop_last)
    assert isinstance(sampler, torch.utils.data.distributed.DistributedSampler)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [batch.tolist() for (batch,) in DataLoader(data, batch_size=2, sampler=sampler)]
        own = [number for batch in batches for number in batch]
        everyone = on_all_ranks(hvd, own)
        assert len({len(each) for each in everyone}) == 1
        drawn = sorted(number for each in everyone for number in each)
        whole = count // hvd.size() * hvd.size()
        if drop_last:
            assert len(set(drawn)) == len(drawn) == whole
        else:
            # A few samples come twice, so that all ranks have equally many.
            assert sorted(set(drawn)) == list(range(count))
            assert len(drawn) - count == -count % hvd.size()
        orders.append(everyone)
    assert orders[0] != orders[1]


# Horovod started again

RESTARTED = """
import copy, sys
import torch
import hvdkit.torch as hvd
from horovod.torch import mpi_ops
from tests.parallel.torch.oracle import *

compression = sys.argv[1]
PLACES = ("forward", "backward", "before step", "no_sync", "twice", "nowhere")

class Lost(Exception):
    pass

def fail(*_):
    raise Lost

def attempt(model, optimizer, step, place):
    optimizer.zero_grad()
    loss = loss_of(model, batch_of(hvd.rank(), step))
    if place == "forward":
        fail()
    if place == "backward":
        handle = model[2].weight.register_hook(fail)
        try:
            loss.backward()
        finally:
            handle.remove()
    if place == "no_sync":
        with hvd.no_sync(optimizer):
            loss.backward()
        fail()
    loss.backward()
    if place == "twice":
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        fail()
    if place == "before step":
        fail()
    optimizer.step()

hvd.init()
model, reference = small_model(), small_model()
optimizer = hvd.DistributedOptimizer(
    sgd(model.parameters()), model.named_parameters(), bucket_bytes=200, compression=compression
)
plain = sgd(reference.parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.sync()
lost = {2 + k: (PLACES[k], PLACES[(k + 1 + k // 3) % 6]) for k in range(len(PLACES))}
names = set()
while state.step < 10:
    try:
        place = lost.get(state.step, ("nowhere", "nowhere"))[hvd.rank()]
        attempt(model, optimizer, state.step, place)
        if state.step in lost:
            fail()  # what the other rank has lost, this one loses as well
    except (Lost, hvd.HorovodInternalError):
        lost.pop(state.step)
        hvd.shutdown()
        hvd.init()
        state.restore()
        state.sync()
        continue
    state.step += 1
    state.save()
    (part,) = optimizer.reducer.gradients.parts
    names.add((part.synchronizer.name, optimizer.rounds.position.step))
    plain.zero_grad()
    loss_of(reference, whole_batch(hvd, state.step - 1)).backward()
    plain.step()
assert not lost
everyone = hvd.allgather_object(names)
assert everyone[0] == everyone[1], everyone
assert_close(model, reference, TOLERANCES[compression])
assert_same_on_all_ranks(hvd, model)
optimizer.rounds.complete_deferred()
assert not mpi_ops._handle_map
print("trained", flush=True)
"""


@pytest.mark.parametrize("compression", [pytest.param("none", marks=pytest.mark.long), "fp16"])
def test_ranks_that_fail_in_different_places_and_start_horovod_again(compression):
    """Shut down, init, restore and sync, as elastic training does after each failure."""
    command = [sys.executable, "-c", RESTARTED, compression]
    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
    ranks = start_ranks_of(Configuration("torch", "gloo", 2), command, env)
    for result in ranks.wait(60, 5.0):
        assert "trained" in result.output


# --- what a review found ------------------------------------------------------------------------


def linear_and_optimizer(hvd, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).to(DEVICE, torch.float64)
    return model, hvd.DistributedOptimizer(sgd(model.parameters()), **options)


def ones(batch=1):
    return torch.ones(batch, 2, device=DEVICE, dtype=torch.float64)


def test_restored_elastic_state_has_no_gradients_of_an_interrupted_step(hvd):
    """A loop that calls zero_grad after the step would add to such gradients."""
    model, optimizer = linear_and_optimizer(hvd)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    state.save()
    model(5 * ones()).sum().backward()
    state.restore()
    state.sync()
    model(ones()).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_pass_that_raises_after_a_reentrant_checkpoint(hvd):
    """The graph stays alive, and with it the callback for the end of the outer pass."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3)).to(DEVICE, torch.float64)
    optimizer = hvd.DistributedOptimizer(sgd(layers.parameters()))
    for step in range(3):
        fails = step == 1 and hvd.rank() == 0
        optimizer.zero_grad()
        x = layers[0](ones())
        # Made before the checkpoint, so its backward runs after that of the checkpoint.
        side = layers[1](x)
        if fails:
            side = Fails.apply(side, ZeroDivisionError)
        loss = (checkpoint(layers[2], x, use_reentrant=True) + side).sum()
        if step == 1:
            with pytest.raises(ZeroDivisionError if fails else BackwardFailed):
                loss.backward()
            continue
        loss.backward()
        optimizer.step()
        assert_same_on_all_ranks(hvd, layers)


LACKING = {
    "first bucket": ("backend.TorchMemory", "in_place", 0),
    "bucket": ("backend.TorchMemory", "in_place", 1),
}


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("bucket_bytes", [200, 10**6])
def test_memory_that_is_lacking_at_the_end_of_a_pass_is_a_pass_that_raised(
    hvd, lacking, bucket_bytes
):
    path, name, when = LACKING[lacking]
    owner = pkgutil.resolve_name(f"hvdkit.torch.{path}")
    call = getattr(owner, name)
    twins = Twins(hvd, bucket_bytes=bucket_bytes)

    def fail(self, *arguments):
        if torch._C._current_autograd_node() is not None:
            return call(self, *arguments)  # a hook: an error there ends the pass
        patch.undo()
        raise MemoryError

    for step in range(4):
        if step != when:
            twins.train(step)
            continue
        first = hvd.rank() == 0
        with pytest.MonkeyPatch.context() as patch:
            if first:
                patch.setattr(owner, name, fail)
            with pytest.raises(MemoryError if first else BackwardFailed):
                twins.own_loss(step).backward()
            twins.optimizer.zero_grad()
    twins.check()


def test_a_loss_of_one_rank_under_no_sync_after_the_reduced_pass(hvd):
    model, optimizer = linear_and_optimizer(hvd, op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        model(ones()).sum().backward()
        with hvd.no_sync(optimizer):
            if hvd.rank() == 0:
                (10 * model(ones())).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[hvd.size() + 10.0] * 2]


def test_a_change_before_a_reduction_is_forgotten_after_it(hvd):
    """After the reduction with a rank that made no pass, the gradients have not been changed."""
    model, optimizer = linear_and_optimizer(hvd, op=hvd.Sum)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        late = step > 0 and hvd.rank() == 1
        if not late:
            model(ones()).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[hvd.size() - (step > 0)] * 2]


def test_a_change_of_data_before_a_late_rank_takes_part_is_an_error(hvd):
    """`p.grad.data` has no version counter, so only the values show the change."""
    model, optimizer = linear_and_optimizer(hvd)
    if hvd.rank() > 0:
        model(ones()).sum().backward()
        model.weight.grad.data.clamp_(max=0.25)
    with pytest.raises(GradientsChanged, match="differ between ranks"):
        optimizer.step()


def test_a_parameter_group_that_comes_one_step_later_on_one_rank(hvd):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).to(DEVICE, torch.float64)
    extra = nn.Linear(8, 8).to(DEVICE, torch.float64)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), bucket_bytes=300)
    x = torch.ones(1, 8, device=DEVICE, dtype=torch.float64)
    for step in range(4):
        optimizer.zero_grad()
        if step == 1 + hvd.rank():
            optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
        loss = extra(model(x)).sum()
        if step == 1:
            with pytest.raises(PassesDiffer):
                loss.backward()
            continue
        loss.backward()
        optimizer.step()
    assert_same_on_all_ranks(hvd, nn.ModuleList([model, extra]))
    # Buckets that stay in flight would end the job at the stall limit.
    assert all(mpi_ops.poll(handle) for handle in list(mpi_ops._handle_map))


def test_an_optimizer_is_not_freed_during_a_round(hvd):
    """A rank takes part with zeros for an optimizer that only a garbage collection will free."""
    from hvdkit.torch.coordination import Coordinator

    def wrapped():
        model = nn.Linear(2, 1).to(DEVICE)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, hvd.DistributedOptimizer(plain, check_parameters=False)

    gc.disable()  # until the round has begun
    model, optimizer = wrapped()
    other_model, other = wrapped()
    first = hvd.rank() == 0
    if not first:
        other.cycle = other
        del other_model, other
    complete_rounds = Coordinator._complete_rounds

    def collect_first(self, *arguments):
        gc.enable()
        gc.collect()
        complete_rounds(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_complete_rounds", collect_first)
        used = other_model if first else model
        used(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    if first:
        share = 1 / hvd.size()
        assert torch.equal(other_model.weight.grad, torch.full((1, 2), share, device=DEVICE))
        other.step()


def test_a_hook_that_moves_gradients_away(hvd):
    """`p.main_grad`, as in Megatron: hvdkit would reduce nothing."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())

    def move(p):
        p.main_grad, p.grad = p.grad, None

    handles = [p.register_post_accumulate_grad_hook(move) for p in model.parameters()]
    with hvd.no_sync(optimizer):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    with pytest.raises(GradientsChanged, match="a hook has set p.grad to None"):
        optimizer.synchronize()
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    loss_of(model, batch_of(hvd.rank(), 1)).backward()
    assert_same_on_all_ranks(hvd, model)
