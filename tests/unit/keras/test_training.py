"""Callback lists of `fit` on one rank."""

import numpy as np
import pytest

from hvdkit.errors import UsageError


def lists_of(model, **options):
    """Call `fit`, and return its callback list."""
    import keras

    class PlainList(keras.callbacks.CallbackList):
        pass

    callbacks = PlainList([], add_history=True, model=model)
    x = np.ones((6, 1), "float32")
    model.fit(x, x, callbacks=callbacks, verbose=0, **options)
    return callbacks


def model_of(optimizer):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    return model


def test_set_model_is_wrapped_once(hvd):
    from keras.callbacks import CallbackList

    from hvdkit.keras.fit.callback_list import wrap_callback_lists

    wrap_callback_lists()
    wrapped = {name for name, value in vars(CallbackList).items() if hasattr(value, "__wrapped__")}
    assert wrapped == {"set_model"}
    assert not hasattr(CallbackList.set_model.__wrapped__, "__wrapped__")


def test_callback_lists_of_one_rank_are_unchanged(hvd):
    import keras

    from hvdkit.keras import data

    # TensorFlow keeps datasets of earlier tests in this process, and so their samplers.
    data._samplers.clear()
    plain = model_of(keras.optimizers.SGD(0.1))
    ours = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    for model in (plain, ours):
        callbacks = lists_of(model)
        assert type(callbacks).__name__ == "PlainList"
        assert callbacks.on_epoch_end.__func__ is keras.callbacks.CallbackList.on_epoch_end
    uncompiled = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    keras.callbacks.CallbackList([], model=uncompiled)
    assert uncompiled.predict(np.ones((2, 1)), verbose=0).shape == (2, 1)


def test_on_one_rank_an_accumulation_window_closes_at_the_end_of_an_epoch(hvd):
    import keras

    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulation_steps=4))
    x = np.ones((14, 1), "float32")
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"accumulation_steps": 4}, -2.0),
        ({"backward_passes_per_step": 4}, -4.0),
        ({"backward_passes_per_step": 4, "average_aggregated_gradients": True}, -2.0),
    ],
)
def test_a_flush_updates_with_the_mean_or_the_sum_of_an_incomplete_window(hvd, options, expected):
    import keras

    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    for gradient in (1.0, 3.0):
        optimizer.apply([keras.ops.convert_to_tensor([gradient])], [variable])
    assert hvd.flush(optimizer)
    assert keras.ops.convert_to_numpy(variable).tolist() == [expected]


@pytest.mark.parametrize("connected", [False, True])
def test_a_graph_that_would_lose_gradients_of_another_one_raises(hvd, connected):
    import keras

    if keras.backend.backend() != "tensorflow":
        return  # there are no graphs
    import tensorflow as tf

    variables = [keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), accumulation_steps=2)
    zero = tf.UnconnectedGradients.ZERO if connected else tf.UnconnectedGradients.NONE

    def step_of(head):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = head * 1.0
            gradients = tape.gradient(
                loss, [v.value for v in variables], unconnected_gradients=zero
            )
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        return step

    step_a, step_b = step_of(variables[0]), step_of(variables[1])
    step_a()
    step_b()
    step_b()
    if not connected:
        with pytest.raises(tf.errors.InvalidArgumentError, match="would be lost.*ZERO"):
            step_a()
        return
    step_a()
    assert [float(v) for v in variables] == [-1.0, -1.0]


def test_settings_of_an_optimizer_without_slots_are_compared(hvd):
    """SGD without momentum has as many variables of its own as it trains here."""
    import keras

    from hvdkit.keras.replicas import keras_replicas

    optimizer = keras.optimizers.SGD(0.1)
    variables = [keras.Variable(np.zeros(3), name=name) for name in ("shared", "local")]
    optimizer.build(variables)
    replicas = keras_replicas(variables[:1], optimizer)
    assert [item.name.strip("'").rpartition("/")[2] for item in replicas.items] == [
        "iteration",
        "learning_rate",
        "shared",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient_predivide_factor": 0.0},
        {"bucket_bytes": -1},
        {"backward_passes_per_step": True},
        {"groups": [1]},
        {"process_set": None},
    ],
)
def test_an_invalid_argument_is_an_error_before_the_first_batch(hvd, wrong):
    import keras

    (name,) = wrong
    with pytest.raises(UsageError, match=f"^{name} is "):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **wrong)


def test_the_last_window_of_data_of_unknown_length(hvd):
    """On TensorFlow, `fit` runs the graph once more without a batch."""
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(
        sgd, backward_passes_per_step=2, average_aggregated_gradients=False
    )
    model.compile(optimizer, loss=keras.losses.MeanAbsoluteError(reduction="sum"))
    batch = np.ones((1, 1), "float32"), np.full((1, 1), 100.0, "float32")
    model.fit((batch for _ in range(5)), verbose=0)
    assert model.get_weights()[0] == 5
    assert optimizer.iterations == 3


def test_the_last_window_if_a_gradient_does_not_depend_on_the_batch(hvd):
    """The last layer's bias has a gradient of -1. The number of samples in a batch is fixed."""
    import keras

    if keras.backend.backend() == "torch":
        pytest.skip("tf.data belongs to the TensorFlow backend")
    import tensorflow as tf

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.layers[0].kernel.assign([[0.0]])
    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(
        sgd, backward_passes_per_step=2, average_aggregated_gradients=False
    )
    model.compile(optimizer, loss=lambda _, output: -output)
    data = tf.data.Dataset.from_tensor_slices((np.ones((10, 1)), np.ones((10, 1))))
    data = data.batch(2, drop_remainder=True).filter(lambda *_: True)
    model.fit(data, verbose=0)
    assert [float(weight.item()) for weight in model.get_weights()] == [5, 5]
