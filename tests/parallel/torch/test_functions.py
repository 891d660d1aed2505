import copy

import pytest
import torch
from torch import nn

from hvdkit.core.consistency import RankMismatchError
from hvdkit.errors import HvdkitError
from tests.parallel.objects import NotPicklable, objects_and_errors
from tests.parallel.torch.oracle import DEVICE

# Several tests broadcast from rank 1.
pytestmark = pytest.mark.device(ranks=2)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.1),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "sgd-stateless": lambda p: torch.optim.SGD(p, lr=0.1),
}


def model_of(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(DEVICE, dtype)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 4, dtype=model[0].weight.dtype).to(DEVICE)
        model(x).square().mean().backward()
        optimizer.step()


def test_broadcast_parameters_of_a_state_dict(hvd):
    model = model_of(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    expected = model_of(seed=1).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("form", ["named generator", "list of parameters"])
def test_broadcast_parameters_of_other_forms(hvd, form):
    model = model_of(seed=hvd.rank())
    if form == "named generator":
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    else:
        hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    for p, q in zip(model.parameters(), model_of(seed=0).parameters(), strict=True):
        assert torch.equal(p, q)


def test_broadcast_parameters_of_every_kind_of_tensor(hvd):
    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randn(6, 4, generator=generator).to(DEVICE)
        return {
            "transposed": values.clone().t(),
            "every second": values.clone()[::2],
            "channels last": values.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
            "no dimension": values[0, 0].clone(),
            "nothing": torch.empty(0, 3, device=DEVICE),
            "bfloat16": values.bfloat16(),
            "float16": values.half(),
            "bool": values > 0,
            "int8": (values * 10).to(torch.int8),
            "complex": torch.complex(values, -values),
            "not a tensor": rank,
        }

    mine = make(hvd.rank())
    hvd.broadcast_parameters(mine, root_rank=1)
    expected = make(1)
    assert mine.pop("not a tensor") == hvd.rank()
    for name, value in mine.items():
        assert value.stride() == expected[name].stride(), name
        assert torch.equal(value, expected[name]), name


def test_broadcast_parameters_of_different_models_is_an_error_on_every_rank(hvd):
    model = nn.Linear(3, 2 + hvd.rank() // (hvd.size() - 1)).to(DEVICE)
    with pytest.raises(RankMismatchError, match=r"'bias', torch.float32 \[2\].*\[3\]"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def assert_equal_state(own, expected):
    assert own["param_groups"] == expected["param_groups"]
    assert own["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert own["state"][key].keys() == state.keys()
        for name, value in state.items():
            mine = own["state"][key][name]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert mine.dtype == value.dtype
                assert torch.equal(mine, value), (key, name)
            else:
                assert mine == value


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("has_state", ["root only", "all but root", "all"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_broadcast_optimizer_state(hvd, kind, has_state, wrapped):
    torch.manual_seed(hvd.rank())
    model = model_of(seed=0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    is_root = hvd.rank() == 0
    if has_state == "all" or is_root == (has_state == "root only"):
        train(model, optimizer, 2 + hvd.rank())
    if is_root:
        optimizer.param_groups[0]["weight_decay"] = 0.25
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    weights = copy.deepcopy(model.state_dict())
    before = copy.deepcopy(optimizer.state_dict())

    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), f"{name} was changed"
    assert all(p.grad is None for p in model.parameters()) or has_state != "root only" or is_root
    expected = hvd.broadcast_object(before, root_rank=0)
    assert_equal_state(optimizer.state_dict(), expected)
    if "betas" in optimizer.param_groups[0]:
        assert isinstance(optimizer.param_groups[0]["betas"], tuple)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(0)
    train(model, optimizer, 1)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(flat[None], name="weights")
    assert all(torch.equal(everyone[0], other) for other in everyone)


def test_broadcast_optimizer_state_keeps_float32_state_of_bfloat16_parameters(hvd):
    model = nn.Linear(3, 3).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    if hvd.rank() == 0:
        for p in model.parameters():
            optimizer.state[p] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full_like(p, 1 / 3, dtype=torch.float32),
                "exp_avg_sq": torch.full_like(p, 1 / 7, dtype=torch.float32),
            }
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state[model.weight]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"], torch.full((3, 3), 1 / 3, device=DEVICE))


def test_broadcast_optimizer_state_of_different_models_is_an_error_on_every_rank(hvd):
    model = nn.Linear(3, 2 if hvd.rank() else 3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RankMismatchError, match="group 0, parameter 0"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
def test_an_object_that_cannot_be_sent_raises_on_every_rank(hvd, large):
    from hvdkit.core import objects

    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(objects, "_LARGE", 1)
        for own, error in objects_and_errors(hvd.rank()):
            for call in (lambda o: hvd.broadcast_object(o, root_rank=1), hvd.allgather_object):
                with pytest.raises(HvdkitError, match=error):
                    call(own)
                assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


def test_optimizer_state_that_cannot_be_pickled_raises_on_every_rank(hvd):
    model = model_of(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["own"] = NotPicklable()
    with pytest.raises(HvdkitError, match="rank 0: TypeError: it has a socket"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
