"""The ranks that have the same part of DTensors: a process set for each part of a device mesh.

Two ranks have the same part if they have the same coordinate in the mesh of the DTensor. With
`init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))` and DTensors over `mesh["tp"]`,
these are ranks 0 and 2, and ranks 1 and 3.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.consistency import gather, ranks_by_value
from hvdkit.errors import UsageError
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.dtensors import is_dtensor
from hvdkit.torch.process_sets import find_or_add


def mesh_of(named: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Return the device mesh of the DTensors among tensors; None without DTensors.

    Raises:
        UsageError: they have several meshes.
    """
    found: dict[Any, str] = {}
    for name, tensor in named:
        if is_dtensor(tensor):
            found.setdefault(tensor.device_mesh, name)  # type: ignore[attr-defined]
    if len(found) > 1:
        (first, one), (second, other), *_ = found.items()
        raise UsageError(
            f"{one!r} is a DTensor over {_text(first)}, and {other!r} over {_text(second)}: "
            f"expected one device mesh, because the ranks with the same part follow from it. Use "
            f"an optimizer, and a call, for the parameters of each mesh"
        )
    return next(iter(found), None)


def _text(mesh: Any) -> str:
    names = mesh.mesh_dim_names or range(mesh.ndim)
    sizes = ", ".join(f"{n}={size}" for n, size in zip(names, mesh.shape, strict=True))
    return f"the mesh ({sizes}) of ranks {mesh.mesh.flatten().tolist()}"


class Replicas:
    """The ranks that have the same part of the DTensors of a mesh as this rank.

    The constructor is a collective of the process set; if the set has to be added, of all ranks.

    Args:
        mesh: the mesh of the DTensors.
        process_set: the ranks to consider.

    Attributes:
        process_set: those of them with the same part.

    Raises:
        UsageError: on every rank, if no other rank has the same part, or if a process set was given
            whose ranks have different parts.
    """

    def __init__(self, mesh: Any, process_set: mpi_ops.ProcessSet) -> None:
        collectives = TorchCollectives(process_set)
        own = [mesh.mesh.flatten().tolist(), list(mesh.get_coordinate() or ())]
        places = gather(collectives, own, "hvdkit.mesh")
        self._mesh_of = {rank: tuple(ranks) for rank, (ranks, _) in places.items()}
        parts = list(ranks_by_value({r: tuple(place) for r, (_, place) in places.items()}).values())
        self.process_set = process_set
        if len(parts) == 1:
            return
        if process_set.process_set_id:
            raise UsageError(
                f"process_set has the ranks {list(places)}, but they have different parts of the "
                f"parameters, which are DTensors over {_text(mesh)}: expected one of {parts}. "
                f"Omit process_set, which then follows from the mesh"
            )
        if len(parts) == len(places):
            raise UsageError(
                f"the parameters are DTensors over {_text(mesh)}, and no other rank has the same "
                f"part of them, so hvdkit has nothing to reduce or to send: expected a mesh over "
                f"some ranks only, such as those of a host. Make "
                f"init_device_mesh(device, (hosts, ranks), mesh_dim_names=('data', 'model')), and "
                f"pass mesh['model'] to fully_shard or parallelize_module; or use a plain optimizer"
            )
        if len({len(ranks) for ranks in parts}) > 1:
            raise UsageError(
                f"the meshes of the ranks have different shapes: the ranks {parts} have the same "
                f"parts of the parameters. Expected meshes of one shape on all ranks"
            )
        own_part = next(ranks for ranks in parts if collectives.rank in ranks)
        try:
            self.process_set = find_or_add(parts)[parts.index(own_part)]
        except ValueError as error:
            raise UsageError(
                f"the process sets {parts}, whose ranks have the same part of DTensors over "
                f"{_text(mesh)}, cannot be added: {error} Or call "
                f"hvd.init(process_sets='dynamic')"
            ) from error

    def root(self, rank: int) -> int:
        """Return the rank of `process_set` in the mesh of `rank`: it has this part of its model."""
        ranks: Sequence[int] = self.process_set.ranks
        return next(each for each in ranks if self._mesh_of[each] == self._mesh_of[rank])
