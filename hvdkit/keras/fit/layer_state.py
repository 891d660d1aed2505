"""Compare the state of layers that is not in variables, at the beginning of a `fit`.

Preprocessing layers such as `StringLookup`, `TextVectorization` and `Discretization` keep the
result of `adapt` in a lookup table or an array. If each rank adapts the layer to its own share of
the data, the ranks average gradients of different words or bins.

The state of a layer consists of its lookup tables, and of the values that Keras writes to a file:
arrays and lists of `get_config`, results of `save_own_variables`, and files of `save_assets`.
"""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import xxhash

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import check_consistency
from hvdkit.agreement.names import without_layer_numbers
from hvdkit.system.owned_folders import TemporaryFolder

_ADVICE = (
    "Adapt the layer to all data, before hvd.shard. Or adapt it on rank 0, and send its state to "
    "all ranks: layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), 0)), or "
    "layer.bin_boundaries = hvd.broadcast_object(list(layer.bin_boundaries), 0). If ranks should "
    "have different states, pass check_parameters=False to hvd.DistributedOptimizer."
)
# The number of values that an error shows, and the number of characters of each.
_SHOWN, _LENGTH = 5, 20


def compare_layers(group: Collectives, model: Any, is_local: Callable[[Any], bool]) -> None:
    """Raise if the state of a layer that is not in variables differs between ranks. A collective.

    Args:
        group: the collectives of the ranks to compare.
        model: the model; layers of nested models are included.
        is_local: returns whether a layer is local to each rank; such layers are excluded.

    Raises:
        RankMismatchError: on every rank, naming the first layer that differs.
    """
    adapted = [each for each in model._flatten_layers(include_self=False) if _is_adapted(each)]
    inside = {id(part) for each in adapted for part in each._flatten_layers(include_self=False)}
    layers = [each for each in adapted if id(each) not in inside and not is_local(each)]
    lines = [
        f"layer {number} of {len(layers)}, {without_layer_numbers(layer.name)!r}, {line}"
        for number, layer in enumerate(layers, 1)
        for part in layer._flatten_layers()
        if _is_adapted(part)
        for line in _lines(part)
    ]
    check_consistency(group, lines, "the layers that are adapted to data", _ADVICE)


def _is_adapted(layer: Any) -> bool:
    """Return whether a layer may have state that is not in variables."""
    return hasattr(layer, "adapt") or hasattr(layer, "save_assets") or bool(_tables_of(layer))


def _lines(layer: Any) -> Iterator[str]:
    """Yield a line with a digest for each part of a layer's state."""
    for read in (_tables, _config, _own_variables, _assets):
        try:
            found = {name: np.asarray(values) for name, values in read(layer)}
        except Exception as error:
            # Keras can train with a layer that it cannot save.
            yield f"{read.__name__}: {type(error).__name__}"
            continue
        for name, array in found.items():
            digest = xxhash.xxh64_hexdigest(repr(array.tolist()).encode())
            shown = [_text(value)[:_LENGTH] for value in array.reshape(-1)[:_SHOWN]]
            yield f"{name}: {array.size} values, the first are {shown} (hash {digest[:8]})"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _tables_of(layer: Any) -> dict[str, Any]:
    """Return the constant lookup tables that are attributes of a layer."""
    # On PyTorch too, Keras's lookup layers use TensorFlow's tables.
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return {}
    kind = tensorflow.lookup.StaticHashTable
    return {name: value for name, value in vars(layer).items() if isinstance(value, kind)}


def _has_table(layer: Any) -> bool:
    return any(map(_tables_of, layer._flatten_layers()))


def _tables(layer: Any) -> Iterator[tuple[str, Any]]:
    for name, table in _tables_of(layer).items():
        keys, values = (tensor.numpy() for tensor in table.export())
        # The order of the exported keys is undefined. Sorting integers is faster.
        is_unique = values.dtype.kind == "i" and len(np.unique(values)) == len(values)
        order = np.argsort(values if is_unique else keys)
        yield name, keys[order]
        yield f"{name}'s values", values[order]


def _config(layer: Any) -> Iterator[tuple[str, Any]]:
    # A layer with a table may have another vocabulary there: the argument of its constructor.
    if _has_table(layer):
        return
    # Single values are settings. Some of them differ between ranks, such as the name.
    for name, value in layer.get_config().items():
        if isinstance(value, list | tuple | np.ndarray):
            array = np.asarray(value)
            if array.dtype != object:
                yield name, array


def _own_variables(layer: Any) -> Iterator[tuple[str, Any]]:
    store: dict[str, Any] = {}
    layer.save_own_variables(store)
    for name, value in store.items():
        # `Coordination.compare_values` compares variables.
        if not isinstance(value, keras.Variable):
            yield name, value


def _assets(layer: Any) -> Iterator[tuple[str, Any]]:
    # Keras needs about 10 times as long to write a vocabulary as its table needs.
    if not hasattr(layer, "save_assets") or _has_table(layer):
        return
    with TemporaryFolder("hvdkit-assets-") as folder:
        layer.save_assets(folder)
        paths = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
        for path in sorted(paths):
            with open(path, "rb") as file:
                content = file.read()
            shown = [line[:_LENGTH] for line in content.split(b"\n", _SHOWN)[:_SHOWN]]
            yield os.path.relpath(path, folder), [*shown, xxhash.xxh64_hexdigest(content).encode()]
