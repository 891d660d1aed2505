"""The tensors of an optimizer that must be equal on all ranks, see `hvdkit.core.replicas`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdkit.core.replicas import SMALL
from hvdkit.torch.digests import bytes_of, digests
from hvdkit.torch.plain_tensors import is_plain

# Integers below it fit into a tensor.
_LARGE = 1 << 63
# Larger keys of dicts may be the result of `id`, which differs between ranks.
_LARGEST_KEY = 1 << 31
# The name of a device with its number.
_DEVICE = re.compile(r"[a-z]+:\d+")


@dataclass(frozen=True)
class _Compared:
    """A tensor that must be equal on all ranks, or a number as a tensor of shape [].

    Attributes:
        name: its name.
        tensor: the tensor.
        write: sets it to another tensor of the same shape and dtype.
    """

    name: str
    tensor: torch.Tensor
    write: Callable[[torch.Tensor], None]


class TorchReplicas:
    """The parameters, the optimizer state and the options of this rank.

    Args:
        parameters: name -> parameter.
        optimizer: the optimizer. It need not have all `parameters`: some may be frozen. None: there
            are only parameters.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
    ) -> None:
        # An optimizer around another one may have no state of its own.
        compared = list(_compared(parameters, getattr(optimizer, "state", {})))
        #: The names of the tensors.
        self.names: Sequence[str] = [each.name for each in compared]
        #: The options of the parameter groups and the names, as text.
        self.settings: Sequence[str] = [
            *(_options(optimizer) if optimizer is not None else ()),
            *(
                f"the optimizer has {each.name}, {str(each.tensor.dtype).removeprefix('torch.')} "
                f"{list(each.tensor.shape)}"
                for each in compared
            ),
        ]
        self._tensors = [each.tensor for each in compared]
        self._writes = [each.write for each in compared]

    def digests(self) -> Sequence[int]:
        """Return a 64-bit digest of each tensor."""
        return digests(self._tensors)

    def small(self) -> Sequence[int]:
        """Return the indices of a few parameters that are trained, the smallest first."""
        sizes = {
            index: tensor.numel()
            for index, tensor in enumerate(self._tensors)
            if tensor.requires_grad and tensor.numel() and not tensor.is_complex()
        }
        return sorted(sizes, key=lambda index: sizes[index])[:SMALL]

    def read(self, index: int) -> np.ndarray:
        """Return the bytes of a tensor as a one-dimensional uint8 array."""
        return bytes_of(self._tensors[index]).cpu().numpy()

    def write(self, index: int, data: np.ndarray) -> None:
        """Set a tensor to the bytes of a result of `read`."""
        self._writes[index](self._from_bytes(index, data))

    def values(self, index: int, data: np.ndarray) -> np.ndarray:
        """Return the bytes of a tensor as its elements, as float64, int64 or complex128."""
        elements = self._from_bytes(index, data).view(-1)
        if elements.dtype.is_complex:
            return elements.to(torch.complex128).numpy()
        wide = torch.float64 if elements.dtype.is_floating_point else torch.int64
        return elements.to(wide).numpy()

    def save(self, indices: Sequence[int], path: Path) -> Path:
        """Write tensors to a file for `torch.load`: a dict name -> tensor. Return the path."""
        file = path.with_name(f"{path.name}.pt")
        torch.save({self.names[i]: self._tensors[i].detach().cpu() for i in indices}, file)
        return file

    def _from_bytes(self, index: int, data: np.ndarray) -> torch.Tensor:
        tensor = self._tensors[index]
        return torch.from_numpy(data.copy()).view(tensor.dtype).view(tensor.shape)


def _compared(
    parameters: Mapping[str, torch.Tensor], state: Mapping[Any, Any]
) -> Iterator[_Compared]:
    for name, parameter in parameters.items():
        if _is_readable(parameter):
            yield _Compared(repr(name), parameter, partial(_copy, parameter))
        yield from _items("", repr(name), state.get(parameter))
    # Some optimizers also keep state that belongs to no single parameter.
    for key in _keys(state):
        yield from _leaves(str(key), "the optimizer", state[key], partial(_set_item, state, key))


def _keys(container: Mapping[Any, Any]) -> Sequence[Any]:
    """Return the keys of a dict that are equal on all ranks: names and small numbers.

    They are sorted, because ranks may have filled a dict in different orders. The texts of objects
    may contain addresses.
    """
    keys = [k for k in container if isinstance(k, str | int) and not _is_address(k)]
    return sorted(keys, key=str)


def _is_address(key: str | int) -> bool:
    return isinstance(key, int) and abs(key) > _LARGEST_KEY


def _items(
    path: str, owner: str, container: Any, outer: Set[int] = frozenset()
) -> Iterator[_Compared]:
    """Yield the tensors and numbers in a dict, a list or a tuple; ignore other objects.

    Args:
        path: the name of the container within the state of `owner`; "" for the whole state.
        owner: the name of the parameter that the state belongs to.
        container: the container.
        outer: the `id`s of the containers that contain this one. A container may contain itself.
    """
    if id(container) in outer:
        return
    if isinstance(container, Mapping):
        keys = _keys(container)
    elif isinstance(container, list | tuple):
        keys = range(len(container))
    else:
        return
    changeable = isinstance(container, dict | list)
    for key in keys:
        replace = partial(_set_item, container, key) if changeable else None
        own = f"{path}[{key!r}]" if path else str(key)
        yield from _leaves(own, owner, container[key], replace, outer | {id(container)})


def _leaves(
    path: str,
    owner: str,
    value: Any,
    replace: Callable[[Any], None] | None,
    outer: Set[int] = frozenset(),
) -> Iterator[_Compared]:
    """Yield the tensors and numbers in a value of the optimizer's state.

    Args:
        path: the name of the value within the state of `owner`.
        owner: the name of the parameter that the state belongs to.
        value: the value.
        replace: replaces the value by another one; None if that is impossible.
        outer: the `id`s of the containers that contain the value.
    """
    name = f"{path} of {owner}"
    if isinstance(value, torch.Tensor):
        if _is_readable(value):
            yield _Compared(name, value, partial(_copy, value))
    elif isinstance(value, bool | int | float):
        # An integer may be too large for a tensor.
        if replace is not None and (isinstance(value, float) or abs(value) < _LARGE):
            yield _Compared(name, _as_tensor(value), partial(_set_number, replace))
    else:
        yield from _items(path, owner, value, outer)


def _is_readable(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not torch.nn.parameter.is_lazy(tensor)


def _set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _as_tensor(number: bool | int | float) -> torch.Tensor:
    dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}
    kind = next(each for each in dtype if isinstance(number, each))
    return torch.tensor(number, dtype=dtype[kind], device="cpu")


def _set_number(replace: Callable[[Any], None], number: torch.Tensor) -> None:
    replace(number.item())


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    # `.data`, because the comparison runs at the end of a backward pass. Autograd would refuse to
    # compute another pass of a graph whose parameters have changed, on the repaired rank only.
    target.data.copy_(values)


def _options(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    # An optimizer around another one may not call `Optimizer.__init__`.
    defaults = getattr(optimizer, "defaults", {})
    for number, group in enumerate(optimizer.param_groups):
        # Other keys are the script's own, and may differ between ranks.
        for key in (key for key in group if key in defaults):
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
