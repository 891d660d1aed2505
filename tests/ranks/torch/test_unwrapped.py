"""An optimizer that nobody wrapped trains another model on each rank: a warning, and no save."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.alone import run_alone
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import (
    adamw,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
)

STEPS = 14


@contextlib.contextmanager
def warnings():
    """Yield the texts that are logged."""
    from hvdkit.torch import unwrapped  # on a rank: it loads the adapter

    unwrapped._warned.clear()  # a process logs only a few
    texts = []
    with recorded("hvdkit") as log:
        yield texts
    texts += [record.getMessage() for record in log if "is slow:" not in record.getMessage()]


def shared_model(hvd):
    model = small_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def train(hvd, model, optimizer, steps=STEPS, before_step=lambda step: None):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        before_step(step)
        optimizer.step()


@pytest.mark.parametrize("make", [sgd, adamw])
def test_an_optimizer_that_is_not_wrapped(hvd, tmp_path, make):
    model = shared_model(hvd)
    optimizer = make(model.parameters())
    with warnings() as texts:
        train(hvd, model, optimizer)
    if hvd.rank() == 0:
        (text,) = texts
        assert f"({type(optimizer).__name__}) makes its step 10 on {hvd.size()} ranks" in text
        assert "hvd.DistributedOptimizer(optimizer, model.named_parameters())" in text
    else:
        assert not texts
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        for given in ({}, {"optimizer": optimizer}):
            with hvd.Checkpointer(folder, model=model, **given) as checkpointer:
                with pytest.raises(RankMismatchError) as caught:
                    checkpointer.save(STEPS)
                assert checkpointer.steps() == []
            message = assert_raised_on_all_ranks(hvd, caught)
            assert "'0.weight' on rank 1" in message
            assert "hvd.DistributedOptimizer(optimizer, model.named_parameters())" in message


def test_one_of_two_optimizers_is_not_wrapped(hvd, tmp_path):
    """As in a GAN of which only the generator's optimizer was wrapped."""
    models = {"g": shared_model(hvd), "d": shared_model(hvd)}
    optimizers = {name: sgd(model.parameters()) for name, model in models.items()}
    optimizers["g"] = hvd.DistributedOptimizer(optimizers["g"])
    with warnings() as texts:
        for step in range(STEPS):
            for name, model in models.items():
                optimizers[name].zero_grad()
                loss_of(model, batch_of(hvd.rank(), step)).backward()
                optimizers[name].step()
    assert len(texts) == (hvd.rank() == 0)
    with refused(hvd, tmp_path, "'model-d: 0.weight' on rank 1", models, optimizers):
        pass


def test_a_small_optimizer_is_not_wrapped(hvd):
    """Its gradients have fewer bytes than the collectives with which hvdkit compares ranks."""
    model, scale = shared_model(hvd), torch.nn.Parameter(torch.ones(1))
    hvd.broadcast_parameters([scale], root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    forgotten = sgd([scale])
    with warnings() as texts:
        for step in range(STEPS):
            for each in (optimizer, forgotten):
                each.zero_grad()
            (scale * loss_of(model, batch_of(hvd.rank(), step))).backward()
            for each in (optimizer, forgotten):
                each.step()
    assert len(texts) == (hvd.rank() == 0)


@contextlib.contextmanager
def refused(hvd, tmp_path, match, models, optimizers):
    """Yield a checkpointer whose save raises on all ranks."""
    with (
        shared_folder(hvd) as folder,
        contextlib.chdir(tmp_path),
        hvd.Checkpointer(folder, model=models, optimizer=optimizers) as checkpointer,
    ):
        with pytest.raises(RankMismatchError, match=match):
            checkpointer.save(STEPS)
        yield checkpointer


def _is_saved(hvd, models, optimizers):
    """Save, and check that the save does not raise."""
    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(folder, model=models, optimizer=optimizers) as checkpointer,
    ):
        checkpointer.save(1)
        assert checkpointer.latest() == 1


def by_allreduce(hvd, model, step):
    for p in model.parameters():
        hvd.allreduce_(p.grad)


def flat_in_half_precision(hvd, model, step):
    gradients = [p.grad for p in model.parameters()]
    flat = torch._utils._flatten_dense_tensors([g.half() for g in gradients])
    flat = hvd.allreduce(flat)
    for g, mean in zip(
        gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True
    ):
        g.copy_(mean)


def from_rank_0(hvd, model, step):
    for p in model.parameters():
        hvd.broadcast_(p.grad, root_rank=0)


@pytest.mark.parametrize("reduce", [by_allreduce, flat_in_half_precision, from_rank_0])
def test_a_script_that_reduces_gradients_itself(hvd, reduce):
    model = shared_model(hvd)
    optimizer = adamw(model.parameters())
    with warnings() as texts:
        train(hvd, model, optimizer, before_step=lambda step: reduce(hvd, model, step))
    assert not texts
    assert_same_on_all_ranks(hvd, model)
    _is_saved(hvd, model, optimizer)


