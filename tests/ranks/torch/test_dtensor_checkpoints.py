"""Checkpoints of models with DTensors. The file of a step has the bytes of `full_tensor()`."""

import contextlib
import os
import shutil

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from tests.ranks.torch import test_dtensors
from tests.ranks.torch.test_dtensors import adamw, batch, device_mesh, loss_of

PLAIN = "plain"
KINDS = ["tensor", "fsdp", "columns", "fsdp of tensor", "replicated", "everywhere"]


class Block(test_dtensors.Block):
    """A block with a dimension that ranks divide unevenly."""

    def __init__(self):
        super().__init__()
        self.odd, self.even = nn.Linear(8, 5), nn.Linear(5, 8)

    def forward(self, x):
        return self.even(self.odd(super().forward(x)))


def block(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block()).double()


def parallelize(model, mesh, kind):
    if kind in ("tensor", "fsdp"):
        test_dtensors.parallelize(model, mesh, kind)
        return
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    how = {"mesh": mesh["model"]}
    if kind == "columns":
        # FSDP2 divides only the first dimension unevenly.
        how["shard_placement_fn"] = lambda p: Shard(int(p.dim() > 1 and p.shape[1] % 2 == 0))
    if kind == "fsdp of tensor":
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        plan = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"out": RowwiseParallel()}
        for layer in model:
            parallelize_module(layer, mesh["model"], plan)
        how["mesh"] = mesh["data"]
    if kind == "replicated":
        how["mesh"] = mesh
    if kind == "everywhere":
        how["mesh"] = mesh._flatten("all")
        how["reshard_after_forward"] = False
    for layer in model:
        fully_shard(layer, **how)
    fully_shard(model, **how)


