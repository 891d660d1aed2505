"""Callbacks that write files, on the ranks that must not write them.

All ranks would write the same files. So `fit` drops Keras's and hvdkit's own callbacks of this kind
on all ranks but the first. A subclass of the script stays on every rank, because its code may call
collectives or change the model. There its class gets a mixin behind the script's class and before
Keras's class, so that `super().on_epoch_end(...)` writes nothing.
"""

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras.callbacks import (
    BackupAndRestore,
    CSVLogger,
    ModelCheckpoint,
    ProgbarLogger,
    TensorBoard,
)

from hvdkit.system.owned_folders import TemporaryFolder

log = logging.getLogger("hvdkit.keras")

_logged: set[str] = set()


class _Unsaved:
    """A model whose `save` and `save_weights` do nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **options: Any) -> None:
        """Ignore the request to save: only the first rank writes."""

    def save_weights(self, *args: Any, **options: Any) -> None:
        """Ignore the request to save: only the first rank writes."""


class _ModelCheckpoint(ModelCheckpoint):
    _model: Any
    filepath: str
    verbose: int

    def _save_model(self, *args: Any, **options: Any) -> None:
        """Keep the best value, which may decide about collectives, and save nothing."""
        own = self._model, self.filepath, self.verbose
        self._model, self.verbose = _Unsaved(self._model), 0
        # Without a folder, which Keras would create.
        self.filepath = os.path.basename(self.filepath)
        try:
            super()._save_model(*args, **options)
        finally:
            self._model, self.filepath, self.verbose = own


class _BackupAndRestore(BackupAndRestore):
    def on_train_begin(self, logs: Any = None) -> None:
        """Read no backup: the first rank's state is broadcast."""

    def on_train_end(self, logs: Any = None) -> None:
        """Delete no files: the first rank deletes them."""

    def _save_model(self) -> None:
        """Write no backup: only the first rank writes."""


class _CSVLogger(CSVLogger):
    filename: str

    def on_train_begin(self, logs: Any = None) -> None:
        """Open a file that discards everything."""
        own, self.filename = self.filename, os.devnull
        try:
            super().on_train_begin(logs)
        finally:
            self.filename = own


class _TensorBoard(TensorBoard):
    log_dir: str

    @functools.cached_property
    def _folder(self) -> TemporaryFolder:
        return TemporaryFolder("hvdkit-tensorboard-")

    def set_model(self, model: Any) -> None:
        """Write to a folder that is deleted with this callback."""
        own, self.log_dir = self.log_dir, self._folder.name
        try:
            super().set_model(model)
        finally:
            self.log_dir = own


class _ProgbarLogger(ProgbarLogger):
    def set_params(self, params: Any) -> None:
        """Print nothing."""
        super().set_params({**params, "verbose": 0})


def _without_hooks(cls: type) -> type:
    """Return a subclass whose hooks do nothing."""

    def hook(*args: Any, **options: Any) -> None:
        """Write nothing and send nothing."""

    hooks = {name: hook for name in vars(cls) if name.startswith("on_")}
    return type(f"_{cls.__name__}", (cls,), hooks)


#: A class of Keras -> the subclass that writes nothing.
_MIXINS: Mapping[type, type] = {
    BackupAndRestore: _BackupAndRestore,
    CSVLogger: _CSVLogger,
    ModelCheckpoint: _ModelCheckpoint,
    ProgbarLogger: _ProgbarLogger,
    TensorBoard: _TensorBoard,
    **{
        getattr(keras.callbacks, name): _without_hooks(getattr(keras.callbacks, name))
        for name in ("OrbaxCheckpoint", "RemoteMonitor")
        if hasattr(keras.callbacks, name)
    },
}


def without_files(callbacks: Sequence[Any], warns: bool) -> list[Any]:
    """Return the callbacks for a rank that must not write files.

    Args:
        callbacks: the callbacks; subclasses of the script change.
        warns: whether to log a warning for such subclasses, because their own code may write files.
    """
    kept = []
    for callback in callbacks:
        kind = type(callback)
        base = next((each for each in _MIXINS if isinstance(callback, each)), None)
        if base is None or isinstance(callback, _MIXINS[base]):
            kept.append(callback)
        elif kind.__module__.partition(".")[0] not in ("keras", "hvdkit"):
            _insert(callback, _MIXINS[base])
            kept.append(callback)
            if warns and kind.__qualname__ not in _logged:
                log.warning(
                    "%s is a class of the script, so its hooks run on every rank. Keras's %s "
                    "writes on rank 0 only. If %s itself writes files, write them only if "
                    "hvd.rank() == 0",
                    *(kind.__name__, base.__name__, kind.__name__),
                )
                _logged.add(kind.__qualname__)
    return kept


def with_files(callbacks: Sequence[Any]) -> None:
    """Undo the changes of `without_files`: this rank may write files in another `fit`."""
    for callback in callbacks:
        kind = type(callback)
        if kind.__bases__[-1] in _MIXINS.values():
            callback.__class__ = kind.__bases__[0]


def _insert(callback: Any, mixin: type) -> None:
    kind = type(callback)
    # Names that errors and checkpoints contain.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    callback.__class__ = type(kind.__name__, (kind, mixin), names)
