"""`hvd.shard` on several ranks, for every kind of data, and `fit` on the shares."""

from itertools import chain

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.frameworks import keras, tf
from tests.ranks.keras.job import of_every_rank, same_everywhere

COUNT = 13


@pytest.mark.parametrize("tail", [pytest.param("drop", marks=pytest.mark.long), "pad"])
def test_weighted_metrics_count_every_element_once(hvd, tail):
    if keras.backend.backend() == "torch":
        pytest.skip("tf.data belongs to the TensorFlow backend")
    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, 3)).astype(np.float32)
    y = random.normal(size=(COUNT, 1)).astype(np.float32)
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    # A rate of 0, so that metrics are those of one set of weights.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, loss="mse", weighted_metrics=["mae", "mse"])
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    share = hvd.shard(examples, batch_size=2, shuffle=True, tail=tail)
    shown = {name: values[0] for name, values in model.fit(share, verbose=0).history.items()}

    used = COUNT if tail == "pad" else COUNT - COUNT % hvd.size()
    errors = model.predict(x, verbose=0)[:used] - y[:used]
    assert shown["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert shown["mse"] == pytest.approx((errors**2).mean(), rel=1e-5)
    # Keras divides a loss by the number of rows, not by their weights.
    rows = -(-used // hvd.size()) * hvd.size()
    assert shown["loss"] == pytest.approx((errors**2).sum() / rows, rel=1e-5)


# --- arrays, PyDataset, DataLoader --------------------------------------------------------------


def regression(hvd, rate=0.1):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate))
    model.compile(optimizer, loss="mse", weighted_metrics=["mae"])
    return model


def numbered(count=COUNT):
    """Return distinct rows, and targets."""
    x = np.arange(count * 3, dtype="float32").reshape(count, 3) / 50
    return x, np.sin(x.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("kind", ["numpy", "tensor", "dict", "three"])
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_shares_of_arrays(hvd, kind, tail):
    x, y = numbered()
    given = {
        "numpy": (x, y),
        "tensor": (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)),
        "dict": ({"a": x, "b": x + 1}, y),
        "three": (x, y, np.arange(COUNT, dtype="float32") + 1),
    }[kind]
    share = hvd.shard(given, tail=tail)
    own = keras.ops.convert_to_numpy(share[0]["a"] if kind == "dict" else share[0])
    weights = np.asarray(share[2]) if len(share) == 3 else np.ones(len(own))
    used = COUNT if tail == "pad" else COUNT - COUNT % hvd.size()
    same_everywhere(len(own))
    by_rank = of_every_rank([own[:, 0].tolist(), weights.tolist(), np.asarray(share[1]).tolist()])
    rows = sorted((r, w) for rows, ws, _ in by_rank for r, w in zip(rows, ws, strict=True) if w)
    expected = np.arange(used) + 1 if kind == "three" else np.ones(used)
    assert rows == [(r, w) for r, w in zip(x[:used, 0].tolist(), expected.tolist(), strict=True)]
    if kind == "dict":
        np.testing.assert_array_equal(share[0]["b"], share[0]["a"] + 1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_arrays_of_a_resumable_sampler(hvd, drop_last):
    x, y = numbered(16 * hvd.size() + 5)
    sampler = hvd.ResumableSampler(len(x), 4, seed=3, drop_last=drop_last)
    batches = sampler.arrays(({"rows": x, "numbers": np.arange(len(x))}, y))
    epochs = []
    for _ in range(2):
        own = []
        for inputs, targets in sampler.batches(batches):
            numbers = keras.ops.convert_to_numpy(inputs["numbers"])
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(inputs["rows"]), x[numbers])
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(targets), y[numbers])
            own.append(numbers.tolist())
        assert len(own) == sampler.batches_per_epoch == len(batches)
        seen = sorted(chain(*chain(*of_every_rank(own))))
        assert len(seen) == len(set(seen)) == (16 * hvd.size() if drop_last else len(x))
        epochs.append(own)
    assert epochs[0] != epochs[1]


@pytest.mark.long_with("keras-tensorflow")
def test_fit_on_arrays_of_a_resumable_sampler(hvd):
    x, y = numbered(8 * hvd.size())
    sampler = hvd.ResumableSampler(len(x), 4, shuffle=False)
    model, reference = regression(hvd), regression(hvd)
    reference.compile(keras.optimizers.SGD(0.1), loss="mse")
    model.fit(sampler.arrays((x, y)), epochs=2, shuffle=False, verbose=0)
    with hvd.local_fit():
        reference.fit(x, y, 4 * hvd.size(), epochs=2, shuffle=False, verbose=0)
    for own, wanted in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5)
    same_everywhere([w.tolist() for w in model.get_weights()])


def test_arrays_with_another_number_of_rows_are_refused(hvd):
    x, y = numbered()
    with pytest.raises(UsageError, match=r"shape \(12, 1\), but the ResumableSampler has 13"):
        hvd.ResumableSampler(len(x), 4).arrays((x, y[1:]))


