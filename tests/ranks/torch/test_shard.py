"""`shard="optimizer"`: each rank updates its share of the parameters. The result is the same."""

import copy

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import batch_of, loss_of, small_model

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),  # it makes its state in the constructor
    "groups": lambda p: torch.optim.Adam(
        [{"params": list(p)[:2], "lr": 0.02, "weight_decay": 0.1}, {"params": list(p)[2:]}], lr=0.01
    ),
}


def model_of(dtype=torch.float32):
    """A model with a parameter of several messages, and parameters smaller than the ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(5, 41), nn.LayerNorm(41), nn.Tanh(), nn.Linear(41, 3), nn.Linear(3, 2))
    ).to(dtype)


def train(hvd, make, steps=range(4), model=None, state=None, **options):
    model = model_of() if model is None else model
    parameters = [*model.parameters()] if make is MAKERS["groups"] else model.parameters()
    optimizer = hvd.DistributedOptimizer(make(parameters), model.named_parameters(), **options)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in steps:
        optimizer.zero_grad()
        x = batch_of(hvd.rank(), step, next(model.parameters()).dtype)
        loss_of(model, x).backward()
        optimizer.step()
    return model, optimizer


def assert_equal(hvd, some, others):
    """Compare two trainings bit by bit, with the state of the optimizers."""
    for p, q in zip(some[0].parameters(), others[0].parameters(), strict=True):
        assert torch.equal(p, q)
    states = [each[1].state_dict() for each in (some, others)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


@pytest.mark.parametrize("make", MAKERS)
def test_the_bits_are_those_of_the_replicated_optimizer(hvd, make):
    for options in (
        {},
        {"compression": "fp16", "bucket_bytes": 300},
        {"compression": hvd.Int8(as_bf16=lambda name, shape: not shape)},
        {"max_grad_norm": 0.1, "compression": "bf16"},
        {"accumulation_steps": 2, "on_nonfinite": "skip"},
    ):
        sharded = train(hvd, MAKERS[make], shard="optimizer", **options)
        assert_equal(hvd, sharded, train(hvd, MAKERS[make], **options))


@pytest.mark.parametrize("make", ["adamw", "whole"])
def test_closures(hvd, make):
    results = []
    for shard in ("optimizer", None):
        model = model_of()
        make_one = MAKERS.get(make, lambda p: torch.optim.Adafactor(p, lr=0.01))
        optimizer = hvd.DistributedOptimizer(make_one(model.parameters()), shard=shard)

        def closure(step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), step, torch.float32))
            loss.backward()
            hvd.clip_grad_norm_(optimizer, 0.1)
            return loss

        losses = [optimizer.step(lambda step=step: closure(step)).item() for step in range(3)]
        results.append((model, optimizer, losses))
    assert_equal(hvd, *(each[:2] for each in results))
    assert results[0][2] == results[1][2]


def test_state_moves_between_sharded_and_replicated_optimizers(hvd):
    whole = train(hvd, MAKERS["adamw"], range(6))
    for first, then in (("optimizer", None), (None, "optimizer"), ("optimizer", "optimizer")):
        model, optimizer = train(hvd, MAKERS["adamw"], range(3), shard=first)
        state = copy.deepcopy(optimizer.state_dict())
        resumed = train(hvd, MAKERS["adamw"], range(3, 6), model, state, shard=then)
        assert_equal(hvd, resumed, whole)


def test_each_rank_has_its_share_of_the_state(hvd):
    model = nn.Linear(64, 33)
    _, optimizer = train(hvd, MAKERS["adamw"], range(0), model, shard="optimizer")
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    elements = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    total = sum(p.numel() for p in model.parameters())
    assert elements <= 1.05 * total / hvd.size() + 16
    everyone = hvd.allreduce(torch.tensor([elements]), op=hvd.Sum)
    assert int(everyone) == total


class Scale(nn.Module):
    """Other parameters: complex, without dimensions, empty, and in another memory order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(256).bfloat16())

    def forward(self, x):
        seen = self.conv(x).square().mean() * self.scale + self.narrow.float().square().sum()
        return seen + self.phase.abs().sum() * x.mean() + self.empty.sum()


def test_parameters_of_all_kinds(hvd):
    results = []
    for shard in ("optimizer", None):
        model = Scale()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), shard=shard
        )
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            model(torch.randn(2, 3, 6, 6, generator=generator)).backward()
            optimizer.step()
        results.append((model, optimizer))
    assert_equal(hvd, *results)


