"""Parameters, optimizer state and options that change on one rank only are found while training."""

import contextlib
import math
import re

import numpy as np
import pytest
import torch

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.agreement.replicas import FOLDER
from hvdkit.errors import UsageError
from hvdkit.reduction.accumulation import PassesDiffer
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import (
    adamw,
    assert_close,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
    whole_batch,
)

INTERVAL = 3


def train(hvd, model, optimizer, steps, before=lambda step: None, dtype=torch.float64):
    """Train, and call `before(step)` before each step's forward pass."""
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step, dtype)).backward()
        optimizer.step()


def wrapped(hvd, model, make, **options):
    return hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), check_interval=INTERVAL, **options
    )


def text_of(log):
    return "".join(record.getMessage() for record in log)


def flip(tensor, element, bit):
    """Flip one bit, as a fault of memory does."""
    with torch.no_grad():
        words = tensor.view(-1).view(torch.int64)
        words[element] ^= torch.tensor(1, dtype=words.dtype) << bit


def test_both_versions_are_saved(hvd, tmp_path):
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    with contextlib.chdir(folder):
        model = small_model()
        optimizer = wrapped(hvd, model, adamw)
        last = hvd.size() - 1

        def before(step):
            if step == 2 and hvd.rank() == last:
                flip(model[2].weight, 5, 63)

        with pytest.raises(RankMismatchError) as caught:
            train(hvd, model, optimizer, 8, before)
        message = assert_raised_on_all_ranks(hvd, caught)
        assert "after step 3: '2.weight'" in message
        assert re.search(r"differs in 1 of 42 elements from rank 0: element 5 is -?0", message)
        hvd.barrier()
        own = np.load(f"{FOLDER}/step-3-rank-{last}.npz")
        first = np.load(f"{FOLDER}/step-3-rank-0.npz")
        assert own.keys() == first.keys()
        difference = own["'2.weight'"] != first["'2.weight'"]
        assert np.flatnonzero(difference).tolist() == [5]
        # The training can go on after a broadcast.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(hvd, model, optimizer, 4)
        assert_same_on_all_ranks(hvd, model)


def test_keys_of_the_script_may_differ(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model, sgd)
    optimizer.param_groups[0]["of this rank"] = hvd.rank()
    train(hvd, model, optimizer, 5)


def test_optimizer_states_are_compared_after_each_join(hvd, tmp_path):
    """`join` may end every epoch before the first comparison is due."""
    with contextlib.chdir(tmp_path):
        model = small_model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        train(hvd, model, optimizer, 5 if hvd.rank() == 0 else 4)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        with pytest.raises(RankMismatchError) as caught:
            train(hvd, model, optimizer, 1)
        message = assert_raised_on_all_ranks(hvd, caught)
        where = "momentum_buffer of '0.weight'"
        assert f"Ranks have different values at the first comparison: {where}" in message
        assert "After hvd.join()" in message
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        train(hvd, model, optimizer, 4)
        assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"check_interval": -1}, "check_interval is -1: expected a number of steps, or 0"),
        ({"check_interval": 1.5}, "check_interval is 1.5: expected a number of steps"),
        ({"on_mismatch": "ignore"}, "on_mismatch is 'ignore': expected 'stop' or 'repair'"),
    ],
)
def test_wrong_settings(hvd, options, text):
    model = small_model()
    with pytest.raises(UsageError, match=text):
        hvd.DistributedOptimizer(sgd(model.parameters()), **options)


