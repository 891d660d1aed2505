"""`hvdkit.lightning`: a Trainer and a Fabric on several ranks against one process with all data."""

import contextlib
import dataclasses
import os
import random
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hvdkit.errors import RESUMABLE, UsageError
from tests.ranks.torch.oracle import (
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    assert_trains_alike,
    flat,
    on_all_ranks,
)

BATCH = 4


def lightning(fabric=False):
    """Return the package and the strategy of its Trainer or Fabric; skip the test without it."""
    package = pytest.importorskip("lightning")
    pytest.importorskip("torchmetrics")
    from hvdkit import lightning as ours

    if fabric:
        from hvdkit.lightning import fabric as ours
    return package, ours.HvdkitStrategy


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of the Trainer, and what the model does."""

    accumulate: int = 1
    clip: float | None = None
    clip_by: str = "norm"
    precision: str = "32-true"
    optimizer: str = "SGD"
    batch_norm: bool = False
    epochs: int = 1
    batches: int = 3
    manual: bool = False
    compression: str = "none"

    @property
    def tolerance(self) -> float:
        """The largest error, relative to the distance that training moves the weights."""
        rounds = self.precision in ("bf16-mixed", "16-mixed") or self.compression != "none"
        return 0.1 if rounds else 1e-3


def draw(seed):
    """Return a random setting."""
    number = random.Random(seed)
    manual = number.random() < 0.2
    return Setting(
        accumulate=1 if manual else number.choice([1, 1, 2, 3]),
        clip=None if manual else number.choice([None, 0.05, 0.2]),
        clip_by=number.choice(["norm", "value"]),
        precision=number.choice(["32-true", "64-true", "bf16-mixed", "16-mixed"]),
        optimizer=number.choice(["SGD", "momentum", "AdamW"]),
        batch_norm=number.random() < 0.4,
        epochs=number.choice([1, 2]),
        batches=number.choice([1, 3, 4]),
        manual=manual,
        compression=number.choice(["none", "none", "fp16", "bf16"]),
    )


def make_model(L, setting):
    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            norm = [nn.BatchNorm1d(8)] if setting.batch_norm else []
            self.net = nn.Sequential(nn.Linear(6, 8), *norm, nn.Tanh(), nn.Linear(8, 3))
            self.automatic_optimization = not setting.manual

        def training_step(self, batch, index):
            inputs, targets = batch
            loss = functional.cross_entropy(self.net(inputs), targets)
            if setting.manual:
                # Two passes in one step.
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.manual_backward(self.net(inputs).square().mean())
                optimizer.step()
            return loss

        def configure_optimizers(self):
            if setting.optimizer == "AdamW":
                # A large epsilon, because otherwise rounding decides the sign of small updates.
                return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-2)
            momentum = 0.9 if setting.optimizer == "momentum" else 0.0
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=momentum)

    return Model()


def train(L, setting, ranks, rank, strategy):
    """Train a new model; return it and its weights before."""
    torch.manual_seed(3)
    model = make_model(L, setting)
    before = flat(model)
    if rank:
        for p in model.parameters():
            p.data.add_(rank)  # The strategy copies the parameters of rank 0.
    data = torch.Generator().manual_seed(5)
    count = setting.batches * BATCH * WORLD
    dtype = torch.float64 if setting.precision == "64-true" else torch.float32
    inputs = torch.randn(count, 6, generator=data).to(dtype)
    targets = torch.randint(3, (count,), generator=data)
    dataset = TensorDataset(inputs, targets)
    loader = loader_of(dataset, ranks)
    trainer = make_trainer(
        L,
        strategy,
        max_epochs=setting.epochs,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=setting.clip,
        gradient_clip_algorithm=setting.clip_by if setting.clip else None,
        sync_batchnorm=setting.batch_norm and ranks > 1,
        **precision(setting.precision),
    )
    trainer.fit(model, loader)
    return model, before


WORLD = 2


def loader_of(dataset, ranks):
    """Return a loader for one of `ranks` ranks; their batches together are those of one process."""
    # Lightning replaces the sampler on several ranks, by one that shuffles.
    alone = torch.utils.data.DistributedSampler(dataset, 1, 0) if ranks == 1 else None
    return DataLoader(dataset, BATCH * WORLD // ranks, sampler=alone)


def precision(name):
    if name != "16-mixed":
        return {"precision": name}
    # For a CPU, Lightning replaces 16-mixed by bf16-mixed, but accepts the plugin.
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def make_trainer(L, strategy, **arguments):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1}
    if strategy is None:
        defaults["devices"] = 1
    else:
        defaults["strategy"] = strategy
    return L.Trainer(**(quiet | defaults | arguments))


def check(hvd, setting):
    L, HvdkitStrategy = lightning()
    strategy = HvdkitStrategy(compression=setting.compression)
    model, before = train(L, setting, hvd.size(), hvd.rank(), strategy)
    alone, _ = train(L, setting, 1, 0, None)
    strategy.set_world_ranks()
    assert_trains_alike(hvd, model, alone, before, setting.tolerance)
    buffers = [buffer.tolist() for buffer in model.buffers()]
    assert all(each == buffers for each in on_all_ranks(hvd, buffers))
    if hvd.rank() == 0:
        # A pass of one rank, after the training, does not wait for the others.
        dtype = next(model.parameters()).dtype
        model.eval().net(torch.zeros(2, 6, dtype=dtype)).sum().backward()


def test_a_trainer_trains_like_one_process(hvd):
    check(hvd, Setting(accumulate=2, clip=0.1, optimizer="momentum", epochs=2))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_settings(hvd, seed):
    check(hvd, draw(seed))


# --- the Trainer ----------------------------------------------------------------------------------


def one_layer(L, **methods):
    """Return a module with one linear layer, and these methods in place of its own."""

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return type("Model", (Model,), methods)()


class Stream(IterableDataset):
    """A data set without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.ones(self.count, 2))


