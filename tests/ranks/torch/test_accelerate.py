"""`hvdkit.accelerate` and `hvdkit.transformers` on several ranks, against one process."""

import contextlib
import dataclasses
import os
import random
import socket

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hvdkit.errors import UsageError
from tests.ranks.torch.oracle import (
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    assert_trains_alike,
    flat,
)

BATCH = 4
WORLD = 2


@contextlib.contextmanager
def processes(hvd, alone=False):
    """Context with the variables of torchrun, for Accelerate; without them if `alone`."""
    accelerate = pytest.importorskip("accelerate")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = hvd.broadcast_object(server.getsockname()[1])
    variables = {
        "RANK": hvd.rank(),
        "LOCAL_RANK": hvd.rank(),
        "WORLD_SIZE": hvd.size(),
        "LOCAL_WORLD_SIZE": hvd.size(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    reset = accelerate.state.AcceleratorState._reset_state
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            if alone:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, str(value))
        reset(reset_partial_state=True)
        try:
            yield
        finally:
            hvd.barrier()
            if distributed.is_initialized():
                distributed.destroy_process_group()
            reset(reset_partial_state=True)
            accelerate.state.GradientState._reset_state()


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of the accelerator, and what the loop does."""

    accumulate: int = 1
    clip: str | None = None
    precision: str = "no"
    optimizer: str = "SGD"
    models: int = 1
    compression: str = "none"
    together: bool = True

    @property
    def tolerance(self):
        """The largest error, relative to the distance that training moves the weights."""
        return 0.1 if self.precision != "no" or self.compression != "none" else 1e-3


def draw(seed):
    number = random.Random(seed)
    return Setting(
        accumulate=number.choice([1, 2, 3]),
        clip=number.choice([None, "norm", "value"]),
        precision=number.choice(["no", "no", "bf16"]),
        optimizer=number.choice(["SGD", "AdamW"]),
        models=number.choice([1, 2]),
        compression=number.choice(["none", "none", "fp16"]),
        together=number.random() < 0.5,
    )


def train(setting, size, rank, accelerator):
    """Train new models; return them and their weights before."""
    torch.manual_seed(3)
    models = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(setting.models - 1)]
    models.append(nn.Linear(6, 3))
    before = flat(nn.ModuleList(models))
    if rank:
        models[-1].weight.data.add_(1)  # Accelerate copies the parameters of rank 0.
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.02, eps=1e-2)
        if setting.optimizer == "AdamW"
        else torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        for m in models
    ]
    data = torch.Generator().manual_seed(5)
    count = 10 * BATCH * WORLD
    dataset = TensorDataset(
        torch.randn(count, 6, generator=data), torch.randint(3, (count,), generator=data)
    )
    loader = DataLoader(dataset, BATCH * WORLD // size)
    # Optimizers before models: Accelerate allows any order.
    everything = [*optimizers, *models, loader]
    if setting.together:
        prepared = accelerator.prepare(*everything)
    else:
        prepared = [accelerator.prepare(each) for each in everything]
    optimizers, loader = prepared[: len(models)], prepared[-1]
    networks = prepared[len(models) : -1]
    for inputs, targets in loader:
        with accelerator.accumulate(*networks):
            outputs = inputs
            for network in networks:
                outputs = network(outputs)
            accelerator.backward(functional.cross_entropy(outputs, targets))
            if accelerator.sync_gradients and setting.clip:
                parameters = [p for m in networks for p in m.parameters()]
                if setting.clip == "norm":
                    accelerator.clip_grad_norm_(parameters, 0.1)
                else:
                    accelerator.clip_grad_value_(parameters, 0.02)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return nn.ModuleList(accelerator.unwrap_model(m) for m in networks), before


def check(hvd, setting):
    with processes(hvd):
        from hvdkit.accelerate import HvdkitAccelerator

        accelerator = HvdkitAccelerator(
            cpu=True,
            mixed_precision=setting.precision,
            gradient_accumulation_steps=setting.accumulate,
            reduction={"compression": setting.compression},
        )
        models, before = train(setting, hvd.size(), hvd.rank(), accelerator)
    with processes(hvd, alone=True):
        from accelerate import Accelerator

        alone = Accelerator(
            cpu=True,
            mixed_precision=setting.precision,
            gradient_accumulation_steps=setting.accumulate,
        )
        reference, _ = train(setting, 1, 0, alone)
    assert_trains_alike(hvd, models, reference, before, setting.tolerance)


def test_accelerate_trains_like_one_process(hvd):
    check(hvd, Setting(accumulate=3, clip="norm", optimizer="AdamW", models=2))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_settings(hvd, seed):
    check(hvd, draw(seed))


@pytest.mark.long
def test_a_saved_state_is_loaded(hvd):
    with processes(hvd):
        from hvdkit.accelerate import HvdkitAccelerator

        accelerator = HvdkitAccelerator(cpu=True)
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, plain)
        folder = hvd.broadcast_object(os.path.join(os.environ["TMPDIR"], f"state-{os.getpid()}"))

        def steps(count):
            for number in range(count):
                optimizer.zero_grad()
                accelerator.backward(model(torch.full((1, 2), number + hvd.rank() + 0.5)).sum())
                optimizer.step()
            return flat(model).tolist()

        steps(2)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        expected = steps(3)
        accelerator.load_state(folder)
        assert steps(3) == expected
        assert_same_on_all_ranks(hvd, model)


def test_a_reduction_within_no_sync(hvd):
    with processes(hvd):
        from hvdkit.accelerate import HvdkitAccelerator

        accelerator = HvdkitAccelerator(cpu=True)
        model = nn.Linear(2, 1, bias=False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.full((1, 2), 1.0 + hvd.rank())).sum())
            assert model.weight.grad.tolist() == [[1.0 + hvd.rank()] * 2]
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
        mean = sum(1.0 + rank for rank in range(hvd.size())) / hvd.size() + 1.0
        assert model.weight.grad.tolist() == [[mean] * 2]
        optimizer.step()


def test_an_optimizer_that_is_not_prepared_is_refused(hvd):
    with processes(hvd):
        from hvdkit.accelerate import HvdkitAccelerator

        accelerator = HvdkitAccelerator(cpu=True)
        model, other = accelerator.prepare(nn.Linear(2, 1), nn.Linear(2, 1))
        local = accelerator.prepare_model(nn.Linear(2, 1), evaluation_mode=True)
        prepared = accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((1, 2), 1.0 + hvd.rank())
        accelerator.backward((model(x) * other(x) * local(x)).sum())
        before = flat(model)
        with pytest.raises(UsageError, match=r"accelerator\.prepare\(model, optimizer\)") as own:
            plain.step()
        assert_raised_on_all_ranks(hvd, own)
        assert flat(model).equal(before)
        torch.optim.SGD(local.parameters(), lr=0.1).step()
        prepared.step()
        accelerator.prepare(plain).step()
        assert not flat(model).equal(before)
        assert_same_on_all_ranks(hvd, nn.ModuleList([model, other]))
        plain = torch.optim.SGD(accelerator.prepare(nn.Linear(2, 1)).parameters(), lr=0.1)
        plain.param_groups[0]["params"][0].grad = torch.ones(1, 2)
        hvd.register_local(plain)
        plain.step()


def test_what_cannot_be_right_is_refused(hvd):
    with processes(hvd):
        from accelerate import Accelerator, DistributedDataParallelKwargs

        from hvdkit.accelerate import HvdkitAccelerator, adopt

        with pytest.raises(UsageError, match="given accumulation_steps=2"):
            HvdkitAccelerator(cpu=True, reduction={"accumulation_steps": 2})
        hook = DistributedDataParallelKwargs(comm_hook="fp16")
        with pytest.raises(UsageError, match="comm_hook"):
            HvdkitAccelerator(cpu=True, kwargs_handlers=[hook])
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = Accelerator(cpu=True)
        wrapped = plain.prepare(model)
        with pytest.raises(UsageError, match=r"DistributedDataParallel.*hvdkit\.accelerate") as own:
            hvd.DistributedOptimizer(optimizer, wrapped.named_parameters())
        assert_raised_on_all_ranks(hvd, own)
        with pytest.raises(UsageError, match="before it prepares"):
            adopt(plain)
        accelerator = HvdkitAccelerator(cpu=True)
        with pytest.raises(UsageError, match="even_batches"), accelerator.join_uneven_inputs([]):
            pass
        del wrapped
    with processes(hvd, alone=True), pytest.raises(UsageError, match="process 0 of 1"):
        HvdkitAccelerator(cpu=True)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_of_transformers_trains_like_one_process(hvd, accumulate):
    transformers = pytest.importorskip("transformers")

    def train(kind, rank, size):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = transformers.BertForSequenceClassification(config)
        before = flat(model)
        if rank:
            model.classifier.weight.data.add_(1)
        numbers = torch.Generator().manual_seed(1)
        data = [
            {"input_ids": torch.randint(50, (6,), generator=numbers), "labels": i % 2}
            for i in range(48)
        ]
        arguments = transformers.TrainingArguments(
            os.path.join(os.environ["TMPDIR"], "trainer"),
            per_device_train_batch_size=8 // size,
            gradient_accumulation_steps=accumulate,
            num_train_epochs=2,
            learning_rate=0.01,
            adam_epsilon=1e-3,
            max_grad_norm=0.1,
            # Otherwise transformers multiplies this model's loss by the number of processes.
            average_tokens_across_devices=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = kind(
            model,
            arguments,
            train_dataset=data,
            eval_dataset=data[:13],
            compute_metrics=lambda found: {"count": len(found.label_ids)},
        )
        trainer.train()
        assert trainer.evaluate()["eval_count"] == 13
        assert type(trainer.model_wrapped) is type(model)
        return model, before

    with processes(hvd):
        from hvdkit.transformers import HvdkitTrainer

        model, before = train(HvdkitTrainer, hvd.rank(), hvd.size())
    with processes(hvd, alone=True):
        reference, _ = train(transformers.Trainer, 0, 1)
    assert_trains_alike(hvd, model, reference, before, 1e-3)


@pytest.mark.long
def test_a_trainer_of_transformers_evaluates_the_buffers_of_rank_0(hvd):
    transformers = pytest.importorskip("transformers")

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, inputs, labels=None):
            outputs = self.out(self.norm(inputs)).squeeze(1)
            return functional.mse_loss(outputs, labels), outputs

    with processes(hvd):
        from hvdkit.transformers import HvdkitTrainer

        torch.manual_seed(0)
        data = [{"inputs": i * torch.randn(3), "labels": float(i)} for i in range(16)]
        model = Network()
        arguments = transformers.TrainingArguments(
            os.path.join(os.environ["TMPDIR"], "buffers"),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = HvdkitTrainer(model, arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        own = hvd.allgather_object([buffer.tolist() for buffer in model.buffers()])
        assert own[0] != own[1]  # each rank has the statistics of its own batches
        trainer.evaluate()
        assert [buffer.tolist() for buffer in model.buffers()] == own[0]
