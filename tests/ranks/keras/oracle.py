"""The reference for training on n ranks: one process with the batches of all ranks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tests.ranks.frameworks import tf

FEATURES, TARGETS, WORDS = 6, 3, 20


@dataclass(frozen=True)
class Data:
    """Batches for all ranks.

    Attributes:
        inputs: `steps` * `size` * `batch` rows.
        targets: the same number of rows.
        batch: rows per rank and step.
        size: the number of ranks.
    """

    inputs: np.ndarray
    targets: np.ndarray
    batch: int
    size: int

    @property
    def steps(self) -> int:
        return len(self.inputs) // (self.batch * self.size)

    def of_rank(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        def part(rows: np.ndarray) -> np.ndarray:
            shaped = rows.reshape(self.steps, self.size, self.batch, *rows.shape[1:])
            return shaped[:, rank].reshape(-1, *rows.shape[1:])

        return part(self.inputs), part(self.targets)

    def steps_of(self, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        inputs, targets = self.of_rank(rank)
        for k in range(0, len(inputs), self.batch):
            yield inputs[k : k + self.batch], targets[k : k + self.batch]

    def windows(self, passes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows of all ranks in `passes` steps. The last window may be shorter."""
        rows = self.batch * self.size * passes
        for k in range(0, len(self.inputs), rows):
            yield self.inputs[k : k + rows], self.targets[k : k + rows]


def data(size: int, steps: int, batch: int = 4, words: bool = False) -> Data:
    """Return random data. The last rank's rows have another distribution."""
    rng = np.random.default_rng(7)
    rows = (steps, size, batch)
    inputs = rng.normal(size=(*rows, FEATURES)).astype("float32")
    inputs[:, -1] = inputs[:, -1] * 3 + 1
    targets = rng.normal(size=(*rows, TARGETS)).astype("float32")
    if words:
        inputs = rng.integers(0, WORDS, size=(*rows, FEATURES)).astype("int32")
    count = steps * size * batch
    return Data(inputs.reshape(count, FEATURES), targets.reshape(count, TARGETS), batch, size)


def dense_model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(TARGETS),
        ]
    )


def word_model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int32"),
            keras.layers.Embedding(WORDS, 8),
            keras.layers.Flatten(),
            keras.layers.Dense(TARGETS),
        ]
    )


def frozen_normalization_model() -> Any:
    """Return a model with a frozen batch normalization, whose statistics do not change."""
    keras.utils.set_random_seed(3)
    normalization = keras.layers.BatchNormalization()
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16),
            normalization,
            keras.layers.Dense(TARGETS),
        ]
    )
    rng = np.random.default_rng(1)
    gamma, beta, _, _ = normalization.get_weights()
    statistics = [rng.normal(size=16), rng.uniform(0.5, 2, 16)]
    normalization.set_weights([gamma, beta, *statistics])
    normalization.trainable = False
    return model


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return keras.ops.mean(keras.losses.mean_squared_error(targets, model(inputs, training=True)))


def loop_step(model: Any, optimizer: Any) -> Callable[[np.ndarray, np.ndarray], None]:
    """Return a custom training step for the backend."""
    if keras.backend.backend() == "torch":
        import torch

        def step(inputs: np.ndarray, targets: np.ndarray) -> None:
            # PyTorch does not know the variables that `quantize` has added.
            for variable in model.trainable_variables:
                variable.value.grad = None
            loss = loss_of(model, torch.from_numpy(inputs), torch.from_numpy(targets))
            optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                variables = model.trainable_variables
                optimizer.apply([v.value.grad for v in variables], variables)

        return step

    @tf.function
    def traced(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(model, inputs, targets))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return lambda inputs, targets: traced(tf.constant(inputs), tf.constant(targets))


def distance(weights: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the relative distance in the Euclidean norm of all weights."""
    pairs = list(zip(weights, expected, strict=True))
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in pairs)
    return float(np.sqrt(difference / sum(float(np.sum(b**2)) for _, b in pairs)))


def same_everywhere(hvd: Any, weights: Sequence[np.ndarray]) -> bool:
    """Return whether all ranks have the same bytes."""
    own = b"".join(weight.tobytes() for weight in weights)
    return len(set(hvd.backend.collectives().allgather(own, "tests.weights"))) == 1


@contextlib.contextmanager
def dtype_policy(name: str) -> Iterator[None]:
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy(before)