@pytest.mark.long_with("keras-tensorflow")
def test_fit_on_shares_of_arrays_equals_fit_on_all_rows(hvd):
    x, y = numbered(8 * hvd.size())
    model, alone = regression(hvd), regression(hvd)
    alone.compile(keras.optimizers.SGD(0.1), loss="mse")
    model.fit(*hvd.shard((x, y)), batch_size=4, shuffle=False, verbose=0)
    with hvd.local_fit():
        alone.fit(x, y, batch_size=4 * hvd.size(), shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def batches_of(x, y, size):
    class Batches(keras.utils.PyDataset):
        begun = ended = 0

        def __len__(self):
            return len(x) // size

        def __getitem__(self, k):
            return x[k * size : (k + 1) * size], y[k * size : (k + 1) * size]

        def on_epoch_begin(self):
            self.begun += 1

        def on_epoch_end(self):
            self.ended += 1

    return Batches()


@pytest.mark.parametrize(
    "tail", [pytest.param("drop", marks=pytest.mark.long_with("keras-tensorflow")), "pad"]
)
def test_shares_of_a_py_dataset(hvd, tail):
    count = 4 * hvd.size() + 1
    x, y = numbered(2 * count)
    dataset = batches_of(x, y, 2)
    share = hvd.shard(dataset, tail=tail)
    assert same_everywhere(len(share)) == (5 if tail == "pad" else 4)
    own = []
    for k in range(len(share)):
        rows, _, *weights = share[k]
        own += [row for row, w in zip(rows[:, 0], (weights or [np.ones(2)])[0], strict=True) if w]
    found = sorted(chain(*of_every_rank(np.asarray(own).tolist())))
    assert found == x[: 2 * (count if tail == "pad" else count - 1), 0].tolist()
    model = regression(hvd)
    history = model.fit(share, epochs=2, verbose=0).history
    same_everywhere([history["loss"], [w.tolist() for w in model.get_weights()]])
    # Keras may call the hooks more than once per epoch.
    assert dataset.begun >= 2
    assert same_everywhere(dataset.ended) >= 2
    errors = np.abs(model.predict(x, verbose=0) - y)[: 2 * (count if tail == "pad" else count - 1)]
    model.optimizer.learning_rate = 0.0
    shown = model.fit(share, verbose=0).history["mae"][0]
    assert shown == pytest.approx(float(errors.mean()), rel=1e-4)


def loader_of(x, y, **options):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 2, **options)


@pytest.mark.parametrize("drop_last", [False, True])
def test_shares_of_a_data_loader(hvd, drop_last):
    if keras.backend.backend() != "torch":
        pytest.skip("it would load Horovod's other extension")
    count = 8 * hvd.size() + 3
    x, y = numbered(count)
    loader = hvd.shard(loader_of(x, y, shuffle=True, drop_last=drop_last, num_workers=1))
    seen = [[]]

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([])

    class Model(keras.Sequential):
        def train_step(self, data):
            seen[-1] += data[0][:, 0].tolist()
            return super().train_step(data)

    keras.utils.set_random_seed(5)
    model = Model([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse", run_eagerly=True)
    model.fit(loader, epochs=2, verbose=0, callbacks=[Look()])
    by_rank = of_every_rank(seen[:2])
    orders = [list(chain(*(rank[epoch] for rank in by_rank))) for epoch in range(2)]
    assert orders[0] != orders[1]
    for order in orders:
        rows = np.unique(np.float32(order))
        assert len(rows) == (8 * hvd.size() if drop_last else count)
        assert set(rows.tolist()) <= set(x[:, 0].tolist())
    same_everywhere([w.tolist() for w in model.get_weights()])


def test_invalid_data_and_arguments_raise(hvd):
    x, y = numbered()
    for data, options, message in [
        ([1, 2], {}, "of type list: expected arrays of shape"),
        ("files", {}, "of type str: expected arrays of shape"),
        ((x, y[1:]), {}, r"have \[12, 13\] rows: expected the same"),
        ((x[:0], y[:0]), {}, "have 0 rows for . ranks"),
        (x, {"tail": "pad"}, r"must be \(x, y\)"),
        (x, {"tail": "keep"}, "tail is 'keep'"),
        ((x, y), {"batch_size": 4}, "for a tf.data.Dataset .* and the data are of type tuple"),
        (x, {"batch_size": y}, r"as one argument: hvd.shard\(\(x, y\)\)"),
        (batches_of(x[:0], y, 2), {}, "have 0 batches for . ranks"),
    ]:
        with pytest.raises(UsageError, match=message):
            hvd.shard(data, **options)
    if keras.backend.backend() == "torch":
        from torch.utils.data import RandomSampler

        loader = loader_of(x, y, sampler=RandomSampler(x, replacement=True))
        with pytest.raises(UsageError, match="draws with replacement"):
            hvd.shard(loader)
        with pytest.raises(UsageError, match="samples of a DataLoader have no weights"):
            hvd.shard(loader_of(x, y), tail="pad")
    tails = ["drop", "pad"]
    for other, options in [
        (x[: COUNT - hvd.rank()], {}),
        (x + hvd.rank(), {}),
        ((x, y), {"tail": tails[hvd.rank() % 2]}),
        (x if hvd.rank() else [1], {}),
        (batches_of(x, y, 1 if hvd.rank() else 2), {}),
        (batches_of(x, y if hvd.rank() else None, 2), {}),  # cannot be read on one rank
    ]:
        with pytest.raises(RankMismatchError, match="same data in the same order on every rank"):
            hvd.shard(other, **options)


def test_different_orders_log_a_warning(hvd):
    x, y = numbered()
    order = np.random.default_rng(hvd.rank()).permutation(COUNT)
    with recorded("hvdkit.keras") as records:
        hvd.shard(batches_of(x[order], y[order], 2))
    told = [record.getMessage() for record in records]
    assert ["the first targets differ" in message for message in told] == [True] * (not hvd.rank())
