"""Stateful items of Keras for checkpoints; see `hvdkit.checkpoint.state`."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Not public: the layout of a .weights.h5 file, and the global seed of `keras.random`.
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.saving import saving_lib

from hvdkit.checkpoint import arrays, h5
from hvdkit.checkpoint.items import Plain, Variables, named, plain, smallest
from hvdkit.checkpoint.state import RankItem, StatefulItem, TensorSpec, Tree
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.metrics import flat_metrics
from hvdkit.keras.further_optimizers import (
    FurtherOptimizers,
    OptimizerVariables,
    all_optimizers,
    built_optimizers,
    further_optimizers,
)
from hvdkit.keras.model_state import buffers_of, loss_variables, recurrent_states
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras_variables.optimizer_slots import optimizer_variables, slots_of

log = logging.getLogger("hvdkit.keras")

#: The part of a checkpoint with the optimizers that are attributes of the model.
_FURTHER = "optimizers"


def items_of(model: Any) -> dict[str, StatefulItem]:
    """Return the items of a built and compiled model that are the same on all ranks."""
    optimizer = model.optimizer
    items: dict[str, StatefulItem] = {
        "model": Variables(lambda: named(model.weights), "the model", backend.tensor_of)
    }
    if buffers_of(model):
        items["buffers"] = Buffers(
            lambda: named(buffers_of(model)), "the buffers of modules", backend.tensor_of
        )
    if optimizer is not None:
        items["optimizer"] = OptimizerVariables(optimizer, "the optimizer")
    if further_optimizers(model):
        items[_FURTHER] = FurtherOptimizers(model)
    items[h5.PART] = Layout(model)
    return items | reduction_items_of(optimizer)


def reduction_items_of(optimizer: Any) -> dict[str, Plain]:
    """Return the item that is needed to resume with bit-identical sums.

    Args:
        optimizer: an optimizer. The dict is empty if it is not wrapped, or None.
    """
    distribution = distribution_of(optimizer)
    if distribution is None:
        return {}
    return {"reduction": Plain(distribution.reduction_state, distribution.restore_reduction_state)}


def rank_items_of(model: Any) -> dict[str, RankItem]:
    """Return the items of a built and compiled model that differ between ranks, except metrics."""
    items: dict[str, RankItem] = {
        "seeds": OwnVariables(lambda: _seeds(model)),
        "global_seed": GlobalSeed(),
        "variables": OwnVariables(lambda: _local(model)),
    }
    # Parts of their own, because earlier checkpoints lack them.
    if buffers_of(model):
        items["own_buffers"] = OwnVariables(lambda: _smallest(buffers_of(model)))
    if recurrent_states(model):
        items["recurrent"] = OwnVariables(lambda: recurrent_states(model))
    if loss_variables(model):
        items["losses"] = OwnVariables(lambda: _smallest(loss_variables(model)))
    return items | {
        # Last, because creating a seed draws from Python's random numbers.
        "random": backend.randomness(),
    }


class Buffers(Variables):
    """A `StatefulItem`: the first rank's buffers of PyTorch modules."""

    #: Earlier versions saved no buffers.
    optional = True


class Layout:
    """A `StatefulItem`: the place of each variable in Keras's `.weights.h5` format.

    Only the export of a checkpoint to such a file reads this item. A resume ignores it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layout: Tree = None
        self._others: dict[str, Any] = {}
        # The optimizers that were built when the layout was looked up.
        self._built: Sequence[str] = ()

    def save(self) -> Tree:
        """Return the layout, and the tensors that are neither weights nor optimizer state."""
        built = list(built_optimizers(self._model))
        if self._layout is None or self._built != built:
            self._others = {}
            self._layout, self._built = self._look_up(), built
        others = {name: backend.tensor_of(variable) for name, variable in self._others.items()}
        return {h5.LAYOUT: self._layout, "others": others}

    def plan_restore(self, tree: Tree) -> Tree:
        """Return memory to read the other tensors into. `restore` ignores them."""
        others = {name: arrays.empty(spec) for name, spec in tree["others"].items()}
        return {**tree, "others": others}

    def restore(self, tree: Tree) -> None:
        """Ignore the saved layout."""

    def _look_up(self) -> Tree:
        recorder = _Recorder()
        try:
            saving_lib._save_state(
                self._model,
                weights_store=recorder,
                assets_store=None,
                inner_path="",
                visited_saveables=set(),
            )
        except Exception as error:
            # An error in the code of a layer. It affects an export only.
            return f"the layout is unknown ({type(error).__name__}: {error})"
        optimizer = self._model.optimizer
        known = {
            id(variable): (part, name)
            for part, variables in (
                ("model", self._model.weights),
                ("optimizer", [] if optimizer is None else optimizer_variables(optimizer)),
            )
            for name, variable in named(variables).items()
        }
        for attribute, further in built_optimizers(self._model).items():
            variables = named(optimizer_variables(further))
            part = f"{attribute}.variables"
            known |= {id(v): (_FURTHER, f"{part}.{name}") for name, v in variables.items()}
        layout: list[Any] = []
        for path, name, values in recorder.groups:
            entries = []
            for key, given in values:
                value = self._of_optimizer(path, key, given)
                if not isinstance(value, keras.Variable):
                    return (
                        f"{path or type(self._model).__name__} computes the value that it saves as "
                        f"{key!r}, so this value is not a copy of a variable"
                    )
                if id(value) not in known:
                    other = f"{path}/{key}"
                    self._others[other] = value
                    # The name of this tensor in the checkpoint.
                    known[id(value)] = (h5.PART, f"others.{other}")
                entries.append([key, *known[id(value)]])
            layout.append([path, name, entries])
        return layout

    def _of_optimizer(self, path: str, key: str, value: Any) -> Any:
        """Return the optimizer's variable if `value` is a copy of it; otherwise `value`."""
        owner = self._model
        for name in path.split("/"):
            owner = getattr(owner, name, None)
        if not isinstance(owner, keras.optimizers.Optimizer):
            return value
        variable = owner.variables[int(key)]
        same = backend.read(variable).tobytes() == np.asarray(value).tobytes()
        return variable if same else value


