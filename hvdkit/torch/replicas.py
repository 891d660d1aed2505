"""The tensors of an optimizer that must be equal on all ranks: its `Replicas`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch

from hvdkit.agreement.differences import Item, Replicas
from hvdkit.agreement.replicas import VALUES_ADVICE
from hvdkit.torch.digests import bytes_of, digests
from hvdkit.torch.dtensors import local
from hvdkit.torch.keras_variables import is_own
from hvdkit.torch.plain_tensors import is_plain

_STATE_ADVICE = (
    "If one rank has loaded the optimizer's state, call hvd.broadcast_optimizer_state(optimizer, "
    "root_rank=0) before the first step. After hvd.join() or another hvd.init(), broadcast the "
    "parameters and the optimizer's state of one rank before you train or save."
)
#: The end of an error about the values of a wrapped optimizer.
ADVICE = f"{VALUES_ADVICE} {_STATE_ADVICE}"
#: The end of an error about its first comparison.
FIRST_ADVICE = (
    "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first backward "
    f"pass. {_STATE_ADVICE} If the forward pass changes parameters, as nn.Embedding(max_norm=...) "
    "does with the rows of a rank's batch, change them in the same way on all ranks instead, for "
    "example after the step: "
    "weight.data.renorm_(2, 0, max_norm). If ranks should have different values, pass "
    "check_parameters=False to hvd.DistributedOptimizer."
)
# Integers below it fit into a tensor.
_LARGE = 1 << 63
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}
# Larger keys of dicts may be the result of `id`, which differs between ranks.
_LARGEST_KEY = 1 << 31
# The name of a device with its number.
_DEVICE = re.compile(r"[a-z]+:\d+")


class TensorAccess:
    """Implements `hvdkit.agreement.differences.Access` for tensors."""

    def digests(self, values: Sequence[torch.Tensor]) -> Sequence[int]:
        return digests(list(values))

    def read(self, value: torch.Tensor) -> np.ndarray:
        return bytes_of(value).cpu().numpy()

    def write(self, value: torch.Tensor, data: np.ndarray) -> None:
        # `.data`, because the comparison runs at the end of a backward pass. Autograd would refuse
        # another pass of a graph whose parameters have changed, on the repaired rank only.
        value.data.copy_(_from_bytes(value, data).view(value.shape))

    def elements(self, value: torch.Tensor, data: np.ndarray) -> np.ndarray:
        elements = _from_bytes(value, data)
        if elements.dtype.is_complex:
            return elements.to(torch.complex128).numpy()
        return (elements.double() if elements.dtype.is_floating_point else elements).numpy()


def _from_bytes(value: torch.Tensor, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy()).view(value.dtype)


def torch_replicas(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
) -> Replicas:
    """Return the parameters, the optimizer state and the options of this rank.

    Args:
        parameters: name -> parameter.
        optimizer: the optimizer. It need not have all `parameters`: some may be frozen. None: there
            are only parameters.
    """
    # An optimizer around another one may have no state of its own.
    items = list(_items_of(parameters, getattr(optimizer, "state", {})))
    return Replicas(
        TensorAccess(), items, list(_options(optimizer)) if optimizer is not None else ()
    )


def _items_of(parameters: Mapping[str, torch.Tensor], state: Mapping[Any, Any]) -> Iterator[Item]:
    for name, parameter in parameters.items():
        part = local(parameter)
        if is_readable(part) and not is_own(name):
            trained = parameter.requires_grad and not parameter.is_complex()
            yield _item(repr(name), part, part.numel() * trained)
        yield from _state_items("", repr(name), state.get(parameter))
    # Some optimizers also keep state that belongs to no single parameter.
    for key in _keys(state):
        yield from _state_items(str(key), "the optimizer", state[key], partial(_set, state, key))


def _item(
    name: str, tensor: torch.Tensor, trained: int = 0, written: Callable[[], None] = lambda: None
) -> Item:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Item(name, f"{name}, {dtype} {list(tensor.shape)}", tensor, trained, written)


def _state_items(
    path: str,
    owner: str,
    value: Any,
    replace: Callable[[Any], None] | None = None,
    outer: Set[int] = frozenset(),
) -> Iterator[Item]:
    """Yield the tensors and numbers in a value of the optimizer's state; ignore other objects.

    Args:
        path: the name of the value within the state of `owner`; "" for the whole state.
        owner: the name of the parameter that the state belongs to.
        value: a tensor, a number, or a dict, list or tuple of values.
        replace: replaces the value by another one; None if that is impossible.
        outer: the `id`s of the containers around the value. A container may contain itself.
    """
    name = f"{path or 'state'} of {owner}"
    if isinstance(value, torch.Tensor):
        if is_readable(local(value)):
            yield _item(name, local(value))
    elif isinstance(value, bool | int | float):
        # An integer may be too large for a tensor.
        if replace is not None and (isinstance(value, float) or abs(value) < _LARGE):
            dtype = next(d for kind, d in _DTYPES.items() if isinstance(value, kind))
            number = torch.tensor(value, dtype=dtype, device="cpu")
            yield _item(name, number, written=lambda: replace(number.item()))
    elif isinstance(value, Mapping | list | tuple) and id(value) not in outer:
        for key in _keys(value) if isinstance(value, Mapping) else range(len(value)):
            inner = f"{path}[{key!r}]" if path else str(key)
            setter = partial(_set, value, key) if isinstance(value, dict | list) else None
            yield from _state_items(inner, owner, value[key], setter, outer | {id(value)})


def _keys(container: Mapping[Any, Any]) -> Sequence[Any]:
    """Return the keys of a dict that are equal on all ranks: names and small numbers.

    They are sorted, because ranks may have filled a dict in different orders. The texts of objects
    may contain addresses.
    """
    keys = [
        k
        for k in container
        if isinstance(k, str) or (isinstance(k, int) and abs(k) <= _LARGEST_KEY)
    ]
    return sorted(keys, key=str)


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory with all of its elements."""
    return is_plain(tensor) and not torch.nn.parameter.is_lazy(tensor)


def _options(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    # An optimizer around another one may not call `Optimizer.__init__`.
    defaults = getattr(optimizer, "defaults", {})
    for number, group in enumerate(optimizer.param_groups):
        # Other keys are the script's own, and may differ between ranks. PyTorch adds
        # `differentiable` to the defaults of any optimizer that loads a state.
        for key in (key for key in group if key in defaults and key != "differentiable"):
            if (text := _option_text(group[key])) is not None:
                yield f"{key} of parameter group {number} is {text}"
        yield f"parameter group {number} has {len(group['params'])} parameters"


def _option_text(value: Any) -> str | None:
    """Return a text that is equal for equal options, such as 1 and 1.0; None for other objects."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        number = isinstance(value, np.generic) or (
            math.prod(value.shape) == 1 and (isinstance(value, np.ndarray) or is_plain(value))
        )
        return _option_text(value.item()) if number else None
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, float):
        # The math libraries of two hosts may round a schedule's cosine differently.
        return f"{value:.12g}"
    if isinstance(value, str):
        # Each rank of a host may have its own GPU: "cuda:0", "cuda:1".
        return None if _DEVICE.fullmatch(value) else repr(value)
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, list | tuple):
        texts = [_option_text(each) for each in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    return None