def test_gradients_are_divided_after_the_pass(hvd):
    model, optimizer = train(hvd, MAKERS["sgd"], range(1), shard="optimizer")
    reference, plain = train(hvd, MAKERS["sgd"], range(1))
    whole = optimizer.full_gradients()
    for gradient, q in zip(whole, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, q.grad, rtol=0, atol=0)
    for use in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model[0].weight.grad.norm(),
        lambda: model[0].weight.grad + 1.0,
        lambda: model[0].weight.grad.numpy(),
    ):
        with pytest.raises((UsageError, RuntimeError)):
            use()
    assert "shape=[41, 5]" in repr(model[0].weight.grad)
    norm = hvd.clip_grad_norm_(optimizer, 0.01)
    expected = hvd.clip_grad_norm_(plain, 0.01)
    torch.testing.assert_close(norm, expected, rtol=0, atol=0)
    copy.deepcopy(model)
    for p in model.parameters():
        p.grad.mul_(0.0)
    assert all(g.abs().sum() == 0 for g in optimizer.full_gradients())


def test_all_ranks_skip_the_step_of_an_overflow(hvd):
    results = []
    for shard in ("optimizer", None):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), shard=shard)
        scaler = hvd.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), step, torch.float32))
            overflow = step == 1 and hvd.rank() == hvd.size() - 1
            scaler.scale(loss).backward(torch.tensor(float("inf")) if overflow else None)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.stepped == (step != 1)
        assert scaler.get_scale() == 2.0
        results.append((model, optimizer))
    assert_equal(hvd, *results)


class Whole(torch.optim.SGD):
    """Needs whole tensors, like LAMB: a parameter's step has the length of its gradient's norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


@pytest.mark.parametrize("make", [Whole, torch.optim.Adafactor, torch.optim.SparseAdam])
def test_optimizers_that_need_whole_tensors(hvd, make):
    results = []
    for shard in ("optimizer", None):
        torch.manual_seed(0)
        sparse = make is torch.optim.SparseAdam
        model = nn.Sequential(nn.Embedding(9, 5, sparse=sparse), *model_of())
        parameters = model[0].parameters() if sparse else model.parameters()
        optimizer = hvd.DistributedOptimizer(make(parameters, lr=0.01), shard=shard)
        for step in range(4):
            optimizer.zero_grad()
            ids = torch.randint(9, (6,), generator=torch.Generator().manual_seed(step + hvd.rank()))
            model(ids).square().mean().backward()
            optimizer.step()
        results.append((model, optimizer))
    assert_equal(hvd, *results)
    shares = hvd.allgather(torch.tensor([len(results[0][1].state)])).tolist()
    assert sum(shares) == len(results[1][1].state)


class Queue(torch.optim.SGD):
    """Has a list of gradients, which are no shares that a `state_dict` could complete."""

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1  # beside the parameters' state
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    queue = self.state[p].setdefault("queue", [])
                    queue.append(p.grad.clone())
                    p -= group["lr"] * sum(queue)


class Mixed(torch.optim.SGD):
    """Needs whole tensors in the groups with an option, like Muon with AdamW."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / (p.grad.norm() if group.get("whole") else 1)


class Decay(torch.optim.SGD):
    """Has a small term with the mean of a whole tensor, and one in the options."""

    def __init__(self, parameters, lr, everyone=False):
        super().__init__(parameters, lr)
        self.everyone = everyone

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = p.grad.square().mean().sqrt()
                    if self.everyone:
                        group["seen"] = group.get("seen", 0.0) + float(mean)
                    p.mul_(1 - 1e-6 / mean).sub_(p.grad, alpha=group["lr"])


WHOLE = {
    "queue": lambda p: Queue(p, lr=0.01),
    "mixed": lambda p: Mixed([{"params": p[:2]}, {"params": p[2:], "whole": True}], lr=0.01),
    "decay": lambda p: Decay(p, lr=0.01),
}


@pytest.mark.parametrize("make", WHOLE)
def test_the_trial_sees_what_needs_whole_tensors(hvd, make):
    made = WHOLE[make]
    sharded, plain = (train(hvd, lambda p: made([*p]), shard=s) for s in ("optimizer", None))
    assert_equal(hvd, sharded, plain)


def test_a_new_group_has_options_that_shares_can_use(hvd):
    model = small_model()
    first, *others = model.parameters()
    optimizer = hvd.DistributedOptimizer(Mixed([first], lr=0.1), shard="optimizer")
    with pytest.raises(UsageError, match="need whole tensors"):
        optimizer.add_param_group({"params": others, "whole": True})
    assert len(optimizer.param_groups) == 1


def test_gradients_that_are_set_to_zero(hvd):
    results = []
    for shard in ("optimizer", None):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(MAKERS["sgd"](model.parameters()), shard=shard)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, batch_of(hvd.rank(), step, torch.float32)).backward()
            optimizer.step()
        results.append((model, optimizer))
    assert_equal(hvd, *results)