def test_weights_that_are_averaged_now_and_then(hvd):
    """Local SGD: ranks differ between two averages, and not at a save."""
    model = shared_model(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def average(step):
        if step % 4 == 3:
            for p in model.parameters():
                hvd.allreduce_(p.data)

    with warnings() as texts:
        for step in range(16):
            train(hvd, model, optimizer, 1)
            average(step)
    assert not texts
    _is_saved(hvd, model, optimizer)


@pytest.mark.parametrize("what", ["optimizer", "module", "parameters"])
def test_parameters_that_each_rank_trains_for_itself(hvd, what):
    model = shared_model(hvd)
    optimizer = sgd(model.parameters())
    hvd.register_local(
        {"optimizer": optimizer, "module": model, "parameters": model.parameters()}[what]
    )
    with warnings() as texts:
        train(hvd, model, optimizer)
    assert not texts
    _is_saved(hvd, model, optimizer)


def test_an_inner_loop_beside_the_training(hvd):
    """Tensors that each rank optimises for its own batch, and copies of the model."""
    model = shared_model(hvd)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    with warnings() as texts:
        train(hvd, model, optimizer, 1)
        latent = nn.Parameter(torch.zeros(2, 5, dtype=torch.float64))
        inner = adamw([latent])
        for _ in range(30):
            inner.zero_grad()
            model(latent + hvd.rank()).sum().backward(inputs=[latent])
            inner.step()
        for _ in range(12):
            task = copy.deepcopy(model)
            train(hvd, task, torch.optim.SGD(task.parameters(), lr=0.1), 5)
            train(hvd, model, optimizer, 1)
    assert not texts


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, which it calls in its step."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def wrapped_inside(hvd, parameters):
    return Lookahead(hvd.DistributedOptimizer(sgd(parameters)))


def wrapped_outside(hvd, parameters):
    return hvd.DistributedOptimizer(Lookahead(sgd(parameters)))


def plain_of_a_wrapped_one(hvd, parameters):
    plain = sgd(parameters)
    plain.wrapped = hvd.DistributedOptimizer(plain)
    return plain


def with_windows(hvd, parameters):
    return hvd.DistributedOptimizer(sgd(parameters), accumulation_steps=2)


@pytest.mark.parametrize(
    "make", [wrapped_inside, wrapped_outside, plain_of_a_wrapped_one, with_windows]
)
def test_optimizers_around_wrapped_ones(hvd, make):
    model = shared_model(hvd)
    optimizer = make(hvd, list(model.parameters()))
    with warnings() as texts:
        train(hvd, model, optimizer, 24)
    assert not texts
    assert_same_on_all_ranks(hvd, model)
    _is_saved(hvd, model, optimizer)


def test_a_process_set_of_this_rank(hvd):
    """Each rank trains a model of its own, and saves it itself."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    own = sets[hvd.rank()]
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), process_set=own)
    with warnings() as texts:
        train(hvd, model, optimizer)
    assert not texts
    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(
            folder / str(hvd.rank()), model=model, optimizer=optimizer, process_set=own
        ) as checkpointer,
    ):
        checkpointer.save(1)
    for each in sets:
        hvd.remove_process_set(each)


def test_one_rank_alone():
    output = run_alone(
        """
import torch, hvdkit.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
    )
    assert output.strip() == "trained"


def test_a_model_that_no_optimizer_has(hvd, tmp_path):
    """A teacher, or an average of the weights: equal on all ranks, or the save raises an error."""
    model, teacher = shared_model(hvd), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        train(hvd, model, optimizer, 1)
        average.update_parameters(model)
    models = {"student": model, "teacher": teacher, "average": average}
    _is_saved(hvd, models, optimizer)
    with torch.no_grad():
        teacher[2].bias[3] += hvd.rank()
    with refused(
        hvd, tmp_path, r"'model-teacher: 2.bias' on rank 1", models, optimizer
    ) as checkpointer:
        hvd.register_local(teacher)
        checkpointer.save(3)


def test_state_that_each_rank_has_for_itself(hvd):
    """The statistics of batch norm, other buffers and random states differ between ranks."""
    model = nn.Sequential(small_model(), nn.BatchNorm1d(2, dtype=torch.float64), nn.Dropout())
    model.register_buffer("mean_of_inputs", torch.full((3,), float(hvd.rank())))
    optimizer = sgd(model.parameters())
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    torch.manual_seed(hvd.rank())
    train(hvd, model, optimizer, 3, lambda step: by_allreduce(hvd, model, step))
    assert not hvd.allgather_object(model[1].running_mean[0].item()).count(0)
    _is_saved(hvd, model, optimizer)


def test_the_state_of_an_optimizer_that_is_not_wrapped(hvd, tmp_path):
    model = shared_model(hvd)
    optimizer = adamw(model.parameters())
    train(hvd, model, optimizer, 2, lambda step: by_allreduce(hvd, model, step))
    optimizer.param_groups[0]["lr"] *= 1 + hvd.rank()
    with refused(hvd, tmp_path, "lr of parameter group 0", model, optimizer):
        pass


def test_an_optimizer_that_only_rank_0_has_wrapped(hvd, tmp_path):
    """Equal ranks are saved; ranks that differ raise an error on each of them."""
    model = shared_model(hvd)
    optimizer = sgd(model.parameters())
    if hvd.rank() == 0:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    _is_saved(hvd, model, optimizer)
    with torch.no_grad():
        model[0].bias[0] += hvd.rank()
    with refused(hvd, tmp_path, "'0.bias' on rank 1", model, optimizer):
        pass


@pytest.mark.parametrize("given", [3, ["weight"], "wrapped"])
def test_wrong_arguments_of_register_local(hvd, given):
    if isinstance(given, str):
        given = hvd.DistributedOptimizer(sgd(small_model().parameters()))
    with pytest.raises(UsageError, match="register_local"):
        hvd.register_local(given)
