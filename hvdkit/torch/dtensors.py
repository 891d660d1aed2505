"""DTensors: tensors of which each rank of a device mesh has a part.

`parallelize_module` (tensor parallel) and `fully_shard` (FSDP2) make parameters DTensors. `local`
returns the part of this rank, a plain tensor. hvdkit reduces, sends and compares local parts only,
between the ranks that have the same part (`hvdkit.torch.meshes`).
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hvdkit.errors import UsageError
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
    spec = like._spec
    if part.dtype != spec.tensor_meta.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    result: torch.Tensor = type(like)(part, spec, requires_grad=False)
    return result


def replicated(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a DTensor that each rank of the mesh of `like` has as a whole."""
    from torch.distributed.tensor import Replicate  # loaded already: `like` is a DTensor

    mesh = like.device_mesh
    result: torch.Tensor = type(like).from_local(
        tensor, mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return result


def first_indices(tensor: Any, subject: str) -> Sequence[int]:
    """Return the first index of this rank's part of a DTensor, in each dimension.

    Raises:
        UsageError: the part is not a range of indices in each dimension. `subject` is the name of
            the tensor in the error.
    """
    mesh, part = tensor.device_mesh, local(tensor)
    coordinate = mesh.get_coordinate()
    placed = [(dim, p) for dim, p in enumerate(tensor.placements) if not p.is_replicate()]
    # FSDP2 divides what a later dimension of the mesh, tensor parallelism, has divided before:
    # _StridedShard.
    strided = [pair for pair in placed if hasattr(pair[1], "split_factor")]
    first, counts, parts = [0] * tensor.dim(), list(tensor.shape), [1] * tensor.dim()
    valid = coordinate is not None and not any(each.is_partial() for _, each in placed)
    for dim, each in [p for p in placed if p not in strided] + strided[::-1] if valid else ():
        size, of = mesh.size(dim), each.dim
        valid = valid and getattr(each, "split_factor", parts[of]) == parts[of]
        chunk = -(-counts[of] // size)
        begin = min(chunk * coordinate[dim], counts[of])
        first[of] += begin
        counts[of] = min(chunk, counts[of] - begin)
        parts[of] *= size
    # FSDP2 gives an empty part other dimensions.
    if not valid or (counts != list(part.shape) and (math.prod(counts) or part.numel())):
        raise UsageError(
            f"{subject} is a DTensor of shape {list(tensor.shape)} with the placements "
            f"{tensor.placements} over a mesh of shape {tuple(mesh.shape)}, and this rank has a "
            f"part of shape {list(part.shape)}: expected Shard or Replicate, parts of {counts}, "
            f"and a mesh with this rank. Call redistribute() first"
        )
    return first


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
