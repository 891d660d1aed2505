"""`hvd.autotune` on real ranks: gradients stay right while buckets change."""

import json

import pytest
import torch

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from hvdkit.training.tuning import Candidate
from tests.ranks.folders import shared_folder
from tests.ranks.torch.oracle import batch_of, loss_of, sgd, small_model, train_step, wrapped

# Bytes: the gradients of the small model have 800.
SIZES = (80, 300, 2000)


def use(tuner, bucket_bytes, wire_format):
    """Choose as if this candidate had won."""
    tuner.use(Candidate(bucket_bytes, wire_format))


def buckets_of(optimizer):
    """Return the number of buckets; 0 after a change, before the next pass."""
    (part,) = optimizer.reducer.gradients.parts
    synchronizer = part.synchronizer
    return len(synchronizer.plan.buckets) if synchronizer.plan else 0


def train_both(hvd, tuned, plain, optimizers, steps):
    """Make the same steps with an optimizer that is tuned and with one that is not.

    Yields:
        The largest difference of the gradients in each step, before the step.
    """
    for step in range(steps):
        plain.load_state_dict(tuned.state_dict())
        for model, optimizer in zip((tuned, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step, torch.float32)).backward()
        pairs = zip(tuned.parameters(), plain.parameters(), strict=True)
        yield max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{"compression": "fp16"}, pytest.param({"accumulation_steps": 2}, marks=pytest.mark.long)],
)
def test_gradients_while_the_buckets_change(hvd, options):
    tuned, plain = small_model(torch.float32), small_model(torch.float32)
    optimizers = [wrapped(hvd, model, **options) for model in (tuned, plain)]
    tuner = hvd.autotune(optimizers[0], bucket_bytes=SIZES, turns=3, steps=2)
    seen = set()
    steps = 45 * options.get("accumulation_steps", 1)
    for difference in train_both(hvd, tuned, plain, optimizers, steps):
        seen.add(buckets_of(optimizers[0]))
        assert difference <= (1e-2 if "compression" in options else 1e-5)
    assert tuner.done
    assert len(seen) == 3 + (0 in seen)
    # All ranks have chosen alike, or the comparison of their settings would have raised.
    assert len({size for (size,) in hvd.allgather_object([tuner.bucket_bytes])}) == 1
    assert tuner.bucket_bytes in {*SIZES, 25_000_000}
    assert optimizers[0].reducer.gradients.reduction.bucket_bytes == tuner.bucket_bytes


def test_a_result_is_used_again(hvd):
    with shared_folder(hvd) as folder:
        path = folder / "tuning.json"
        for attempt in range(2):
            model = small_model(torch.float32)
            optimizer = wrapped(hvd, model)
            tuner = hvd.autotune(optimizer, path, bucket_bytes=[300], turns=3, steps=1)
            assert tuner.done == bool(attempt)
            for step in range(30 * (1 - attempt)):
                train_step(hvd, model, optimizer, step)
            assert tuner.done
            hvd.barrier()
            if attempt == 0 and hvd.rank() == 0:
                ((key, entry),) = json.loads(path.read_text()).items()
                path.write_text(json.dumps({key: {**entry, "bucket_bytes": 300}}))
            hvd.barrier()
        assert tuner.bucket_bytes == 300
        train_step(hvd, model, optimizer, 0)
        assert buckets_of(optimizer) > 1
        # Another model measures.
        other = torch.nn.Linear(5, 9)
        optimizer = wrapped(hvd, other)
        assert not hvd.autotune(optimizer, path, bucket_bytes=[80]).done


def test_wire_formats_take_turns(hvd):
    """Only the listed formats are used, and gradients are those of the format in use."""
    tuned, plain = small_model(torch.float32), small_model(torch.float32)
    optimizers = [wrapped(hvd, model) for model in (tuned, plain)]
    formats = ["bf16", "none"]
    tuner = hvd.autotune(optimizers[0], bucket_bytes=[300], wire_formats=formats, turns=3, steps=1)
    assert not tuner.done
    assert len(tuner.seconds) == 4
    errors = {"none": 0.0, "bf16": 0.0}
    for difference in train_both(hvd, tuned, plain, optimizers, 36):
        errors[tuner.wire_format] = max(errors[tuner.wire_format], difference)
    assert tuner.done
    assert tuner.tuned
    assert len({tuple(each) for each in hvd.allgather_object([str(tuner.candidate)])}) == 1
    if hvd.size() > 1:
        assert errors["bf16"] > 10 * errors["none"]
    assert optimizers[0].reducer.gradients.reduction.format.name == tuner.wire_format
    with pytest.raises(UsageError, match="compression is 'fp17'"):
        hvd.autotune(wrapped(hvd, plain), wire_formats=["fp17"])
    with pytest.raises(UsageError, match="wire_formats is 'fp16': expected a list"):
        hvd.autotune(wrapped(hvd, plain), wire_formats="fp16")


