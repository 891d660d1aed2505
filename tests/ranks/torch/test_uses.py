"""Common uses of PyTorch around `loss.backward()`, on ranks and in one process.

Each use is a training step without code for ranks. A rank runs it with a wrapped optimizer and
its own batch; one process runs it with a plain optimizer and all batches.

Add a use: write a function of a `Training` and decorate it with `use`.
"""

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel

from hvdkit.errors import UsageError
from tests.ranks.actions import Actions
from tests.ranks.torch.oracle import (
    DEVICE,
    TOLERANCES,
    Twins,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
    whole_batch,
)


@dataclass
class Training:
    """A model, its optimizer and a batch, on a rank or in one process.

    Attributes:
        model: maps batches of 5 features to 2.
        optimizer: wrapped or plain.
        step: the number of the step.
        x: the batch.
        kept: values that a use keeps between steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    x: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    kept: dict[str, Any] = field(default_factory=dict)

    def loss(self, factor=1.0):
        return loss_of(self.model, factor * self.x)

    def train(self, loss):
        """Reset the gradients, and make a pass and a step."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def gradients(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]


USES = use = Actions()


# Copies of the model


@use
def moving_average_of_weights(t: Training) -> None:
    """Parameters created after wrapping that no optimizer trains."""
    if "average" not in t.kept:
        t.kept["average"] = AveragedModel(t.model)
        t.kept["schedule"] = SWALR(t.optimizer, swa_lr=0.01, anneal_epochs=2)
    t.train(t.loss())
    t.kept["average"].update_parameters(t.model)
    t.kept["schedule"].step()
    if t.step == 3:
        t.model.load_state_dict(t.kept["average"].module.state_dict())


@use
def teacher(t: Training) -> None:
    """A copy of the model, which also gets gradients."""
    copied = copy.deepcopy(t.model)
    t.optimizer.zero_grad()
    (t.loss() + (t.model(t.x) - copied(t.x) - 0.1).square().mean()).backward()
    loss_of(copied, t.x).backward()
    t.optimizer.step()