class StreamOfWrongLength(Stream):
    """A stream that ends before its length."""

    def __len__(self):
        return 10


# kind -> (data of a rank, additional arguments of the Trainer, part of the error).
UNEVEN = {
    "sized": (lambda rank: torch.ones(3 + rank, 2), {}, "rank 1 has 4"),
    "stream": (lambda rank: Stream(3 + rank), {}, "end after 3 batches: 0"),
    "limited": (
        lambda rank: Stream(4 - rank),
        {"limit_train_batches": 10, "max_epochs": 2},
        "end after 3 batches: 1",
    ),
    "wrong length": (lambda rank: StreamOfWrongLength(3 + rank), {}, "end after 3 batches: 0"),
    "empty": (lambda rank: Stream(3 * rank), {}, "end after 0 batches: 0"),
    "accumulated": (
        lambda rank: Stream(4 - rank),
        {"accumulate_grad_batches": 4, "limit_train_batches": 8},
        "end after 3 batches: 1",
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.long] * (each != "limited")) for each in UNEVEN]
)
def test_different_numbers_of_batches_raise_on_all_ranks(hvd, kind):
    L, HvdkitStrategy = lightning()
    data, arguments, error = UNEVEN[kind]
    trainer = make_trainer(L, HvdkitStrategy(), use_distributed_sampler=False, **arguments)
    with pytest.raises(UsageError, match="different numbers of batches") as caught:
        trainer.fit(one_layer(L), DataLoader(data(hvd.rank()), 1))
    assert_raised_on_all_ranks(hvd, caught)
    assert error in str(caught.value)


def test_ranks_that_restore_different_checkpoints_raise_on_all_ranks(hvd):
    """On hosts without a common folder, `ckpt_path="last"` finds the checkpoint of rank 0 only."""
    L, HvdkitStrategy = lightning()

    class Restored(L.Callback):
        def on_train_start(self, trainer, module):
            trainer.fit_loop.epoch_loop.batch_progress.total.ready += 7 * (hvd.rank() == 0)

    trainer = make_trainer(
        L, HvdkitStrategy(), use_distributed_sampler=False, callbacks=[Restored()]
    )
    with pytest.raises(UsageError, match="rank 0 after 7, rank 1 after 0") as caught:
        trainer.fit(one_layer(L), DataLoader(torch.ones(4, 2), 1))
    assert_raised_on_all_ranks(hvd, caught)


def own_loop(self, dataloader_iter):
    """Train on an iterator, as a module with its own prefetching does."""
    batch, _, _ = next(dataloader_iter)
    return self.net(batch).square().mean()


