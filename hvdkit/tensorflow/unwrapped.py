"""Find optimizers whose gradients nothing reduces: a distributed tape was forgotten.

Such a script raises no error, and each rank trains a model of its own. Keras's optimizers call
`apply` for each step, or in a graph for each trace. Rank 0 then warns if nothing has reduced
gradients of these variables. It has only what this rank knows, so it communicates nothing.
"""

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.keras_variables.loss_scaling import inner_optimizers
from hvdkit.tensorflow.variables import NotedVariables, tf_variable_or_none

log = logging.getLogger("hvdkit.tensorflow")

# The step of an eager loop before which an optimizer is examined.
_STEPS = 10
# The attribute that hvdkit.keras sets. This layer must not import that package.
_WRAPPED = "_hvdkit_distribution"

#: The variables whose gradients a tape or a wrapped optimizer has reduced, or need not reduce.
handled = NotedVariables()
#: The variables that the script makes equal on all ranks, so they should stay equal.
shared = NotedVariables()
_steps: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
# Whether the script has reduced tensors that are no scalars, such as gradients.
_reduces_itself = False
_warned = False


def register_local(variables: Any) -> None:
    """Declare that each rank has its own values of variables, which nothing reduces.

    Optimizers of these variables get no warning, and `hvd.Checkpointer` does not compare the
    variables. It saves those of the first rank.

    Args:
        variables: a model or layer of Keras, a `tf.Module`, or a list of variables.

    Raises:
        UsageError: the argument is something else.
    """
    given = getattr(variables, "trainable_variables", variables)
    if not isinstance(given, list | tuple) or any(tf_variable_or_none(v) is None for v in given):
        raise UsageError(
            f"register_local was called with a {type(variables).__name__}: expected a model, a "
            f"layer, or a list of variables"
        )
    handled.note(given)


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of the script that notes that the script reduces gradients itself."""

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        global _reduces_itself
        first = tensor[0] if isinstance(tensor, list | tuple) and tensor else tensor
        if getattr(first, "shape", None) != ():
            _reduces_itself = True
        return function(tensor, *args, **kwargs)

    return noted


def _examine(optimizer: Any, variables: Sequence[Any]) -> None:
    """Warn if nothing has reduced the gradients that an optimizer applies. Not a collective."""
    global _warned
    if hasattr(optimizer, _WRAPPED):
        handled.note(variables)
        return
    if _warned or _reduces_itself or not mpi_ops.is_initialized() or mpi_ops.size() == 1:
        return
    # `fit` of hvdkit.keras has its own warning.
    fit_call = sys.modules.get("hvdkit.keras.fit.fit_call")
    fitted = fit_call is not None and fit_call.fitted_model() is not None
    if mpi_ops.rank() != 0 or fitted or not variables:
        return
    if not tf.inside_function():
        _steps[optimizer] = _steps.get(optimizer, 0) + 1
        if _steps[optimizer] != _STEPS:
            return
    if any(map(handled.has, variables)):
        return
    if any(hasattr(each, _WRAPPED) for each in inner_optimizers(optimizer).values()):
        return
    # If the script reduces other gradients, it may train these variables on each rank on purpose.
    if handled and not any(map(shared.has, variables)):
        return
    _warned = True
    log.warning(
        "an optimizer (%s) applies gradients on %d ranks, but nothing has reduced the gradients of "
        "its variables: each rank trains a model of its own. Wrap the tape before gradient(): "
        "tape = hvd.DistributedGradientTape(tape); or the optimizer: hvd.DistributedOptimizer("
        "optimizer). If each rank should train its own variables, call "
        "hvd.register_local(variables).",
        *(type(optimizer).__name__, mpi_ops.size()),
    )


def _watch() -> None:
    """Let Keras's optimizers call `_examine` before they apply gradients."""
    original = keras.optimizers.Optimizer.apply

    @functools.wraps(original)
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        _examine(self, list(trainable_variables or getattr(self, "_trainable_variables", ())))
        return original(self, grads, trainable_variables)

    keras.optimizers.Optimizer.apply = apply


_watch()