@use
def pickled(t: Training) -> None:
    """Pickle the model without a warning about hooks. The copy trains by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = pickle.loads(pickle.dumps(t.model))
    loss_of(copied, t.x).backward()
    t.train(t.loss())


# Gradients that are read and changed


@use
def hooks(t: Training) -> None:
    """Hooks on tensors and modules, registered after wrapping; some return None."""
    if not t.kept:
        t.kept["seen"] = []
        for p in t.model.parameters():
            p.register_hook(lambda g: 0.5 * g)
            p.register_hook(lambda g: None)
        t.model[2].register_full_backward_hook(lambda *_: t.kept["seen"].append(t.step))
        t.model[0].register_full_backward_pre_hook(lambda _, g: (2 * g[0],))
    t.train(t.loss())
    assert t.kept["seen"] == list(range(t.step + 1))


@use
def saved_gradients(t: Training) -> None:
    """Gradients saved to a file, and loaded before the step."""
    t.optimizer.zero_grad()
    t.loss().backward()
    file = io.BytesIO()
    torch.save(t.gradients(), file)
    file.seek(0)
    for g, loaded in zip(t.gradients(), torch.load(file, weights_only=True), strict=True):
        assert torch.equal(g, loaded)
    t.optimizer.step()


# Ways to call backward


@use
def backward_in_a_thread(t: Training) -> None:
    t.optimizer.zero_grad()
    thread = threading.Thread(target=t.loss().backward)
    thread.start()
    thread.join()
    t.optimizer.step()


@use
def backward_without_gradient_mode(t: Training) -> None:
    t.optimizer.zero_grad()
    loss = t.loss()
    with torch.no_grad():
        loss.backward()
    t.optimizer.step()


@use
def backward_into_some_parameters(t: Training) -> None:
    """One pass into the last layer, then one into the first ones."""
    t.optimizer.zero_grad()
    loss = t.loss()
    loss.backward(inputs=list(t.model[4].parameters()), retain_graph=True)
    loss.backward(inputs=[*t.model[0].parameters(), *t.model[2].parameters()])
    t.optimizer.step()


@use
def backward_with_anomaly_detection(t: Training) -> None:
    t.optimizer.zero_grad()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        t.loss().backward()
    t.optimizer.step()


@use
def gradients_of_torch_func(t: Training) -> None:
    """Gradients that are assigned, without a backward pass."""

    def loss(values):
        y = torch.func.functional_call(t.model, values, (t.x,))
        return (y - t.x[:, :2].sin()).square().mean()

    values = {name: p.detach() for name, p in t.model.named_parameters()}
    for name, gradient in torch.func.grad(loss)(values).items():
        t.model.get_parameter(name).grad = gradient
    t.optimizer.step()


# Parameters that change


@use
def frozen_between_two_passes(t: Training) -> None:
    t.optimizer.zero_grad()
    t.loss().backward()
    t.model[2].requires_grad_(False)
    t.loss(0.5).backward()
    t.model[2].requires_grad_(True)
    t.optimizer.step()


@use
def edited_groups(t: Training) -> None:
    """Options changed by hand, and one group made into two."""
    group = t.optimizer.param_groups[0]
    group["lr"] *= 0.8
    if t.step == 1:
        taken = group["params"][-2:]
        del group["params"][-2:]
        t.optimizer.add_param_group({"params": taken, "lr": 0.01})
    if t.step == 2:
        t.optimizer.param_groups[1]["momentum"] = 0.5
    t.train(t.loss())


@use
def step_before_any_pass(t: Training) -> None:
    """A step before the first pass, and two steps after each pass."""
    if t.step == 0:
        t.optimizer.step()
    t.train(t.loss())
    t.optimizer.step()


def test_replaced_parameters_are_freed(hvd):
    """A scene whose number of points changes often."""
    scene, offset = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([scene, offset], lr=0.5), bucket_bytes=8)
    earlier = []
    for count in (4, 6, 3, 5):
        optimizer.zero_grad()
        ((scene + offset) * (hvd.rank() + 1)).sum().backward()
        mean = (hvd.size() + 1) / 2
        torch.testing.assert_close(scene.grad, torch.full_like(scene, mean))
        torch.testing.assert_close(offset.grad, torch.full((1,), len(scene) * mean))
        optimizer.step()
        earlier.append(weakref.ref(scene))
        scene = nn.Parameter(torch.ones(count))
        optimizer.param_groups[0]["params"][0] = scene
        if count == 3:
            wire_format = optimizer.reducer.gradients.reduction.format
            optimizer.reducer.set_buckets(16, wire_format)  # as `hvd.autotune` does
    (scene + offset).sum().backward()
    gc.collect()
    assert [reference() for reference in earlier] == [None] * 4


@pytest.mark.parametrize("name", USES)
def test_a_use_equals_one_process(hvd, name):
    compression = ["none", "fp16"][[*USES].index(name) % 2]
    model, reference = small_model(), small_model()
    own = Training(
        model,
        hvd.DistributedOptimizer(
            sgd(model.parameters()), compression=compression, bucket_bytes=200
        ),
    )
    alone = Training(reference, sgd(reference.parameters()))
    for step in range(4):
        own.step = alone.step = step
        own.x, alone.x = batch_of(hvd.rank(), step), whole_batch(hvd, step)
        for training in (own, alone):
            USES[name](training)
    assert_same_on_all_ranks(hvd, model)
    assert_close(model, reference, TOLERANCES[compression])


# Models of other kinds


def train_both(hvd, model, make=sgd):
    def make_trained(parameters):
        return make([p for p in parameters if p.requires_grad])

    twins = Twins(hvd, make_trained, model)
    twins.train(*range(4))
    twins.check()


def test_parametrized_weights(hvd):
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).mT

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2))
    model = model.to(DEVICE, torch.float64)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.weight_norm(model[2])
    parametrizations.orthogonal(model[3])
    train_both(hvd, model)


def test_parameters_of_one_element_with_any_stride(hvd):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 2)
            self.scale = nn.Parameter(torch.arange(10.0, dtype=torch.float64)[5::5])
            self.shift = nn.Parameter(torch.ones(3, 4, dtype=torch.float64)[:1, 1:2].t())

        def forward(self, x):
            return self.layer(x) * self.scale + self.shift

    torch.manual_seed(0)
    train_both(hvd, Scaled().to(DEVICE, torch.float64))


def test_a_compiled_training_step(hvd):
    twins = Twins(hvd)

    @torch.compile(backend="aot_eager")
    def train(x):
        twins.optimizer.zero_grad()
        loss_of(twins.model, x).backward()
        twins.optimizer.step()

    for step in range(4):
        train(batch_of(hvd.rank(), step))
        twins.plain[0].zero_grad()
        twins.backward_of_one_process(step)
        twins.plain[0].step()
    twins.check()


def test_a_model_made_channels_last_after_wrapping(hvd):
    """On one rank before the others: the memory order of a gradient is no part of its value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2)).to(DEVICE).double()
    images = torch.randn(hvd.size(), 2, 2, 5, 5, dtype=torch.float64).to(DEVICE)
    twins = Twins(hvd, model=model)
    for step in range(4):
        if step == 2 + hvd.rank():
            model.to(memory_format=torch.channels_last)
        twins.train(lambda m, rank: m(images[rank]).square().mean())
    twins.check()


