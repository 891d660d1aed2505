"""`hvd.DistributedOptimizer` for Keras: properties of the wrapped optimizer, and errors."""

import json
import subprocess
import sys
import tempfile
import zipfile

import keras
import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from hvdkit.keras.optimizer import distribution_of
from hvdkit.reduction.accumulation import PassesDiffer
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import LazyModule, tf
from tests.ranks.keras import oracle

tensorflow_adapter = LazyModule("hvdkit.tensorflow")


def fitted(hvd, optimizer, steps=3, seed=None, **options):
    model = oracle.dense_model()
    # Keras cannot load an HDF5 file whose loss is given by name.
    model.compile(optimizer, loss=keras.losses.MeanSquaredError(), **options)
    rng = np.random.default_rng(hvd.rank() if seed is None else seed)
    inputs = rng.normal(size=(4 * steps, oracle.FEATURES))
    targets = rng.normal(size=(4 * steps, oracle.TARGETS))
    model.fit(inputs, targets, batch_size=4, shuffle=False, verbose=0)
    return model


def wait_for_all(hvd):
    hvd.backend.collectives().sum([1], "tests.barrier")


def test_a_wrapped_optimizer_keeps_class_and_config(hvd):
    plain = keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=1.0)
    kind, config = plain.__class__, plain.get_config()
    wrapped = hvd.DistributedOptimizer(plain)
    assert wrapped is plain
    assert type(wrapped) is kind
    assert wrapped.get_config() == config
    copy = kind.from_config(wrapped.get_config())
    assert distribution_of(copy) is None
    assert distribution_of(wrapped) is not None


LOAD_WITHOUT_HVDKIT = """
import json, sys
import keras
model = keras.models.load_model(sys.argv[1])
print(json.dumps([
    model.optimizer.__class__.__name__,
    int(model.optimizer.iterations),
    "hvdkit" in sys.modules or "horovod" in sys.modules,
]))
"""


@pytest.mark.parametrize("name", ["model.keras", pytest.param("model.h5", marks=pytest.mark.long)])
@pytest.mark.long_with("keras-torch")
def test_a_saved_model_loads_with_and_without_hvdkit(hvd, name):
    model = fitted(hvd, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    with shared_folder(hvd) as folder:
        path = folder / name
        if hvd.rank() == 0:
            model.save(path)
            if name.endswith(".keras"):
                config = json.loads(zipfile.ZipFile(path).read("config.json"))
                assert config["compile_config"]["optimizer"]["class_name"] == "Adam"
                assert "hvdkit" not in json.dumps(config)
            own = [v.numpy() for v in model.optimizer.variables]
            plain = keras.models.load_model(path).optimizer
            assert distribution_of(plain) is None
            assert (plain.__class__.__name__, int(plain.iterations)) == ("Adam", 3)
            # Keras does not build the optimizer of an HDF5 file before its first use.
            assert len(plain.variables) == len(own) or name.endswith(".h5")
            for variable, expected in zip(plain.variables, own, strict=False):
                np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
            if name.endswith(".h5"):
                # In a process that does not import hvdkit, which takes long.
                command = [sys.executable, "-c", LOAD_WITHOUT_HVDKIT, str(path)]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=50, check=True
                )
                assert json.loads(done.stdout.splitlines()[-1]) == ["Adam", 3, False]
        wait_for_all(hvd)
        loaded = hvd.load_model(path, compression="bf16")
        assert distribution_of(loaded.optimizer) is not None
        assert int(loaded.optimizer.iterations) == 3
        if name.endswith(".keras"):
            check_training_continues(hvd, loaded)


def test_a_rank_that_loads_a_model_trains_with_ranks_that_build_it(hvd):
    """Horovod's examples resume in this way. A loaded Sequential model has shorter paths."""

    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        model.compile(optimizer, "mse")
        return model

    def fit(model):
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(np.ones((8, 4)), np.ones((8, 3)), batch_size=4, verbose=0, callbacks=[broadcast])

    model = build()
    fit(model)
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.keras"
            model.save(path)
            model = hvd.load_model(path)
    else:
        model = build()
    fit(model)
    assert oracle.same_everywhere(hvd, model.get_weights())


def check_training_continues(hvd, loaded):
    rng = np.random.default_rng(100 + hvd.rank())
    inputs = rng.normal(size=(8, oracle.FEATURES))
    loaded.fit(inputs, rng.normal(size=(8, oracle.TARGETS)), batch_size=4, verbose=0)
    assert int(loaded.optimizer.iterations) == 5
    assert oracle.same_everywhere(hvd, loaded.get_weights())


