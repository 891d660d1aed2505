"""Arguments of DistributedOptimizer, and its behaviour in a job of one rank."""

import copy
import math
import types
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdkit.errors import UsageError
from hvdkit.reduction.compression import Float16
from hvdkit.reduction.plan import Reduction


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_one_rank_trains_as_without_it(hvd):
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    plain = sgd(reference)
    for _ in range(3):
        for m, o in ((model, optimizer), (reference, plain)):
            o.zero_grad()
            m(torch.ones(4, 3)).square().sum().backward()
            o.step()
    assert torch.equal(model.weight, reference.weight)


class Around(torch.optim.Optimizer):
    """An optimizer around another one that does not call `Optimizer.__init__`."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_that_does_not_call_the_constructor_of_its_base(hvd):
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    optimizer = hvd.DistributedOptimizer(Around(sgd(model)), model.named_parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_layer_is_unfrozen_on_one_rank(hvd, passes):
    """Its gradients are averaged over the passes, and no gradients remain after the step."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    nn.init.ones_(model[1].weight)
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=passes
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    model[0].requires_grad_(True)
    for state.step in range(1, 3):
        before = model[0].bias.clone()
        nn.init.ones_(model[1].weight)
        for _ in range(passes):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        torch.testing.assert_close(before - model[0].bias, torch.full((2,), 0.4))
        assert not optimizer.gradients_wait()
        state.commit()
        optimizer.zero_grad()
    state.step = 0
    state.restore()
    assert state.step == 2


@pytest.mark.parametrize("passes", [1, 3])
def test_a_dropped_pass_on_one_rank(hvd, passes):
    """The whole window is dropped, as on several ranks."""
    model = nn.Linear(3, 1)
    before = model.bias.clone()
    optimizer = hvd.DistributedOptimizer(sgd(model), accumulation_steps=passes)
    for number in range(2 * passes):
        if number == 0:
            assert optimizer.drop_pass() == (passes == 1)
        elif number == passes - 1:
            with pytest.raises(hvd.BackwardFailed):
                model(torch.ones(2, 3)).sum().backward()
            assert optimizer.drop_pass()
        else:
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert torch.equal(model.bias, before) == (number < 2 * passes - 1)


def test_gradients_of_no_sync_on_one_rank(hvd):
    """They wait for a step. `flush` makes the step."""
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    before = model.bias.clone()
    for ends_early in (False, True):
        optimizer.zero_grad()
        with hvd.no_sync(optimizer):
            for _ in range(1 + ends_early):
                model(torch.ones(2, 3)).sum().backward()
        assert optimizer.gradients_wait()
        state.step += 1
        state.commit()
        if not ends_early:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert not optimizer.gradients_wait()
    assert optimizer.flush()
    assert not optimizer.flush()
    torch.testing.assert_close(before - model.bias, torch.full((1,), 0.8))
    state.restore()
    assert state.step == 0


def test_a_commit_while_a_conjugated_gradient_waits(hvd):
    """PyTorch conjugates the gradient lazily."""
    model = nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    (model[0].conj() * torch.ones(2)).sum().abs().backward()
    assert model[0].grad.is_conj()
    state.commit()
    optimizer.step()
    torch.testing.assert_close(model[0].detach(), torch.full((2,), 0.9 + 0j))


def test_state_loaded_before_wrapping_is_kept(hvd):
    model = nn.Linear(3, 2)
    plain = sgd(model)
    model(torch.ones(4, 3)).sum().backward()
    plain.step()
    momentum = plain.state[model.weight]["momentum_buffer"]
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer.state[model.weight]["momentum_buffer"] is momentum


def test_a_group_with_gradients_is_added_on_one_rank(hvd, tmp_path):
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(sgd(first), first.named_parameters())
    (first(torch.ones(4, 3)) + second(torch.ones(4, 3))).sum().backward()
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
    optimizer.step()
    first.zero_grad()
    second.zero_grad()
    with hvd.Checkpointer(tmp_path, model=first, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)


def lbfgs():
    return torch.optim.LBFGS(nn.Linear(3, 2).parameters())