class Averaging(torch.optim.SGD):
    """Moves the parameters between two points, like a schedule-free optimizer."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["seen"] = p.isfinite()  # a dtype that the engine does not send
                state["mean"] = state["mean"].lerp(p, 0.1) if "mean" in state else p.clone()

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["mean"])


class AveragingWhole(Averaging, Whole):
    pass


@pytest.mark.parametrize("kind", [Averaging, AveragingWhole])
def test_schedule_free_optimizers(hvd, kind):
    results = []
    for shard in ("optimizer", None):
        model, optimizer = train(hvd, lambda p: kind(p, lr=0.05), shard=shard)
        optimizer.eval()
        results.append((model, optimizer))
    assert_equal(hvd, *results)


class Together(torch.optim.SGD):
    """Needs the gradients of all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p -= self.param_groups[0]["lr"] * p.grad / norm


class OneByOne:
    """A compressor with Horovod's interface."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


def test_what_cannot_be_divided_is_an_error(hvd):
    model = small_model()
    with pytest.raises(UsageError, match="depends on other parameters"):
        hvd.DistributedOptimizer(Together(model.parameters(), lr=0.1), shard="optimizer")
    plain = Decay(model.parameters(), 0.1, everyone=True)
    with pytest.raises(UsageError, match="depends on other parameters"):
        hvd.DistributedOptimizer(plain, shard="optimizer")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    around = torch.optim.SGD(model.parameters(), lr=0.1)
    around.base = plain
    with pytest.raises(UsageError, match="'base' of the SGD is another optimizer"):
        hvd.DistributedOptimizer(around, shard="optimizer")
    with pytest.raises(UsageError, match="'optimizer' or None"):
        hvd.DistributedOptimizer(plain, shard="all")
    with pytest.raises(UsageError, match="whole gradients one by one"):
        hvd.DistributedOptimizer(plain, shard="optimizer", compression=OneByOne)
    spread = nn.Parameter(torch.zeros(8, 8)[:, ::2])
    with pytest.raises(UsageError, match="contiguous in memory"):
        hvd.DistributedOptimizer(torch.optim.SGD([spread], lr=0.1), shard="optimizer")
    _kept = hvd.DistributedOptimizer(plain, shard="optimizer")
    with pytest.raises(UsageError, match="as many batches on all ranks"):
        hvd.join()


def test_a_shard_on_one_rank_only_is_an_error(hvd):
    model = small_model()
    _optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), shard="optimizer" if hvd.rank() == 1 else None
    )
    with pytest.raises(RankMismatchError, match="shard"):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()


def test_a_state_of_one_rank_only_is_an_error(hvd):
    model, optimizer = train(hvd, MAKERS["adamw"], range(1), shard="optimizer")
    state = optimizer.state_dict()
    _, fresh = train(hvd, MAKERS["adamw"], range(0), model, shard="optimizer")
    if hvd.rank() == 0:
        fresh.load_state_dict(state)
    with pytest.raises((UsageError, RankMismatchError), match="on all ranks"):
        hvd.broadcast_optimizer_state(fresh, root_rank=0)


def test_the_state_is_broadcast(hvd):
    _, optimizer = train(hvd, MAKERS["adamw"], range(2), shard="optimizer")
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("make", ["adamw", "sgd"])
def test_checkpoints_fit_sharded_and_replicated_optimizers(hvd, make):
    with shared_folder(hvd) as root:
        checkpoints_fit(hvd, root, make)


def checkpoints_fit(hvd, root, make):
    whole = train(hvd, MAKERS[make], range(6))
    for first, then in (("optimizer", None), (None, "optimizer"), ("optimizer", "optimizer")):
        folder = root / f"{first}-{then}"
        model, optimizer = train(hvd, MAKERS[make], range(3), shard=first)
        with hvd.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.save(3)
        model = model_of()
        plain = MAKERS[make](model.parameters())
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), shard=then)
        with hvd.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            assert checkpointer.restore().step == 3
        for step in range(3, 6):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step, torch.float32)).backward()
            optimizer.step()
        assert_equal(hvd, (model, optimizer), whole)


def test_the_memory_of_hosts_keeps_no_shares(hvd):
    model, optimizer = train(hvd, MAKERS["adamw"], range(1), shard="optimizer")
    state = hvd.elastic.TorchState(model, optimizer)
    with pytest.raises(UsageError, match="no shard="):
        state.sync()
    with shared_folder(hvd) as folder, pytest.raises(UsageError, match="every_steps_in_memory"):
        hvd.Checkpointer(folder, model=model, optimizer=optimizer, every_steps_in_memory=1)


def test_ranks_may_have_made_other_optimizers_before(hvd):
    for _ in range(hvd.rank()):
        train(hvd, MAKERS["sgd"], range(0), shard="optimizer")
    sharded = train(hvd, MAKERS["sgd"], range(2), shard="optimizer")
    assert_equal(hvd, sharded, train(hvd, MAKERS["sgd"], range(2)))
