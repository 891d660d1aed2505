"""The tensors of an optimizer that must be equal on all ranks, see `hvdkit.core.replicas`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdkit.torch.digests import digests

_SCALARS = (bool, int, float)


class TorchReplicas:
    """The parameters, the optimizer state and the options of this rank.

    Args:
        parameters: name -> parameter.
        optimizer: the optimizer. It need not have all `parameters`: some may be frozen.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        named = dict(_named_tensors(parameters, optimizer.state))
        #: The names of the tensors.
        self.names: Sequence[str] = list(named)
        #: The options of the parameter groups and the names, as text.
        self.settings: Sequence[str] = [
            *_options(optimizer),
            *(f"the optimizer has {name}" for name in self.names),
        ]
        self._tensors = list(named.values())

    def digests(self) -> Sequence[int]:
        """Return a 64-bit digest of each tensor."""
        return digests(self._tensors)

    def smallest(self) -> int | None:
        """Return the index of the smallest parameter that is trained; None if there is none."""
        sizes = {
            index: tensor.numel()
            for index, tensor in enumerate(self._tensors)
            if tensor.requires_grad and tensor.numel() and not tensor.is_complex()
        }
        return min(sizes, key=lambda index: sizes[index], default=None)

    def read(self, index: int) -> np.ndarray:
        """Return the bytes of a tensor as a one-dimensional uint8 array."""
        host = self._tensors[index].detach().cpu().contiguous()
        return host.view(-1).view(torch.uint8).numpy()

    def write(self, index: int, data: np.ndarray) -> None:
        """Set a tensor to the bytes of a result of `read`."""
        with torch.no_grad():
            self._tensors[index].copy_(self._from_bytes(index, data))

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


def _named_tensors(
    parameters: Mapping[str, torch.Tensor], state: Mapping[Any, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        if _is_plain(parameter):
            yield repr(name), parameter
        of_parameter = state.get(parameter)
        for key, value in of_parameter.items() if isinstance(of_parameter, Mapping) else ():
            if _is_plain(value):
                yield f"{key} of {name!r}", value


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a tensor whose bytes can be read."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not value.is_quantized
    )


def _options(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        # Other keys are the script's own, and may differ between ranks.
        for key in (key for key in group if key in optimizer.defaults):
            value = group[key]
            plain = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
            if isinstance(plain, _SCALARS) or (
                isinstance(plain, tuple) and all(isinstance(each, _SCALARS) for each in plain)
            ):
                yield f"{key} of parameter group {number} is {plain!r}"