class _Recorder(saving_lib.H5IOStore):
    """A store that records the values that Keras would write to a file."""

    def __init__(self) -> None:
        self.mode = "w"
        #: Path, name, and the keys and values of each group.
        self.groups: list[tuple[str, str | None, list[tuple[str, Any]]]] = []
        self._open: list[tuple[str, Any]] | None = None
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: dict[str, Any] | None = None) -> Any:
        self._path, self._open = path, None
        if metadata:
            self._begin(metadata.get("name"))
        return self

    def _begin(self, name: str | None) -> None:
        self._open = []
        self.groups.append((self._path, name, self._open))

    def __setitem__(self, key: str, value: Any) -> None:
        if self._open is None:
            self._begin(None)
        assert self._open is not None
        self._open.append((key, value))

    def __len__(self) -> int:
        return len(self._open or ())


class OwnVariables:
    """A `RankItem`: small variables that differ between ranks.

    Args:
        variables: returns the variables, in the same order in each run of the program.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]]) -> None:
        self._variables = variables

    def save(self) -> Tree:
        """Return each variable's name, dtype and shape, and its content."""
        return [[_line(v), backend.read(v).tobytes()] for v in self._variables()]

    def restore(self, tree: Tree) -> None:
        """Restore the contents.

        Raises:
            UsageError: the model has other variables.
        """
        if not tree:
            # Earlier versions left out all statistics of a model with large ones.
            return
        variables = list(self._variables())
        lines = [_line(variable) for variable in variables]
        if lines != [line for line, _ in tree]:
            raise UsageError(
                f"the checkpoint has other variables of this rank ({[line for line, _ in tree]}) "
                f"than the model ({lines}): build and compile the model as in the run that saved it"
            )
        for variable, (_, content) in zip(variables, tree, strict=True):
            backend.write(variable, np.frombuffer(content, np.uint8))


def _line(variable: Any) -> str:
    return f"{plain(variable.name)} {variable.dtype} {list(variable.shape)}"


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of a model's metrics and losses."""
    return [variable for metric in flat_metrics(model) for variable in metric.variables]


def _seeds(model: Any) -> list[Any]:
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


class GlobalSeed:
    """A `RankItem`: the global seed of `keras.random`."""

    def save(self) -> Tree:
        """Return the state of the seed; None if the program has not used the global seed."""
        if global_state.get_global_attribute("global_seed_generator") is None:
            return None
        return backend.read(seed_generator.global_seed_generator().state).tobytes()

    def restore(self, tree: Tree) -> None:
        """Restore the state."""
        if tree is not None:
            state = seed_generator.global_seed_generator().state
            backend.write(state, np.frombuffer(tree, np.uint8))


def _local(model: Any) -> list[Any]:
    """Return the variables that differ between ranks.

    These are the variables of local layers with their optimizer state, and the statistics of layers
    such as BatchNormalization, up to a limit (`smallest`).
    """
    own = _smallest(
        [each for layer in model._flatten_layers() for each in layer._non_trainable_variables]
    )
    for optimizer in all_optimizers(model):
        distribution = distribution_of(optimizer)
        if distribution is not None and optimizer.built:
            for variable in distribution.local_variables:
                own += [variable, *(slot for each, slot in slots_of(optimizer) if each is variable)]
    return own


def _smallest(variables: Sequence[Any]) -> list[Any]:
    """Return the variables that each rank saves; see `smallest`."""
    by_id = {str(id(variable)): variable for variable in variables}
    chosen = smallest({key: backend.bytes_of(each) for key, each in by_id.items()})
    return [variable for key, variable in by_id.items() if key in chosen]


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
