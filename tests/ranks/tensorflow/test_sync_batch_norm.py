"""`SyncBatchNormalization` compared with one process that has the whole batch."""

import numpy as np
import pytest

from hvdkit.errors import UsageError
from tests.ranks.frameworks import keras, tf
from tests.ranks.tensorflow.oracle import assert_same_on_all_ranks, numbers, slowly

WHERE = ["eager", "graph"]


def batch_of(rank, shape, count, offset=0.0):
    """Return a rank's samples. Mean and standard deviation depend on the rank."""
    return numbers(rank, count, *shape) * (rank + 1) + rank + offset


def forward_and_back(layer, x, where, mask=None):
    """Return the output, and the gradients of a loss with a different weight for each element."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(y * tf.sin(3 * x) + y**3)
        return y, tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    y, gradients = (tf.function(run) if where == "graph" else run)(tf.constant(x))
    return y.numpy(), [g.numpy() for g in gradients]


def assert_as_one_process(hvd, where, batches, masks=None, tolerance=1e-11, **options):
    options = {"momentum": 0.5, "epsilon": 1e-5, "dtype": "float64", **options}
    ours = hvd.SyncBatchNormalization(**options)
    plain = keras.layers.BatchNormalization(**options)
    rank = hvd.rank()
    mask = whole_mask = None
    if masks is not None:
        mask, whole_mask = masks[rank], np.concatenate(masks)
    y, (of_x, *of_weights) = forward_and_back(ours, batches[rank], where, mask)
    whole_y, (whole_of_x, *whole_of_weights) = forward_and_back(
        plain, np.concatenate(batches), where, whole_mask
    )
    start = sum(len(b) for b in batches[:rank])
    here = slice(start, start + len(batches[rank]))
    # Rounding errors are relative to the largest element.
    np.testing.assert_allclose(y, whole_y[here], rtol=tolerance, atol=tolerance)
    scale = np.abs(whole_of_x).max()
    np.testing.assert_allclose(of_x, whole_of_x[here], rtol=tolerance, atol=tolerance * scale)
    for own, wanted in zip(of_weights, whole_of_weights, strict=True):
        total = sum(hvd.allgather_object(own))
        np.testing.assert_allclose(
            total, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max()
        )
    for name in ("moving_mean", "moving_variance"):
        own, wanted = getattr(ours, name).numpy(), getattr(plain, name).numpy()
        np.testing.assert_allclose(own, wanted, rtol=tolerance, atol=tolerance)
        assert_same_on_all_ranks(hvd, [own])


@pytest.mark.parametrize("where", WHERE)
def test_second_derivatives(hvd, where):
    """A gradient penalty, as in WGAN-GP: its gradient for a weight before the layer."""

    # `keras.layers.BatchNormalization` has other second derivatives: its variance does not depend
    # on the mean.
    def plain(x, training):
        mean = tf.reduce_mean(x, 0)
        return (x - mean) * tf.math.rsqrt(tf.reduce_mean((x - mean) ** 2, 0) + 1e-5)

    def penalty_gradient(layer, x):
        def run(x, kernel):
            with tf.GradientTape() as outer:
                outer.watch(kernel)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = layer(tf.tanh(x @ kernel), training=True)
                    loss = tf.reduce_sum(tf.sin(y) * y)
                penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
            return outer.gradient(penalty, kernel)

        run = tf.function(run) if where == "graph" else run
        return run(tf.constant(x), tf.constant(numbers(7, 4, 3))).numpy()

    batches = [batch_of(rank, (4,), 3 + rank) for rank in range(hvd.size())]
    layer = hvd.SyncBatchNormalization(dtype="float64", epsilon=1e-5)
    total = sum(hvd.allgather_object(penalty_gradient(layer, batches[hvd.rank()])))
    whole = penalty_gradient(plain, np.concatenate(batches))
    np.testing.assert_allclose(total, whole, rtol=1e-9, atol=1e-9 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("where", "shape", "options"),
    [
        ("graph", (4, 3, 5), {}),
        ("eager", (5, 4), {"axis": 1, "center": False}),
        ("eager", (5,), {}),
        ("graph", (3, 1), {"scale": False}),
    ],
    ids=str,
)
def test_values_and_gradients(hvd, where, shape, options):
    batches = [batch_of(rank, shape, 2 + rank) for rank in range(hvd.size())]
    assert_as_one_process(hvd, where, batches, **options)


def test_batch_renormalization(hvd):
    batches = [batch_of(rank, (4,), 3) for rank in range(hvd.size())]
    clipping = {"rmax": 2.0, "rmin": 0.5, "dmax": 1.0}
    assert_as_one_process(hvd, "graph", batches, renorm=True, renorm_clipping=clipping)


def test_masked_samples(hvd):
    batches = [batch_of(rank, (4, 3), 3) for rank in range(hvd.size())]
    masks = [np.random.default_rng(rank).random((3, 4)) < 0.6 for rank in range(hvd.size())]
    # One rank has only masked samples, whose values do not matter.
    masks[1][:] = False
    batches[1][:] = np.inf
    assert_masked_as_one_process(hvd, "eager", batches, masks)


def assert_masked_as_one_process(hvd, where, batches, masks):
    # The loss of infinite elements is not a number, so compare with finite elements.
    finite = [np.where(np.isfinite(b), b, 0.0) for b in batches]
    assert_as_one_process(hvd, where, finite, masks)
    layer = hvd.SyncBatchNormalization(dtype="float64")
    layer(tf.constant(batches[hvd.rank()]), training=True, mask=masks[hvd.rank()])
    reference = hvd.SyncBatchNormalization(dtype="float64")
    reference(tf.constant(finite[hvd.rank()]), training=True, mask=masks[hvd.rank()])
    np.testing.assert_array_equal(layer.moving_mean.numpy(), reference.moving_mean.numpy())
    assert np.isfinite(layer.moving_variance.numpy()).all()


def test_masked_samples_only(hvd):
    batches = [batch_of(rank, (4, 3), 3) for rank in range(hvd.size())]
    assert_as_one_process(hvd, "graph", batches, [np.zeros((3, 4), bool)] * hvd.size())


def test_a_rank_without_samples(hvd):
    batches = [batch_of(rank, (3,), 0 if rank == 1 else 4) for rank in range(hvd.size())]
    assert_as_one_process(hvd, "graph", batches)


def test_values_far_from_zero(hvd):
    # E[x^2] - E[x]^2 in float32 would be only rounding errors of 10^8.
    batches = [
        batch_of(rank, (6,), 8, offset=10_000).astype("float32") for rank in range(hvd.size())
    ]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(batches[hvd.rank()], training=True)
    whole = np.concatenate(batches).astype("float64")
    np.testing.assert_allclose(layer.moving_variance.numpy(), whole.var(axis=0), rtol=2e-3)


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_narrow_inputs(hvd, policy):
    batches = [batch_of(rank, (6,), 8).astype("float16") for rank in range(hvd.size())]
    layer = hvd.SyncBatchNormalization(momentum=0.0, dtype=f"mixed_{policy}")
    y = layer(tf.cast(batches[hvd.rank()], policy), training=True)
    assert y.dtype == policy
    rounded = tf.cast(tf.constant(np.concatenate(batches)), policy)
    whole = tf.cast(rounded, tf.float64).numpy()
    np.testing.assert_allclose(layer.moving_variance.numpy(), whole.var(axis=0), rtol=1e-5)


def test_inference_and_frozen_layers_do_not_communicate(hvd):
    layer = hvd.SyncBatchNormalization()
    x = batch_of(0, (3,), 4).astype("float32")
    layer.build(x.shape)
    if hvd.rank() == 0:
        layer(x)
        layer(x, training=False)
        layer.trainable = False
        layer(x, training=True)
    assert hvd.allgather_object("still in step") == ["still in step"] * hvd.size()


@pytest.mark.parametrize("where", WHERE)
def test_a_layer_normalizes_over_its_process_set(hvd, where):
    sets = [hvd.add_process_set(list(range(k, hvd.size(), 2))) for k in range(2)]
    mine = next(each for each in sets if each.included())
    batches = [batch_of(rank, (4,), 3 + rank) for rank in range(hvd.size())]
    # The other set has a further layer before this one.
    if mine is sets[1]:
        other = hvd.SyncBatchNormalization(dtype="float64", process_set=mine)
        forward_and_back(other, batches[hvd.rank()], where)
    layer = hvd.SyncBatchNormalization(dtype="float64", process_set=mine)
    y, (of_x, *_) = forward_and_back(layer, batches[hvd.rank()], where)
    plain = keras.layers.BatchNormalization(dtype="float64")
    whole = np.concatenate([batches[rank] for rank in mine.ranks])
    whole_y, (whole_of_x, *_) = forward_and_back(plain, whole, where)
    start = sum(len(batches[rank]) for rank in mine.ranks if rank < hvd.rank())
    here = slice(start, start + len(batches[hvd.rank()]))
    np.testing.assert_allclose(y, whole_y[here], rtol=1e-11, atol=1e-11)
    scale = np.abs(whole_of_x).max()
    np.testing.assert_allclose(of_x, whole_of_x[here], rtol=1e-11, atol=1e-11 * scale)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-11)
    for each in sets:
        hvd.remove_process_set(each)


@pytest.mark.parametrize(("of_layer", "of_tape"), [("all", "set"), ("set", "all")])
def test_a_layer_that_normalizes_over_samples_of_another_model_raises(hvd, of_layer, of_tape):
    """Normalization over a part of the ranks that train the model is valid."""
    sets = [hvd.add_process_set(list(range(k, hvd.size(), 2))) for k in range(2)]
    used = {"all": hvd.global_process_set, "set": next(s for s in sets if s.included())}
    layer = hvd.SyncBatchNormalization(process_set=used[of_layer])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant(numbers(hvd.rank(), 4, 3)), training=True) ** 3)
    tape = hvd.DistributedGradientTape(tape, process_set=used[of_tape])
    if of_layer == "set":
        assert np.isfinite(tape.gradient(loss, layer.trainable_variables)[0]).all()
    else:
        with pytest.raises(UsageError, match=r"over ranks \[0, 1.*over ranks \[[01].*process_set"):
            tape.gradient(loss, layer.trainable_variables)
    for each in sets:
        hvd.remove_process_set(each)


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_a_model_with_several_layers(hvd, run_eagerly):
    def model_of(kind):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,), dtype="float64")

        def dense(units):
            return keras.layers.Dense(units, use_bias=False, dtype="float64")

        # Two branches, whose layers run concurrently, and one layer that is called twice.
        left = kind(dtype="float64")(dense(5)(inputs))
        right = kind(dtype="float64")(dense(5)(inputs))
        shared = kind(dtype="float64")
        outputs = dense(1)(shared(left) * shared(right) + left)
        return keras.Model(inputs, outputs)

    def trained(model, x, wrap):
        # Small steps, so that rounding differences do not grow.
        optimizer = keras.optimizers.SGD(0.001)

        def step(x):
            with tf.GradientTape() as tape:
                y = model(x, training=True)
                loss = tf.reduce_mean((y - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
            gradients = wrap(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = step if run_eagerly else tf.function(step)
        for _ in range(3):
            step(tf.constant(x))
        return [v.numpy() for v in model.variables]

    # The numbers in the names of layers differ between ranks.
    for _ in range(hvd.rank()):
        keras.layers.Dense(1)
        hvd.SyncBatchNormalization()
    batches = [numbers(rank, 6, 4) + rank for rank in range(hvd.size())]
    own = trained(
        model_of(hvd.SyncBatchNormalization), batches[hvd.rank()], hvd.DistributedGradientTape
    )
    plain = trained(
        model_of(keras.layers.BatchNormalization), np.concatenate(batches), lambda tape: tape
    )
    for mine, theirs in zip(own, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    assert_same_on_all_ranks(hvd, own)


@pytest.mark.parametrize("layers", [1, 2])
def test_two_calls_of_one_function_in_a_graph(hvd, layers):
    """Each rank is slow in another call, so that it could meet other ranks' other call."""

    class Tower:
        def __init__(self):
            self.layer = hvd.SyncBatchNormalization(epsilon=1e-5, dtype="float64")
            self.layer.build((None, 3))

        @tf.function
        def __call__(self, x, seconds):
            return slowly(self.layer(slowly(x, seconds), training=True), seconds)

    towers = [Tower() for _ in range(layers)]

    def run(data, seconds):
        pairs = zip([towers[0], towers[-1]], data, seconds, strict=True)
        return [tower(x, s) for tower, x, s in pairs]

    assert_two_as_one_process(hvd, run)


