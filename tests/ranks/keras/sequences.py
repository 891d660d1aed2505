"""User actions with Keras for the random sequences of test_sequences.py.

Every rank takes the same actions on its own rows, except where an action says otherwise. A
reference model trains in one process on the rows of all ranks. After each action, the trainable
variables and the optimizer's variables are bit-identical on all ranks and near those of the
reference, which are then set to the same values. After a `fit`, moving statistics are also
bit-identical. With batch normalization or mixed precision the reference would compute other values,
so the ranks are not compared with it.

To add an action, write a function with the decorator `action`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.agreement.consistency import RankMismatchError
from tests.ranks.actions import Actions
from tests.ranks.frameworks import keras, tf
from tests.ranks.keras.job import of_every_rank, same_everywhere

BATCH, FEATURES = 4, 3

#: By wire format, relative to the largest trainable element. Keras partly computes in float32.
TOLERANCE = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Setting:
    """The arguments of the wrapped optimizer, and the kind of training step.

    Attributes:
        compression: the wire format.
        kind: "sgd" or "adam".
        passes: accumulation_steps.
        step: "keras", or "own": a `train_step` with a tape and the wrapped optimizer.
        model: "plain", "norm": with moving statistics, or "mixed": in mixed_float16.
    """

    compression: str = "none"
    kind: str = "sgd"
    passes: int = 1
    step: str = "keras"
    model: str = "plain"


def model_of(setting: Setting, own_step: bool) -> Any:
    """Return a model, in float64 unless it is mixed, the same on every rank."""
    keras.utils.set_random_seed(1)
    dtype = "mixed_float16" if setting.model == "mixed" else "float64"
    inputs = keras.Input((FEATURES,), dtype="float64")
    hidden = keras.layers.Dense(5, activation="tanh", name="first", dtype=dtype)(inputs)
    if setting.model == "norm":
        hidden = keras.layers.BatchNormalization(momentum=0.5)(hidden)
    outputs = keras.layers.Dense(1, name="second", dtype=dtype)(hidden)
    return (_own_step_class() if own_step else keras.Model)(inputs, outputs)


def _own_step_class() -> Any:
    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True), weights)
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return OwnStep


class World:
    """The state of a sequence on one rank."""

    def __init__(self, hvd: Any, setting: Setting, folder: Path) -> None:
        self.hvd = hvd
        self.setting = setting
        self.folder = folder
        self.tensorflow = keras.backend.backend() == "tensorflow"
        self.own_step = setting.step == "own" and self.tensorflow
        self.options: dict[str, Any] = {}
        # Moving statistics differ between ranks until a `fit` averages them.
        self.statistics_differ = False
        self.model = model_of(setting, self.own_step)
        self.reference = model_of(setting, False)
        self.compile(new=True)

    def optimizer(self) -> Any:
        if self.setting.kind == "sgd":
            # Larger rates diverge with the statistics of four rows.
            rate = 0.01 if self.setting.model == "norm" else 0.05
            return keras.optimizers.SGD(rate, momentum=0.9)
        return keras.optimizers.Adam(0.01, epsilon=1e-3)

    def compile(self, new: bool) -> None:
        """Compile with a new wrapped optimizer, or the same."""
        if new:
            self.wrapped = self.hvd.DistributedOptimizer(
                self.optimizer(),
                compression=self.setting.compression,
                accumulation_steps=self.setting.passes,
                # Compare after every step: the ranks' variables must never differ.
                check_interval=1,
            )
            self.reference.compile(self.optimizer(), loss="mse", jit_compile=False)
        self.model.compile(self.wrapped, loss="mse", **self.options)

    def rows(self, number: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of `steps` batches: [steps, ranks, BATCH, ...]."""
        random = np.random.default_rng(number)
        x = random.normal(size=(steps, self.hvd.size(), BATCH, FEATURES))
        x[:, -1] = 2 * x[:, -1] + 1
        return x, np.sin(x.sum(axis=-1, keepdims=True))

    def own(self, rows: np.ndarray) -> np.ndarray:
        """Return this rank's part of `rows`, batch after batch."""
        part = rows[:, self.hvd.rank()]
        return part.reshape(-1, *part.shape[2:])

    def train_reference(self, *rows: np.ndarray) -> None:
        """Train one epoch on all ranks' rows, with one step for each accumulation window."""
        for k in range(0, len(rows[0]), self.setting.passes):
            window = [part[k : k + self.setting.passes] for part in rows]
            self.reference.train_on_batch(*(part.reshape(-1, *part.shape[3:]) for part in window))

    def fit(self, number: int, *, weighted: bool = False, **options: Any) -> Any:
        """Fit 2 or 3 batches, and train the reference for the same epochs and batches."""
        steps = 2 + number % 2
        rows = list(self.rows(number, steps))
        if weighted:
            rows.append(np.random.default_rng(number).uniform(size=rows[0].shape[:3]))
        x, y, *weights = map(self.own, rows)
        history = self.model.fit(
            x,
            y,
            sample_weight=weights[0] if weights else None,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            **options,
        )
        self.statistics_differ = False
        for _ in same_everywhere(history.epoch):
            self.train_reference(*rows)
        return history

    def check(self) -> None:
        """Compare ranks and reference, and copy the ranks' values to the reference."""
        bound = TOLERANCE[self.setting.compression]
        pairs = list(
            zip(self.model.trainable_variables, self.reference.trainable_variables, strict=True)
        )
        optimizer, other = self.model.optimizer, self.reference.optimizer
        # On PyTorch, evaluate builds the optimizer of the rank that calls it.
        if all(of_every_rank(bool(optimizer.built))):
            if not other.built:
                other.build(self.reference.trainable_variables)
            pairs += zip(optimizer.variables, other.variables, strict=True)
        own = [np.asarray(keras.ops.convert_to_numpy(v)) for v, _ in pairs]
        same_everywhere([value.tobytes().hex() for value in own])
        assert all(np.isfinite(value).all() for value in own)
        if not self.statistics_differ:
            moved = map(keras.ops.convert_to_numpy, self.model.non_trainable_variables)
            same_everywhere([np.asarray(value).tobytes().hex() for value in moved])
        wanted = [np.asarray(keras.ops.convert_to_numpy(v)) for _, v in pairs]
        trained = wanted[: len(self.model.trainable_variables)]
        bound *= max(float(np.max(np.abs(value), initial=0.0)) for value in trained)
        for (variable, reference), value, other in zip(pairs, own, wanted, strict=True):
            worst = float(np.max(np.abs(value - other), initial=0.0))
            if self.setting.model == "plain":
                assert worst <= bound, f"{variable.path} is off by {worst}, bound {bound}"
            reference.assign(value)

    def broadcast(self, rank: int) -> None:
        """Copy the state of one rank to all ranks and to the reference."""
        self.hvd.broadcast_model(self.model, root_rank=rank)
        if not self.reference.optimizer.built and self.model.optimizer.built:
            self.reference.optimizer.build(self.reference.trainable_variables)
        for variable, reference in zip(
            [*self.model.weights, *self.model.optimizer.variables],
            [*self.reference.weights, *self.reference.optimizer.variables],
            strict=True,
        ):
            reference.assign(keras.ops.convert_to_numpy(variable))

    def set_weights(self, number: int) -> None:
        """Set random weights, the same for equal numbers."""
        random = np.random.default_rng(number)
        values = [random.normal(size=w.shape) for w in self.model.weights]
        # A negative variance would make every evaluation NaN.
        named = zip(self.model.weights, values, strict=True)
        self.model.set_weights([abs(v) if "variance" in w.path else v for w, v in named])

    def chosen(self, number: int) -> bool:
        """Return whether this is the rank that `number` selects."""
        return bool(self.hvd.rank() == number % self.hvd.size())


