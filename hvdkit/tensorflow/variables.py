"""TensorFlow's variables, and Keras's, which hold one."""

from typing import Any

import tensorflow as tf

from hvdkit.errors import UsageError


def tf_variable_or_none(source: Any) -> tf.Variable | None:
    """The `tf.Variable` that `source` is or, as a `keras.Variable`, holds; otherwise None."""
    if isinstance(source, tf.Variable):
        return source
    held = getattr(source, "value", None)
    return held if isinstance(held, tf.Variable) else None


def tf_variable(variable: Any) -> tf.Variable:
    """The same for what must be one.

    Raises:
        UsageError: it is neither.
    """
    found = tf_variable_or_none(variable)
    if found is not None:
        return found
    raise UsageError(
        f"expected a tf.Variable, or a keras.Variable of Keras on TensorFlow; this is a "
        f"{type(variable).__name__}"
    )


def tf_variables(variables: Any, argument: str = "variables") -> list[tf.Variable]:
    """The same for several, such as `model.variables`.

    Raises:
        UsageError: something in it is no variable; the message names its place in `argument`.
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