def with_method(name, replace, scheduled=False):
    """Return an optimizer one of whose methods a script has replaced."""
    optimizer = sgd(nn.Linear(3, 2))
    setattr(optimizer, name, replace(optimizer, getattr(optimizer, name)))
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def wrapped(hvd, optimizer=None, named_parameters=None, **options):
    """Wrap an optimizer; `named_parameters` makes them of a model."""
    model = nn.Linear(3, 2)
    named = named_parameters and named_parameters(model)
    return hvd.DistributedOptimizer(optimizer or sgd(model), named, **options)


REFUSED = {
    "a name twice": (
        lambda hvd: wrapped(hvd, None, lambda m: [("w", m.weight), ("w", m.bias)]),
        "the name 'w' twice",
    ),
    "a parameter without a name": (
        lambda hvd: wrapped(hvd, None, lambda m: [("weight", m.weight)]),
        r"lacks 1 of the optimizer's 2 parameters.*\[2\]",
    ),
    "no names": (
        lambda hvd: wrapped(hvd, None, lambda m: m.parameters()),
        r"pairs \(name, parameter\)",
    ),
    "wrapped twice": (
        lambda hvd: wrapped(hvd, wrapped(hvd, compression=hvd.Compression.fp16)),
        "already",
    ),
    **{
        f"{passes} passes": (
            lambda hvd, passes=passes: wrapped(hvd, backward_passes_per_step=passes),
            "backward_passes_per_step is",
        )
        for passes in (0, 1.5)
    },
    **{
        f"operation {op}": (
            lambda hvd, op=op: wrapped(hvd, op=getattr(hvd, op, 99)),
            r"expected hvd\.Average, hvd\.Sum or hvd\.Adasum",
        )
        for op in ("Min", "Max", "Product", "99")
    },
    "a factor with a sum": (
        lambda hvd: wrapped(hvd, op=hvd.Sum, gradient_predivide_factor=2.0),
        r"pass op=hvd\.Average",
    ),
    "no optimizer": (lambda hvd: wrapped(hvd, nn.Linear(3, 2)), "optimizer is a Linear"),
    "LBFGS": (lambda hvd: wrapped(hvd, lbfgs()), "LBFGS"),
    "the state of LBFGS": (lambda hvd: hvd.broadcast_optimizer_state(lbfgs(), 0), "LBFGS"),
    "a tensor": (
        lambda hvd: hvd.broadcast_parameters(torch.ones(3), root_rank=0),
        "params is a tensor",
    ),
    "parameters to clip": (
        lambda hvd: hvd.clip_grad_norm_(nn.Linear(3, 2).parameters(), 1.0),
        "Give the optimizer instead of the model's parameters",
    ),
    "a group without memory": (
        lambda hvd: wrapped(hvd).add_param_group({"params": nn.LazyLinear(2).parameters()}),
        "a parameter of the new group is not initialised",
    ),
    "a replaced step": (
        lambda hvd: wrapped(hvd, with_method("step", lambda _, plain: lambda c=None: plain(c))),
        "of this SGD was replaced.*Wrap the optimizer first",
    ),
    "a replaced step under a scheduler": (
        lambda hvd: wrapped(hvd, with_method("step", _bound, scheduled=True)),
        "of this SGD was replaced",
    ),
    "a replaced zero_grad": (
        lambda hvd: wrapped(hvd, with_method("zero_grad", lambda _, plain: partial(plain, False))),
        "of this SGD was replaced",
    ),
}


def _bound(optimizer, plain):
    return types.MethodType(lambda self, closure=None: plain(closure), optimizer)


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused(hvd, what):
    call, said = REFUSED[what]
    with pytest.raises(UsageError, match=said):
        call(hvd)


def test_what_looks_like_a_wrong_argument(hvd):
    hvd.broadcast_parameters(nn.ParameterList([torch.ones(3)]), root_rank=0)
    optimizer = sgd(nn.Linear(3, 2))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hvd.DistributedOptimizer(optimizer)


