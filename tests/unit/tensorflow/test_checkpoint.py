"""`hvd.Checkpointer` and `hvd.ResumableSampler` in a job of one rank."""

import numpy as np
import pytest

from tests.alone import run_alone
from tests.large_table import with_large_table


def test_tensors_of_every_dtype_are_restored_in_pieces(hvd):
    import tensorflow as tf

    from hvdkit.checkpoint.dtypes import CODES
    from hvdkit.checkpoint.tensors import nbytes
    from hvdkit.tensorflow.items import VariableTensor

    random = np.random.default_rng(1)
    for name in CODES:
        try:
            dtype = tf.as_dtype(name)
        except TypeError:
            continue  # not one of TensorFlow's
        content = random.integers(0, 2, 4 * 5 * 3 * dtype.size).astype(np.uint8)
        values = content.view(dtype.as_numpy_dtype).reshape(4, 5, 3)
        try:
            saved, restored = tf.Variable(values), tf.Variable(np.zeros_like(values))
        except tf.errors.OpError:
            continue  # float8 has no kernels on some machines
        out = np.empty(nbytes(VariableTensor(saved).spec), np.uint8)
        VariableTensor(saved).read(out)
        assert out.tobytes() == content.tobytes(), name
        VariableTensor(restored).write(out)
        assert np.array_equal(restored.numpy(), values), name
    # Write pieces of any number of elements.
    values = random.normal(size=(4, 5, 3)).astype(np.float32)
    out = values.reshape(-1).view(np.uint8)
    for size in (3, 7, 16, 59):
        restored = tf.Variable(np.zeros_like(values))
        tensor = VariableTensor(restored)
        for first in range(0, out.size, 4 * size):
            tensor.write(out[first : first + 4 * size], first)
        assert np.array_equal(restored.numpy(), values), size
    scalar = tf.Variable(3, dtype=tf.int64)
    VariableTensor(scalar).write(np.array([7]).view(np.uint8))
    assert int(scalar) == 7


def test_the_order_depends_only_on_seed_and_epoch(hvd):
    def epochs(seed):
        sampler = hvd.ResumableSampler(11, 4, seed=seed)
        data = sampler.dataset()
        return [[b.numpy().tolist() for b in sampler.batches(data)] for _ in range(2)]

    first = epochs(1)
    assert first == epochs(1) != epochs(2)
    assert first[0] != first[1]
    for epoch in first:
        assert [len(batch) for batch in epoch] == [4, 4, 3]
        assert sorted(i for batch in epoch for i in batch) == list(range(11))
    plain = hvd.ResumableSampler(5, 2, shuffle=False, drop_last=True)
    assert [b.numpy().tolist() for b in plain.batches(plain.dataset())] == [[0, 1], [2, 3]]


def test_a_sampler_resumes_at_any_batch(hvd):
    def make():
        sampler, read = hvd.ResumableSampler(11, 2, seed=5), []

        def load(number, seed):
            import tensorflow as tf

            number = tf.numpy_function(lambda n: read.append(int(n)) or n, [number], "int64")
            return tf.ensure_shape(number, []), seed

        return sampler, sampler.dataset(load, seeds=True), read

    def rows(batch):
        numbers, seeds = batch
        return numbers.numpy().tolist(), seeds.numpy().tolist()

    sampler, data, _ = make()
    assert int(data.cardinality()) == sampler.batches_per_epoch == 6
    whole = [rows(batch) for _ in range(2) for batch in sampler.batches(data)]
    # Each sample has a different seed in each epoch.
    assert len({tuple(seed) for _, seeds in whole for seed in seeds}) == 22
    # Within an epoch, at its end, and at the end of the last one.
    for done in (0, 2, 5, 6, 11):
        sampler, data, _ = make()
        batches = (b for _ in range(2) for b in sampler.batches(data))
        assert [rows(next(batches)) for _ in range(done)] == whole[:done]
        state = sampler.save()
        other, data, read = make()
        other.restore(other.plan_restore(state))
        assert len(other.batches(data)) == other.batches_left
        rest = [rows(b) for _ in range(other.epoch, 2) for b in other.batches(data)]
        assert rest == whole[done:]
        assert len(read) == 22 - sum(len(numbers) for numbers, _ in whole[:done])


