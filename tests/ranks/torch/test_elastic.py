"""Elastic states and samplers of PyTorch, in a job whose ranks stay."""

import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, RandomSampler

from hvdkit.checkpoint.manifest import check_part_name
from hvdkit.errors import UsageError
from tests.commit_files import read_commit, write_commit
from tests.ranks.elastic_hosts import commit_in, host_of_its_own
from tests.ranks.elastic_samplers import check_that_a_commit_keeps_the_position
from tests.ranks.elastic_samplers import start as start_with_sampler


def test_the_objects_of_a_state_are_sent_as_other_objects(hvd):
    """Horovod's function takes a minute for 400 MB, and names collectives after types."""
    for kind in (hvd.elastic.ObjectState, hvd.elastic.TorchState):
        assert kind(epoch=0)._bcast_object is hvd.broadcast_object


def test_a_state_is_restored_twice(hvd):
    """The optimizer changes the tensors that it has loaded."""
    model = torch.nn.Linear(3, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    state.sync()

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        momentum = [each["momentum_buffer"] for each in optimizer.state.values()]
        return [tensor.clone() for tensor in (*model.parameters(), *momentum)]

    step()
    state.save()
    first = step()
    for _ in range(2):
        state.restore()
        for again, before in zip(step(), first, strict=True):
            assert torch.equal(again, before)


@pytest.mark.parametrize("name", ["objects", "reduction", "positions", "_größe"])
def test_a_model_may_have_any_name(hvd, name):
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(**{name: model}, step=0)
    state.sync()
    before = model.weight.tolist()
    with torch.no_grad():
        model.weight.add_(1)
    state.restore()
    assert model.weight.tolist() == before
    assert all(map(check_part_name, state._saved))


class Averages:
    """Averages of a script, which has a handler of its own."""

    def __init__(self):
        self.values = [0.0]


class AveragesHandler:
    def __init__(self, averages):
        self.value = self.averages = averages
        self.save()

    def save(self):
        self.saved = list(self.averages.values)

    def restore(self):
        self.averages.values[:] = self.saved


def test_a_handler_refers_to_its_value(hvd):
    from hvdkit.torch.elastic.state import get_handler_registry, set_handler_registry

    known = get_handler_registry()
    averages = Averages()
    set_handler_registry([(Averages, AveragesHandler), *known])
    try:
        state = hvd.elastic.TorchState(averages=averages)
    finally:
        set_handler_registry(known)
    for number in range(2):
        averages.values[0] = hvd.rank() + number
        state.sync()
        averages.values[0] = 7.0
        state.restore()
        assert averages.values == [number]


class Counting(torch.optim.SGD):
    """An optimizer with an entry of its own after its first step."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | ({"count": self.count} if self.count else {})

    def load_state_dict(self, state_dict):
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})
        self.count = state_dict.get("count", 0)


def test_an_optimizer_with_entries_of_its_own(hvd, tmp_path):
    def start():
        model = torch.nn.Linear(3, 1)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return model, optimizer, hvd.elastic.TorchState(model, optimizer)

    model, optimizer, state = start()
    state.sync()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state.save()
    write_commit(state, tmp_path / str(hvd.rank()))
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    model, optimizer, state = start()
    read_commit(state, tmp_path / str(hvd.rank()))
    state.restore()
    assert optimizer.count == 1
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)


def test_a_state_of_several_process_sets_is_refused(hvd):
    """Commits and `sync` would replace the models of all process sets by that of rank 0."""
    first = hvd.add_process_set([0])
    try:
        # The ranks have different optimizers, and all of them raise.
        own = first if hvd.rank() == 0 else hvd.global_process_set
        model = torch.nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), process_set=own)
        before = model.weight.tolist()
        with pytest.raises(
            UsageError, match=r"rank 0: optimizer over ranks \[0\]; ranks? 1.*: all"
        ):
            hvd.elastic.TorchState(model, optimizer).sync()
        assert model.weight.tolist() == before
    finally:
        hvd.remove_process_set(first)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scheduler_and_a_scaler_get_the_state(hvd, tmp_path, wrapped):
    """A copy of a scheduler would change the learning rate of a copy of the optimizer."""

    def start(rate):
        model = torch.nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), lr=rate)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer if wrapped else plain, lambda step: 0.5**step
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=rate)
        state = hvd.elastic.TorchState(
            model, optimizer, scheduler=scheduler, scaler=scaler, names=["a"]
        )
        return optimizer, scheduler, scaler, state

    optimizer, scheduler, scaler, state = start(8.0)
    state.sync()
    assert state.scheduler is scheduler
    assert state.scaler is scaler
    for _ in range(2):
        optimizer.zero_grad()
        next(iter(optimizer.param_groups[0]["params"])).sum().backward()
        optimizer.step()
        state.scheduler.step()
    scaler.scale(torch.ones(()))  # the scaler makes its state here
    scaler.update(16.0)
    state.names.append("b")
    state.save()
    commit = tmp_path / str(hvd.rank())
    write_commit(state, commit)

    optimizer, scheduler, scaler, state = start(4.0)
    read_commit(state, commit)
    state.restore()
    state.sync()
    scheduler.step()
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (1.0, 3)
    assert scaler.get_scale() == 16.0
    assert state.names == ["a", "b"]


@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
@pytest.mark.parametrize("joined", [0, 1])
def test_a_commit_while_a_rank_waits_in_join_is_an_error(hvd, joined, method):
    """The host of this rank would store nothing."""

    @hvd.elastic.run
    def train(state):
        state.commit()
        state.batch = 1
        if hvd.rank() != joined:
            text = f"{method}.. was called while 1 of {hvd.size()} ranks wait in join"
            with pytest.raises(UsageError, match=text):
                getattr(state, method)()
        hvd.join()
        state.batch = 2
        state.commit()

    state = hvd.elastic.ObjectState(batch=0)
    with host_of_its_own() as folder:
        train(state)
        state._saved = commit_in(folder)
    state.restore()
    assert state.batch == 2


@pytest.mark.parametrize("other", ["check_host_updates", "maybe_save", "wait"])
def test_different_calls_are_an_error_that_names_them(hvd, tmp_path, other):
    """The ranks would wait for each other."""
    model = torch.nn.Linear(3, 1)
    folder = hvd.broadcast_object(str(tmp_path))

    @hvd.elastic.run
    def train(state):
        with hvd.Checkpointer(folder, model=model) as checkpointer:
            calls = {
                "check_host_updates": state.check_host_updates,
                "maybe_save": lambda: checkpointer.maybe_save(1),
                "wait": checkpointer.wait,
            }
            call = state.commit if hvd.rank() == 1 else calls[other]
            with pytest.raises(UsageError, match=f"rank.* 0.*: {other}; rank 1: commit"):
                call()
            state.commit()

    with host_of_its_own():
        train(hvd.elastic.TorchState(model))


def test_restore_after_sync_returns_to_the_sync(hvd):
    """The script may restore a checkpoint before the training function, and fail before a commit.

    A state would be mixed if its epoch were that of the last `sync`, and its weights older.
    """
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = hvd.elastic.ElasticSampler(range(20))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    def move_to(number):
        torch.nn.init.constant_(model.weight, number)
        optimizer.param_groups[0]["lr"] = number
        sampler.load_state_dict({"epoch": number, "processed_num": number})
        state.epoch = number

    def position():
        rate = optimizer.param_groups[0]["lr"]
        return model.weight[0, 0].item(), rate, sampler.epoch, sampler.processed_num, state.epoch

    move_to(5 + hvd.rank())
    state.sync()
    move_to(7)
    state.restore()
    assert position() == (5, 5, 5, 5, 5)


@pytest.mark.parametrize("kind", ["ObjectState", "TorchState"])
def test_a_state_keeps_the_position_of_a_sampler(hvd, tmp_path, kind):
    check_that_a_commit_keeps_the_position(hvd, kind, tmp_path / str(hvd.rank()))


@pytest.mark.parametrize("kind", ["ObjectState", "TorchState"])
def test_a_restore_ends_the_loop_over_a_sampler(hvd, kind):
    sampler, state = start_with_sampler(hvd, kind)
    state.sync()
    batches = sampler.batches()
    for _ in range(3):
        next(batches)
        state.commit()
    next(batches)
    state.restore()
    assert sampler.position.consumed == 6 * hvd.size()
    with pytest.raises(UsageError, match="the sampler was restored in this loop"):
        next(batches)


def test_a_sampler_of_a_state_can_be_replaced(hvd):
    state = hvd.elastic.TorchState(sampler=hvd.ResumableSampler(40, 2), batch=0)
    state.sampler = sampler = hvd.ResumableSampler(12, 1)
    sampler.set_epoch(3)
    state.commit()
    sampler.set_epoch(4)
    state.restore()
    assert sampler.epoch == 3
    with pytest.raises(UsageError, match="state.sampler is a ResumableSampler, and was set to 7"):
        state.sampler = 7


def test_a_sampler_without_counted_batches_is_not_committed(hvd):
    sampler = hvd.ResumableSampler(40, 2)
    next(iter(sampler))  # for example to build a model
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    next(iter(sampler))
    with pytest.raises(UsageError, match="no batch was counted after that: iterate its DataLoader"):
        state.commit()


class Holder:
    """An object of a script, without `state_dict`."""

    def __init__(self, held):
        self.held = held


class Tracker(torch.nn.Module):
    """A module without variables, as a metric of torchmetrics."""

    total = 0


#: Values that a state cannot copy: the copy would not be used, or would use other copies.
NOT_COPIED = {
    "data is a DistributedSampler": lambda hvd, *_: {"data": hvd.DistributedSampler(range(4))},
    "data is a RandomSampler": lambda *_: {"data": RandomSampler(range(4))},
    "data is a DataLoader": lambda *_: {"data": DataLoader(range(4))},
    "data['train'] is a DataLoader": lambda *_: {"data": {"train": DataLoader(range(4))}},
    "samplers[1] is a ResumableSampler": (
        lambda hvd, *_: {"samplers": (None, hvd.ResumableSampler(4, 1))}
    ),
    "samplers['a'] is a ElasticSampler": (
        lambda hvd, *_: {"samplers": {"a": hvd.elastic.ElasticSampler(range(4))}}
    ),
    "of_parts[0] is a StepLR": lambda _, model, optimizer: {"of_parts": [StepLR(optimizer, 1)]},
    "of_parts[0][0] is a SGD": lambda _, model, optimizer: {"of_parts": [[optimizer]]},
    "models[0] is a Linear": lambda *_: {"models": [torch.nn.Linear(1, 1)]},
    "models[0] is a BatchNorm1d": (lambda *_: {"models": [torch.nn.BatchNorm1d(1, affine=False)]}),
    "tools .* refers to a Linear": lambda _, model, optimizer: {"tools": Holder(model)},
    "tools .* refers to a SGD": lambda _, model, optimizer: {"tools": Holder(optimizer)},
    "tensors .* refers to a Parameter": lambda _, model, optimizer: {"tensors": [model.weight]},
}


@pytest.mark.parametrize("error", NOT_COPIED)
def test_values_that_cannot_be_copied(hvd, error):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = NOT_COPIED[error](hvd, model, optimizer)
    pattern = error if "refers" in error else re.escape(error)
    with pytest.raises(UsageError, match=pattern):
        hvd.elastic.TorchState(model, optimizer, **values)
    if "refers" in error:
        return
    # Also later, and for a state that keeps objects only.
    state = hvd.elastic.TorchState(**dict.fromkeys(values))
    ((name, value),) = values.items()
    with pytest.raises(UsageError, match=pattern):
        setattr(state, name, value)
    with pytest.raises(UsageError, match=pattern):
        hvd.elastic.ObjectState(**values)


@pytest.mark.parametrize("kind", ["model", "optimizer", "sampler"])
def test_a_state_of_objects_does_not_keep_objects_with_a_state(hvd, kind):
    model = torch.nn.Linear(3, 1)
    value = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "sampler": hvd.elastic.ElasticSampler(range(4)),
    }[kind]
    with pytest.raises(UsageError, match=f"{kind} is a .* pass it to hvd.elastic.TorchState"):
        hvd.elastic.ObjectState(**{kind: value})


def test_values_that_are_copied(hvd):
    model = torch.nn.Linear(3, 1)
    values = {
        "numbers": [1, 2.0, {"a": (3, None)}],
        "names": {"b"},
        "tensors": [torch.ones(2), {"a": torch.zeros(1, requires_grad=True)}],
        "array": np.arange(3),
        "random": np.random.default_rng(hvd.rank()),
        "metrics": {"loss": Tracker(), "accuracy": Holder(Tracker())},
        "frozen": Holder(torch.nn.Linear(1, 1)),
        "best": None,
    }
    values["itself"] = [values["numbers"]]
    values["itself"].append(values["itself"])
    state = hvd.elastic.TorchState(model, **values)
    state.metrics["loss"].total = hvd.rank() + 1
    state.best = {"weights": [1.0]}
    state.sync()
    state.metrics["loss"].total = 5
    state.restore()
    assert (state.metrics["loss"].total, state.best) == (1, {"weights": [1.0]})


@contextmanager
def own_gpu(number):
    """Simulate that new CPU tensors are on GPU 0, and that this rank's GPU is `number`.

    Yields:
        A list that gets the device of each tensor that is read.
    """
    devices = []

    def place(storage, location):
        if location.startswith("cuda"):
            devices.append(location)
            return storage
        return None

    torch.serialization.register_package(0, lambda _: "cuda:0", place)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=number),
    ):
        try:
            yield devices
        finally:
            packages = torch.serialization._package_registry
            packages[:] = [package for package in packages if package[2] is not place]


def test_tensors_of_other_gpus_arrive_on_the_own_gpu(hvd, tmp_path):
    with own_gpu(3 + hvd.rank()) as devices:
        state = hvd.elastic.ObjectState(history=[torch.full((2,), hvd.rank())])
        state.sync()
        assert devices == [f"cuda:{3 + hvd.rank()}"]
        devices.clear()
        write_commit(state, tmp_path / str(hvd.rank()))
        state.history.clear()
        read_commit(state, tmp_path / str(hvd.rank()))
        state.restore()
        assert devices == [f"cuda:{3 + hvd.rank()}"]
    assert [tensor.tolist() for tensor in state.history] == [[0, 0]]


def test_a_sampler_without_set_epoch_raises(hvd):
    """It works until a restart. All later epochs would then be empty."""
    sampler = hvd.elastic.ElasticSampler(range(20))
    for number, _ in enumerate(sampler):
        sampler.record_batch(number, 1)
    with pytest.raises(UsageError, match=r"Call sampler.set_epoch\(epoch \+ 1\) at the end"):
        iter(sampler)
    restarted = hvd.elastic.ElasticSampler(range(20))
    restarted.load_state_dict(sampler.state_dict())
    # The script has not called `set_epoch` between the last batch and the commit.
    assert list(restarted) == []
    with pytest.raises(UsageError, match="all samples of epoch 0 were recorded"):
        iter(restarted)
    restarted.set_epoch(1)
    assert list(restarted)


@pytest.mark.parametrize("left", [0, 1, 3, 5, 8])
def test_a_sampler_with_few_samples_left(hvd, left):
    """The ranks repeat the first samples of the epoch, as an epoch without a restart does."""
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    sampler.load_state_dict({"epoch": 0, "processed_num": 20 - left})
    own = list(sampler)
    assert len(own) == len(sampler) == -(-left // hvd.size())
    steps = zip(*hvd.allgather_object(own), strict=True)
    everywhere = [sample for step in steps for sample in step]
    assert everywhere == [*range(20 - left, 20), *range(20)][: len(everywhere)]


def test_a_sampler_with_an_order_of_its_own_repeats_its_samples_only(hvd):
    class Even(hvd.elastic.ElasticSampler):
        def reset(self):
            self.num_replicas, self.rank = hvd.size(), hvd.rank()
            self.remaining_indices = [*range(len(self.dataset))][::-2][self.processed_num :]
            self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas

    sampler = Even(range(11))
    sampler.load_state_dict({"epoch": 0, "processed_num": 1})
    steps = zip(*hvd.allgather_object(list(sampler)), strict=True)
    everywhere = [sample for step in steps for sample in step]
    assert everywhere == [8, 6, 4, 2, 0, 10, 8, 6][: len(everywhere)]


@pytest.mark.parametrize("wraps", [True, False])
def test_a_commit_within_an_accumulation_window_saves_nothing(hvd, wraps):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wraps:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=2
        )
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    state.sync()
    for batch in range(1, 4):
        model(torch.ones(2, 3)).sum().backward()
        if batch == 2:
            optimizer.step()
            optimizer.zero_grad()
        state.batch = batch
        state.commit()
    state.restore()
    assert state.batch == 2
    # The gradients of batch 3 were discarded.
    before = model.weight.clone()
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - model.weight, torch.full((1, 3), 0.4))


def test_a_commit_contains_the_scales_of_fp16(hvd):
    """The last rank has no commit, as on a host that was lost. It gets the state of rank 0."""
    commit = Path(tempfile.gettempdir()) / f"hvdkit-commit-{os.getpid()}"

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), compression="fp16", bucket_bytes=64
        )
        return model, optimizer, hvd.elastic.TorchState(model, optimizer, step=0)

    def train(model, optimizer, state):
        gradients = {}
        while state.step < 12:
            if state.step == 6 and not commit.exists():
                state.save()
                write_commit(state, commit)
            inputs = torch.rand(3, 7, generator=torch.manual_seed(10 * state.step + hvd.rank()))
            # The magnitude of the gradients changes, and with it the scales.
            (model(inputs).sum() * 2.0 ** (6 * (state.step % 6) - 30)).backward()
            gradients[state.step] = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
        return [gradients[step] for step in range(6, 12)]

    expected = train(*make())
    model, optimizer, state = make()
    if hvd.rank() < hvd.size() - 1:
        read_commit(state, commit)
        state.restore()
    state.sync()
    assert state.step == 6
    found = train(model, optimizer, state)
    commit.unlink()
    for mine, before in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