def saving(hvd, folder, **options):
    """Return a model, its optimizer and a checkpointer, and a function that trains until a step."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        adamw(model.parameters()), model.named_parameters(), **options
    )
    checkpointer = hvd.Checkpointer(folder, model=model, optimizer=optimizer, every_steps=2)

    def until(last, first=0, before_save=lambda step: None):
        for step in range(first, last):
            train(hvd, model, optimizer, 1)
            before_save(step + 1)
            checkpointer.maybe_save(step + 1)

    return model, optimizer, checkpointer, until


@pytest.mark.parametrize(("rank", "kind"), [(0, "parameter"), (1, "exp_avg"), (1, "lr")])
def test_ranks_that_differ_are_not_saved(hvd, tmp_path, rank, kind):
    """The checkpoint is that of rank 0, and a restart would resume from it."""
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        model, optimizer, checkpointer, until = saving(hvd, folder)

        def change(step):
            if step == 2:
                hvd.barrier()
                kept.extend(p.detach().clone() for p in model.parameters())
            if step != 4 or hvd.rank() != rank:
                return
            if kind == "lr":
                optimizer.param_groups[0]["lr"] *= 2
            else:
                changed = model[2].weight
                flip(changed if kind == "parameter" else optimizer.state[changed][kind], 5, 62)

        kept = []
        with pytest.raises(RankMismatchError) as caught:
            until(8, before_save=change)
        message = assert_raised_on_all_ranks(hvd, caught)
        assert "after step 4" in message
        assert message.endswith("Step 4 was not saved.")
        if kind == "lr":
            assert "lr of parameter group 0 is 0.02" in message
        else:
            blamed = 1 if hvd.size() == 2 else rank
            assert f"'2.weight' on rank {blamed} (host " in message
        assert [saved.step for saved in checkpointer.steps()] == [2]
        checkpointer.close()
        model, _, checkpointer, until = saving(hvd, folder)
        assert checkpointer.restore().step == 2
        assert all(map(torch.equal, model.parameters(), kept))
        until(4, first=2)
        assert checkpointer.latest() == 4
        checkpointer.close()


def test_what_the_majority_has_is_saved(hvd, tmp_path):
    """All of rank 0's tensors are wrong, also the small ones that are saved as plain values."""
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        model, optimizer, checkpointer, until = saving(hvd, folder, on_mismatch="repair")

        def change(step):
            if step == 4 and hvd.rank() == 0:
                state = optimizer.state[model[0].bias]
                for each in (model[0].bias, state["exp_avg"], state["step"]):
                    each.detach().mul_(2)

        if hvd.size() == 2:
            with pytest.raises(RankMismatchError, match="Step 4 was not saved"):
                until(4, before_save=change)
            return
        until(4, before_save=change)
        last = hvd.size() - 1
        state = optimizer.state_dict()["state"] if hvd.rank() == last else None
        expected = hvd.broadcast_object(state, last)
        weights = [p.detach().clone() for p in model.parameters()]
        checkpointer.close()
        model, optimizer, checkpointer, _ = saving(hvd, folder)
        assert checkpointer.restore().step == 4
        assert all(map(torch.equal, model.parameters(), weights))
        for key, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                assert torch.equal(value, expected[key][name]), name
        assert_same_on_all_ranks(hvd, model)
        checkpointer.close()


@pytest.mark.parametrize("options", [{"check_interval": 0}, {"check_parameters": False}])
def test_ranks_that_differ_on_purpose_are_saved(hvd, options):
    with shared_folder(hvd) as folder:
        model, _, checkpointer, until = saving(hvd, folder, **options)
        until(2, before_save=lambda _: flip(model[0].weight, 3, 62) if hvd.rank() == 1 else None)
        assert checkpointer.latest() == 2
        checkpointer.close()


def test_a_save_after_join_needs_a_broadcast(hvd, tmp_path):
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        model, optimizer, checkpointer, _ = saving(hvd, folder)
        train(hvd, model, optimizer, 5 if hvd.rank() == 0 else 3)
        last = hvd.join()
        with pytest.raises(RankMismatchError, match=r"After hvd.join\(\) or .* Step 5 was not"):
            checkpointer.save(5)
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        checkpointer.save(5)
        assert checkpointer.latest() == 5
        checkpointer.close()


def test_a_save_before_the_first_step_needs_no_broadcast(hvd):
    """The checkpoint is that of rank 0."""
    with shared_folder(hvd) as folder:
        model, _, checkpointer, until = saving(hvd, folder)
        if hvd.rank() == 1:
            flip(model[0].weight, 3, 62)
        checkpointer.save(0)
        assert checkpointer.latest() == 0
        with pytest.raises(RankMismatchError, match="at the first comparison: '0.weight'"):
            until(1)
        checkpointer.close()


@pytest.mark.parametrize(("make", "bits"), [(sgd, 0x7FF8000000000000), (adamw, -1)])
def test_weights_that_are_nan_on_all_ranks_are_reported_once(hvd, make, bits):
    """Weights that become NaN on one rank make the gradients of all ranks NaN.

    There are several NaN, so the ranks may have different ones.
    """
    model = small_model()
    optimizer = wrapped(hvd, model, make)

    def before(step):
        if step == 4 and hvd.rank() == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(torch.int64).fill_(bits)

    with recorded("hvdkit") as log:
        train(hvd, model, optimizer, 12, before)
    lines = [record.getMessage() for record in log]
    beginning = "After step 6, '4.bias' is NaN on all ranks: the loss or a gradient"
    assert sum(line.startswith(beginning) for line in lines) == (hvd.rank() == 0)