def test_another_seed_or_number_of_samples_raises(hvd):
    from hvdkit.errors import UsageError

    state = hvd.ResumableSampler(10, 2, seed=1).save()
    with pytest.raises(UsageError, match="seed 1, but this one has seed 2"):
        hvd.ResumableSampler(10, 2, seed=2).plan_restore(state)
    with pytest.raises(UsageError, match="samples 10, but this"):
        hvd.ResumableSampler(12, 2, seed=1).plan_restore(state)
    for arguments in ((0, 1), (4, 0), (4, 2.0)):
        with pytest.raises(UsageError, match="expected a whole number"):
            hvd.ResumableSampler(*arguments)
    with pytest.raises(UsageError, match="do not make a batch"):
        hvd.ResumableSampler(3, 4, drop_last=True)


def test_uncounted_samples_raise_at_the_next_save(hvd):
    from hvdkit.errors import UsageError

    sampler = hvd.ResumableSampler(10, 2)
    next(iter(sampler.dataset()))
    with pytest.raises(UsageError, match=r"for batch in sampler.batches\(dataset\)"):
        sampler.save()
    next(sampler.batches())
    assert sampler.save()["consumed"] == 2


def test_a_dataset_without_a_fixed_order_raises(hvd):
    import tensorflow as tf

    from hvdkit.errors import UsageError

    sampler = hvd.ResumableSampler(10, 2)
    options = tf.data.Options()
    options.deterministic = False
    with pytest.raises(UsageError, match="deterministic=False: expected True or None"):
        sampler.batches(sampler.dataset().with_options(options).prefetch(1))


def test_variables_seeds_and_generators_are_restored(hvd, tmp_path):
    import random

    import keras
    import tensorflow as tf

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
        module = tf.Module()
        module.rows = tf.Variable(tf.ones((4, 3)))
        noise = tf.random.Generator.from_seed(5)
        of_numpy, of_python = np.random.default_rng(6), random.Random(7)
        counts = {}
        checkpointer = hvd.Checkpointer(
            tmp_path / "steps",
            model={"net": model, "module": module},
            optimizer=[tf.Variable(1.5)],
            generators={"noise": noise, "numpy": of_numpy, "python": of_python},
            metadata=counts,
        )

        def draw():
            dropped = model(module.rows, training=True).numpy()
            drawn = noise.normal([2]).numpy().tolist(), keras.random.normal([2]).numpy().tolist()
            own = float(of_numpy.random()), of_python.random()
            return dropped.tolist(), drawn, own, random.random(), float(np.random.rand())

        return checkpointer, module, counts, draw

    checkpointer, module, counts, draw = make()
    with checkpointer:
        assert checkpointer.restore() is None
        draw()
        module.rows.assign_add(tf.ones((4, 3)))
        counts["seen"] = {"words": (1, 2.5)}
        counts["array"] = np.arange(3, dtype=np.float16)
        checkpointer.save(7, metrics={"loss": 0.5})
        expected = [draw(), draw()]
    checkpointer, module, counts, draw = make()
    with checkpointer:
        assert checkpointer.restore().step == 7
        assert counts.pop("array").tobytes() == np.arange(3, dtype=np.float16).tobytes()
        assert counts == {"seen": {"words": (1, 2.5)}}
        assert module.rows.numpy().tolist() == [[2.0] * 3] * 4
        drawn = [draw(), draw()]
        assert drawn == expected


def test_objects_that_cannot_be_saved_raise(hvd, tmp_path):
    import keras
    import tensorflow as tf

    from hvdkit.errors import UsageError

    with pytest.raises(UsageError, match="neither model nor optimizer"):
        hvd.Checkpointer(tmp_path)
    with pytest.raises(UsageError, match=r"generators\['x'\] is a int: expected a tf.random.Gen"):
        hvd.Checkpointer(tmp_path, model=[tf.Variable(1)], generators={"x": 3})
    metadata = {"x": tf.ones(2)}
    with (
        hvd.Checkpointer(tmp_path / "x", model=[tf.Variable(1)], metadata=metadata) as checkpointer,
        pytest.raises(UsageError, match=r"metadata\['x'\] is a .*EagerTensor.* x.numpy\(\)"),
    ):
        checkpointer.save(1)
    with pytest.raises(AttributeError):
        # Another dict would not be saved.
        checkpointer.metadata = {}
    with pytest.raises(UsageError, match=r"call its build\(model.trainable_variables\)"):
        hvd.Checkpointer(tmp_path, optimizer=keras.optimizers.SGD())
    with pytest.raises(UsageError, match="model or optimizer is a float: expected"):
        hvd.Checkpointer(tmp_path, model=1.5)
    words = hvd.Checkpointer(tmp_path, model=[tf.Variable("word", name="w")])
    with words, pytest.raises(UsageError, match="is of string"):
        words.save(1)


