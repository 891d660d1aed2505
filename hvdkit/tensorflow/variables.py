"""Find the `tf.Variable` of a `tf.Variable` or `keras.Variable`."""

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