class OptimizerWithNumbers(torch.optim.SGD):
    """An optimizer that keeps numbers, lists and dicts in its state, as many libraries do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "count" not in state:
                    state |= {"count": 0, "factor": 1.0, "sums": [torch.zeros_like(p)], "more": {}}
                    state["more"]["square"] = torch.zeros_like(p)
                state["count"] += 1
                state["factor"] *= 0.9
                state["sums"][0].add_(p.grad)
                state["more"]["square"].add_(p.grad.square())
        self.state["all"] = self.state.get("all", 0) + 1
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """An optimizer around another one that does not call `Optimizer.__init__`: no defaults."""

    def __init__(self, parameters):
        self.inner = sgd(parameters)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.inner.step(closure)


class Weight(torch.nn.Parameter):
    """A parameter of a class of the script."""


def with_numbers(parameters):
    return OptimizerWithNumbers(parameters, lr=0.01)


def two_groups(parameters):
    parameters = list(parameters)
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)


def set_option(name, value):
    def change(model, optimizer):
        optimizer.param_groups[0][name] = value

    return change


def change_state(change):
    return lambda model, optimizer: change(optimizer.state[model[0].weight])


def move_to_the_first_group(_, optimizer):
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop(0))


def to_float(state):
    state["momentum_buffer"] = state["momentum_buffer"].float()


def count_more(state):
    state["count"] += 2


def count_all_more(_, optimizer):
    optimizer.state["all"] += 2


def double_weight(model, _):
    model[0].weight.data.mul_(2)


def scale_by_five(model, _):
    model.scale.data = torch.full((1,), 5.0).expand(3)


#: Name -> optimizer, what rank 1 changes before step 3, and a part of the error on all ranks.
CHANGES = {
    "a tensor as option": (adamw, set_option("lr", torch.tensor([0.5])), "lr of parameter group 0"),
    "a NumPy number": (adamw, set_option("eps", np.float32(0.25)), "eps of parameter group 0 is 0"),
    "a tuple": (adamw, set_option("betas", (torch.tensor(0.5), 0.9)), "group 0 is (0.5, 0.9)"),
    "a flag": (
        adamw,
        set_option("foreach", False),
        "rank 1: foreach of parameter group 0 is False",
    ),
    "a group": (two_groups, move_to_the_first_group, "rank 1: parameter group 0 has 3 parameters"),
    "a dtype": (sgd, change_state(to_float), "rank 1: momentum_buffer of '0.weight', float32 [7, "),
    "a number": (with_numbers, change_state(count_more), "3: count of '0.weight' on rank 1 "),
    "a list": (
        with_numbers,
        change_state(lambda state: state["sums"][0].add_(2)),
        "after step 3: sums[0] of '0.weight' on rank 1 ",
    ),
    "a dict": (
        with_numbers,
        change_state(lambda state: state["more"]["square"].add_(2)),
        "after step 3: more['square'] of '0.weight' on rank 1 ",
    ),
    "a number of all": (with_numbers, count_all_more, "3: all of the optimizer on rank 1 "),
    "no defaults": (Around, double_weight, "after step 3: '0.weight' on rank 1 "),
    "expanded": (sgd, scale_by_five, "'scale' on rank 1 (host "),
}
#: Those that no rank can repair.
KEPT = (
    "a tensor as option",
    "a NumPy number",
    "a tuple",
    "a flag",
    "a group",
    "a dtype",
    "expanded",
)


@pytest.mark.parametrize("on_mismatch", ["stop", "repair"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_on_one_rank_is_named_or_repaired(hvd, tmp_path, kind, on_mismatch):
    """Otherwise a repair would copy parameters again and again, and never the cause."""
    make, change, text = CHANGES[kind]
    model = small_model()
    model[0].weight = Weight(model[0].weight.detach())
    model.scale = torch.nn.Parameter(torch.ones(1).expand(3), requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        make(trained), model.named_parameters(), check_interval=INTERVAL, on_mismatch=on_mismatch
    )

    def before(step):
        if step == INTERVAL - 1 and hvd.rank() == 1:
            change(model, optimizer)

    with contextlib.chdir(tmp_path), recorded("hvdkit") as log:
        if on_mismatch == "stop" or kind in KEPT or hvd.size() == 2:
            with pytest.raises(RankMismatchError) as caught:
                train(hvd, model, optimizer, 8, before)
            message = assert_raised_on_all_ranks(hvd, caught)
            assert text in message
            if (kind, on_mismatch) == ("expanded", "repair") and hvd.size() > 2:
                assert "Rank 1 cannot copy the values of the majority: RuntimeError: " in message
            return
        train(hvd, model, optimizer, 8, before)
    assert (text in text_of(log)) == (hvd.rank() == 0)
    assert len(log) == (hvd.rank() == 0)
    assert_same_on_all_ranks(hvd, model)
    if make is with_numbers:
        state = optimizer.state[model[0].weight]
        assert (state["count"], type(state["count"]), optimizer.state["all"]) == (8, int, 8)
        assert state["factor"] == pytest.approx(0.9**8)


def test_a_conjugated_parameter_is_compared(hvd):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]).conj())
    optimizer = wrapped(hvd, model, lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        model.weight.abs().sum().backward()
        optimizer.step()


def rounded_differently(number):
    return math.nextafter(number, 2.0)


@pytest.mark.parametrize(
    "make", [float, int, np.float64, np.float32, torch.tensor, rounded_differently]
)
def test_equal_options_of_different_types(hvd, make):
    model = small_model()
    optimizer = wrapped(hvd, model, lambda p: torch.optim.SGD(p, lr=1.0, foreach=False))
    if hvd.rank() == 1:
        optimizer.param_groups[0]["lr"] = make(1)
    train(hvd, model, optimizer, 5)


def test_a_repair_between_two_passes_of_one_graph(hvd, tmp_path):
    """Autograd refuses a pass of a graph whose parameters were changed in place."""
    if hvd.size() == 2:
        pytest.skip("a majority is needed")
    model = small_model()
    optimizer = wrapped(hvd, model, sgd, on_mismatch="repair")
    with contextlib.chdir(tmp_path), recorded("hvdkit") as log:
        for step in range(6):
            if step == 2 and hvd.rank() == 1:
                model[2].weight.data.mul_(2)
            optimizer.zero_grad()
            x = batch_of(hvd.rank(), step)
            y = model(x)
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()
            optimizer.step()
    assert len(log) == (hvd.rank() == 0)
    assert_same_on_all_ranks(hvd, model)


def test_a_parameter_that_one_rank_has_changed_to_another_shape(hvd):
    """No rank waits, and the error names the parameter."""
    model = small_model(torch.float32)
    optimizer = wrapped(hvd, model, sgd)

    def before(step):
        if step == 2 and hvd.rank() == 1:
            optimizer.state.clear()
            for p, shape in zip(model[:3].parameters(), [(9, 5), (9,), (6, 9)], strict=False):
                p.data = torch.ones(shape)

    with pytest.raises(PassesDiffer) as caught:
        train(hvd, model, optimizer, 5, before, torch.float32)
    message = assert_raised_on_all_ranks(hvd, caught)
    assert "rank 1: step 3" in message
    assert "dtype, device or shape than before (0.weight is now float32 [9, 5] on " in message


def test_an_unused_parameter_does_not_hide_nan(hvd):
    """The loss does not depend on the smallest parameter, which stays finite."""
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        sgd([*model.parameters(), torch.nn.Parameter(torch.ones(()))]), check_interval=INTERVAL
    )
    with recorded("hvdkit") as log:
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), step))
            (loss * torch.nan if step == 1 and hvd.rank() == 1 else loss).backward()
            optimizer.step()
    assert ("is NaN on all ranks" in text_of(log)) == (hvd.rank() == 0)


class SharpnessAware(torch.optim.Optimizer):
    """Has methods of its own that make the step."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05)

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["move"] = 0.05 * p.grad.sign()
            p.add_(self.state[p]["move"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["move"])
        self.base.step()
        self.zero_grad()


def test_an_optimizer_with_steps_of_its_own_is_compared(hvd, tmp_path):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(
        SharpnessAware(model.parameters()), model.named_parameters()
    )
    plain = SharpnessAware(reference.parameters())
    for number in range(4):
        for step in ("first_step", "second_step"):
            loss_of(model, batch_of(hvd.rank(), number)).backward()
            getattr(optimizer, step)()
            loss_of(reference, whole_batch(hvd, number)).backward()
            getattr(plain, step)()
    assert_close(model, reference)
    with torch.no_grad():
        model[0].bias[0] += hvd.rank()

    def train():
        for number in range(4):
            for step in ("first_step", "second_step"):
                loss_of(model, batch_of(hvd.rank(), number)).backward()
                getattr(optimizer, step)()

    with contextlib.chdir(tmp_path), pytest.raises(RankMismatchError, match=r"0\.bias"):
        train()


def test_a_forward_pass_that_changes_the_weights(hvd):
    embedding = torch.nn.Embedding(6, 2, max_norm=0.1)
    hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))
    with pytest.raises(RankMismatchError, match=r"max_norm.*after the step: weight.data.renorm_"):
        embedding(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.zero_grad()


def test_added_parameters_are_compared_at_their_first_reduction(hvd):
    """A head joins in the middle of the training, with other values on each rank."""
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False)
    for p in model.parameters():
        torch.nn.init.ones_(p)
    torch.nn.init.constant_(head.weight, 1.0 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.add_param_group({"params": head.parameters()})
    with pytest.raises(RankMismatchError, match=r"first comparison.*broadcast_parameters"):
        head(model(torch.ones(1, 2))).sum().backward()
    hvd.broadcast_parameters(head, root_rank=0)
    optimizer.zero_grad()
    head(model(torch.ones(1, 2))).sum().backward()
    optimizer.step()
