"""Find the callbacks of `fit` that may change weights, or stop the training.

Ranks may have different callbacks.
"""

from collections.abc import Sequence
from typing import Any

import keras

_BATCH_HOOKS = ("on_train_batch_begin", "on_batch_begin", "on_train_batch_end", "on_batch_end")


class HasLocalVariables(keras.callbacks.Callback):
    """Base of callbacks with variables that are local to each rank.

    Attributes:
        local_variables: each one a `keras.Variable` or a variable of the framework.
    """

    local_variables: list[Any]


def local_variables(callbacks: Sequence[Any]) -> set[int]:
    """Return the ids of the variables that callbacks keep local to each rank."""
    return {id(v) for c in callbacks if isinstance(c, HasLocalVariables) for v in c.local_variables}


def changes_at_end(callback: Any) -> bool:
    """Return whether `on_train_end` of a callback may change weights."""
    if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
        return True
    return isinstance(callback, keras.callbacks.SwapEMAWeights) or _is_own(callback.on_train_end)


def acts_on_batches(callback: Any) -> bool:
    """Return whether a callback of a user has hooks for batches, and may stop training there."""
    return any(_is_own(getattr(callback, name)) for name in _BATCH_HOOKS)


def _is_own(hook: Any) -> bool:
    """Return whether a callback's hook is a user's; those of a LambdaCallback are functions."""
    owner = (getattr(hook, "__module__", None) or "").split(".")[0]
    return owner not in ("keras", "hvdkit")
