"""Parameters, optimizer state and options that change on one rank only are found while training."""

import contextlib
import random
import re

import pytest
import torch

from hvdkit.core.consistency import RankMismatchError
from hvdkit.core.replicas import FOLDER
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.parallel.torch.oracle import (
    adamw,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
)

INTERVAL = 3
WIDTHS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


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
        words = tensor.view(-1).view(WIDTHS[tensor.dtype])
        words[element] ^= torch.tensor(1, dtype=words.dtype) << bit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_a_flipped_bit_is_found_and_named(hvd, tmp_path, seed, dtype):
    with contextlib.chdir(tmp_path):
        draw = random.Random(f"{seed} {dtype}")
        model = small_model(dtype)
        optimizer = wrapped(hvd, model, adamw)
        name, parameter = draw.choice(list(model.named_parameters()))
        key = draw.choice(["", "exp_avg", "exp_avg_sq"])
        rank, step = draw.randrange(hvd.size()), draw.randrange(1, 6)
        element = draw.randrange(parameter.numel())
        # From the middle of the mantissa to the sign.
        bit = draw.randrange(dtype.itemsize * 8 - 12, dtype.itemsize * 8)

        def before(now):
            if now == step and hvd.rank() == rank:
                flip(optimizer.state[parameter][key] if key else parameter, element, bit)

        found = INTERVAL if step <= INTERVAL else 2 * INTERVAL
        where = f"{key} of '{name}'" if key else f"'{name}'"
        blamed = 1 if hvd.size() == 2 else rank
        with recorded("hvdkit") as log:
            try:
                train(hvd, model, optimizer, 8, before, dtype)
            except RankMismatchError as error:
                message = str(error)
            else:
                message = text_of(log) if hvd.rank() == 0 else None
        # A flip of a low bit is as small as rounding, and only the first rank logs it.
        if message is None:
            return
        assert f"after step {found}: " in message
        assert where in message
        assert f"on rank {blamed} (host " in message
    assert ("No majority" in message) == (hvd.size() == 2)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_both_versions_are_saved(hvd, tmp_path, make):
    folder = hvd.broadcast_object(tmp_path, root_rank=0, name="folder")
    with contextlib.chdir(folder):
        model = small_model()
        optimizer = wrapped(hvd, model, make)
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
        own = torch.load(f"{FOLDER}/step-3-rank-{last}.pt")
        first = torch.load(f"{FOLDER}/step-3-rank-0.pt")
        assert own.keys() == first.keys()
        assert not torch.equal(own["'2.weight'"], first["'2.weight'"])
        # The training can go on after a broadcast.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(hvd, model, optimizer, 4)
        assert_same_on_all_ranks(hvd, model)


def test_the_majority_repairs(hvd, tmp_path):
    with contextlib.chdir(tmp_path):
        model = small_model()
        optimizer = wrapped(hvd, model, adamw, on_mismatch="repair")

        def before(step):
            if step == 2 and hvd.rank() == 0:
                flip(optimizer.state[model[0].bias]["exp_avg"], 1, 60)

        if hvd.size() == 2:
            with pytest.raises(RankMismatchError, match=r"exp_avg of '0.bias' on rank 1 "):
                train(hvd, model, optimizer, 8, before)
            return
        with recorded("hvdkit") as log:
            train(hvd, model, optimizer, 8, before)
        if hvd.rank() == 0:
            assert "The values of the majority were copied" in text_of(log)
            assert "on rank 0 (host" in text_of(log)
        assert_same_on_all_ranks(hvd, model)


def test_a_version_that_cannot_be_saved_changes_nothing(hvd, tmp_path):
    """A rank that raised another error would leave the others in a collective."""
    model = small_model()
    optimizer = wrapped(hvd, model, adamw, on_mismatch="repair")

    def before(step):
        if step == 2 and hvd.rank() == 0:
            flip(model[0].weight, 1, 60)

    with contextlib.chdir(tmp_path):
        (tmp_path / FOLDER).write_text("not a folder")
        if hvd.size() == 2:
            with pytest.raises(RankMismatchError, match="No majority"):
                train(hvd, model, optimizer, 5, before)
            return
        train(hvd, model, optimizer, 5, before)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("lr", 0.5, "lr of parameter group 0 is 0.5"),
        ("weight_decay", 0.1, "weight_decay of parameter group 0 is 0.1"),
    ],
)
def test_an_option_that_one_rank_has_changed(hvd, option, value, text):
    model = small_model()
    optimizer = wrapped(hvd, model, sgd)

    def before(step):
        if step == 2 and hvd.rank() == 1:
            optimizer.param_groups[0][option] = value

    with pytest.raises(RankMismatchError) as caught:
        train(hvd, model, optimizer, 8, before)
    message = assert_raised_on_all_ranks(hvd, caught)
    assert "rank 1: " in message
    assert text in message


def test_keys_of_the_script_may_differ(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model, sgd)
    optimizer.param_groups[0]["of this rank"] = hvd.rank()
    train(hvd, model, optimizer, 5)


def test_differences_of_rounding_are_logged_once(hvd):
    model = small_model(torch.float32)
    optimizer = wrapped(hvd, model, sgd)

    def before(step):
        if step == 1 and hvd.rank() == 1:
            with torch.no_grad():
                model[0].weight.mul_(1 + 1e-6)

    with recorded("hvdkit") as log:
        train(hvd, model, optimizer, 8, before, torch.float32)
    assert sum("as if processors round differently" in text_of([each]) for each in log) == (
        hvd.rank() == 0
    )


def test_ranks_that_joined_are_not_compared(hvd):
    """The other ranks find a difference at the first comparison after `join` has returned."""
    model = small_model()
    optimizer = wrapped(hvd, model, sgd)
    own = 7 if hvd.rank() == 0 else 5
    train(hvd, model, optimizer, own)
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    train(hvd, model, optimizer, 5)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("options", [{"check_interval": 0}, {"check_parameters": False}])
def test_without_comparisons_ranks_may_differ(hvd, options):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), **{"check_interval": 1} | options
    )

    def before(step):
        if step == 1 and hvd.rank() == 1:
            flip(model[0].weight, 3, 63)

    train(hvd, model, optimizer, 5, before)


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
