"""DTensors: tensors of which each rank of a device mesh has a part.

`parallelize_module` (tensor parallel) and `fully_shard` (FSDP2) make parameters DTensors. `local`
returns the part of this rank, a plain tensor. hvdkit reduces, sends and compares local parts only,
between the ranks that have the same part (`hvdkit.torch.meshes`).
"""

import sys
from typing import Any

import torch

from hvdkit.torch.divided_gradients import DividedGradient

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    # Importing DTensor takes long. Without an import by the script, no tensor is of this class.
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part that this rank has of a DTensor or of a `DividedGradient`.

    In the same memory. Other tensors are returned as they are.
    """
    if isinstance(tensor, DividedGradient):
        assert tensor.own is not None
        return tensor.own
    if not is_dtensor(tensor):
        return tensor
    found: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return found


def with_local(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor whose local part is `part`, with the mesh and placements of `like`."""
    result: torch.Tensor = type(like)(part, like._spec, requires_grad=False)
    return result


def placements(tensor: Any) -> str:
    """Return a text about the placements of a DTensor; "" for other tensors."""
    return f", {tensor.placements}" if is_dtensor(tensor) else ""


def sharded_over(tensor: Any) -> tuple[Any, ...]:
    """Return the groups whose ranks have different parts of a tensor.

    Groups of torch.distributed; of a `DividedGradient`, its `Collectives`.
    """
    if isinstance(tensor, DividedGradient):
        return (tensor.collectives,)
    if not is_dtensor(tensor):
        return ()
    mesh = tensor.device_mesh
    placed = enumerate(tensor.placements)
    return tuple(mesh.get_group(dim) for dim, each in placed if not each.is_replicate())


def align_gradient(parameter: Any) -> None:
    """Give the gradient of a DTensor the placements of its parameter.

    A collective of the mesh if they differ: where each rank has computed a summand of the gradient
    (`Partial`), as for the norms under sequence parallel.
    """
    gradient = parameter.grad
    if gradient is None or not is_dtensor(gradient):
        return
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    part = local(gradient)
    if type(part) is not torch.Tensor:  # the result of a collective that has not ended
        part = part.wait()  # type: ignore[attr-defined]
    if gradient is not parameter.grad or part is not local(gradient):
        parameter.grad = with_local(part, parameter)


class LocalParameter:
    """The part of a parameter that this rank has, with the attributes of a plain parameter.

    Args:
        parameter: a DTensor.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(local(self._parameter), name)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter needs gradients."""
        return bool(self._parameter.requires_grad)

    @property
    def grad_dtype(self) -> torch.dtype:
        """See `torch.Tensor.grad_dtype`."""
        return getattr(self._parameter, "grad_dtype", None) or self._parameter.dtype

    @property
    def grad(self) -> torch.Tensor | None:
        """The local part of the gradient."""
        gradient = self._parameter.grad
        return None if gradient is None else local(gradient)

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        self._parameter.grad = None if part is None else with_local(part, self._parameter)


def local_parameter(parameter: Any) -> Any:
    """Return a parameter as the reduction uses it: a `LocalParameter` for a DTensor."""
    return LocalParameter(parameter) if is_dtensor(parameter) else parameter
