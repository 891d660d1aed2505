"""TensorFlow's variables, and Keras's, which hold one."""

from typing import Any

import tensorflow as tf

from hvdkit.errors import UsageError


def tf_variable(variable: Any) -> tf.Variable:
    """The `tf.Variable` that `variable` is or, as a `keras.Variable`, holds.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(variable, tf.Variable):
        return variable
    held = getattr(variable, "value", None)
    if isinstance(held, tf.Variable):
        return held
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