def test_only_training_is_compiled_without_xla(hvd):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("for the TensorFlow backend")
    from tensorflow.python.ops import control_flow_util

    traced = []

    class Look(keras.layers.Layer):
        def call(self, inputs, training=False):
            graph = tf.compat.v1.get_default_graph()
            traced.append((training, control_flow_util.GraphOrParentsInXlaContext(graph)))
            return inputs

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Look()])
    hvd.broadcast_model(model, 0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    x = np.random.default_rng(hvd.rank()).normal(size=(8, 3))
    for _ in range(2):
        model.compile(optimizer, loss="mse", jit_compile=True)
        traced.clear()
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, validation_data=(x, x[:, :1]))
        model.evaluate(x, x[:, :1], batch_size=4, verbose=0)
        model.predict(x, batch_size=4, verbose=0)
        assert set(traced) == {(True, False), (False, True)}
    assert oracle.same_everywhere(hvd, model.get_weights())


def test_a_plain_optimizer_may_use_xla(hvd):
    model = oracle.dense_model()
    model.compile(keras.optimizers.SGD(0.01), loss="mse", jit_compile=True)
    assert model.jit_compile


def test_apply_in_a_function_for_xla_raises(hvd):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("for the TensorFlow backend")
    model = oracle.dense_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    variables = model.trainable_variables

    @tf.function(jit_compile=True)
    def step():
        optimizer.apply([tf.ones_like(v.value) for v in variables], variables)

    with pytest.raises(UsageError, match="jit_compile=True"):
        step()


def test_a_variable_without_a_gradient_is_unchanged(hvd):
    model = oracle.dense_model()
    unused = keras.Variable(np.ones(3, "float32"), name="unused")
    variables = [*model.trainable_variables, unused]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    ones = [keras.ops.ones_like(v) * (hvd.rank() + 1.0) for v in model.trainable_variables]
    before = model.get_weights()
    optimizer.apply([*ones, None], variables)
    assert unused.numpy().tolist() == [1, 1, 1]
    mean = (hvd.size() + 1) / 2
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(weight, old - mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_apply_leaves_other_gradients_of_a_parameter(hvd, passes):
    """The `grad` of a parameter changes only if it is what the optimizer was given."""
    if keras.backend.backend() != "torch":
        pytest.skip("only PyTorch keeps gradients in parameters")
    import torch

    variable = keras.Variable(np.ones(3, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), accumulation_steps=passes)
    for _ in range(passes):
        loss = torch.sum(variable.value) * (hvd.rank() + 1.0)
        optimizer.apply(list(torch.autograd.grad(loss, [variable.value])), [variable])
    assert variable.value.grad is None
    torch.sum(variable.value).backward()
    own = variable.value.grad
    for _ in range(passes):
        optimizer.apply([own.clone()], [variable])
    assert variable.value.grad is own
    assert own.tolist() == [1, 1, 1]
    expected = 1 - (hvd.size() + 1) / 2 - 1
    assert variable.numpy().tolist() == [expected] * 3


@pytest.mark.long_with("keras-tensorflow")
def test_two_optimizers_at_once(hvd):
    first, second = oracle.dense_model(), oracle.dense_model()
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]
    before = first.get_weights()
    for factor in (1.0, 3.0):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            gradients = [
                keras.ops.ones_like(v) * factor * (hvd.rank() + 1.0)
                for v in model.trainable_variables
            ]
            optimizer.apply(gradients, model.trainable_variables)
    for model in (first, second):
        for weight, old in zip(model.get_weights(), before, strict=True):
            expected = old - 4 * (hvd.size() + 1) / 2
            np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-5)


def test_a_process_set(hvd):
    if hvd.size() < 3:
        pytest.skip("needs at least three ranks")
    members = hvd.add_process_set(range(hvd.size() - 1))
    try:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=members)
        variable = keras.Variable(np.zeros(5, "float32"))
        optimizer.apply([keras.ops.ones((5,)) * float(hvd.rank() + 1)], [variable])
        inside = hvd.rank() < hvd.size() - 1
        expected = hvd.size() / 2 if inside else hvd.size()
        np.testing.assert_allclose(variable.numpy(), -expected)
    finally:
        hvd.remove_process_set(members)


def multi_optimizer(default, of_biases):
    choice = keras.optimizers.OptimizerMap(default, {".*bias": of_biases})
    return keras.optimizers.MultiOptimizer(choice)