ACTIONS = action = Actions()


def run_sequence(hvd: Any, setting: Setting, actions: list[tuple[str, int]], folder: Path) -> None:
    """Run a sequence of actions on this rank, and then a `fit`."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        world = World(hvd, setting, folder)
        for name, number in [*actions, ("fit", 7)]:
            ACTIONS[name](world, number)
            world.check()
    finally:
        keras.config.set_floatx(before)
        keras.utils.clear_session()


# --- the actions --------------------------------------------------------------------------------


@action
def fit(world: World, number: int) -> None:
    world.fit(number)


@action
def fit_with_weights(world: World, number: int) -> None:
    world.fit(number, weighted=True)


@action
def fit_with_validation(world: World, number: int) -> None:
    x, y = world.rows(number + 1, 2)
    own = world.own(x), world.own(y)
    history = world.fit(number, epochs=2, validation_data=own, validation_freq=1 + number % 2)
    assert len(history.history["val_loss"]) == 2 - number % 2
    same_everywhere([history.history["loss"], history.history["val_loss"]])


@action
def fit_with_a_callback_that_looks_at_batches(world: World, number: int) -> None:
    """Fit with a callback on one rank only."""
    seen: list[int] = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append(b))
    world.fit(number, callbacks=[callback] if world.chosen(number) else [])
    assert len(seen) > 0 or not world.chosen(number)


@action
def stop_in_the_first_batch(world: World, number: int) -> None:
    """Stop training in a callback of one rank. The epoch ends after this batch on all ranks."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    x, y = world.rows(number, 3)
    callbacks = [Stop()] if world.chosen(number) else []
    world.model.fit(
        *map(world.own, (x, y)),
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    world.statistics_differ = False
    done = int(world.options.get("steps_per_execution", 1))
    world.train_reference(x[:done], y[:done])


@action
def stop_early(world: World, number: int) -> None:
    """Fit with EarlyStopping and validation data that differ between ranks."""
    x, y = world.rows(number + 1, 1)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=number % 2, min_delta=1e-3)
    validation = (world.own(x), world.own(y) * (1 + world.hvd.rank()))
    world.fit(number, epochs=4, callbacks=[stop], validation_data=validation)


