"""Checkpoints of PyTorch training on real ranks."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hvdkit.checkpoint import chunks
from hvdkit.checkpoint.items import LARGEST_STATISTICS
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.torch.checkpoints import restore_once, save_once


def samples(count=61):
    fixed = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 6, generator=fixed), torch.randint(3, (count,), generator=fixed)
    )


class Centered(nn.Module):
    """Subtract the mean of this rank's inputs so far."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("scale", torch.full((features,), 0.5))  # never changes
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean) * self.scale


class Training:
    """A small training with everything that a checkpoint keeps."""

    def __init__(self, hvd, folder, *, seed=0, optimizer="adam", size=16, workers=0, **how):
        self.hvd = hvd
        torch.manual_seed(100 * seed + hvd.rank())
        np.random.seed(100 * seed + hvd.rank())
        random.seed(100 * seed + hvd.rank())
        self.model = nn.Sequential(
            *(
                Centered(6),
                nn.Linear(6, size),
                nn.Unflatten(1, (4, -1)),
                nn.BatchNorm1d(4),
                nn.Flatten(),
            ),
            *(nn.ReLU(), nn.Dropout(0.3)),
            nn.Linear(size, 3),
        )
        plain = {
            "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
            "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
            "tensor lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
        }[optimizer](self.model.parameters())
        self.optimizer = hvd.DistributedOptimizer(
            plain, self.model.named_parameters(), bucket_bytes=200, **how
        )
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(plain, [3, 5], gamma=0.5)
        data = samples()
        self.sampler = hvd.ResumableSampler(data, 2, seed=3)
        self.loader = DataLoader(data, batch_size=2, sampler=self.sampler, num_workers=workers)
        self.generator = torch.Generator().manual_seed(7 + hvd.rank() + 100 * seed)
        self.counts = {"passes": 0}
        self.losses = []
        self.checkpointer = hvd.Checkpointer(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.schedule,
            data=self.sampler,
            metadata=self.counts,
            generators={"noise": self.generator},
            keep_last=None,
        )
        self.step = 0

    def broadcast(self):
        self.hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def restore(self, step=None):
        self.step = self.checkpointer.restore(step).step

    def train(self, until, save=()):
        while True:
            for x, y in self.sampler.batches(self.loader):
                x = x + torch.randn(x.shape, generator=self.generator) * random.random()
                loss = functional.cross_entropy(self.model(x), y) + float(np.random.rand())
                loss.backward()
                self.optimizer.step()
                self.counts["passes"] += 1
                if self.optimizer.stepped:
                    self.step += 1
                    self.schedule.step()
                    self.optimizer.zero_grad()
                    if self.step in save:
                        self.checkpointer.save(self.step, self.sampler.epoch)
                self.losses.append(loss.item())
                if self.step == until:
                    return

    def everything(self):
        """All that must be the same, in bytes and plain values."""
        tensors = [*self.model.state_dict().values()]
        state = self.optimizer.state_dict()
        for values in state["state"].values():
            tensors += [values[name] for name in sorted(values)]
        groups = [
            {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
            for group in state["param_groups"]
        ]
        return (
            [(t.dtype, t.shape, t.numpy().tobytes()) for t in tensors],
            groups,
            self.schedule.state_dict(),
            self.sampler.position,
            dict(self.counts),
            torch.rand(2).tolist(),
            np.random.rand(),
            random.random(),
            torch.rand(2, generator=self.generator).tolist(),
        )


@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": "adam"},
        {"optimizer": "fused"},
        {"optimizer": "tensor lr"},
        {"compression": "fp16", "accumulation_steps": 3},
        *(
            pytest.param(
                {"compression": compression, "accumulation_steps": passes}, marks=pytest.mark.long
            )
            for compression, passes in [("fp16", 1), ("bf16", 1), ("bf16", 3)]
        ),
    ],
    ids=str,
)
def test_a_resumed_training_equals_an_uninterrupted_one(hvd, how):
    with shared_folder(hvd) as folder:
        never = Training(hvd, folder, **how)
        never.broadcast()
        never.train(14, save=[4, 9])
        expected = never.everything()
        never.checkpointer.close()
        for step in (4, 9):
            again = Training(hvd, folder, seed=1, **how)
            again.restore(step)
            # A save before the first step after a restore has the same content.
            again.checkpointer.save(step, wait=True)
            again.checkpointer.close()
            again = Training(hvd, folder, seed=2, **how)
            # The same objects can go back.
            for _ in range(2):
                again.restore(step)
                again.losses.clear()
                again.train(14)
                assert again.losses == never.losses[-len(again.losses) :]
                assert again.everything() == expected
            again.checkpointer.close()