def compile_with(optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")


def two_optimizers(hvd):
    """Return two optimizers, the second one wrapped."""
    return keras.optimizers.SGD(0.1), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


INVALID = {
    "such as keras.optimizers.get..adam": lambda hvd: hvd.DistributedOptimizer("adam"),
    "a builtins.object": lambda hvd: hvd.DistributedOptimizer(object()),
    "already": lambda hvd: hvd.DistributedOptimizer(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    ),
    "already a DistributedOptimizer": lambda hvd: hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    ),
    "is already a Distributed.*plain": lambda hvd: hvd.DistributedOptimizer(
        multi_optimizer(*two_optimizers(hvd))
    ),
    "wrap the MultiOptimizer itself": lambda hvd: compile_with(
        multi_optimizer(*two_optimizers(hvd))
    ),
    "has a global_clipnorm, and local_layers": lambda hvd: hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1, global_clipnorm=1.0), local_layers=keras.layers.Dense(1)
    ),
    "accumulation_steps is 0": lambda hvd: hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), accumulation_steps=0
    ),
    "averages the gradients of several passes": lambda hvd: hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), accumulation_steps=2, backward_passes_per_step=2
    ),
    "gradient_accumulation_steps=2": lambda hvd: hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), accumulation_steps=3
    ),
    "compression is 'fp8'": lambda hvd: hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression="fp8"
    ),
    "op is": lambda hvd: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum),
    "not wrapped": lambda hvd: hvd.flush(keras.optimizers.SGD(0.1)),
}


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("message", INVALID)
def test_invalid_arguments_raise(hvd, message):
    with pytest.raises(UsageError, match=message):
        INVALID[message](hvd)


def test_a_strategy_raises(hvd):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("for the TensorFlow backend")
    with (
        tf.distribute.OneDeviceStrategy("cpu:0").scope(),
        pytest.raises(UsageError, match="OneDeviceStrategy of tf.distribute"),
    ):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


class OwnUpdate(keras.optimizers.SGD):
    """An optimizer whose own `apply_gradients` does not call `apply`."""

    def apply_gradients(self, grads_and_vars, factor=0.1):
        pairs = list(grads_and_vars)
        if not self.built:
            self.build([variable for _, variable in pairs])
        for gradient, variable in pairs:
            variable.assign_sub(factor * keras.ops.sign(gradient) * keras.ops.abs(gradient) ** 0.5)
        self.iterations.assign_add(1)
        return factor


def test_the_arguments_and_the_result_of_an_own_apply_gradients(hvd):
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = hvd.DistributedOptimizer(OwnUpdate(0.1))
    gradient = keras.ops.ones(2) * (4.0 if hvd.rank() == 0 else 0.0) * hvd.size()
    assert optimizer.apply_gradients([(gradient, variable)], 0.25) == 0.25
    np.testing.assert_allclose(variable.numpy(), [0.5, 0.5], 1e-6)


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_with_its_own_apply_gradients_is_reduced(hvd, passes):
    data = oracle.data(hvd.size(), 4)
    variable, expected = (keras.Variable(np.ones(3, "float32")) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(OwnUpdate(0.1), accumulation_steps=passes)
    plain = OwnUpdate(0.1)

    def gradient(targets):
        return keras.ops.convert_to_tensor(np.mean(targets, axis=0))

    for _, targets in data.steps_of(hvd.rank()):
        optimizer.apply_gradients([(gradient(targets), variable)])
    for _, targets in data.windows(passes):
        plain.apply_gradients([(gradient(targets), expected)])
    np.testing.assert_allclose(variable.numpy(), expected.numpy(), 1e-5)
    assert int(optimizer.iterations) == int(plain.iterations) == data.steps // passes


def skip_without_tapes():
    if keras.backend.backend() == "torch":
        pytest.skip("PyTorch has no tapes")


@pytest.mark.parametrize(
    ("where", "op"),
    [
        ("eager", "Sum"),
        ("graph", "Average"),
        ("graph and eager", "Average"),
        ("two graphs", "Sum"),
    ],
)
def test_gradients_that_a_tape_has_reduced(hvd, where, op):
    """A second sum is an error on every rank. A second mean is a warning."""
    skip_without_tapes()
    model = oracle.dense_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=getattr(hvd, op))
    inputs, targets = oracle.data(hvd.size(), 1).of_rank(hvd.rank())

    def gradients_of_batch():
        with tf.GradientTape() as tape:
            loss = oracle.loss_of(model, tf.constant(inputs), tf.constant(targets))
        tape = tensorflow_adapter.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        # The tensors are no longer those of the tape.
        return tf.clip_by_global_norm(gradients, 0.5)[0]

    def apply(gradients):
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    optimizer.build(model.trainable_variables)
    if where in ("graph and eager", "two graphs"):
        gradients_of_batch = tf.function(gradients_of_batch)
    if where == "two graphs":
        apply = tf.function(apply)

    def step():
        apply(gradients_of_batch())

    step = tf.function(step) if where == "graph" else step
    error = tf.errors.OpError if "graph" in where.split()[-1] else UsageError
    with recorded("hvdkit.tensorflow") as log:
        if op == "Sum":
            with pytest.raises(error, match=rf"twice.* multiply them by {hvd.size()}"):
                step()
        else:
            step()
            step()
    texts = [record.getMessage() for record in log]
    expected = op == "Average" and hvd.rank() == 0
    assert sum("gradients are reduced twice" in text for text in texts) == expected
    wait_for_all(hvd)