def test_a_checkpoint_restores_a_wire_format(hvd):
    """The resumed run has the same bits; without permission for the format, it measures again."""
    with shared_folder(hvd) as folder:
        results = []
        for attempt in range(3):
            model = small_model(torch.float32)
            optimizer = wrapped(hvd, model)
            listed = ["fp16"] if attempt < 2 else ["bf16"]
            tuner = hvd.autotune(
                optimizer, bucket_bytes=[300], wire_formats=listed, turns=3, steps=1
            )
            with hvd.Checkpointer(
                folder / "steps", model=model, optimizer=optimizer, every_steps=100
            ) as checkpointer:
                if attempt == 0:
                    use(tuner, 300, "fp16")
                    for step in range(4):
                        train_step(hvd, model, optimizer, step)
                    checkpointer.save(4, wait=True)
                else:
                    assert checkpointer.restore().step == 4
                if attempt == 2:
                    assert not tuner.done
                    break
                assert tuner.done
                assert optimizer.reducer.gradients.reduction.format.name == "fp16"
                for step in range(4, 8):
                    train_step(hvd, model, optimizer, step)
            results.append([p.detach().clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_training_continues_after_an_error(hvd):
    """A tuner that could not begin must not measure."""
    model = small_model(torch.float32)
    optimizer = wrapped(hvd, model)
    with pytest.raises(RankMismatchError):
        hvd.autotune(optimizer, bucket_bytes=[80], steps=1 + hvd.rank())
    for step in range(5):
        train_step(hvd, model, optimizer, step)
    assert optimizer.hvdkit_tuner is None


def test_a_call_after_the_restore(hvd):
    """The size in the checkpoint would be lost."""
    with shared_folder(hvd) as folder:
        for attempt in range(2):
            model = small_model(torch.float32)
            optimizer = wrapped(hvd, model)
            with hvd.Checkpointer(
                folder / "steps", model=model, optimizer=optimizer, every_steps=100
            ) as checkpointer:
                if attempt == 0:
                    train_step(hvd, model, optimizer, 0)
                    checkpointer.save(1, wait=True)
                    continue
                checkpointer.restore()
                with pytest.raises(UsageError, match="call hvd.autotune before"):
                    hvd.autotune(optimizer, bucket_bytes=[80])


def test_join_ends_the_measurement(hvd):
    model = small_model(torch.float32)
    optimizer = wrapped(hvd, model)
    tuner = hvd.autotune(optimizer, bucket_bytes=[80, 300], turns=3, steps=3)
    for _ in range(2):
        for step in range(7 if hvd.rank() == 0 else 12):
            train_step(hvd, model, optimizer, step)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    assert tuner.done
    assert not tuner.tuned
    assert optimizer.reducer.gradients.reduction.bucket_bytes == 25_000_000
    assert buckets_of(optimizer) == 1


def test_invalid_arguments(hvd):
    model = small_model(torch.float32)
    with pytest.raises(UsageError, match="that is not wrapped"):
        hvd.autotune(sgd(model.parameters()))
    optimizer = wrapped(hvd, model)
    for options, text in [
        ({"turns": 2}, "turns is 2: expected a whole number >= 3"),
        ({"steps": 0}, "steps is 0"),
        ({"bucket_bytes": [0]}, "bucket_bytes is 0"),
        ({"bucket_bytes": ["5"]}, "bucket_bytes is '5'"),
    ]:
        with pytest.raises(UsageError, match=text):
            hvd.autotune(optimizer, **options)
    # All candidates make one bucket.
    assert hvd.autotune(optimizer).done
    with pytest.raises(UsageError, match="called twice"):
        hvd.autotune(optimizer)
    other = small_model(torch.float32)
    with pytest.raises(RankMismatchError, match="ranks disagree about hvd.autotune"):
        hvd.autotune(wrapped(hvd, other), bucket_bytes=[80], steps=5 + hvd.rank())