def test_two_layers_side_by_side_in_a_nested_function(hvd):
    layers = [hvd.SyncBatchNormalization(epsilon=1e-5, dtype="float64") for _ in range(2)]
    for layer in layers:
        layer.build((None, 3))

    @tf.function
    def run(data, seconds):
        return [
            slowly(layer(slowly(x, s), training=True), s)
            for layer, x, s in zip(layers, data, seconds, strict=True)
        ]

    assert_two_as_one_process(hvd, run)


def assert_two_as_one_process(hvd, normalize):
    """Assert that `normalize` normalizes two batches in a graph, which may be slow on a rank."""

    @tf.function
    def run(data):
        seconds = [tf.constant(0.3 * (hvd.rank() % 2 == k), tf.float64) for k in range(2)]
        with tf.GradientTape() as tape:
            tape.watch(data)
            outputs = normalize(data, seconds)
            loss = tf.add_n([tf.reduce_sum(y**3) for y in outputs])
        return outputs, tape.gradient(loss, data)

    batches = [[batch_of(r, (3,), 4) * (k + 1) ** r for r in range(hvd.size())] for k in range(2)]
    for _ in range(2):
        outputs, gradients = run([tf.constant(of_call[hvd.rank()]) for of_call in batches])
    here = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    for of_call, y, gradient in zip(batches, outputs, gradients, strict=True):
        x = tf.constant(np.concatenate(of_call))
        with tf.GradientTape() as tape:
            tape.watch(x)
            plain = keras.layers.BatchNormalization(epsilon=1e-5, dtype="float64")
            whole = plain(x, training=True)
            loss = tf.reduce_sum(whole**3)
        np.testing.assert_allclose(y, whole[here], rtol=1e-11, atol=1e-11)
        wanted = tape.gradient(loss, x)[here]
        np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-9)
