"""`fit` if the data of one rank end earlier than those of other ranks."""

import time

import numpy as np
import pytest

from hvdkit.errors import UsageError
from tests.ranks.frameworks import LazyModule, keras, tf
from tests.ranks.keras.job import (
    classifier,
    distributed,
    of_every_rank,
    same_everywhere,
    skip_without_executions,
)

tensorflow_adapter = LazyModule("hvdkit.tensorflow")

BATCHES = 4


def batches(count):
    for k in range(count):
        rng = np.random.default_rng(k)
        yield (
            rng.normal(size=(4, 3)).astype("float32"),
            rng.integers(0, 2, (4, 1)).astype("float32"),
        )


def count_of(hvd):
    """Return the number of batches of this rank; rank 0 has one less."""
    return BATCHES - (hvd.rank() == 0)


def filtered(hvd):
    """Return a dataset whose length is not known."""
    data = list(batches(BATCHES))
    arrays = tuple(np.stack(each) for each in zip(*data, strict=True))
    numbered = tf.data.Dataset.from_tensor_slices(arrays).enumerate()
    kept = numbered.filter(lambda number, _: number < count_of(hvd))
    return kept.map(lambda _, batch: batch)


def error_types():
    """Return the types of the error; in a graph, TensorFlow raises an error of its own."""
    if keras.backend.backend() == "torch":
        return UsageError
    return UsageError, tf.errors.OpError


@pytest.mark.parametrize(
    "kind",
    [
        "filter",
        pytest.param("generator", marks=pytest.mark.long),
        pytest.param("steps_per_epoch", marks=pytest.mark.long),
        pytest.param("several steps per execution", marks=pytest.mark.long),
        pytest.param("eager", marks=pytest.mark.long),
        pytest.param("accumulation", marks=pytest.mark.long),
        pytest.param("tape", marks=pytest.mark.long),
    ],
)
def test_data_that_end_earlier_on_one_rank(hvd, kind):
    in_graph = keras.backend.backend() == "tensorflow"
    compiled = {}
    if kind == "several steps per execution":
        skip_without_executions()
        compiled = {"steps_per_execution": 2}
    if kind == "eager":
        compiled = {"run_eagerly": True}
    options = {"steps_per_epoch": 6} if kind == "steps_per_epoch" else {}
    if kind == "tape":
        if not in_graph:
            pytest.skip("PyTorch has no tapes")
        model = model_with_a_tape(hvd)
    else:
        passes = 2 if kind == "accumulation" else 1
        model = classifier(distributed(hvd, 0.1, accumulation_steps=passes), **compiled)
    data = filtered(hvd) if kind != "generator" and in_graph else batches(count_of(hvd))
    begin = time.monotonic()
    with pytest.raises(error_types()) as caught:
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks_of(hvd, kind), **options)
    assert time.monotonic() - begin < 60
    text = str(caught.value).replace("\n", " ")
    assert "ended earlier than those of other ranks" in text
    together = kind == "several steps per execution"
    assert ("rank 0: at most 4 batches" if together else "rank 0: 3 batches") in text
    assert "hvd.shard(data)" in text
    same_everywhere("all ranks are here")
    # The job works afterwards.
    if kind not in ("tape", "generator"):
        fresh = classifier(distributed(hvd, 0.1), **compiled)
        fresh.fit(filtered_evenly() if in_graph else batches(2), verbose=0)
        same_everywhere([weight.tolist() for weight in fresh.get_weights()])


def callbacks_of(hvd, kind):
    return [hvd.callbacks.MetricAverageCallback()] if kind == "tape" else []


def filtered_evenly():
    arrays = tuple(np.stack(each) for each in zip(*batches(2), strict=True))
    return tf.data.Dataset.from_tensor_slices(arrays)


def model_with_a_tape(hvd):
    """Return a model whose `train_step` reduces the gradients with a tape."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            inputs, targets = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(inputs) - targets) ** 2)
            tape = tensorflow_adapter.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Model()
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.1))
    return model


@pytest.mark.long_with("keras-tensorflow")
def test_validation_data_of_different_lengths(hvd):
    """Validation needs no collective in a batch. The loss is that of all samples."""
    model = classifier(distributed(hvd))
    own = list(batches(count_of(hvd)))
    history = model.fit(
        batches(2), epochs=1, verbose=0, validation_data=batches(count_of(hvd))
    ).history
    counts = of_every_rank(len(own))
    rows = [batch for count in counts for batch in batches(count)]
    x, y = (np.concatenate(each) for each in zip(*rows, strict=True))
    expected = classifier("sgd").evaluate(x, y, verbose=0, return_dict=True)
    assert history["val_loss"][0] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.long_with("keras-tensorflow")
def test_data_of_one_length_end_on_all_ranks(hvd):
    """Keras warns only, because `steps_per_epoch` is more than the data have."""
    model = classifier(distributed(hvd, 0.1))
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(batches(3), steps_per_epoch=5, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 3
