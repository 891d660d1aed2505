"""The current call of `fit`: its model, and the epoch at which it begins.

Keras does not pass the argument `initial_epoch` of `fit` to callbacks. Importing hvdkit.keras wraps
`fit`, to read the argument.
"""

import functools
import inspect
from contextvars import ContextVar
from typing import Any

import keras

# The model and the argument `initial_epoch`.
_call: ContextVar[tuple[Any, int]] = ContextVar("hvdkit_fit_call", default=(None, 0))


def fitted_model() -> Any:
    """Return the model that `fit` trains now; None outside of `fit`."""
    return _call.get()[0]


def initial_epoch(model: Any) -> int:
    """Return the epoch (zero-based) at which the current `fit` of a model begins.

    Args:
        model: the model. A callback that resumes the training has set its `_initial_epoch`.
    """
    return int(model._initial_epoch or _call.get()[1])


def wrap_fit() -> None:
    """Wrap the `fit` of Keras's backend, unless that has been done."""
    trainer: Any = next(each for each in keras.Model.__mro__ if "fit" in vars(each))
    original = trainer.fit
    if hasattr(original, "_hvdkit"):
        return
    place = list(inspect.signature(original).parameters).index("initial_epoch")

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **options: Any) -> Any:
        given = args[place - 1] if len(args) >= place else options.get("initial_epoch")
        token = _call.set((self, given or 0))
        try:
            return original(self, *args, **options)
        finally:
            _call.reset(token)

    fit._hvdkit = True  # type: ignore[attr-defined]
    trainer.fit = fit
