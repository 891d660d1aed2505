"""`hvd.Checkpointer` and `hvd.ResumableSampler` on several ranks, and examples with them."""

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras, tf
from tests.ranks.rank_pool import Configuration, start_ranks_of
from tests.ranks.tensorflow.test_digits import QUIET, example
from tests.ranks.tensorflow.test_elastic import forget_tapes


def of_every_rank(hvd, value):
    return hvd.allgather_object(value)


def trained(hvd, folder, compression, interrupted_after=None):
    """Return the bytes of the state and the losses after 24 steps; None if interrupted."""
    keras.utils.set_random_seed(hvd.rank())
    sampler = hvd.ResumableSampler(40, 2, seed=2)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    x *= 4.0 ** (np.arange(40)[:, None] % 9 - 4)
    data = sampler.dataset().map(lambda i: tf.gather(x, i))
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch, training=True) ** 2)
        tape = hvd.DistributedGradientTape(tape, compression=compression, bucket_bytes=30)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses: list[str] = []
    log = {"losses": losses}
    with hvd.Checkpointer(
        folder, model=model, optimizer=optimizer, data=sampler, every_steps=4, metadata=log
    ) as checkpointer:
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        losses = log["losses"]
        while step < 24:
            for batch in sampler.batches(data):
                losses.append(float(train_step(batch)).hex())
                step += 1
                checkpointer.maybe_save(step, sampler.epoch)
                if step == interrupted_after:
                    return None
                if step == 24:
                    break
    # After a restore, all ranks have the first rank's metadata.
    content = [v.numpy().tobytes() for v in [*model.weights, *optimizer.variables]]
    return content, losses if hvd.rank() == 0 else losses[-8:]


@pytest.mark.long
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_resumed_loop_is_bit_identical(hvd, compression):
    with shared_folder(hvd) as folder, shared_folder(hvd) as other:
        assert trained(hvd, folder, compression, interrupted_after=14) is None
        forget_tapes()
        resumed = trained(hvd, folder, compression)
        forget_tapes()
        assert resumed == trained(hvd, other, compression)
        assert len({str(content) for content, _ in of_every_rank(hvd, resumed)}) == 1


def steps_of(hvd, kind, rate=0.1):
    """Return a model with a local layer, its optimizer and a training step."""
    keras.utils.set_random_seed(1)
    local = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((4,)), local, keras.layers.Dense(2)])
    local.kernel.assign_add(tf.ones_like(local.kernel) * hvd.rank())
    optimizer = keras.optimizers.Adam(rate)
    if kind == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, check_interval=1)
        local.trainable = False
    optimizer.build(model.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones((2, 4)) * float(hvd.rank())) ** 2)
        if kind != "optimizer":
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=local)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return model, optimizer, step if kind == "eager" else tf.function(step)


@pytest.mark.parametrize(
    ("kind", "rank", "changed"),
    [("graph", 0, "kernel"), ("eager", 1, "kernel_momentum"), ("optimizer", 0, "kernel")],
)
def test_ranks_that_differ_are_not_saved(hvd, tmp_path, kind, rank, changed):
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        model, optimizer, step = steps_of(hvd, kind)
        with hvd.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            for number in range(1, 4):
                step()
                checkpointer.save(number)
            if hvd.rank() == rank:
                variables = [*model.layers[1].variables, *optimizer.variables]
                (found,) = [
                    v for v in variables if v.path.endswith(changed) and tuple(v.shape) == (3, 2)
                ]
                value = found.numpy()
                value.view(np.uint32)[1, 1] ^= 1 << 30
                found.assign(value)
            step()
            with pytest.raises(RankMismatchError) as caught:
                checkpointer.save(4)
            message = str(caught.value)
            assert len(set(of_every_rank(hvd, message))) == 1
            assert f"{changed}' on rank {1 if hvd.size() == 2 else rank} (host " in message
            assert message.endswith("Step 4 was not saved.")
            assert checkpointer.latest() == 3
            assert checkpointer.restore().step == 3
            # Nothing has been trained here since, but the ranks compare once more.
            checkpointer.save(4)


def test_two_models_with_equal_names_are_both_compared(hvd, tmp_path):
    def named(changed):
        models = {}
        for name in ("generator", "critic"):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((2,))
            models[name] = keras.Model(inputs, keras.layers.Dense(1, name="out")(inputs))
        with hvd.Checkpointer(folder, model=models) as checkpointer:
            for model in models.values():
                with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                    loss = tf.reduce_sum(model(tf.ones((1, 2))))
                tape.gradient(loss, model.trainable_variables)
            if hvd.rank() == 0:
                models[changed].layers[1].kernel.assign(tf.ones((2, 1)))
            checkpointer.save(1)

    for changed in ("generator", "critic"):
        with (
            shared_folder(hvd) as folder,
            contextlib.chdir(tmp_path),
            pytest.raises(RankMismatchError, match=f"'model-{changed}: out/kernel' on rank"),
        ):
            named(changed)


def test_a_restore_discards_the_gradients_of_a_window(hvd):
    import hvdkit.keras

    variable = keras.Variable([0.0])
    optimizer = hvdkit.keras.DistributedOptimizer(keras.optimizers.SGD(1.0), accumulation_steps=2)
    optimizer.build([variable])

    def apply(gradient):
        optimizer.apply_gradients([(keras.ops.convert_to_tensor([gradient]), variable)])

    with (
        shared_folder(hvd) as folder,
        hvd.Checkpointer(folder, model=[variable.value], optimizer=optimizer) as checkpointer,
    ):
        apply(1.0)
        apply(1.0)
        checkpointer.save(2)
        apply(1000.0)
        checkpointer.restore()
        apply(1.0)
        assert variable.numpy() == [-1.0]
        apply(1.0)
    assert variable.numpy() == [-2.0]