class Training:
    """A model and its optimizer, whose gradients are those of the same batches for all kinds."""

    def __init__(self, hvd, mesh, kind, seed=0):
        self.model = block(seed)
        if kind != PLAIN:
            parallelize(self.model, mesh, kind)
        self.model[0].q.bias.requires_grad_(False)
        self.optimizer = adamw(self.model.parameters())
        if kind in ("tensor", "fsdp", "columns"):
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters())

    def train(self, steps):
        for step in steps:
            loss_of(self.model, batch(0, step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def whole(self):
        """Return all tensors of the model and of the optimizer, by name."""
        found = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"state.{index}.{name}": t for name, t in values.items()}
        return {
            n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
            for n, t in found.items()
        }

    def checkpointer(self, hvd, folder, **how):
        return hvd.Checkpointer(folder, model=self.model, optimizer=self.optimizer, **how)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@contextlib.contextmanager
def folder_of(hvd):
    """Make a folder of all ranks, for the duration of a block."""
    folder = hvd.broadcast_object(os.path.join(os.environ["TMPDIR"], f"steps-{os.getpid()}"))
    try:
        yield folder
    finally:
        if hvd.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_bit_for_bit_the_same(hvd, kind):
    import safetensors.torch

    with device_mesh(hvd) as mesh, folder_of(hvd) as folder:
        undisturbed = Training(hvd, mesh, kind)
        undisturbed.train(range(2))
        with undisturbed.checkpointer(hvd, folder) as saving:
            saving.save(2)
            saving.wait()
            expected = undisturbed.whole()
            if hvd.rank() == 0:
                step = f"{folder}/step-000000000002"
                found = {
                    f"{prefix}{name}": tensor
                    for prefix, file in (("model.", "model"), ("", "optimizer"))
                    for name, tensor in safetensors.torch.load_file(
                        f"{step}/{file}.safetensors"
                    ).items()
                }
                assert_equal(found, expected)
        undisturbed.train(range(2, 4))
        resumed = Training(hvd, mesh, kind, seed=1)
        with resumed.checkpointer(hvd, folder) as restoring:
            assert restoring.restore().step == 2
            assert_equal(resumed.whole(), expected)
            resumed.train(range(2, 4))
        assert_equal(resumed.whole(), undisturbed.whole())


@pytest.mark.parametrize("saved", [*KINDS, PLAIN])
def test_a_step_is_restored_with_any_division(hvd, saved):
    with device_mesh(hvd) as mesh, folder_of(hvd) as folder:
        training = Training(hvd, mesh, saved)
        training.train(range(1))
        expected = training.whole()
        with training.checkpointer(hvd, folder, asynchronous=False) as saving:
            saving.save(1)
        for kind in [*KINDS, PLAIN]:
            other = Training(hvd, mesh, kind, seed=1)
            with other.checkpointer(hvd, folder) as restoring:
                assert restoring.restore().step == 1
            assert_equal(other.whole(), expected)
            other.train([1])


def test_fsdp_over_other_numbers_of_ranks(hvd):
    with device_mesh(hvd) as mesh, folder_of(hvd) as folder:
        from hvdkit.torch.process_sets import find_or_add

        halves = find_or_add([[0, 1], [2, 3]])
        half = Training(hvd, mesh, "fsdp", seed=hvd.rank() // 2)
        half.optimizer = adamw(half.model.parameters())
        half.train(range(1))
        own = halves[hvd.rank() // 2]
        with half.checkpointer(hvd, f"{folder}-{own.ranks[0]}", process_set=own) as saving:
            saving.save(1)
        expected = hvd.broadcast_object(half.whole())
        for kind in ("everywhere", "tensor"):
            all_ranks = Training(hvd, mesh, kind, seed=2)
            with all_ranks.checkpointer(hvd, f"{folder}-0") as restoring:
                assert restoring.restore().world_size == 2
            assert_equal(all_ranks.whole(), expected)
        for each in halves:
            hvd.remove_process_set(each)


def set_partial(training):
    from torch.distributed.tensor import DTensor, Partial

    p = next(iter(training.model.parameters()))
    mesh = training.model[1].q.weight.device_mesh
    training.optimizer.state[p]["exp_avg"] = DTensor.from_local(torch.ones(2), mesh, [Partial()])


def forget(training):
    del training.optimizer.state[training.model[1].q.weight]["exp_avg"]


def change(training):
    training.model[1].q.weight._local_tensor[0] += 1


@pytest.mark.parametrize(
    ("ranks", "fault", "kind", "words"),
    [
        ([1], forget, UsageError, r"exp_avg'\]"),
        ([0], forget, UsageError, r"exp_avg'\]"),
        ([1], set_partial, UsageError, "with the placements .*Partial"),
        ([2], change, RankMismatchError, r"model\['1.q.weight'\]: ranks 0, 2 have the same part"),
    ],
)
def test_faults_of_one_rank_of_fsdp_are_errors_on_all(hvd, ranks, fault, kind, words):
    with device_mesh(hvd) as mesh, folder_of(hvd) as folder:
        training = Training(hvd, mesh, "fsdp")
        training.train(range(1))
        if hvd.rank() in ranks:
            fault(training)
        with training.checkpointer(hvd, folder) as saving, pytest.raises(kind, match=words):
            saving.save(1)
        assert hvd.rank() or not os.path.exists(f"{folder}/step-000000000001")


def test_a_plain_model_on_one_rank_is_an_error_on_all(hvd):
    with device_mesh(hvd) as mesh, folder_of(hvd) as folder:
        model = block()
        test_dtensors.parallelize(model, mesh, "tensor")
        model = block() if hvd.rank() == 1 else model
        with (
            hvd.Checkpointer(folder, model=model) as saving,
            pytest.raises(HvdkitError, match="ranks disagree about the parameters"),
        ):
            saving.save(1)


def test_the_memory_of_hosts_keeps_no_parts_of_fsdp(hvd):
    with device_mesh(hvd) as mesh, folder_of(hvd) as folder:
        training = Training(hvd, mesh, "fsdp")
        with pytest.raises(UsageError, match="tensors are divided among the ranks"):
            training.checkpointer(hvd, folder, every_steps_in_memory=1)
        state = hvd.elastic.TorchState(model=training.model, optimizer=training.optimizer)
        with pytest.raises(UsageError, match="tensors are divided"):
            state.sync()


@pytest.mark.parametrize("root", [0, 3])
@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_optimizer_state_is_broadcast_to_the_same_parts(hvd, kind, root):
    with device_mesh(hvd) as mesh:
        training = Training(hvd, mesh, kind)
        training.optimizer = adamw(training.model.parameters())
        if hvd.rank() // 2 == root // 2:
            training.train(range(2))
        expected = hvd.broadcast_object(training.whole(), root_rank=root)
        hvd.broadcast_parameters(training.model, root)
        hvd.broadcast_optimizer_state(training.optimizer, root)
        assert_equal(training.whole(), expected)
        if hvd.rank() // 2 == root // 2 and hvd.rank() != root:
            training.optimizer.state.clear()
        with pytest.raises(UsageError, match="differs from that of rank"):
            hvd.broadcast_optimizer_state(training.optimizer, root)