class Counting(torch.optim.SGD):
    """An optimizer with attributes of its own."""

    def __init__(self, parameters, **attributes):
        super().__init__(parameters, lr=0.1)
        self.__dict__.update(attributes)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def test_attributes_of_an_optimizer_keep_their_meaning(hvd):
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(Counting(model.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert optimizer.steps == number + 1
    for name in ("grad_norm", "process_set", "_stepped"):
        with pytest.raises(UsageError, match=f"Counting has '{name}', and so has"):
            hvd.DistributedOptimizer(Counting(model.parameters(), **{name: 7}))


def test_both_optimizers_have_one_state_and_the_same_groups(hvd):
    """The scheduler may hold the plain one, and the script may replace groups of the other."""
    model = nn.Linear(2, 1)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    replace = {
        "__setstate__": lambda groups: optimizer.__setstate__({"param_groups": groups}),
        "assignment": lambda groups: setattr(optimizer, "param_groups", groups),
        "load_state_dict": lambda _: optimizer.load_state_dict(optimizer.state_dict()),
        "of the plain one": lambda _: plain.load_state_dict(plain.state_dict()),
    }
    for how in replace.values():
        how([{**group, "lr": 0.1} for group in optimizer.param_groups])
        rate = plain.param_groups[0]["lr"]
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups is plain.param_groups
        assert optimizer.state is plain.state
        assert optimizer.param_groups[0]["lr"] == 0.5 * rate


class Scaled(torch.optim.SGD):
    def step(self, closure=None, *, loss=1.0):
        for group in self.param_groups:
            group["lr"] = 0.1 * loss
        return super().step(closure)


def test_arguments_of_the_step_of_an_optimizer(hvd):
    weight = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(Scaled([weight], lr=1.0), [("weight", weight)])
    weight.sum().backward()
    optimizer.step(loss=3.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.7]))


def test_one_norm_of_several_optimizers_waits_for_the_window_of_each(hvd):
    model = nn.Linear(3, 2)
    one = hvd.DistributedOptimizer(torch.optim.SGD([model.weight], lr=0.1))
    other = hvd.DistributedOptimizer(torch.optim.SGD([model.bias], lr=0.1), accumulation_steps=2)
    model(torch.ones(4, 3)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    assert hvd.clip_grad_norm_([one, other], 1e-6) is None
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    other.step()
    model(torch.ones(4, 3)).sum().backward()
    assert hvd.clip_grad_norm_([one, other], 1e-6) > 1


def test_process_sets_are_entered_in_one_order(hvd):
    """Gradients arrive in different orders on the ranks, which would wait for each other."""
    from hvdkit.torch.reduction import passes

    entered = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def send(self, rounds, failed):
            entered.append((self.name, rounds))

        def wait(self, entry):
            entered.append((self.name, "wait"))

    sets = {identity: Recorder(f"set {identity}") for identity in (0, 1)}

    def listener(identity, number):
        return SimpleNamespace(
            coordinator=sets[identity],
            settings=SimpleNamespace(process_set=SimpleNamespace(process_set_id=identity)),
            number=number,
            rounds=f"rounds {number}",
            siblings=passes.Reducers(),
        )

    passes.reduce([listener(1, 3), listener(0, 2), listener(1, 1), listener(0, 4)], ())
    assert entered == [
        ("set 0", ["rounds 2", "rounds 4"]),
        ("set 1", ["rounds 1", "rounds 3"]),
        ("set 0", "wait"),
        ("set 1", "wait"),
    ]


def test_a_reducers_state_includes_restored_states_of_unreduced_gradients(hvd):
    from hvdkit.torch.reduction.reducer import GradientReducer

    def reduce(reducer, *names):
        for name in names:
            p = nn.Parameter(torch.zeros(3))
            parameters.append(p)
            reducer.reduce([torch.ones(3)], [p], [name])

    parameters = []  # kept, because ids of sets must differ
    reducer = GradientReducer(Reduction(Float16()))
    reduce(reducer, "a", "b")
    state = reducer.state()
    assert len(state) == 2
    resumed = GradientReducer(Reduction(Float16()))
    resumed.restore_state(state)
    assert resumed.state() == state
    reduce(resumed, "a")
    assert len(resumed.state()) == 2


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_sparse_gradients_are_clipped_as_dense_ones(hvd, p):
    norms, weights = [], []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 3, sparse=sparse), nn.Linear(3, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        model(torch.tensor([1, 1, 3])).square().sum().backward()
        norms.append(hvd.clip_grad_norm_(optimizer, 0.01, p))
        optimizer.step()
        weights.append(model[0].weight)
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*weights)


def test_a_pass_waits_for_its_step_on_one_rank(hvd):
    model = nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for _ in range(2):
        assert not optimizer.gradients_wait()
        model(torch.ones(2, 3)).sum().backward()
        assert optimizer.gradients_wait()
        optimizer.step()
        assert not optimizer.gradients_wait()
        optimizer.zero_grad()