@pytest.mark.long
def test_a_stream_that_training_step_reads_needs_equal_batches(hvd):
    L, HvdkitStrategy = lightning()
    loader = DataLoader(Stream(3 + hvd.rank()), 1)
    with pytest.raises(UsageError, match="takes a dataloader_iter") as caught:
        make_trainer(L, HvdkitStrategy()).fit(one_layer(L, training_step=own_loop), loader)
    assert_raised_on_all_ranks(hvd, caught)
    trainer = make_trainer(L, HvdkitStrategy())
    trainer.fit(one_layer(L, training_step=own_loop), hvd.equal_batches(loader))
    assert trainer.global_step == 3


@pytest.mark.long
@pytest.mark.parametrize("limit", [2, 3, 10, 0.5])
def test_equal_streams_train_to_their_end(hvd, limit):
    L, HvdkitStrategy = lightning()
    data = Stream(3) if limit != 0.5 else torch.ones(6, 2)
    model = one_layer(L)
    arguments = {"use_distributed_sampler": False, "max_epochs": 2, "limit_train_batches": limit}
    trainer = make_trainer(L, HvdkitStrategy(), **arguments)
    callbacks = list(trainer.callbacks)
    trainer.fit(model, DataLoader(data, 1))
    assert trainer.global_step == 2 * min(3, limit if limit != 0.5 else 3)
    assert trainer.callbacks == callbacks
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_after_the_same_batch(hvd, number):
    L, HvdkitStrategy = lightning()

    def step(self, batch, index):
        if index == 2 and hvd.rank() == 1:
            signal.raise_signal(number)
        return self.net(batch).square().mean()

    trainer = make_trainer(L, HvdkitStrategy(), use_distributed_sampler=False)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(SystemExit) as caught:
        trainer.fit(one_layer(L, training_step=step), DataLoader(torch.ones(6, 2), 1))
    assert caught.value.code == RESUMABLE
    assert on_all_ranks(hvd, trainer.global_step) == [3] * hvd.size()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers


