"""Accumulate the gradients of several batches in variables, for one update of a Keras optimizer."""

from collections.abc import Sequence
from typing import Any

import keras

from hvdkit.errors import UsageError
from hvdkit.keras import backend


def overwritten(variable: Any) -> bool:
    """Return whether the "gradient" of a variable is its new value, as of a scale for float8.

    Keras computes it from the largest absolute values in a batch. One process with the batches of
    all ranks has their maximum, as `gradient_accumulation_steps` of Keras does for several batches.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


_UNKNOWN = (
    "several tf.functions add gradients to one accumulation window, and the one that ends it was "
    "traced when no batch had a gradient of some variables, such as {path!r}, which another one "
    "has added. Their gradients would be lost. Give each batch gradients of all variables: "
    "tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)"
)


class AccumulationWindow:
    """The sums of gradients since the last update.

    Args:
        variables: the variables of the gradients.
        size: batches per update.

    Attributes:
        variables: as given.
        passes: number of accumulated batches, in a variable that graphs can update.
    """

    def __init__(self, variables: Sequence[Any], size: int) -> None:
        self.variables = list(variables)
        self._size = size
        self._indices = {id(variable): k for k, variable in enumerate(variables)}
        self._seen = [False] * len(self.variables)
        # Whether the last batch had a gradient of the variable. In a graph, whether the last traced
        # one has it.
        self._given = list(self._seen)
        with backend.outside_of_graphs():
            self.passes = keras.Variable(0, dtype="int32", trainable=False)
            # For each variable, the number of gradients that the window has.
            self._counts = keras.Variable(
                "zeros", shape=(len(self.variables),), dtype="int32", trainable=False
            )
            self._sums = [
                keras.Variable("zeros", shape=v.shape, dtype=v.dtype, trainable=False)
                for v in variables
            ]

    def ordered(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return a batch's gradients in the order of the window's variables; None if missing."""
        ordered: list[Any] = [None] * len(self.variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            k = self._indices.get(id(variable))
            if k is None:
                raise UsageError(
                    f"{variable.path!r} was not among the variables of the first batch: "
                    f"accumulation_steps needs the same variables in all batches. Do not unfreeze "
                    f"layers after the first batch, or omit accumulation_steps"
                )
            if gradient is not None:
                self._seen[k] = True
                ordered[k] = gradient
        self._given = [gradient is not None for gradient in ordered]
        return ordered

    def add(self, ordered: Sequence[Any]) -> None:
        """Add one batch's gradients, as `ordered` returns them."""
        gradients = [None if each is None else backend.dense(each) for each in ordered]
        given = keras.ops.convert_to_tensor([int(each is not None) for each in ordered], "int32")

        def begin() -> None:
            self._counts.assign(given)
            for total, gradient in zip(self._sums, gradients, strict=True):
                total.assign(keras.ops.zeros_like(total) if gradient is None else gradient)

        def extend() -> None:
            self._counts.assign_add(given)
            for variable, total, gradient in zip(
                self.variables, self._sums, gradients, strict=True
            ):
                if gradient is None:
                    continue
                if overwritten(variable):
                    total.assign(keras.ops.maximum(total, gradient))
                else:
                    total.assign_add(gradient)

        keras.ops.cond(keras.ops.equal(self.passes, 0), begin, extend)
        self.passes.assign_add(1)

    @property
    def is_last_batch(self) -> Any:
        """Whether the next batch is the last of the window."""
        return keras.ops.equal(self.passes, self._size - 1)

    def sums(self, ordered: Sequence[Any] = ()) -> list[Any]:
        """Return one sum for each variable; None if no batch of any window had its gradient.

        Frozen variables without a gradient in the last batch get None, too. With a sum of zero,
        momentum and weight decay would change them.

        Args:
            ordered: the gradients of one more batch to add, as the method `ordered` returns them.
                The window itself does not change.

        Raises:
            tf.errors.InvalidArgumentError: in a graph, if another graph has added a gradient that
                this graph did not know of when it was traced.
        """
        unknown = [k for k, seen in enumerate(self._seen) if not seen]
        if unknown:
            added = keras.ops.sum(keras.ops.take(self._counts, unknown))
            backend.check_zero(added, _UNKNOWN.format(path=self.variables[unknown[0]].path))
        sums: list[Any] = [
            keras.ops.convert_to_tensor(total) if given or (seen and variable.trainable) else None
            for total, seen, given, variable in zip(
                self._sums, self._seen, self._given, self.variables, strict=True
            )
        ]
        for k, gradient in enumerate(ordered):
            if gradient is not None:
                more = backend.dense(gradient)
                if overwritten(self.variables[k]):
                    sums[k] = keras.ops.maximum(sums[k], more)
                else:
                    sums[k] = sums[k] + more
        return sums

    def clear(self) -> None:
        """Begin the next window. Its first batch replaces the sums."""
        self.passes.assign(0)
