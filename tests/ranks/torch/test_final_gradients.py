"""Gradients are reduced when `loss.backward()` returns, whatever the script does afterwards.

Each test is a use on real ranks that sequences.py does not draw, compared with one process with
all data.
"""

import copy
from functools import partial

import pytest
import torch
from horovod.torch import mpi_ops
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.reduction.accumulation import PassesDiffer
from hvdkit.reduction.step_errors import BackwardFailed
from tests.logs import recorded
from tests.ranks.torch.oracle import (
    DEVICE,
    Fails,
    Twins,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
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
    optimizer.reducer.rounds.complete_deferred()
    assert set(mpi_ops._handle_map) <= before
    if loads == "wrapped":
        optimizer.zero_grad()
    twins.adopt()
    for k in range(passes):
        twins.backward(4 + k)
        twins.step()
    twins.check()
    optimizer.reducer.rounds.complete_deferred()
    assert set(mpi_ops._handle_map) <= before


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

        def again(layers, x):
            return checkpoint(layers, x, use_reentrant=True)

        ways = {
            "one": lambda: again(nn.Sequential(first, second, third), x),
            "several": lambda: again(third, again(second, again(first, x))),
            "side by side": lambda: again(third, again(first, x) + again(second, x)),
            "nested": lambda: again(lambda v: third(again(nn.Sequential(first, second), v)), x),
            "nested twice": lambda: again(
                lambda v: third(again(lambda w: second(again(first, w)), v)), x
            ),
        }
        return ways[self.kind]()[:, :2]


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


class BackwardOf(torch.autograd.Function):
    """The sum of two tensors, whose backward pass runs that of a layer."""

    @staticmethod
    def forward(ctx, layer, x, y):
        ctx.layer = layer
        return x + y

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            ctx.layer(g).sum().backward()
        return None, g, g


def test_an_inner_pass_in_a_node_with_an_input_that_gets_no_gradient(hvd):
    """The outer pass goes on through the other input only, and ends there."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(sgd(layer.parameters()))
    leaves = [torch.ones(2, 3, device=DEVICE, requires_grad=True) for _ in range(2)]
    for leaf in leaves:
        optimizer.zero_grad()
        x, y = (1.0 * each for each in leaves)
        loss = BackwardOf.apply(layer, x, y).sum() * (hvd.rank() + 1)
        loss.backward(inputs=[leaf])
        mean = torch.full_like(layer.weight, 2 * (hvd.size() + 1) / 2)
        torch.testing.assert_close(layer.weight.grad, mean)
        optimizer.step()


def test_names_that_scripts_for_horovod_use(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    assert hvd.mpi_ops.allreduce_async_ is hvd.allreduce_async_
    assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
    assert hvd.mpi_lib_v2 is mpi_ops.mpi_lib


def ones(batch=1):
    return torch.ones(batch, 2, device=DEVICE, dtype=torch.float64)


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


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [200, 10**6])
def test_memory_that_is_lacking_at_the_end_of_a_pass_is_a_pass_that_raised(hvd, when, bucket_bytes):
    from hvdkit.torch.reduction.backend import TorchMemory

    call = TorchMemory.in_place
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
                patch.setattr(TorchMemory, "in_place", fail)
            with pytest.raises(MemoryError if first else BackwardFailed):
                twins.own_loss(step).backward()
            twins.optimizer.zero_grad()
    twins.check()


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


def test_a_loss_of_one_rank_under_no_sync_after_the_reduced_pass(hvd):
    model = nn.Linear(2, 1, bias=False).to(DEVICE, torch.float64)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        model(ones()).sum().backward()
        with hvd.no_sync(optimizer):
            if hvd.rank() == 0:
                (10 * model(ones())).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[hvd.size() + 10.0] * 2]