def test_variables_that_a_model_does_not_count_log_a_warning(hvd, tmp_path):
    import logging

    import keras
    import tensorflow as tf

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dropout, self.dense = keras.layers.Dropout(0.1), keras.layers.Dense(1)
            self.scale = tf.Variable(1.0, name="scale")

        def call(self, x):
            return self.dense(self.dropout(x)) * self.scale

    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.bias = tf.Variable(1.0, name="bias")
            self.dense = keras.layers.Dense(1, name="inner")
            self.dense.build((None, 2))

    class Untracked(tf.Module):
        def __init__(self):
            super().__init__()
            self.heads = {0: tf.Variable(1.0), 1: tf.Variable(2.0)}

    model, module = Model(), Module()
    model(tf.ones((1, 2)))
    model.compile("adam", loss="mse", metrics=["mae"], run_eagerly=True)
    model.fit(tf.ones((1, 2)), tf.ones((1, 1)), verbose=0)
    logger, handler = logging.getLogger("hvdkit.tensorflow"), logging.Handler()
    logger.addHandler(handler)
    try:
        for given, words in (
            (model, ["model is a Model, and its .weights has no scale:0, so a checkpoint"]),
            (module, ["model is a Module, and its .variables has no inner/kernel, inner/bias,"]),
            ({"one": model, "other": [model.scale]}, []),
            ({"one": module, "other": module.dense.weights}, []),
            # TensorFlow raises an error if it looks for its variables.
            (Untracked(), []),
        ):
            records = []
            handler.emit = lambda record, found=records: found.append(record.getMessage())
            hvd.Checkpointer(tmp_path, model=given).close()
            assert [text[: len(word)] for text, word in zip(records, words, strict=True)] == words
    finally:
        logger.removeHandler(handler)


def test_weights_load_with_safetensors(hvd, tmp_path):
    import keras
    from safetensors.numpy import load_file

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")
    with hvd.Checkpointer(tmp_path, model=model) as checkpointer:
        checkpointer.save(1)
    (path,) = tmp_path.glob("step-*/model.safetensors")
    loaded = load_file(path)
    assert set(loaded) == {
        "net/head/kernel",
        "net/head/bias",
    }
    assert np.array_equal(loaded["net/head/kernel"], model.layers[0].kernel.numpy())


def test_reduction_states_of_future_tapes_are_kept(hvd):
    from hvdkit.tensorflow import tape_reducers

    saved = tape_reducers.reduction_state()
    try:
        tape_reducers.restore_reduction_state({"some settings": {"some buckets": [[1, 2]]}})
        # Kept for a reducer that does not exist yet.
        assert tape_reducers.reduction_state()["some settings"] == {"some buckets": [[1, 2]]}
    finally:
        tape_reducers.restore_reduction_state(saved)


def test_a_checkpoint_opens_without_tensorflow(tmp_path):
    run_alone(
        f"""
import tensorflow as tf, hvdkit.tensorflow as hvd
hvd.init()
with hvd.Checkpointer({str(tmp_path)!r}, model=[tf.Variable([1.0, 2.0], name="v")]) as c:
    c.save(3)
hvd.shutdown()
""",
        framework="tensorflow",
    )
    output = run_alone(
        f"""
import sys
from hvdkit.checkpoint.store import Store
with Store({str(tmp_path)!r}).newest_good() as opened:
    print(opened.manifest.step, dict(opened.outline.specs["model"]))
print("tensorflow" in sys.modules)
""",
        framework=None,
    )
    assert output.splitlines() == ["3 {'v': TensorSpec(dtype='F32', shape=(2,))}", "False"]


def test_data_without_a_position_raise(hvd, tmp_path):
    import tensorflow as tf

    from hvdkit.errors import UsageError

    class Stateful:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    for data, words in (
        (tf.data.Dataset.range(4), "expected a hvd.ResumableSampler$"),
        (Stateful(), "data is a Stateful: expected .*only the hvd.Checkpointer of hvdkit.torch"),
    ):
        with pytest.raises(UsageError, match=words):
            hvd.Checkpointer(tmp_path, model=[tf.Variable(1.0)], data=data)


def test_each_rank_saves_its_statistics_beside_a_large_table(hvd):
    from hvdkit.tensorflow.items import Statistics

    assert sorted(map(len, Statistics({"m": with_large_table()}).save().values())) == [12, 12]
