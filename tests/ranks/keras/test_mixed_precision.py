"""Loss scaling: all ranks skip a step if gradients of one rank overflow."""

import keras
import numpy as np
import pytest
from keras.optimizers import LossScaleOptimizer

from tests.ranks.keras import oracle

INITIAL = 2.0**10
# Tracing takes long.
SLOW = pytest.mark.long_with("keras-tensorflow")


def batches(hvd, poisoned):
    """Return two rows per step. In the steps `poisoned`, the last rank's inputs are infinite."""
    rng = np.random.default_rng(hvd.rank())
    inputs = rng.normal(size=(10, 2, oracle.FEATURES)).astype("float32")
    targets = rng.normal(size=(10, 2, oracle.TARGETS)).astype("float32")
    if hvd.rank() == hvd.size() - 1:
        inputs[poisoned] = np.inf
    return inputs, targets


def check(hvd, scaling, model, skipped, steps=10):
    assert isinstance(scaling, LossScaleOptimizer)
    assert int(scaling.iterations) == steps - skipped
    assert float(scaling.dynamic_scale) == scaling.initial_scale * 2.0**-skipped
    weights = model.get_weights()
    assert all(np.isfinite(weight).all() for weight in weights)
    assert oracle.same_everywhere(hvd, weights)
    assert oracle.same_everywhere(hvd, [v.numpy() for v in scaling.variables])


def fit(model, inputs, targets):
    model.fit(
        inputs.reshape(-1, oracle.FEATURES),
        targets.reshape(-1, oracle.TARGETS),
        batch_size=2,
        shuffle=False,
        verbose=0,
    )


@pytest.mark.parametrize(
    "wraps",
    ["compile", *(pytest.param(f"user {where}", marks=SLOW) for where in ("inside", "outside"))],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(hvd, wraps):
    inputs, targets = batches(hvd, poisoned=[3, 6])
    with oracle.dtype_policy("mixed_float16"):
        model = oracle.dense_model()
        optimizer = keras.optimizers.SGD(0.01)
        if wraps == "compile":
            optimizer = hvd.DistributedOptimizer(optimizer)
        elif wraps == "user inside":
            optimizer = LossScaleOptimizer(hvd.DistributedOptimizer(optimizer), INITIAL)
        else:
            optimizer = hvd.DistributedOptimizer(LossScaleOptimizer(optimizer, INITIAL))
        model.compile(optimizer, loss="mse")
        fit(model, inputs, targets)
    check(hvd, model.optimizer, model, skipped=2)


def test_loss_scaling_in_a_custom_loop(hvd):
    inputs, targets = batches(hvd, poisoned=[0, 9])
    with oracle.dtype_policy("mixed_float16"):
        model = oracle.dense_model()
        optimizer = LossScaleOptimizer(
            hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), INITIAL
        )
        # An optimizer that is not built does not scale the loss by dynamic_scale.
        optimizer.build(model.trainable_variables)
        step = oracle.loop_step(model, optimizer)
        for row, target in zip(inputs, targets, strict=True):
            step(row, target)
    check(hvd, optimizer, model, skipped=2)


@pytest.mark.parametrize("compression", ["fp16", pytest.param("bf16", marks=SLOW)])
def test_infinities_pass_through_16_bit_wire_formats(hvd, compression):
    inputs, targets = batches(hvd, poisoned=[4])
    with oracle.dtype_policy("mixed_float16"):
        model = oracle.dense_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=compression)
        model.compile(optimizer, loss="mse")
        fit(model, inputs, targets)
    check(hvd, model.optimizer, model, skipped=1)


@pytest.mark.long_with("keras-tensorflow")
def test_an_accumulation_window_with_an_infinity_is_skipped(hvd):
    inputs, targets = batches(hvd, poisoned=[3])
    with oracle.dtype_policy("mixed_float16"):
        model = oracle.dense_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), accumulation_steps=2)
        model.compile(optimizer, loss="mse")
        fit(model, inputs, targets)
    check(hvd, model.optimizer, model, skipped=1, steps=5)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("bfloat16", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("compression", [pytest.param("none", marks=SLOW), "bf16"])
def test_bfloat16(hvd, policy, compression):
    inputs, targets = batches(hvd, poisoned=[])
    with oracle.dtype_policy(policy):
        model = oracle.dense_model()
        before = model.get_weights()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        model.compile(optimizer, loss="mse")
        fit(model, inputs, targets)
    weights = [np.asarray(weight, "float32") for weight in model.get_weights()]
    assert all(np.isfinite(weight).all() for weight in weights)
    assert not np.array_equal(weights[0], np.asarray(before[0], "float32"))
    assert oracle.same_everywhere(hvd, weights)


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.long_with("keras-tensorflow")
def test_scales_of_float8_are_those_of_one_process(hvd, passes):
    """Their "gradients" are new values. The largest absolute value counts, not the mean."""
    data = oracle.data(hvd.size(), 4)

    def trained(optimizer, batches):
        model = oracle.dense_model()
        for layer in model.layers:
            layer.quantize("float8")
        step = oracle.loop_step(model, optimizer)
        for inputs, targets in batches:
            step(inputs, targets)
        return model

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), accumulation_steps=passes)
    model = trained(optimizer, data.steps_of(hvd.rank()))
    expected = trained(keras.optimizers.SGD(0.0), data.windows(passes))
    compared = 0
    for own, right in zip(model.trainable_variables, expected.trainable_variables, strict=True):
        # Gradients of outputs are those of a rank's own batch, which has fewer rows.
        if own.overwrite_with_gradient and "outputs_grad" not in own.path:
            pair = (keras.ops.convert_to_numpy(each) for each in (own, right))
            np.testing.assert_allclose(*pair, rtol=1e-5, err_msg=own.path)
            compared += 1
    assert compared == 8
    assert oracle.same_everywhere(hvd, model.get_weights())


def test_a_broadcast_contains_what_a_loss_scale_optimizer_does_not_count(hvd):
    """It builds Nadam untracked, so the optimizer's `variables` lack Nadam's product of factors."""
    inner = keras.optimizers.Nadam(0.01)
    model = oracle.dense_model()
    model.compile(LossScaleOptimizer(inner, INITIAL), "mse")
    if hvd.rank() == 0:
        with hvd.local_fit():
            inputs, targets = batches(hvd, poisoned=[])
            fit(model, inputs, targets)
    hvd.broadcast_model(model, root_rank=0)
    assert float(inner._u_product) < 0.1
    assert oracle.same_everywhere(hvd, [inner._u_product.numpy()])
