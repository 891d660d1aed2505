"""`hvd.shard` without collectives: shares for different numbers of ranks, and errors.

Only functions import TensorFlow, because the pytest process collects tests without a framework. See
tests/ranks/tensorflow/test_data.py for several ranks.
"""

import logging

import numpy as np
import pytest

from tests.logs import recorded

SHARED = [(7, 7), (8, 3), (12, 4), (13, 2), (13, 1), (50, 7)]
BATCH = 3


def numbered(count):
    """Return a dataset of distinct elements (x, y)."""
    import tensorflow as tf

    x = np.arange(count)
    return tf.data.Dataset.from_tensor_slices((x.astype(np.float32), x))


def all_shares(count, size, padded):
    from hvdkit.tensorflow.data import share_of_examples
    from hvdkit.training.sharding import Division

    dataset = numbered(count)
    division = Division(count, size, padded)
    first = next(iter(dataset))
    return [share_of_examples(dataset, division, rank, first) for rank in range(size)]


def labels_and_weights(batches):
    labels = [y for _, ys, _ in batches for y in ys.tolist()]
    weights = [w for _, _, ws in batches for w in ws.tolist()]
    return labels, weights


@pytest.mark.parametrize(("count", "size"), SHARED)
def test_shares_have_each_element_once(hvd, count, size):
    """With `drop` at most once, and with `pad` once with weight 1."""
    shares = [list(share.as_numpy_iterator()) for share in all_shares(count, size, padded=False)]
    assert {len(share) for share in shares} == {count // size}
    used = sorted(int(y) for share in shares for _, y in share)
    assert used == list(range(count - count % size))
    shares = all_shares(count, size, padded=True)
    assert {int(share.cardinality()) for share in shares} == {-(-count // size)}
    elements = [element for share in shares for element in share.as_numpy_iterator()]
    assert len(elements) == -(-count // size) * size
    assert {float(w) for _, _, w in elements} <= {0.0, 1.0}
    assert sorted(int(y) for _, y, w in elements if w == 1) == list(range(count))


@pytest.mark.parametrize(("count", "size"), [(6, 1), (6, 2), (13, 3)])
def test_a_step_of_all_ranks_equals_a_step_of_one_process(hvd, count, size):
    shares = all_shares(count, size, padded=False)
    steps = zip(*(share.batch(BATCH).as_numpy_iterator() for share in shares), strict=True)
    together = [sorted(y for _, ys in step for y in ys.tolist()) for step in steps]
    expected = numbered(count - count % size).batch(BATCH * size).as_numpy_iterator()
    assert together == [ys.tolist() for _, ys in expected]


@pytest.mark.parametrize(
    ("counts", "size", "tail"),
    [
        ([13], 4, "drop"),
        ([13], 3, "pad"),
        ([9, 0, 4], 3, "drop"),
        ([9, 0, 4], 7, "pad"),
        ([1] * 7, 2, "drop"),
        ([1] * 7, 4, "pad"),
        ([2, 30], 7, "drop"),
        ([2, 30], 1, "pad"),
    ],
)
def test_ranges_of_files_contain_each_element_once(hvd, tmp_path, counts, size, tail):
    import tensorflow as tf

    from hvdkit.tensorflow.data import share_of_files
    from hvdkit.training.sharding import Division

    names = [str(tmp_path / f"part-{i}") for i in range(len(counts))]
    numbers = iter(range(sum(counts)))
    for name, count in zip(names, counts, strict=True):
        with open(name, "w") as file:
            file.writelines(f"{next(numbers)}\n" for _ in range(count))

    def reader(name):
        lines = tf.data.TextLineDataset(name)
        return lines.map(lambda line: (line, tf.strings.to_number(line, tf.int64)))

    division = Division(sum(counts), size, tail == "pad")
    shares = [share_of_files(names, counts, reader, division, rank) for rank in range(size)]
    assert {int(share.cardinality()) for share in shares} == {division.per_rank}
    read = [element for share in shares for element in share.as_numpy_iterator()]
    assert sorted(e[1] for e in read if e[2:] != (0.0,)) == list(range(division.used))


def test_a_share_is_shuffled_batched_and_prefetched(hvd):
    import tensorflow as tf

    share = hvd.shard(numbered(50), batch_size=8, shuffle=True, seed=3)
    epochs = [[y for _, ys in share.as_numpy_iterator() for y in ys.tolist()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]
    again = hvd.shard(numbered(50), batch_size=8, shuffle=True, seed=3)
    assert [y for _, ys in again.as_numpy_iterator() for y in ys.tolist()] == epochs[0]
    assert int(share.cardinality()) == 7
    assert type(share).__name__ == type(tf.data.Dataset.range(1).prefetch(1)).__name__


def test_without_a_batch_size_the_share_can_be_transformed(hvd):
    share = hvd.shard(numbered(10)).map(lambda x, y: (x + 1, y)).repeat(2).batch(4)
    assert next(ys.tolist() for _, ys in share.as_numpy_iterator()) == [0, 1, 2, 3]
    assert int(share.cardinality()) == 5


def test_pad_keeps_given_weights(hvd):
    import tensorflow as tf

    from hvdkit.tensorflow.data import share_of_examples
    from hvdkit.training.sharding import Division

    def with_weight(x, y):
        return {"a": x, "b": x}, y, tf.stack([x, x + 1])

    dataset = numbered(3).map(with_weight)
    first = next(iter(dataset))
    real = share_of_examples(dataset, Division(3, 2, True), 0, first)
    padded = share_of_examples(dataset, Division(3, 2, True), 1, first)
    assert real.element_spec == padded.element_spec
    assert [w.tolist() for _, _, w in real.as_numpy_iterator()] == [[0, 1], [2, 3]]
    assert [w.tolist() for _, _, w in padded.as_numpy_iterator()] == [[1, 2], [0, 0]]


def test_pad_with_ragged_and_string_elements(hvd):
    import tensorflow as tf

    from hvdkit.tensorflow.data import share_of_examples
    from hvdkit.training.sharding import Division

    rows = tf.ragged.constant([[1, 2], [3], [4, 5, 6]])
    dataset = tf.data.Dataset.from_tensor_slices((rows, ["a", "b", "c"]))
    varying = dataset.map(lambda x, y: (x.to_tensor() if hasattr(x, "to_tensor") else x, y))
    for elements in (dataset, varying):
        first = next(iter(elements))
        share = share_of_examples(elements, Division(3, 2, True), 1, first)
        got = [(x.numpy().tolist(), y.numpy().decode(), float(w)) for x, y, w in share]
        assert got == [([3], "b", 1.0), ([1, 2], "a", 0.0)]


def test_pad_with_a_shuffle_before_shard(hvd):
    """Reading the repeated element must not begin another iteration on one rank."""
    from hvdkit.tensorflow.data import share_of_examples
    from hvdkit.training.sharding import Division

    shares = []
    for rank in range(2):
        shuffled = numbered(5).shuffle(5, seed=1)
        first = next(iter(numbered(5)))
        shares.append(share_of_examples(shuffled, Division(5, 2, True), rank, first))
    for _ in range(3):
        elements = [e for share in shares for e in share.as_numpy_iterator()]
        assert sorted(int(y) for _, y, w in elements if w == 1) == list(range(5))


def test_a_dataset_of_unknown_size_is_counted(hvd):
    import tensorflow as tf

    def produce():
        yield from ((float(i), i) for i in range(11))

    signature = (tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
    dataset = tf.data.Dataset.from_generator(produce, output_signature=signature)
    assert int(hvd.shard(dataset).cardinality()) == 11
    even = numbered(11).filter(lambda x, y: y % 2 == 0)
    assert int(hvd.shard(even, batch_size=4).cardinality()) == 2


def test_a_wrong_cardinality_raises(hvd):
    import tensorflow as tf

    dataset = numbered(11).filter(lambda x, y: y < 9)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(11))
    with pytest.raises(tf.errors.FailedPreconditionError, match="11 elements but contained only 9"):
        list(hvd.shard(dataset))


def infinite(dataset):
    return {"dataset": dataset.repeat()}


def batched(dataset):
    return {"dataset": dataset.batch(2).prefetch(1)}


def padded_batches(dataset):
    return {"dataset": dataset.padded_batch(2)}


def empty(dataset):
    return {"dataset": dataset.take(0)}


def no_labels(dataset):
    return {"dataset": dataset.map(lambda x, y: x), "tail": "pad"}


def broken(dataset):
    import tensorflow as tf

    return {"dataset": dataset.map(lambda x, y: tf.debugging.check_numerics(x / 0.0, "no number"))}


def unreadable_file(dataset):
    import tensorflow as tf

    return {"dataset": ["/nowhere/at/all"], "reader": tf.data.TFRecordDataset}


def infinite_file(dataset):
    return {"dataset": ["a"], "reader": lambda name: dataset.repeat()}


def file_name_as_string(dataset):
    return {"dataset": "/a/file", "reader": lambda name: dataset}


def tail(dataset):
    return {"dataset": dataset, "tail": "keep"}


def batch_size(dataset):
    return {"dataset": dataset, "batch_size": 0}


def shuffle(dataset):
    return {"dataset": dataset, "shuffle": -1}


def array(dataset):
    return {"dataset": np.arange(4)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (infinite, "call repeat.. after hvd.shard"),
        (batched, "the dataset is batched.*batch_size="),
        (padded_batches, "the dataset is batched"),
        (empty, "0 elements for 1 ranks: expected at least one each"),
        (no_labels, "must be .x, y. or .x, y, sample_weight., and are TensorSpec"),
        (broken, "cannot be read: InvalidArgumentError.*no number"),
        (unreadable_file, "rank 0 cannot count its files: NotFoundError"),
        (infinite_file, "infinite dataset for a"),
        (file_name_as_string, "dataset is '/a/file': expected a list"),
        (tail, "tail is 'keep': expected 'drop' or 'pad'"),
        (batch_size, "batch_size is 0: expected an integer"),
        (shuffle, "shuffle is -1: expected True, False or a number"),
        (array, "of type ndarray: expected a tf.data.Dataset"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invalid_data_and_arguments_raise(hvd, wrong, message):
    from hvdkit.errors import UsageError

    with pytest.raises(UsageError, match=message):
        hvd.shard(**wrong(numbered(8)))


def test_dropped_elements_log_one_warning(hvd):
    from hvdkit.training.sharding import Division

    with recorded("hvdkit.data") as records:
        Division(50, 4, padded=False).log_tail()
        Division(48, 4, padded=False).log_tail()
    (record,) = records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("hvd.shard leaves out 2 of 50 elements")


def keras_numbers(x, y, w, metrics, weighted, reduction="sum_over_batch_size", batch=BATCH):
    """Return Keras's metrics of a linear model for these data, and the last batch's gradient."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(optimizer="sgd", loss=loss, metrics=metrics, weighted_metrics=weighted)
    shown = model.evaluate(
        tf.data.Dataset.from_tensor_slices((x, y, w)).batch(batch), return_dict=True, verbose=0
    )
    with tf.GradientTape() as tape:
        value = loss(y[-batch:, None], model(x[-batch:, None]), w[-batch:])
    return shown, tape.gradient(value, model.trainable_variables)[0].numpy()


def test_keras_results_with_zero_weights(hvd):
    """Check the docstring of `hvd.shard` with five examples and one repeated with weight 0."""
    x = np.array([1, 2, 3, 4, 5, 1], np.float32)
    y = np.array([2, 1, 7, 5, 9, 2], np.float32)
    w = np.array([1, 1, 1, 1, 1, 0], np.float32)
    padded, gradient = keras_numbers(x, y, w, ["mse"], ["mae", "mean_squared_error"])
    real, _ = keras_numbers(x[:5], y[:5], w[:5], ["mse"], ["mae", "mean_squared_error"])
    everything, whole = keras_numbers(x, y, np.ones(6, np.float32), ["mse"], [])
    close = pytest.approx
    assert padded["mae"] == close(real["mae"])
    assert padded["mean_squared_error"] == close(real["mean_squared_error"])
    assert padded["mse"] == close(everything["mse"])  # without weights
    assert padded["loss"] == close(real["mean_squared_error"] * 5 / 6)
    _, one = keras_numbers(x[5:], y[5:], np.ones(1, np.float32), [], [], batch=1)
    np.testing.assert_allclose(gradient, whole - one / BATCH, rtol=1e-5)
