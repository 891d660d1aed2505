"""Warn if nothing reduces the gradients of an optimizer in a loop of the script, on PyTorch.

An example is a copy of a wrapped optimizer. On TensorFlow, hvdkit.tensorflow does this for all
optimizers of Keras. Importing hvdkit.keras calls `watch_optimizers`.
"""

import functools
from typing import Any

import keras

from hvdkit.keras import backend
from hvdkit.keras.distribution import being_applied, distribution_of
from hvdkit.keras.fit.fit_call import fitted_model
from hvdkit.keras_variables.loss_scaling import inner_optimizers


def watch_optimizers() -> None:
    """Let Keras's optimizers count their steps, unless that has been done."""
    original = keras.optimizers.Optimizer.apply
    if backend.NAME != "torch" or hasattr(original, "__wrapped__"):
        return
    import torch

    from hvdkit.torch.unwrapped import examine

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        def parameters() -> list[Any]:
            variables = list(trainable_variables or getattr(self, "_trainable_variables", ()))
            both = (self, *inner_optimizers(self).values())
            # `fit` has its own warning.
            if fitted_model() or being_applied(variables) or any(map(distribution_of, both)):
                return []
            return [v.value for v, g in zip(variables, grads, strict=False) if g is not None]

        if not torch.compiler.is_compiling():
            examine(self, parameters)
        return original(self, grads, trainable_variables)

    keras.optimizers.Optimizer.apply = apply