def test_a_layer_that_grows(hvd):
    """The layer's parameters get data of another shape, and stay the optimizer's parameters."""
    twins = Twins(hvd, partial(torch.optim.SGD, lr=0.05), compression="fp16")
    for step in range(4):
        for model, _ in twins.sides if step == 2 else []:
            for p in model[0].parameters():
                p.data = torch.cat([p.data, 0.5 * p.data])
            model[2].weight.data = model[2].weight.data.repeat(1, 2)
        twins.train(step)
    twins.check()


def test_an_optimizer_with_methods_of_its_own(hvd):
    """An optimizer with `train()` and `eval()`, such as schedule-free optimizers."""

    class Switching(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.training = False

        def train(self):
            self.training = True

        def step(self, closure=None):
            assert self.training, "call train() first"
            return super().step(closure)

    model = small_model()
    optimizer = hvd.DistributedOptimizer(Switching(model.parameters()))
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    with pytest.raises(AssertionError, match="call train"):
        optimizer.step()
    optimizer.train()
    optimizer.step()
    assert optimizer.hvdkit_steps == 1
    assert_same_on_all_ranks(hvd, model)


def test_an_optimizer_for_each_parameter_that_steps_in_the_backward_pass(hvd):
    """Steps in hooks, which free each gradient before the next one is computed."""
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    def parts(model):
        return [nn.ParameterList([p]) for p in model.parameters()]

    twins = Twins(hvd, make, parts=parts, compression="fp16")

    def step(optimizer, _):
        optimizer.step()
        optimizer.zero_grad()

    for p, optimizer in zip(twins.model.parameters(), twins.optimizers, strict=True):
        p.register_post_accumulate_grad_hook(partial(step, optimizer))
    for number in range(4):
        twins.backward(number)
        assert all(p.grad is None for p in twins.model.parameters())
        for plain in twins.plain:
            step(plain, None)
    twins.check()


def test_one_optimizer_that_steps_at_the_end_of_the_backward_pass(hvd):
    """The step is in the hook of the parameter whose gradient comes last."""
    twins = Twins(hvd)
    left = []

    def count(_):
        left.pop()
        if not left:
            twins.optimizer.step()

    for p in twins.model.parameters():
        p.register_post_accumulate_grad_hook(count)
    for number in range(4):
        twins.zero_grad()
        left.extend(twins.model.parameters())
        twins.backward(number)
        twins.plain[0].step()
    twins.check()


def test_a_caught_error_of_autograd_grad_has_no_effect(hvd):
    twins = Twins(hvd)
    for step in range(3):
        if hvd.rank() == 0:
            hook = twins.model[0].weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                torch.autograd.grad(twins.own_loss(step), list(twins.model.parameters()))
            hook.remove()
        twins.train(step)
    twins.check()


def test_parameters_of_two_optimizers_are_refused(hvd):
    model = small_model()
    first = hvd.DistributedOptimizer(sgd(model[:3].parameters()))
    second = hvd.DistributedOptimizer(sgd(model[2:].parameters()))
    with pytest.raises(UsageError, match="wrapped again"):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    with pytest.raises(UsageError, match="wrapped again"):
        first.step()
    second.zero_grad()


def test_a_wrapped_optimizer_is_not_copied(hvd):
    optimizer = hvd.DistributedOptimizer(sgd(small_model().parameters()))
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(UsageError, match="cannot be copied or pickled"):
        copy.copy(optimizer)
    with pytest.raises(UsageError, match=r"store its state_dict\(\)"):
        pickle.dumps(optimizer)


def meta_loss(model, x):
    """The loss after a step of gradient descent, which is differentiated too."""
    named = dict(model.named_parameters())
    inner = torch.autograd.grad(loss_of(model, x), list(named.values()), create_graph=True)
    ahead = {name: p - 0.01 * g for (name, p), g in zip(named.items(), inner, strict=True)}
    made = torch.func.functional_call(model, ahead, (x,))
    return (made - x[:, :2].sin()).square().mean()


def test_derivatives_of_parameters_in_meta_learning(hvd):
    twins = Twins(hvd)
    for step in range(3):
        twins.train(lambda m, rank, s=step: meta_loss(m, batch_of(rank, s)))
    twins.check()