def test_workers_and_their_random_numbers_resume(hvd):
    class Noisy(Dataset):
        def __len__(self):
            return 37

        def __getitem__(self, i):
            return i, torch.rand(()), random.random(), np.random.rand()

    def noisy_batch(samples):
        return [*default_collate(samples), torch.rand(()), torch.tensor(random.random())]

    def epochs(workers, start=None, persistent=False, collate=None):
        torch.manual_seed(start or 0)
        sampler = hvd.ResumableSampler(Noisy(), 2, seed=1)
        loader = DataLoader(
            sampler.seeded(Noisy()),
            batch_size=2,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=persistent,
            collate_fn=collate,
        )
        with hvd.Checkpointer(folder, model=nn.Linear(1, 1), data=sampler) as checkpointer:
            if start is not None:
                checkpointer.restore()
            seen, numbers = [], []
            for _ in range(sampler.epoch, 2):
                for batch in sampler.batches(loader):
                    seen.append([part.tolist() for part in batch])
                    numbers.append(torch.rand(()).item())
                    if len(seen) == 3 and start is None:
                        checkpointer.save(3)
            return seen, numbers

    with shared_folder(hvd) as folder:
        seen, numbers = epochs(0)
        assert epochs(0, start=9) == (seen[3:], numbers[3:])
        assert epochs(2, start=8) == (seen[3:], numbers[3:])
        assert epochs(2, start=8, persistent=True) == (seen[3:], numbers[3:])
    with shared_folder(hvd) as folder:
        seen, numbers = epochs(2, collate=noisy_batch)
        assert epochs(2, start=7, collate=noisy_batch) == (seen[3:], numbers[3:])


class Odd(nn.Module):
    """Tied weights, several dtypes, a buffer, extra state."""

    def __init__(self, value):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.narrow = nn.Parameter(torch.full((3, 2), value, dtype=torch.bfloat16))
        self.last = nn.Parameter(
            torch.full((2, 3, 4, 4), value).to(memory_format=torch.channels_last)
        )
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("flags", torch.tensor([True, value > 0]))
        self.register_buffer("none", torch.empty(0, 3))
        self.secret = value
        with torch.no_grad():
            self.embedding.weight.fill_(value)
            self.last += torch.arange(96.0).view(2, 3, 4, 4)

    def get_extra_state(self):
        return {"secret": self.secret, "tensor": 1}

    def set_extra_state(self, state):
        self.secret = state["secret"]


def test_every_kind_of_tensor_is_restored_and_loads_with_plain_safetensors(hvd):
    with shared_folder(hvd) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 100)  # each tensor comes in pieces
        model = Odd(hvd.rank() + 1.0)
        hvd.register_local(model)
        save_once(hvd, folder, model=model)
        other = Odd(-3.0)
        addresses = {
            name: t.data_ptr()
            for name, t in other.state_dict(keep_vars=True).items()
            if isinstance(t, torch.Tensor)
        }
        restore_once(hvd, folder, model=other)
        expected = Odd(1.0)
        # The values of this rank, because they differ between the ranks.
        buffers = dict(model.named_buffers())
        for name, saved in expected.state_dict().items():
            tensor = buffers.get(name, saved)
            mine = other.state_dict()[name]
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(mine, tensor), name
                assert mine.dtype == tensor.dtype
                assert mine.stride() == tensor.stride()
                assert mine.data_ptr() == addresses[name]
        assert other.secret == 1.0
        assert other.head.weight is other.embedding.weight
        (info,) = Store(folder).steps()
        plain = load_file(f"{info.location}/model.safetensors")
        assert "head.weight" not in plain
        for name, tensor in plain.items():
            assert torch.equal(tensor, expected.state_dict()[name])


