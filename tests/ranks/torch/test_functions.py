import copy

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from tests.ranks.objects import objects_and_errors
from tests.ranks.torch.oracle import DEVICE

# Several tests broadcast from rank 1.
pytestmark = pytest.mark.device(ranks=2)


class Rotated(torch.optim.SGD):
    """An optimizer with a column-major matrix, as in SOAP."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["basis"] = torch.linalg.qr(p.detach().reshape(len(p), -1)).R


OPTIMIZERS = {
    "rotated": lambda p: Rotated(p, lr=0.1, momentum=0.9),
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


def test_broadcast_parameters_of_a_model_sends_all_buffers(hvd):
    """As the constructor of DistributedDataParallel (pytorch #111138)."""
    model = nn.Module()
    for persistent in (False, True):
        own = torch.full((2,), 1.0 + hvd.rank())
        model.register_buffer(f"buffer{persistent}", own, persistent=persistent)
    model.weight = nn.Parameter(torch.full((3,), 1.0 + hvd.rank()))
    hvd.broadcast_parameters(model, root_rank=1)
    for each in (model.weight, model.bufferFalse, model.bufferTrue):
        assert each.tolist() == [2.0] * len(each)


def test_broadcast_parameters_of_other_forms(hvd):
    model = model_of(seed=hvd.rank())
    for root, form in ((0, model.named_parameters()), (1, list(model.parameters()))):
        hvd.broadcast_parameters(form, root_rank=root)
        for p, q in zip(model.parameters(), model_of(seed=root).parameters(), strict=True):
            assert torch.equal(p, q)
        model.load_state_dict(model_of(seed=hvd.rank()).state_dict())


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
            "conjugate": torch.complex(values, -values).conj(),
            "not a tensor": rank,
        }

    mine = make(hvd.rank())
    hvd.broadcast_parameters(mine, root_rank=1)
    expected = make(1)
    assert mine.pop("not a tensor") == hvd.rank()
    for name, value in mine.items():
        assert value.stride() == expected[name].stride(), name
        assert torch.equal(value, expected[name]), name