@pytest.mark.parametrize("has_handler", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_signal_in_the_last_validation_is_not_lost(hvd, has_handler):
    """The script may use another loop of the trainer afterwards. It may have its own handler."""
    L, HvdkitStrategy = lightning()

    class Handler(L.Callback):
        def on_sanity_check_start(self, trainer, module):
            before = signal.getsignal(signal.SIGTERM)
            if has_handler:
                signal.signal(signal.SIGTERM, lambda *args: before(*args))

    def validate(self, batch, index):
        if self.global_step == 4 and hvd.rank() == 1:
            signal.raise_signal(signal.SIGTERM)

    trainer = make_trainer(
        L, HvdkitStrategy(), use_distributed_sampler=False, max_epochs=2,
        num_sanity_val_steps=1, limit_val_batches=1, callbacks=[Handler()],
    )  # fmt: skip
    loader = DataLoader(torch.ones(2, 2), 1)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(one_layer(L, validation_step=validate), loader, loader)
    assert caught.value.code == RESUMABLE
    assert on_all_ranks(hvd, trainer.global_step) == [4] * hvd.size()


@pytest.mark.long
def test_a_resumable_sampler_in_a_trainer(hvd):
    L, HvdkitStrategy = lightning()
    seen = []

    def training_step(self, batch, index):
        seen.append((self.current_epoch, *batch[:, 0].tolist()))
        return self.net(batch).square().mean()

    data = torch.arange(16.0).repeat(2, 1).T
    sampler = hvd.ResumableSampler(data, 2, seed=3)
    trainer = make_trainer(L, HvdkitStrategy(), use_distributed_sampler=False, max_epochs=2)
    trainer.fit(
        one_layer(L, training_step=training_step), DataLoader(data / 16, 2, sampler=sampler)
    )
    everything = [batch for each in on_all_ranks(hvd, seen) for batch in each]
    epochs = [[x for epoch, *xs in everything if epoch == e for x in xs] for e in range(2)]
    assert all(sorted(epoch) == (torch.arange(16.0) / 16).tolist() for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.long
def test_metrics_validation_and_early_stopping(hvd):
    L, HvdkitStrategy = lightning()
    from lightning.pytorch.callbacks import EarlyStopping
    from torchmetrics import MeanMetric

    rank = hvd.rank()

    def validation_step(self, batch, index):
        self.mean.update(float(rank))
        self.log("metric", self.mean)
        self.log("logged", float(rank), sync_dist=True)
        self.log("most", float(rank), sync_dist=True, reduce_fx="max")
        # On rank 0 this improves, and on the others it does not.
        self.log("loss", 1.0 if rank else -float(self.current_epoch))

    def setup(self, stage):
        self.mean = MeanMetric()

    model = one_layer(L, validation_step=validation_step, setup=setup)
    trainer = make_trainer(
        L, HvdkitStrategy(), max_epochs=9, callbacks=[EarlyStopping("loss", patience=2)]
    )
    trainer.fit(model, DataLoader(torch.ones(8, 2), 2), DataLoader(torch.ones(8, 2), 2))
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    mean = (hvd.size() - 1) / 2
    assert (found["metric"], found["logged"], found["most"]) == (mean, mean, hvd.size() - 1)
    assert on_all_ranks(hvd, trainer.current_epoch) == [3] * hvd.size()
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.long
def test_a_checkpoint_is_written_once_and_resumed(hvd):
    L, HvdkitStrategy = lightning()
    folder = hvd.broadcast_object(os.path.join(os.environ["TMPDIR"], f"ckpt-{os.getpid()}"))
    data = DataLoader(torch.arange(16.0).reshape(8, 2) / 16, 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def fit(epochs, path=None):
        torch.manual_seed(hvd.rank())
        model = one_layer(L, configure_optimizers=configure_optimizers)
        callback = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        trainer = make_trainer(
            L, HvdkitStrategy(), max_epochs=epochs, enable_checkpointing=True, callbacks=[callback]
        )
        trainer.fit(model, data, ckpt_path=path, weights_only=False)
        return model

    whole = fit(4)
    hvd.barrier()
    assert sorted(os.listdir(folder)) == [f"epoch={epoch}.ckpt" for epoch in range(4)]
    hvd.barrier()
    resumed = fit(4, os.path.join(folder, "epoch=1.ckpt"))
    torch.testing.assert_close(flat(resumed), flat(whole), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "interval", "kept"),
    [(4, 100, []), (7, 100, ["step=5.ckpt"]), (4, 0, ["step=10.ckpt", "step=5.ckpt"])],
)
def test_ranks_that_differ_are_not_saved(hvd, at, interval, kept, tmp_path):
    """At step 4, a save finds the difference; at step 7, the comparison after step 10 does.

    With `check_interval=0`, no rank looks for differences.
    """
    L, HvdkitStrategy = lightning()
    folder = hvd.broadcast_object(str(tmp_path / "saved"))

    def step(self, batch, index):
        if self.global_step == at and hvd.rank() == 0:
            self.net.weight.data += 100
        return self.net(batch).square().mean()

    saved = L.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{step}", save_top_k=-1, every_n_train_steps=5, save_on_exception=True
    )
    trainer = make_trainer(
        L, HvdkitStrategy(check_interval=interval), callbacks=[saved], enable_checkpointing=True,
        use_distributed_sampler=False,
    )  # fmt: skip
    raises = pytest.raises(hvd.RankMismatchError) if interval else contextlib.nullcontext()
    with contextlib.chdir(tmp_path), raises:
        trainer.fit(one_layer(L, training_step=step), DataLoader(torch.ones(12, 2), 1))
    hvd.barrier()
    assert (sorted(os.listdir(folder)) if os.path.isdir(folder) else []) == kept
    hvd.barrier()


def test_a_scheduler_has_the_wrapped_optimizer(hvd):
    L, HvdkitStrategy = lightning()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    model = one_layer(L, configure_optimizers=configure_optimizers)
    trainer = make_trainer(L, HvdkitStrategy(), max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        trainer.fit(model, DataLoader(torch.ones(4, 2), 2))
    (config,) = trainer.lr_scheduler_configs
    assert config.scheduler.optimizer is trainer.optimizers[0]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025


def test_what_cannot_be_right_is_refused(hvd):
    L, HvdkitStrategy = lightning()

    def fit(model, data=None, **arguments):
        trainer = make_trainer(L, HvdkitStrategy(), **arguments)
        trainer.fit(model, DataLoader(torch.ones(4, 2)) if data is None else data)

    def shared(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def synced(self):
        self.norm = nn.SyncBatchNorm(2)

    def lbfgs(self):
        return torch.optim.LBFGS(self.parameters())

    def wrapped(self):
        return hvd.DistributedOptimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    manual = one_layer(L, configure_optimizers=shared)
    manual.automatic_optimization = False
    sampler = hvd.ResumableSampler(4, 1)
    loader = DataLoader(torch.ones(4, 2), sampler=sampler)
    cases = [
        (lambda: HvdkitStrategy(accumulation_steps=2), "use the accumulation of the library"),
        (lambda: HvdkitStrategy(compresion="fp16"), "expected options .* compression"),
        (lambda: HvdkitStrategy(op=hvd.Adasum), "Adasum"),
        (lambda: HvdkitStrategy(on_nonfinite="skip"), "raise"),
        (lambda: fit(one_layer(L), devices=3), "3 devices"),
        (lambda: fit(one_layer(L), num_nodes=2), "num_nodes is 2"),
        (lambda: fit(manual), "share a parameter"),
        (lambda: fit(one_layer(L, configure_model=synced)), "SyncBatchNorm"),
        (lambda: fit(one_layer(L, configure_optimizers=lbfgs)), "LBFGS"),
        (lambda: fit(one_layer(L, configure_optimizers=wrapped)), "already"),
        (lambda: fit(one_layer(L), loader), "use_distributed_sampler=False"),
    ]
    for call, text in cases:
        with pytest.raises(UsageError, match=text):
            call()


def test_each_rank_gets_its_device(hvd):
    lightning()
    from hvdkit.lightning.environment import devices_of_host

    cpu, gpus = torch.device("cpu"), [torch.device("cuda", number) for number in range(4)]
    size = hvd.size()
    assert devices_of_host([cpu]) == devices_of_host([cpu] * size) == [cpu] * size
    assert devices_of_host(gpus) == gpus[:size]
    assert devices_of_host(gpus[4 - size :]) == gpus[4 - size :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        assert devices_of_host(gpus[:1]) == gpus[:1] * size
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        with pytest.raises(UsageError, match="1 devices"):
            devices_of_host(gpus[:1])


# --- Fabric and the collectives -------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_fabric_trains_like_one_process(hvd, seed):
    L, HvdkitStrategy = lightning(fabric=True)
    number = random.Random(seed)
    accumulate = number.choice([1, 2, 3])
    clip = number.choice([{}, {"max_norm": 0.1}, {"clip_val": 0.02}])
    several = number.random() < 0.5
    bf16 = number.random() < 0.3

    def train(size, rank, fabric):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        before = flat(model)
        if rank:
            model[0].weight.data.add_(1)
        halves = [model[0].parameters(), model[2].parameters()] if several else [model.parameters()]
        optimizers = [torch.optim.SGD(half, lr=0.1, momentum=0.5) for half in halves]
        model, *optimizers = fabric.setup(model, *optimizers)
        data = torch.Generator().manual_seed(5)
        dataset = TensorDataset(
            torch.randn(12 * size * 4 // size, 6, generator=data),
            torch.randint(3, (48,), generator=data),
        )
        loader = fabric.setup_dataloaders(DataLoader(dataset, 8 // size))
        for index, (inputs, targets) in enumerate(loader):
            ends = index % accumulate == accumulate - 1
            with fabric.no_backward_sync(model, enabled=not ends):
                loss = functional.cross_entropy(model(inputs), targets)
                fabric.backward(loss / accumulate)
            if ends:
                for optimizer in optimizers:
                    if clip:
                        fabric.clip_gradients(model, optimizer, **clip)
                    optimizer.step()
                    optimizer.zero_grad()
        return model.module, before

    kind = {"accelerator": "cpu", "precision": "bf16-mixed" if bf16 else "32-true"}
    together = L.Fabric(strategy=HvdkitStrategy(), **kind)
    together.launch()
    model, before = train(hvd.size(), hvd.rank(), together)
    alone = L.Fabric(devices=1, **kind)
    reference, _ = train(1, 0, alone)
    together.strategy.set_world_ranks()
    assert_trains_alike(hvd, model, reference, before, 0.1 if bf16 else 1e-4)


def test_fabric_refuses_what_cannot_be_right(hvd):
    L, HvdkitStrategy = lightning(fabric=True)
    fabric = L.Fabric(strategy=HvdkitStrategy(), accelerator="cpu")
    fabric.launch()
    sampler = hvd.ResumableSampler(4, 1)
    with pytest.raises(UsageError, match="use_distributed_sampler=False"):
        fabric.setup_dataloaders(DataLoader(torch.ones(4, 2), sampler=sampler))
    model = fabric.setup_module(nn.Linear(2, 1))
    weight = fabric.setup_optimizers(torch.optim.SGD([model.weight], lr=0.1))
    bias = torch.optim.SGD([model.bias], lr=0.1)
    fabric.backward(model(torch.ones(1, 2) * (1 + hvd.rank())).sum() * (1 + hvd.rank()))
    weight.step()
    with pytest.raises(UsageError, match=r"fabric\.setup_optimizers") as own:
        bias.step()
    assert_raised_on_all_ranks(hvd, own)
    fabric.setup_optimizers(bias).step()
    assert_same_on_all_ranks(hvd, model)


def test_fabric_resumes_a_resumable_sampler(hvd):
    L, HvdkitStrategy = lightning(fabric=True)
    fabric = L.Fabric(strategy=HvdkitStrategy(), accelerator="cpu")
    fabric.launch()
    data = torch.arange(16.0)
    expected = hvd.ResumableSampler(data, 2, seed=3)
    own = hvd.ResumableSampler(data, 2, seed=3)
    loader = fabric.setup_dataloaders(
        DataLoader(data, 2, sampler=own), use_distributed_sampler=False
    )
    for sampler in (expected, own):
        sampler.restore({"epoch": 2, "consumed": 2 * hvd.size()})
    for epoch in (2, 3):
        assert own.epoch == epoch
        batches = [batch.long().tolist() for batch in own.batches(loader)]
        assert batches == [batch.tolist() for batch in expected.batches()]


def test_fabric_skips_a_step_that_is_not_finite(hvd):
    L, HvdkitStrategy = lightning(fabric=True)
    fabric = L.Fabric(strategy=HvdkitStrategy(on_nonfinite="skip"), accelerator="cpu")
    fabric.launch()
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for value, steps in ((float("nan"), False), (1.0, True)):
        before = flat(model)
        optimizer.zero_grad()
        x = torch.full((1, 2), value if hvd.rank() == 1 else 1.0)
        fabric.backward(model(x).sum())
        optimizer.step()
        assert torch.equal(flat(model), before) != steps
    assert_same_on_all_ranks(hvd, model)


def test_collectives(hvd):
    L, HvdkitStrategy = lightning(fabric=True)
    from torch.distributed import ReduceOp

    fabric = L.Fabric(strategy=HvdkitStrategy(), accelerator="cpu")
    fabric.launch()
    rank, size = hvd.rank(), hvd.size()
    values = [float(each + 1) for each in range(size)]
    mean = sum(values) / size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.tensor(values[rank], dtype=dtype)
        assert fabric.all_reduce(tensor) is tensor
        assert (tensor.item(), tensor.dtype) == (mean, dtype)
    assert fabric.all_reduce(torch.tensor([3 * rank]), reduce_op="mean").tolist() == [
        3 * sum(range(size)) // size
    ]
    for operation, expected in (
        ("sum", sum(values)),
        (ReduceOp.SUM, sum(values)),
        ("max", size),
        (ReduceOp.MIN, 1),
        ("product", 2),
    ):
        assert fabric.all_reduce(torch.tensor(values[rank]), reduce_op=operation) == expected
    with torch.inference_mode():
        assert fabric.all_reduce(torch.tensor(values[rank])) == mean
        assert fabric.all_gather(torch.tensor(values[rank])).tolist() == values
    gathered = fabric.all_gather({"a": torch.full((2, 3), values[rank])})["a"]
    assert gathered.shape == (size, 2, 3)
    assert gathered[:, 0, 0].tolist() == values
    assert fabric.broadcast({"from": rank}, src=size - 1) == {"from": size - 1}
    assert fabric.strategy.reduce_boolean_decision(rank == 0, all=False) is True
    assert fabric.strategy.reduce_boolean_decision(rank == 0, all=True) is False
    # The gradient of a sum over ranks: each rank's loss depends on all tensors.
    own = torch.tensor([values[rank]], requires_grad=True)
    (fabric.all_gather(own, sync_grads=True).sum() * values[rank]).backward()
    assert own.grad.item() == sum(values)
    with pytest.raises(UsageError, match="reduce_op is 'median'"):
        fabric.all_reduce(torch.ones(1), reduce_op="median")
    with pytest.raises(UsageError, match="group"):
        fabric.all_reduce(torch.ones(1), group="some")
