"""The states of a `fit`'s callbacks in checkpoints."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

from hvdkit.checkpoint import arrays
from hvdkit.checkpoint.state import TensorSpec, Tree
from hvdkit.keras import backend

log = logging.getLogger("hvdkit.keras")

#: The attributes of Keras's callbacks on which later epochs depend.
_CALLBACK_ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "cooldown_counter", "best"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "BackupAndRestore": ("_batches_seen_since_last_saving", "_last_batch_seen"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "History": ("epoch", "history"),
}


#: The key of the callbacks' settings, beside their states.
_SETTINGS = "settings"

_SETTING_NAMES = ("monitor", "mode", "filepath")


class CallbackStates:
    """A `StatefulItem`: the states of the other callbacks of a `fit`.

    Includes Keras's callbacks with a state that affects later epochs, and all callbacks with
    `state_dict()` and `load_state_dict()` for plain values and NumPy arrays. All ranks get the
    first rank's states, because logs are the same on all ranks, and other ranks drop callbacks
    that write files.

    A callback gets the state of a callback of the same class, with the same `monitor`, `mode` and
    `filepath`. Callbacks that are equal in all of these are matched in their order.

    Args:
        callbacks: returns the callbacks.
        warns: whether `restore` logs a warning on rank 0 if states or callbacks have no match.
    """

    def __init__(self, callbacks: Callable[[], Sequence[Any]], warns: bool = True) -> None:
        self._callbacks = callbacks
        self._warns = warns

    def save(self) -> Tree:
        """Return the states. A key is a class and an index, such as `EarlyStopping.0`."""
        named = self._named()
        states: dict[str, Any] = {key: _with_arrays(_state(each)) for key, each in named.items()}
        return {**states, _SETTINGS: {key: _settings(each) for key, each in named.items()}}

    def plan_restore(self, tree: Tree) -> Tree:
        """Return memory for weights of callbacks, which version 1 of the format has as tensors."""
        return _mapped(
            tree, lambda leaf: arrays.empty(leaf) if isinstance(leaf, TensorSpec) else leaf
        )

    def restore(self, tree: Tree) -> None:
        """Restore the states of callbacks that have one in the checkpoint."""
        named = self._named()
        own = {key: _settings(callback) for key, callback in named.items()}
        # Earlier versions saved no settings. Then the class and the index have to match.
        saved = tree.get(_SETTINGS)
        known = saved if saved is not None else {key: own.get(key, []) for key in tree}
        matched = _matched(own, known)
        if self._warns and backend.hvd.rank() == 0:
            _warn_of_others(
                # Checkpoints of earlier versions lack states of hvdkit's own objects.
                [
                    _described(key, own[key])
                    for key, callback in named.items()
                    if key not in matched and isinstance(callback, keras.callbacks.Callback)
                ],
                [_described(key, known[key]) for key in known.keys() - matched.values()],
            )
        for key, saved_key in matched.items():
            callback, state = named[key], tree[saved_key]
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state)
                continue
            for name, value in state.items():
                setattr(callback, name, value)

    def _named(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for callback in self._callbacks():
            if _state(callback) is None:
                continue
            kind, number = type(callback).__name__, 0
            while f"{kind}.{number}" in result:
                number += 1
            result[f"{kind}.{number}"] = callback
        return result


def _settings(callback: Any) -> list[str | None]:
    """Return `monitor`, `mode` and `filepath`, which distinguish callbacks of one class."""
    # In a class with `state_dict()`, other attributes may be a part of the state.
    names = _SETTING_NAMES[:1] if hasattr(callback, "state_dict") else _SETTING_NAMES
    values = [getattr(callback, name, None) for name in names]
    return [str(value) if isinstance(value, str | os.PathLike) else None for value in values]


def _matched(
    own: Mapping[str, Sequence[str | None]], saved: Mapping[str, Sequence[str | None]]
) -> dict[str, str]:
    """Return the key of each callback that has a saved state -> the key of the state.

    Args:
        own: key -> settings of each callback.
        saved: key -> settings of each callback that was saved.
    """
    matched: dict[str, str] = {}
    for whole in (True, False):
        there = _grouped(saved, saved.keys() - matched.values(), whole)
        for group, keys in _grouped(own, own.keys() - matched.keys(), whole).items():
            matched |= dict(zip(keys, there.get(group, []), strict=False))
    return matched


def _grouped(
    settings: Mapping[str, Sequence[str | None]], keys: Collection[str], whole: bool
) -> dict[tuple[Any, ...], list[str]]:
    """Return the keys of each class with equal settings, in their order.

    Args:
        settings: key -> settings.
        keys: the keys to group.
        whole: whether to compare whole paths. A folder may have another path than before, so
            otherwise only the names of the files are compared.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for key in sorted(keys, key=_class_and_index):
        values = [v if whole or v is None else os.path.basename(v) for v in settings[key]]
        found.setdefault((_class_and_index(key)[0], *values), []).append(key)
    return found


def _class_and_index(key: str) -> tuple[str, int]:
    kind, _, index = key.rpartition(".")
    return kind, int(index)


def _described(key: str, settings: Sequence[str | None]) -> str:
    """Return the text for a callback in a warning, such as `EarlyStopping(monitor='loss')`."""
    values = [f"{n}={v!r}" for n, v in zip(_SETTING_NAMES, settings, strict=False) if v is not None]
    return f"{_class_and_index(key)[0]}({', '.join(values)})"


def _warn_of_others(own: Sequence[str], saved: Sequence[str]) -> None:
    """Warn of callbacks and saved states that have no match."""
    if own:
        log.warning(
            "the checkpoint has no state of %s, which begins without a best value and counters. A "
            "callback gets the state of the same class with the same monitor, mode and filepath. "
            "If the callback is not new, pass it to fit as in the run that saved the checkpoint.",
            ", ".join(own),
        )
    if saved:
        log.warning(
            "the checkpoint has the state of %s, and fit has no such callback: the next save drops "
            "this state. If this is not intended, pass the callback to fit as in the run that "
            "saved the checkpoint.",
            ", ".join(sorted(saved)),
        )


def _state(callback: Any) -> dict[str, Any] | None:
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        state: dict[str, Any] = callback.state_dict()
        return state
    for kind in type(callback).__mro__:
        if kind.__module__.startswith("keras.") and kind.__name__ in _CALLBACK_ATTRIBUTES:
            names = _CALLBACK_ATTRIBUTES[kind.__name__]
            return {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    return None


def _with_arrays(state: Any) -> Tree:
    def leaf(value: Any) -> Any:
        # A log may be a tensor. The best weights may have arrays of shape (), which become scalars
        # of NumPy with the same dtype.
        return keras.ops.convert_to_numpy(value)[()] if hasattr(value, "shape") else value

    return _mapped(state, leaf)


def _mapped(tree: Tree, leaf: Callable[[Any], Any]) -> Tree:
    if isinstance(tree, dict):
        return {key: _mapped(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, leaf) for value in tree)
    return leaf(tree)