class Unsaved(nn.Module):
    """Buffers that the state dict lacks, of which each rank has another number."""

    def __init__(self, count):
        super().__init__()
        for k in range(count):
            self.register_buffer(f"b{k}", torch.ones(1))

    def state_dict(self, *args, **options):
        return {}


def test_statistics_are_restored_beside_buffers_that_are_not_saved(hvd):
    def build(value):
        model = nn.Sequential(nn.BatchNorm1d(2), Unsaved(1 + hvd.rank()), nn.Module())
        model[0].running_mean.fill_(value)
        model[2].register_buffer("large", torch.full((LARGEST_STATISTICS // 4,), value))
        return model

    with shared_folder(hvd) as folder:
        save_once(hvd, folder, model=build(1.0 + hvd.rank()))
        other = build(-1.0)
        restore_once(hvd, folder, model=other)
        assert other[0].running_mean.tolist() == [1.0 + hvd.rank()] * 2
        assert other[2].large[0] == 1.0


def test_a_checkpoint_that_does_not_fit_is_an_error_and_changes_nothing(hvd):
    with shared_folder(hvd) as folder:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        save_once(hvd, folder, model=model, optimizer=optimizer)
        before = nn.Linear(3, 2)
        content = before.weight.detach().clone()
        # Only the last rank has built another model.
        other = nn.Linear(3, 4) if hvd.rank() == hvd.size() - 1 else before
        cases = [
            (other, None, "weight is F32 .4, 3. here and F32 .2, 3. in the"),
            (before, torch.optim.Adam(before.parameters(), 0.1), "is Adam here and SGD in"),
            (before, torch.optim.SGD([before.weight], 0.1), "group 0 has 1 parameters here and 2"),
            (nn.Linear(3, 2, bias=False), None, "the model has no bias"),
            (nn.Linear(3, 2).double(), None, "F64 .2. here and F32 .2. in the checkpoint"),
        ]
        for model, optimizer, words in cases:
            with pytest.raises(UsageError, match=words):
                restore_once(hvd, folder, model=model, optimizer=optimizer)
        assert torch.equal(before.weight, content)


def test_several_models_and_optimizers_and_scalers(hvd):
    def make(value):
        models = {"g": nn.Linear(2, 2), "d": nn.Linear(3, 1)}
        for model in models.values():
            nn.init.constant_(model.weight, value)
        optimizers = {
            "g": hvd.DistributedOptimizer(torch.optim.Adam(models["g"].parameters(), value)),
            "d": torch.optim.SGD(models["d"].parameters(), value, momentum=0.9),
        }
        scaler = hvd.GradScaler("cpu", init_scale=value * 64)
        return models, optimizers, scaler

    with shared_folder(hvd) as folder:
        models, optimizers, scaler = make(0.5)
        for _ in range(2):
            for name, model in models.items():
                optimizers[name].zero_grad()
                scaler.scale(model(torch.ones(1, model.in_features)).sum()).backward()
                scaler.step(optimizers[name])
            scaler.update()
        how = {"model": models, "optimizer": optimizers, "scaler": scaler}
        save_once(hvd, folder, **how)
        others, their, scale = make(0.25)
        how = {"model": others, "optimizer": their, "scaler": scale}
        restore_once(hvd, folder, **how)
        for name in models:
            assert torch.equal(models[name].weight, others[name].weight)
            mine, saved = their[name].state_dict(), optimizers[name].state_dict()
            assert mine["param_groups"] == saved["param_groups"]
            assert str(mine["state"]) == str(saved["state"])
        assert scale.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("wraps", [True, False])
def test_a_due_save_waits_for_the_end_of_a_window_and_save_does_not(hvd, wraps):
    with shared_folder(hvd) as folder, recorded("hvdkit.torch") as records:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if wraps:
            optimizer = hvd.DistributedOptimizer(optimizer, accumulation_steps=3)
        saved = []
        with hvd.Checkpointer(
            folder, model=model, optimizer=optimizer, every_steps=1, stop_signals=[]
        ) as checkpointer:
            for passes in range(1, 7):
                model(torch.ones(1, 2)).sum().backward()
                if passes == 2:
                    checkpointer.save(2)
                # Without a wrapped optimizer, the script counts the passes of the window.
                steps = wraps or passes % 3 == 0
                if steps:
                    optimizer.step()
                if checkpointer.maybe_save(passes):
                    saved.append(passes)
                if steps:
                    optimizer.zero_grad()
        assert saved == [3, 6]
        texts = [record.getMessage() for record in records]
        assert len(texts) == (hvd.rank() == 0)
        assert all("lacks the gradients of an accumulation window" in text for text in texts)


@pytest.mark.parametrize(
    ("kind", "counts", "used"),
    [
        # The passes 4 and 5 are lost.
        ("backward_passes_per_step", "since the beginning", [1, 2, 3, 6, 7, 8, 9]),
        ("backward_passes_per_step", "since the restart", [1, 2, 3, 6, 7, 8]),
        ("accumulation_steps", "", [1, 2, 3, 6, 7, 8, 9]),
    ],
)
def test_a_job_resumes_in_an_accumulation_window(hvd, kind, counts, used):
    def passes(begin, end):
        for number in range(begin, end):
            (model(torch.ones(1, 2)).sum() * number).backward()
            count = number if counts.endswith("beginning") else number - begin + 1
            if count % 3 == 0 or not counts:
                optimizer.step()
                optimizer.zero_grad()

    with shared_folder(hvd) as folder:
        for begin, end in ((1, 6), (6, 10)):
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            start = model.bias.item()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 1.0), **{kind: 3}
            )
            with hvd.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
                if begin > 1:
                    assert checkpointer.restore().step == begin - 1
                    optimizer.discard_accumulated()  # as an elastic job does
                passes(begin, end)
                if begin == 1:
                    checkpointer.save(end - 1)
    total = sum(used) / (3 if kind == "accumulation_steps" else 1)
    assert model.bias.item() == pytest.approx(start - total)


def wrapped_gan(hvd, wraps=True):
    """Return the generator and the discriminator, and their optimizers, wrapped or not."""
    torch.manual_seed(0)
    models = {"generator": nn.Linear(2, 3), "discriminator": nn.Linear(3, 1)}
    optimizers = {n: torch.optim.SGD(model.parameters(), 0.1) for n, model in models.items()}
    if wraps:
        optimizers = {n: hvd.DistributedOptimizer(each) for n, each in optimizers.items()}
    return models, optimizers


def gan(hvd, models, optimizers, ask, no_sync=contextlib.nullcontext):
    """Train the discriminator, and then the generator: this pass reaches both."""
    generator, discriminator = models
    optimizer_g, optimizer_d = optimizers
    discriminator.zero_grad()
    discriminator(generator(torch.ones(1, 2)).detach()).sum().backward()
    optimizer_d.step()
    generator.zero_grad()
    with no_sync(optimizer_d):
        discriminator(generator(torch.ones(1, 2))).sum().backward()
    optimizer_g.step()
    ask()


def gan_with_less_communication(hvd, models, optimizers, ask):
    """Train without a reduction of the gradients of the discriminator that no step uses."""
    gan(hvd, models, optimizers, ask, hvd.no_sync)


def one_network(hvd, models, optimizers, ask):
    """Train the generator only, with an empty batch on one rank in some steps."""
    generator, discriminator = models
    networks = torch.nn.ModuleList(models)
    networks.zero_grad()
    if ask.step != 3 or hvd.rank() == 0:
        discriminator(generator(torch.ones(1, 2))).sum().backward()
    optimizers[0].step()
    ask()


def pass_for_gradients(hvd, models, optimizers, ask, remove):
    """Step after a pass, then make a pass for its gradients only."""
    discriminator, optimizer = models[1], optimizers[1]
    discriminator(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    discriminator(torch.ones(1, 3)).sum().backward()
    remove(discriminator, optimizer, ask.step)
    ask()


def gradient_norm(*arguments):
    pass_for_gradients(*arguments, lambda model, optimizer, _: optimizer.zero_grad())


def gradients_of_the_model(*arguments):
    """Remove the gradients from the model, or set them to 0."""

    def remove(model, _, step):
        model.zero_grad(set_to_none=bool(step % 2))

    pass_for_gradients(*arguments, remove)


def adversarial_example(*arguments):
    """Make a pass for the gradients of the input, and remove the others in the next step."""
    arguments[1][1].zero_grad()
    pass_for_gradients(*arguments, lambda *_: None)


def left_over(hvd, models, optimizers, ask):
    """Let gradients of the last step of the generator flow into the next step of the other."""
    generator, discriminator = models
    optimizer_g, optimizer_d = optimizers
    discriminator(generator(torch.ones(1, 2)).detach()).sum().backward()
    optimizer_d.step()
    optimizer_d.zero_grad()
    discriminator(generator(torch.ones(1, 2))).sum().backward()
    optimizer_g.step()
    optimizer_g.zero_grad()
    ask()


def one_loss(hvd, models, optimizers, ask):
    """Ask before the step of the second optimizer."""
    generator, discriminator = models
    optimizer_g, optimizer_d = optimizers
    discriminator.zero_grad()
    generator.zero_grad()
    discriminator(generator(torch.ones(1, 2))).sum().backward()
    optimizer_g.step()
    ask()
    optimizer_d.step()


def gradient_hook(hvd, models, optimizers, ask):
    """Ask within a pass, before its gradients are there."""
    discriminator, optimizer = models[1], optimizers[1]
    optimizer.zero_grad()
    outputs = discriminator(torch.ones(1, 3))
    outputs.register_hook(lambda _: ask())
    outputs.sum().backward()
    optimizer.step()


def dropped_pass(hvd, models, optimizers, ask):
    """Ask within a window in which one rank has dropped a pass."""
    discriminator, optimizer = models[1], optimizers[1]
    optimizer.zero_grad()
    with hvd.no_sync(optimizer):
        if ask.step == 3 and hvd.rank() == 1:
            assert not optimizer.drop_pass()
        else:
            discriminator(torch.ones(1, 3)).sum().backward()
    ask()
    try:
        discriminator(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    except hvd.BackwardFailed:
        optimizer.drop_pass()


@pytest.mark.parametrize(
    ("use", "wraps", "warns"),
    [
        (gan, True, False),
        (gan, False, False),
        (gan_with_less_communication, True, False),
        (one_network, True, False),
        (gradient_norm, True, False),
        (gradient_norm, False, False),
        (gradients_of_the_model, True, False),
        (gradients_of_the_model, False, False),
        (left_over, True, True),
        (left_over, False, True),
        (one_loss, True, True),
        (one_loss, False, True),
    ],
)
def test_saves_after_a_step_do_not_wait_for_gradients_of_other_optimizers(hvd, use, wraps, warns):
    assert_saves(hvd, use, range(1, 5), warns, wraps)


@pytest.mark.parametrize(
    ("use", "wraps"),
    [
        (adversarial_example, True),
        (adversarial_example, False),
        (dropped_pass, True),
        (gradient_hook, True),
        (gradient_hook, False),
    ],
)
def test_calls_that_are_never_after_a_step_are_an_error(hvd, use, wraps):
    with pytest.raises(UsageError, match=r"maybe_save\(2\) was called between a backward pass"):
        assert_saves(hvd, use, [], False, wraps)


def assert_saves(hvd, use, saved, warns, wraps):
    models, optimizers = wrapped_gan(hvd, wraps)
    ask = Asking()
    with (
        shared_folder(hvd) as folder,
        recorded("hvdkit.torch") as records,
        hvd.Checkpointer(
            folder, model=models, optimizer=optimizers, every_steps=1, stop_signals=[]
        ) as ask.checkpointer,
    ):
        for _ in range(4):
            use(hvd, list(models.values()), list(optimizers.values()), ask)
    assert ask.saved == list(saved)
    texts = [record.getMessage() for record in records]
    texts = [text for text in texts if "the checkpoint lacks these gradients" in text]
    assert len(texts) == (warns and hvd.rank() == 0)


class Asking:
    """Calls `maybe_save` with the number of the step.

    Attributes:
        step: the number of the next call.
        saved: the steps that were saved.
    """

    def __init__(self):
        self.step, self.saved = 1, []

    def __call__(self):
        if self.checkpointer.maybe_save(self.step):
            self.saved.append(self.step)
        self.step += 1


def test_a_signal_to_one_rank_stops_all_with_everything_saved(hvd):
    with shared_folder(hvd) as folder:
        checkpointer = hvd.Checkpointer(
            folder, model=nn.Linear(1, 1), stop_signals=[signal.SIGTERM]
        )
        stopped = None
        with checkpointer:
            try:
                for step in range(1, 6):
                    if step == 3 and hvd.rank() == hvd.size() - 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    checkpointer.maybe_save(step)
            except hvd.Stopped as error:
                stopped = error
        assert stopped is not None
        assert (stopped.code, stopped.step) == (hvd.RESUMABLE, 3)
        assert [info.step for info in Store(folder).steps()] == [3]


def test_a_signal_to_all_processes_leaves_the_workers_of_a_loader(hvd):
    """Slurm's scancel sends such a signal. If a worker ended, its rank would also end."""
    dataset = torch.utils.data.TensorDataset(torch.arange(64.0))
    sampler = hvd.ResumableSampler(dataset, batch_size=2)
    loader = torch.utils.data.DataLoader(dataset, 2, sampler=sampler, num_workers=2)
    with shared_folder(hvd) as folder:
        step, stopped = 0, None
        with hvd.Checkpointer(
            folder, model=nn.Linear(1, 1), data=sampler, every_steps=1000
        ) as checkpointer:
            try:
                for _ in sampler.batches(loader):
                    step += 1
                    if step == 2:
                        workers = multiprocessing.active_children()
                        # From a process that is not their parent.
                        for process in (*(worker.pid for worker in workers), os.getpid()):
                            subprocess.run(["kill", "-TERM", str(process)], check=True)
                        time.sleep(0.3)
                        assert all(worker.is_alive() for worker in workers)
                    checkpointer.maybe_save(step)
            except hvd.Stopped as error:
                stopped = error
        assert stopped is not None
        assert len(workers) == 2
        assert step == 2
        assert [info.step for info in Store(folder).steps()] == [2]
        # Their parent can still end them.
        workers[0].terminate()
        workers[0].join(5)
        assert workers[0].exitcode == 0


@pytest.mark.parametrize("item", ["model", "optimizer"])
def test_a_state_of_another_shape_on_one_rank_is_an_error_at_the_save(hvd, item):
    """For example, an optimizer has this rank's rows of a table that the ranks divide."""
    model = nn.Linear(1 + (item == "model" and hvd.rank() == 1), 1, bias=False)
    table = nn.Parameter(torch.ones(3 + (hvd.rank() == 1), 2))
    optimizer = torch.optim.Adam([model.weight, table])
    words = {
        "model": r"model differs .*rank 1 has weight F32 \[1, 2\] where rank 0 has weight F32 \[1",
        "optimizer": r"rank 1 has parameter 1 of group 0 \[4, 2\] where rank 0 has parameter 1",
    }[item]
    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer,
    ):
        with pytest.raises(UsageError, match=words):
            checkpointer.save(1)
        assert checkpointer.latest() is None


@pytest.mark.parametrize("unusable", ["expanded", "meta"])
def test_a_tensor_that_no_restore_could_write_is_an_error_at_the_save(hvd, unusable):
    model = nn.Linear(1, 1)
    model.register_buffer(
        "scale", torch.ones(1).expand(3) if unusable == "expanded" else torch.ones(3, device="meta")
    )
    with shared_folder(hvd) as folder, hvd.Checkpointer(folder, model=model) as checkpointer:
        with pytest.raises(UsageError, match=r"model\['scale'\] (has several|is on the meta)"):
            checkpointer.save(1)
        assert checkpointer.latest() is None


def test_an_embedding_that_is_divided_between_the_ranks(hvd):
    """A job with another number of ranks restores the rows and their optimizer state."""
    rows, width = 13, 5
    table = torch.arange(rows * width, dtype=torch.float32).view(rows, width)

    def shards(collectives_rank, size, content):
        first, end = (rows * k // size for k in (collectives_rank, collectives_rank + 1))
        own = {name: whole[first:end].clone() for name, whole in content.items()}
        own["weight"] = nn.Parameter(own["weight"])
        return own, {name: hvd.Shard(tensor, first, rows) for name, tensor in own.items()}

    whole = {"weight": table, "exp_avg": table.double() / 3, "transposed": table.flip(0)}
    with shared_folder(hvd) as folder:
        own, sharded = shards(hvd.rank(), hvd.size(), whole)
        sharded["transposed"] = hvd.Shard(
            own["transposed"].t().contiguous().t(), sharded["transposed"].first, rows
        )
        save_once(hvd, folder, model=nn.Linear(1, 1), sharded=sharded)
        saved = torch.cat(hvd.allgather_object(own["weight"].detach()))
        assert torch.equal(saved, table)
        members = list(range(1, hvd.size()))
        process_set = hvd.add_process_set(members)
        try:
            if hvd.rank() in members:
                zeros = {name: 0 * tensor for name, tensor in whole.items()}
                own, sharded = shards(members.index(hvd.rank()), len(members), zeros)
                with hvd.Checkpointer(
                    folder, model=nn.Linear(1, 1), sharded=sharded, process_set=process_set
                ) as checkpointer:
                    assert checkpointer.restore().step == 1
                for name, shard in sharded.items():
                    expected = whole[name][shard.first : shard.first + len(own[name])]
                    assert torch.equal(own[name].detach(), expected)
        finally:
            hvd.remove_process_set(process_set)


@pytest.mark.parametrize("wrap", [torch.compile, nn.Sequential])
def test_an_archive_may_have_a_wrapper_of_the_model(hvd, wrap):
    with shared_folder(hvd) as folder:
        training = Training(hvd, folder / "main")
        training.broadcast()
        with hvd.Checkpointer(folder / "best", model=wrap(training.model)) as archive:
            archive.continue_at(0)
            archive.save(1)
        training.checkpointer.close()


def test_a_checkpoint_of_several_process_sets_is_refused(hvd):
    """It would have the model of the first rank only."""
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    own = sets[hvd.rank()]
    try:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=own)
        with shared_folder(hvd) as folder:
            whole = {"model": model, "optimizer": optimizer}
            with pytest.raises(UsageError, match=r"\(optimizer over ranks \[\d\]\)"):
                hvd.Checkpointer(folder, **whole)
            for restores in (False, True):
                path = f"{folder}/{hvd.rank()}"
                with hvd.Checkpointer(path, **whole, process_set=own) as checkpointer:
                    if restores:
                        assert checkpointer.restore().step == 1
                    else:
                        checkpointer.save(1)
                        nn.init.zeros_(model.weight)
            assert model.weight.item() == hvd.rank()
    finally:
        for each in sets:
            hvd.remove_process_set(each)