def test_moving_statistics_are_restored_on_their_rank(hvd):
    class Centered(keras.layers.Layer):
        """Subtract the sum of this rank's inputs so far."""

        def build(self, shape):
            self.sum = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.sum.assign_add(tf.reduce_sum(x, 0))
            return x - self.sum

    def model():
        inputs = keras.Input((3,))
        norm = keras.layers.BatchNormalization(momentum=0.5)
        shared = hvd.SyncBatchNormalization(momentum=0.5)(norm(Centered()(inputs)))
        return keras.Model(inputs, shared)

    with shared_folder(hvd) as folder:
        saved, restored = model(), model()
        with hvd.Checkpointer(folder, model=saved) as c:
            saved(tf.fill((4, 3), 1.0 + hvd.rank()) * tf.range(4.0)[:, None], training=True)
            c.save(1)
        with hvd.Checkpointer(folder, model=restored) as c:
            assert c.restore().step == 1
        for layer, back in zip(saved.layers, restored.layers, strict=True):
            for mine, theirs in zip(
                layer.non_trainable_variables, back.non_trainable_variables, strict=True
            ):
                np.testing.assert_array_equal(theirs.numpy(), mine.numpy())
        for own in (saved.layers[1].sum, saved.layers[2].moving_variance):
            assert len({each.tobytes() for each in of_every_rank(hvd, own.numpy())}) == hvd.size()


def test_a_checkpoint_of_other_variables_raises_on_every_rank(hvd):
    with shared_folder(hvd) as folder:
        with hvd.Checkpointer(folder, model=[tf.Variable([1.0, 2.0], name="v")]) as c:
            c.save(1)
        own = tf.Variable([0.0] * (2 + hvd.rank() % 2), name="v")
        refused = pytest.raises(UsageError, match=r"rank.* 1.*v F32\[2\] -> v F32\[3\]")
        with hvd.Checkpointer(folder, model=[own]) as c, refused:
            c.restore()
        assert not own.numpy().any()


# Kill all ranks of an example, start it again, and compare with an uninterrupted run.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("tensorflow_digits", "tensorflow"),
        pytest.param("keras_digits", "keras-torch", marks=pytest.mark.long),
    ],
)
def test_digits_resume_after_a_kill(name, framework, tmp_path):
    two = Configuration(framework, "gloo", 2)
    # A killed TensorFlow leaves files with generated code there.
    environment = QUIET | {"TMPDIR": str(tmp_path)}

    def start(folder):
        arguments = ["--epochs", "3", "--checkpoint-dir", str(folder), "--checkpoint-every", "7"]
        command = [sys.executable, example(name), *arguments, "--resume"]
        return start_ranks_of(two, command, environment)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = start(whole).wait(timeout=120)[0].output.splitlines()
    with start(killed) as group:
        deadline = time.monotonic() + 120
        while len(Store(killed).steps()) < 2 and time.monotonic() < deadline:
            assert group.running(), group.output(0)
            time.sleep(0.01)
        for process in group._group.started:
            process.kill()
    again = start(killed).wait(timeout=120)[0].output.splitlines()
    assert again[0].startswith("resumed after step ")
    assert again[1:] == expected
    newest = [Store(folder).steps()[-1] for folder in (whole, killed)]
    assert newest[0].step == newest[1].step
    for part in ("model", "optimizer"):
        files = [Path(info.location, f"{part}.safetensors") for info in newest]
        contents = [tensors_of(file) for file in files]
        assert contents[0] == contents[1]


def tensors_of(file):
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(file).items()}


@pytest.mark.parametrize(
    "name", ["tensorflow_digits", pytest.param("keras_digits", marks=pytest.mark.long)]
)
def test_resume_needs_a_folder(name):
    from tests.ranks.torch.test_digits import run_plain

    done = run_plain(sys.executable, example(name), "--resume")
    assert done.returncode == 2
    assert "--resume needs --checkpoint-dir" in done.stderr


def test_another_model_on_one_rank_is_an_error_at_the_save(hvd):
    def built(units):
        model = keras.Sequential([keras.layers.Dense(units)])
        model.build((None, 3))
        return model

    with shared_folder(hvd) as folder:
        checkpointer = hvd.Checkpointer(folder, model=built(2 if hvd.rank() == 0 else 4))
        with pytest.raises(UsageError, match=r"rank 1 has .*kernel F32\[3, 4\] where rank 0 has"):
            checkpointer.save(1)
        assert checkpointer.latest() is None
        checkpointer.close()


def test_sharded_variables(hvd):
    size, rank = hvd.size(), hvd.rank()
    rows = 3 * size + 1
    first, end = 3 * rank, 3 * rank + (4 if rank == size - 1 else 3)
    with shared_folder(hvd) as folder:
        own = tf.Variable(tf.range(first, end, dtype=tf.float32)[:, None] * tf.ones((1, 2)))
        expected = own.numpy()

        def checkpointer():
            shards = {"table": hvd.Shard(own, first, rows)}
            return hvd.Checkpointer(folder, model=[tf.Variable(1.0)], sharded=shards)

        with checkpointer() as saving:
            saving.save(1)
        own.assign(0 * own)
        with checkpointer() as restoring:
            assert restoring.restore().step == 1
        np.testing.assert_array_equal(own.numpy(), expected)