@action
def other_learning_rate(world: World, number: int) -> None:
    rate = 0.01 * (1 + number % 5)
    world.reference.optimizer.learning_rate.assign(rate)
    world.fit(number, callbacks=[keras.callbacks.LearningRateScheduler(lambda *_: rate)])


@action
def train_on_batch(world: World, number: int) -> None:
    x, y = world.rows(number, world.setting.passes)
    for k in range(len(x)):
        world.model.train_on_batch(x[k, world.hvd.rank()], y[k, world.hvd.rank()])
    world.statistics_differ = world.setting.model == "norm"
    world.train_reference(x, y)


@action
def call_on_one_rank(world: World, number: int) -> None:
    """Call the model, its predict or its evaluate on one rank."""
    x, y = (rows.reshape(-1, rows.shape[-1]) for rows in world.rows(number, 1))
    if world.chosen(number):
        if number % 3 == 0:
            world.model(x[:2])
        elif number % 3 == 1:
            world.model.predict(x, batch_size=3, verbose=0)
        else:
            world.model.evaluate(x, y, batch_size=3, verbose=0)


@action
def evaluate_on_all(world: World, number: int) -> None:
    x, y = world.rows(number, 2)
    callback = world.hvd.callbacks.MetricAverageCallback()
    found = world.model.evaluate(
        world.own(x), world.own(y), batch_size=BATCH, verbose=0, callbacks=[callback]
    )
    if world.setting.model != "plain":
        same_everywhere(found)
        return
    expected = world.reference.evaluate(
        x.reshape(-1, FEATURES), y.reshape(-1, 1), batch_size=BATCH, verbose=0
    )
    np.testing.assert_allclose(same_everywhere(found), expected, rtol=1e-4)


@action
def compile_again(world: World, number: int) -> None:
    """Compile with the same optimizer or a new one."""
    world.compile(new=bool(number % 2))


@action
def steps_per_execution(world: World, number: int) -> None:
    if world.tensorflow:
        world.options["steps_per_execution"] = 1 + number % 2
        world.compile(new=False)


@action
def eagerly(world: World, number: int) -> None:
    world.options["run_eagerly"] = bool(number % 2)
    world.compile(new=False)


@action
def freeze(world: World, number: int) -> None:
    """Freeze the first layer, or unfreeze it."""
    for model in (world.model, world.reference):
        layer = model.get_layer("first")
        layer.trainable = not layer.trainable
    world.compile(new=True)


@action
def load_on_one_rank(world: World, number: int) -> None:
    """Set weights on one rank, and broadcast them with the callback."""
    root = number % world.hvd.size()
    if world.chosen(number):
        world.set_weights(number)
    random = np.random.default_rng(number)
    shapes = [w.shape for w in world.reference.get_weights()]
    world.reference.set_weights([random.normal(size=shape) for shape in shapes])
    callback = world.hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    world.fit(number, callbacks=[callback])


@action
def forget_the_broadcast(world: World, number: int) -> None:
    """Fit with different weights, which raises on every rank; then broadcast."""
    if world.hvd.size() == 1:
        return
    if world.chosen(number):
        # New values even if this action is repeated.
        world.model.set_weights([0.5 * weights + 1 for weights in world.model.get_weights()])
    raised = None
    try:
        x, y = world.rows(number, 2)
        world.model.fit(world.own(x), world.own(y), batch_size=BATCH, verbose=0, shuffle=False)
    except RankMismatchError as error:
        raised = str(error)
    assert same_everywhere(raised) is not None
    world.statistics_differ = False
    world.broadcast(number % world.hvd.size())


@action
def fit_another_model_on_one_rank(world: World, number: int) -> None:
    if world.chosen(number):
        other = model_of(world.setting, False)
        other.compile("sgd", loss="mse")
        x, y = world.rows(number, 1)
        with world.hvd.local_fit():
            other.fit(world.own(x), world.own(y), verbose=0)


@action
def save_and_load(world: World, number: int) -> None:
    """Save the model on one rank, and load the file on all ranks."""
    if world.own_step or not world.model.optimizer.built:
        return
    path = world.folder / "model.keras"
    if world.chosen(number):
        world.model.save(path)
    of_every_rank("saved")
    world.model = world.hvd.load_model(
        path, compression=world.setting.compression, accumulation_steps=world.setting.passes
    )
    world.wrapped = world.model.optimizer
    world.options = {}
    of_every_rank("loaded")