def test_a_graph_with_a_tape_that_one_rank_traces_again(hvd):
    """A rank traces by itself, so a trace must not start a collective."""
    skip_without_tapes()
    model = oracle.dense_model()
    variables = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    inputs, targets = map(tf.constant, oracle.data(hvd.size(), 1).of_rank(hvd.rank()))

    @tf.function
    def gradients(inputs, targets):
        with tf.GradientTape() as tape:
            loss = oracle.loss_of(model, inputs, targets)
        return tensorflow_adapter.DistributedGradientTape(tape).gradient(loss, variables)

    for rows in (len(inputs), len(inputs) - (hvd.rank() == 0), len(inputs)):
        optimizer.apply(gradients(inputs[:rows], targets[:rows]), variables)
    assert oracle.same_everywhere(hvd, model.get_weights())


def test_a_tape_beside_a_wrapped_optimizer(hvd):
    """A graph reduces gradients to log their norm, and applies others: once each."""
    skip_without_tapes()
    model = oracle.dense_model()
    variables = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    inputs, targets = map(tf.constant, oracle.data(hvd.size(), 1).of_rank(hvd.rank()))

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = oracle.loss_of(model, inputs, targets)
        optimizer.apply(tape.gradient(loss, variables), variables)
        reduced = tensorflow_adapter.DistributedGradientTape(tape).gradient(loss, variables)
        return tf.linalg.global_norm(reduced)

    norms = [float(step()) for _ in range(4)]
    assert all(norm > 0 for norm in norms)
    assert oracle.same_everywhere(hvd, model.get_weights())


def test_a_wrapped_optimizer_after_a_loop_with_a_tape(hvd):
    """The tape's gradients went to another optimizer, so nothing is reduced twice."""
    skip_without_tapes()
    model = oracle.dense_model()
    variables = model.trainable_variables
    inputs, targets = map(tf.constant, oracle.data(hvd.size(), 1).of_rank(hvd.rank()))

    def gradients(wrap):
        with tf.GradientTape() as tape:
            loss = oracle.loss_of(model, inputs, targets)
        return wrap(tape).gradient(loss, variables)

    reduced = gradients(tensorflow_adapter.DistributedGradientTape)
    keras.optimizers.SGD(0.1).apply(reduced, variables)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    optimizer.apply(gradients(lambda tape: tape), variables)
    assert oracle.same_everywhere(hvd, model.get_weights())


def test_different_models_raise_on_every_rank(hvd):
    width = 16 if hvd.rank() else 17
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with pytest.raises(RankMismatchError, match=r"\[4, 17\]"):
        model.fit(np.ones((4, 4)), np.ones((4, width)), verbose=0)


def test_different_settings_raise_on_every_rank(hvd):
    compression = "bf16" if hvd.rank() else "none"
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
    with pytest.raises(RankMismatchError, match="compression: none"):
        optimizer.apply([keras.ops.ones((2,))], [keras.Variable(np.ones(2, "float32"))])


def test_different_numbers_of_passes_raise_on_every_rank(hvd):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulation_steps=4)
    variable = keras.Variable(np.ones(2, "float32"))
    for _ in range(1 if hvd.rank() else 2):
        optimizer.apply([keras.ops.ones((2,))], [variable])
    with pytest.raises(PassesDiffer, match="rank 0: 2; ranks? 1.*: 1"):
        hvd.flush(optimizer)


def test_only_one_framework_is_loaded(hvd):
    other = "torch" if keras.backend.backend() == "tensorflow" else "tensorflow"
    assert f"horovod.{other}" not in sys.modules
    if other == "torch":
        assert "torch" not in sys.modules
