"""Find the `tf.Variable` of a `tf.Variable` or `keras.Variable`, and remember variables."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.errors import UsageError


def tf_variable_or_none(source: Any) -> tf.Variable | None:
    """Return the `tf.Variable` that `source` is or holds; None if there is none."""
    if isinstance(source, tf.Variable):
        return source
    held = getattr(source, "value", None)
    return held if isinstance(held, tf.Variable) else None


def tf_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` of a `tf.Variable` or `keras.Variable`.

    Raises:
        UsageError: `variable` is neither.
    """
    found = tf_variable_or_none(variable)
    if found is not None:
        return found
    raise UsageError(
        f"found a {type(variable).__name__}: expected a tf.Variable, or a keras.Variable of Keras "
        f"on TensorFlow"
    )


def tf_variables(variables: Any, argument: str = "variables") -> list[tf.Variable]:
    """Return the `tf.Variable`s of a list such as `model.variables`.

    Raises:
        UsageError: an element is not a variable; the message names its index in `argument`.
    """
    if isinstance(variables, tf.Variable | tf.Tensor):
        raise UsageError(f"{argument} is one {type(variables).__name__}: expected a list of them")
    found = []
    for i, variable in enumerate(variables):
        try:
            found.append(tf_variable(variable))
        except UsageError as error:
            raise UsageError(f"{argument}[{i}]: {error}") from None
    return found


class NotedVariables:
    """Variables that share a property; they are held weakly."""

    def __init__(self) -> None:
        self._noted: weakref.WeakValueDictionary[tuple[Sequence[int], int], tf.Variable] = (
            weakref.WeakValueDictionary()
        )

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, sources: Iterable[Any], ranks: Sequence[int] = ()) -> None:
        """Note variables, for some ranks; other sources of a tape are ignored."""
        for source in sources:
            if (variable := tf_variable_or_none(source)) is not None:
                self._noted[tuple(ranks), id(variable)] = variable

    def has(self, source: Any, ranks: Sequence[int] = ()) -> bool:
        """Return whether a variable was noted for these ranks."""
        return self.has_id(id(tf_variable_or_none(source)), ranks)

    def has_id(self, identity: int, ranks: Sequence[int] = ()) -> bool:
        """Return whether the `tf.Variable` with an id was noted for these ranks."""
        return (tuple(ranks), identity) in self._noted
