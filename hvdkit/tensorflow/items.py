"""Stateful items of TensorFlow for checkpoints; see `hvdkit.checkpoint.state`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Not public. The public functions would create a generator if none exists; these modules only read.
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.ops import stateful_random_ops

from hvdkit.checkpoint import randomness
from hvdkit.checkpoint.dtypes import code_of
from hvdkit.checkpoint.items import smallest
from hvdkit.checkpoint.state import TensorSpec, Tree
from hvdkit.tensorflow.variables import tf_variable


class VariableTensor:
    """A `hvdkit.checkpoint.state.Tensor` for a `tf.Variable`.

    Raises:
        UsageError: the dtype is not supported.
    """

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable
        dtype = code_of(variable.dtype.name, f"variable {variable.name!r}")
        self._spec = TensorSpec(dtype, tuple(variable.shape))

    @property
    def spec(self) -> TensorSpec:
        """The dtype and the shape."""
        return self._spec

    def read(self, out: np.ndarray) -> None:
        """Copy the content into `out`."""
        out[:] = self.memory()

    def memory(self) -> np.ndarray:
        """Return the variable's memory if it is on the CPU; otherwise a copy."""
        return memory_of(self._variable.read_value())

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Write a piece of the content, without a copy of the whole variable."""
        variable = self._variable
        dtype = variable.dtype
        values = np.array(content).view(dtype.as_numpy_dtype)
        shape = tuple(variable.shape)
        first = start // dtype.size
        if first == 0 and len(values) == math.prod(shape):
            variable.assign(values.reshape(shape))
            return
        for place, count in _boxes(shape, first, first + len(values)):
            box = variable[place]
            box.assign(values[:count].reshape(tuple(box.shape)))
            values = values[count:]


def memory_of(tensor: tf.Tensor) -> np.ndarray:
    """Return the content of a tensor as one-dimensional uint8, without a copy on the CPU."""
    with tf.device("/cpu:0"):
        value = tf.identity(tensor)
        if value.dtype == tf.bfloat16:
            # The buffer protocol does not have bfloat16.
            value = tf.bitcast(value, tf.uint16)
    # The buffer protocol does not have float8 either, and TensorFlow cannot bitcast it.
    narrow = value.dtype.name.startswith("float8")
    array = value.numpy() if narrow else np.asarray(memoryview(value))
    return array.reshape(-1).view(np.uint8)


def _boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield slices that contain the row-major elements from `first` to `end`, and their sizes."""
    if len(shape) == 1:
        yield (slice(first, end),), end - first
        return
    row = math.prod(shape[1:])
    if first % row:
        stop = min(end, first - first % row + row)
        for place, count in _boxes(shape[1:], first % row, stop - first + first % row):
            yield (first // row, *place), count
        first = stop
    if end - first >= row:
        yield (slice(first // row, end // row),), (end - first) // row * row
        first += (end - first) // row * row
    if first < end:
        for place, count in _boxes(shape[1:], 0, end - first):
            yield (first // row, *place), count


class Randomness:
    """A `RankItem`: the random states of Python, NumPy, TensorFlow and Keras.

    The generators of TensorFlow are `tf.random.get_global_generator()` and the user's own. Older
    operations, such as `tf.random.uniform`, use no generator, and keep their state in their
    kernels, where it cannot be read.

    Args:
        generators: name -> generator of TensorFlow, NumPy or Python.
        seeds: returns the variables with the random states of Keras's layers.
    """

    def __init__(
        self,
        generators: Mapping[str, Any] | None = None,
        seeds: Callable[[], Sequence[Any]] = list,
    ) -> None:
        self._generators = self._of(generators)
        self._seeds = seeds

    def save(self) -> Tree:
        """Return the states of this rank."""
        of_keras = global_seed_state()
        return randomness.save() | {
            "generators": self._generators.save() | self._global().save(),
            "seeds": [_content(variable) for variable in self._seeds()],
            "keras": None if of_keras is None else _content(of_keras),
        }

    def check(self, tree: Tree) -> None:
        """Check that the saved generators match.

        Raises:
            UsageError: names or kinds differ.
        """
        randomness.check(tree)
        saved = tree["generators"]
        self._generators.check({name: saved[name] for name in saved if name != _GLOBAL})

    def restore(self, tree: Tree) -> None:
        """Restore the states."""
        if _GLOBAL in tree["generators"]:
            # Create the global generator.
            tf.random.get_global_generator()
        self._generators.restore(tree["generators"])
        self._global().restore(tree["generators"])
        for variable, content in zip(self._seeds(), tree["seeds"], strict=False):
            _put(variable, content)
        if tree["keras"] is not None:
            _put(global_seed_state(create=True), tree["keras"])
        # Last, because the operations above may draw from Python's random numbers.
        randomness.restore(tree)

    def _global(self) -> randomness.Generators:
        made = stateful_random_ops.global_generator
        return self._of({} if made is None else {_GLOBAL: made})

    @staticmethod
    def _of(generators: Mapping[str, Any] | None) -> randomness.Generators:
        return randomness.Generators(
            generators,
            tf.random.Generator,
            "tf.random.Generator",
            lambda generator: _content(generator.state),
            lambda generator, content: _put(generator.state, content),
        )


class Statistics:
    """A `RankItem`: what layers compute from this rank's batches, such as moving statistics.

    These are the non-trainable variables of layers, the smallest first, up to a limit (`smallest`).
    Of the others, all ranks get the first rank's values.

    Args:
        models: name -> model. Only Keras models have such layers.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models

    def save(self) -> Tree:
        """Return the statistics of this rank."""
        own = self._variables()
        chosen = smallest(
            {name: tf_variable(v).dtype.size * math.prod(v.shape) for name, v in own.items()}
        )
        return {name: _content(v) for name, v in own.items() if name in chosen}

    def restore(self, tree: Tree) -> None:
        """Restore the statistics."""
        own = self._variables()
        for name in own.keys() & tree.keys():
            _put(own[name], tree[name])

    def _variables(self) -> dict[str, Any]:
        return {
            f"{model}.{place}.{k}": variable
            for model, given in self._models.items()
            if isinstance(given, keras.layers.Layer)
            for place, layer in enumerate(given._flatten_layers())
            # Without frozen weights.
            for k, variable in enumerate(layer._non_trainable_variables)
        }


_GLOBAL = "(global)"


def global_seed_state(create: bool = False) -> Any:
    """Return the variable of the global seed of `keras.random`; None if it is unused."""
    if not create and global_state.get_global_attribute("global_seed_generator") is None:
        return None
    return seed_generator.global_seed_generator().state


def _content(variable: Any) -> bytes:
    held = tf_variable(variable)
    out = np.empty(held.dtype.size * math.prod(held.shape), np.uint8)
    VariableTensor(held).read(out)
    return out.tobytes()


def _put(variable: Any, content: bytes) -> None:
    VariableTensor(tf_variable(variable)).write(np.frombuffer(content, np.uint8))