class Packed(torch.Tensor):
    """A tensor whose elements are in another tensor, as of a quantised weight."""

    @staticmethod
    def __new__(cls, content):
        return torch.Tensor._make_wrapper_subclass(cls, content.shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return torch.zeros(args[0].shape) if function is torch.ops.aten.clone.default else args[0]


def test_tensors_without_memory_of_their_own_are_refused(hvd):
    state = {"state": {0: {"packed": Packed(torch.ones(2))}}}
    for tensor, text in (
        (nn.Linear(1, 1).state_dict(), ".* for each state dict"),
        (torch.ones(2).to_sparse(), r"has the layout torch\.sparse_coo"),
        (torch.ones(2, device="meta"), "is on the meta device"),
        (torch.ones(1, 2).expand(3, 2), r"is an expanded tensor of shape \[3, 2\]"),
        (nn.LazyLinear(1).weight, "is not initialised and has no shape"),
        (Packed(torch.ones(2)), "is a .*Packed, whose elements are in other tensors"),
    ):
        with pytest.raises(UsageError, match=rf"params\['w'\] {text}"):
            hvd.broadcast_parameters({"w": tensor}, root_rank=0)
    optimizer = sgd()
    optimizer.step()
    if hvd.rank() == 0:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = state["state"][0]
    with pytest.raises(HvdkitError, match="in the optimizer's state is a .*Packed"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    lazy = nn.LazyLinear(1)
    plain = torch.optim.SGD(lazy.parameters())
    with pytest.raises(UsageError, match="is not initialised"):
        hvd.DistributedOptimizer(plain, lazy.named_parameters())


def test_a_frozen_parameter_without_memory_of_its_own_is_not_compared(hvd):
    model = nn.Linear(2, 1, device=DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    frozen = nn.Parameter(Packed(torch.ones(2)), requires_grad=False)
    named = [*model.named_parameters(), ("frozen", frozen)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named)
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()


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
                assert mine.stride() == value.stride()
                assert torch.equal(mine, value), (key, name)
            else:
                assert mine == value


@pytest.mark.parametrize(
    ("has_state", "wrapped"), [("root only", False), ("all but root", True), ("all", False)]
)
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


class Counting(torch.optim.SGD):
    """An optimizer with an entry of its own in its `state_dict()`."""

    total_step = 0

    def state_dict(self):
        return super().state_dict() | {"total_step": self.total_step, "scale": torch.ones(2)}


class Lookahead(torch.optim.SGD):
    """An optimizer with the state of another one in its `state_dict()`."""

    def state_dict(self):
        return {"base_optimizer": super().state_dict()}


def test_broadcast_optimizer_state_refuses_other_entries_that_differ(hvd):
    optimizer = Counting(model_of(seed=0).parameters(), lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if hvd.rank() == 0:
        optimizer.total_step = 3
    text = r"\['total_step'\].* does not send: 3.*does not send: 0.*hvd.broadcast_object"
    with pytest.raises(RankMismatchError, match=text):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.raises(UsageError, match=r"Lookahead has the entries 'base_optimizer'.*Use "):
        hvd.broadcast_optimizer_state(Lookahead(model_of(seed=0).parameters(), lr=0.1), 0)


def test_broadcast_optimizer_state_of_different_models_is_an_error_on_every_rank(hvd):
    model = nn.Linear(3, 2 if hvd.rank() else 3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RankMismatchError, match="group 0, parameter 0"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
def test_an_object_that_cannot_be_sent_raises_on_every_rank(hvd, large):
    from hvdkit.agreement import objects

    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(objects, "_LARGE", 1)
        for own, error in objects_and_errors(hvd.rank()):
            for call in (lambda o: hvd.broadcast_object(o, root_rank=1), hvd.allgather_object):
                with pytest.raises(HvdkitError, match=error):
                    call(own)
                assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


def sgd():
    return torch.optim.SGD([torch.zeros(2, device=DEVICE, requires_grad=True)], lr=0.1)


# The call, with an argument that depends on the rank; the argument of most ranks and of one rank;
# and the error on all ranks.
BAD_ARGUMENTS = {
    "broadcast_parameters": (
        lambda hvd, params: hvd.broadcast_parameters(params, root_rank=0),
        lambda: {"w": torch.zeros(2, device=DEVICE)},
        lambda: torch.zeros(2, device=DEVICE),
        "params is a tensor",
    ),
    "broadcast_parameters from": (
        lambda hvd, root: hvd.broadcast_parameters([torch.zeros(2, device=DEVICE)], root_rank=root),
        lambda: 0,
        lambda: "0",
        r"root_rank is '0': expected one of \[0, 1",
    ),
    "broadcast_optimizer_state": (
        lambda hvd, optimizer: hvd.broadcast_optimizer_state(optimizer, root_rank=0),
        sgd,
        lambda: torch.optim.LBFGS([torch.zeros(2, requires_grad=True)]),
        "LBFGS keeps one history",
    ),
    "broadcast_optimizer_state of": (
        lambda hvd, optimizer: hvd.broadcast_optimizer_state(optimizer, root_rank=0),
        sgd,
        lambda: nn.Linear(1, 1),
        "optimizer is a Linear: expected a torch optimizer",
    ),
    "broadcast_object": (
        lambda hvd, root: hvd.broadcast_object("text", root_rank=root),
        lambda: 0,
        lambda: 99,
        r"rank 1: UsageError: root_rank is 99: expected one of",
    ),
    "broadcast_object from": (
        lambda hvd, root: hvd.broadcast_object("text", root_rank=root),
        lambda: 0,
        lambda: 1,
        r"disagree about the rank that sends \(ranks? 0[, 23]*: root_rank is 0; rank 1: root_rank",
    ),
    "Monitor": (
        lambda hvd, every: hvd.Monitor([], every=every),
        lambda: 1,
        lambda: 0,
        "every is 0: expected a whole number",
    ),
    "remove_process_set": (
        lambda hvd, own: hvd.remove_process_set(own or hvd.global_process_set),
        lambda: None,
        lambda: [0],
        r"has not passed a process set \(rank 1: UsageError: process_set is \[0\]",
    ),
    "equal_batches": (
        lambda hvd, data: list(hvd.equal_batches(data)),
        lambda: [1],
        lambda: 1,
        "reading a batch has raised on another rank|'int' object is not iterable",
    ),
    # The engine compares what the ranks give to a collective of one name.
    "allreduce": (
        lambda hvd, x: hvd.allreduce(x, name="bad shape"),
        lambda: torch.zeros(2, device=DEVICE),
        lambda: torch.zeros(3, device=DEVICE),
        "Mismatched ALLREDUCE tensor shapes",
    ),
    "allreduce of": (
        lambda hvd, x: hvd.allreduce(x, name="bad dtype"),
        lambda: torch.zeros(2, device=DEVICE),
        lambda: torch.zeros(2, device=DEVICE).double(),
        "Mismatched data types",
    ),
    "broadcast": (
        lambda hvd, root: hvd.broadcast(torch.zeros(2), root, name="bad root"),
        lambda: 0,
        lambda: 1,
        "Mismatched BROADCAST root ranks",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_of_one_rank_raises_on_every_rank(hvd, name):
    call, good, bad, error = BAD_ARGUMENTS[name]
    argument = bad() if hvd.rank() == 1 else good()
    with pytest.raises((RuntimeError, TypeError), match=error):
        call(hvd, argument)
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
