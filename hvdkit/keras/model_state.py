"""The state of a model that Keras has no variables of, or does not count among `model.variables`.

`broadcast_model`, `fit`, `hvd.predict`, checkpoints and elastic states use this module, so that
they agree on what the state of a model is.
"""

import weakref
from typing import Any

import keras
import numpy as np

from hvdkit.keras import backend


class Buffer:
    """A buffer of a `torch.nn.Module`, with the methods of a `keras.Variable` that hvdkit uses.

    Args:
        module: the module that owns the buffer. A module may replace the tensor.
        key: the name of the buffer in its module.
        path: the path in texts and checkpoints.
    """

    def __init__(self, module: Any, key: str, path: str) -> None:
        self._module = weakref.ref(module)
        self._key = key
        self.path = path
        self.name = key

    @property
    def value(self) -> Any:
        """The tensor."""
        return getattr(self._module(), self._key)

    @property
    def dtype(self) -> str:
        """The dtype, as Keras names it."""
        return str(keras.backend.standardize_dtype(self.value.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.value.shape)

    @property
    def of_normalization(self) -> bool:
        """Whether PyTorch's batch or instance normalization moves the buffer in training."""
        from torch.nn.modules.batchnorm import _NormBase

        return isinstance(self._module(), _NormBase) and self._key in _MOVING

    def assign(self, value: Any) -> None:
        """Copy a value into the tensor."""
        import torch

        with torch.no_grad():
            self.value.copy_(keras.ops.convert_to_tensor(value, dtype=self.dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(keras.ops.convert_to_numpy(self.value), dtype=dtype)


# The buffers of normalization in PyTorch.
_MOVING = ("running_mean", "running_var", "num_batches_tracked")

# Module -> its buffers. Code compares variables by their identity, so a buffer has one object.
_buffers: "weakref.WeakKeyDictionary[Any, dict[str, Buffer]]" = weakref.WeakKeyDictionary()


def buffers_of(layer: Any) -> list[Buffer]:
    """Return the buffers of the PyTorch modules in a model or layer, such as running statistics.

    Keras wraps a module that is an attribute of a layer into a `TorchModuleWrapper`. As in
    `state_dict()`, buffers that are not persistent are left out. The list is empty on TensorFlow.
    """
    if backend.NAME != "torch":
        return []
    found: dict[int, Buffer] = {}
    for wrapper in layer._flatten_layers():
        if not isinstance(wrapper, keras.layers.TorchModuleWrapper):
            continue
        for prefix, module in wrapper.module.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is None or key in module._non_persistent_buffers_set:
                    continue
                # Keras has no names of other dtypes.
                if tensor.is_complex() or tensor.is_quantized or tensor.is_sparse:
                    continue
                path = "/".join(
                    [wrapper.name, *prefix.split("."), key] if prefix else [wrapper.name, key]
                )
                own = _buffers.setdefault(module, {})
                each = own.setdefault(key, Buffer(module, key, path))
                found.setdefault(id(each), each)
    return list(found.values())


def weights_of(model: Any) -> list[Any]:
    """Return the variables and buffers that are equal on all ranks after a broadcast."""
    return [*model.weights, *buffers_of(model)]


def stateful_layers(model: Any) -> list[Any]:
    """Return the layers that begin a batch with the states after the previous batch."""
    return [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]


def recurrent_states(model: Any) -> list[Any]:
    """Return the states of RNN layers with `stateful=True`, of which each rank has its own.

    Keras counts them neither among the weights nor among the variables of a model.
    """
    found = {
        id(state): state
        for layer in stateful_layers(model)
        for state in keras.tree.flatten(getattr(layer, "states", None))
        if isinstance(state, keras.Variable)
    }
    for variable in model.variables:
        found.pop(id(variable), None)
    return list(found.values())


def loss_variables(model: Any) -> list[Any]:
    """Return the variables that are attributes of a model's losses, such as an average of outputs.

    Keras does not count them among the variables of the model.
    """
    known = {id(variable) for variable in model.variables}
    found = {
        id(value): value
        for loss in keras.tree.flatten(getattr(model, "loss", None))
        if isinstance(loss, keras.losses.Loss)
        for value in keras.tree.flatten(list(vars(loss).values()))
        if isinstance(value, keras.Variable) and id(value) not in known
    }
    return list(found.values())


def variables_of(model: Any) -> list[Any]:
    """Return the whole state of a model: also random seeds, and states of RNN layers and losses."""
    return [
        *model.variables,
        *buffers_of(model),
        *recurrent_states(model),
        *loss_variables(model),
    ]
