"""Sharded optimizers that need whole tensors, such as Muon and Adafactor.

Each parameter has an owner, which has its optimizer state, updates it, and sends it to the other
ranks. Gradients are reduced as without `shard`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.objects import allgather_object
from hvdkit.reduction.bucketing import BUCKET_BYTES
from hvdkit.torch.devices import loads_on_own_gpu
from hvdkit.torch.divided_gradients import in_memory_order
from hvdkit.torch.shards import IN_FLIGHT, Shards


class TensorShards(Shards):
    """The parameters of an optimizer that this rank updates: see `Shards`."""

    def _owners(self) -> dict[torch.nn.Parameter, int]:
        """Return the place of the owner of each planned parameter.

        A new parameter gets the owner with the fewest elements; the largest ones first.
        """
        planned = [each for part in self._reducer.gradients.parts for each in part.records]
        load = [0] * len(self._collectives.ranks)
        for record in planned:
            if record.place is not None:
                load[record.place] += record.parameter.numel()
        for record in sorted(planned, key=lambda each: -each.parameter.numel()):
            if record.place is None:
                record.place = load.index(min(load))
                load[record.place] += record.parameter.numel()
        return {record.parameter: record.place or 0 for record in planned}

    def _shares_with_gradients(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> list[torch.Tensor]:
        owners, own = self._owners(), self._collectives.place
        return [p for p in parameters if owners.get(p, 0) == own]

    def _release(self, shares: Sequence[Sequence[torch.Tensor]]) -> None:
        """Do nothing: the shares are the parameters themselves."""

    @torch.no_grad()
    def send(self) -> None:
        """See `Shards`."""
        flying: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []
        for number, (owner, tensors) in enumerate(self._whole_messages()):
            if owner == self._collectives.place:
                flat = torch.cat(tensors)
            else:
                flat = tensors[0].new_empty(sum(each.numel() for each in tensors))
            real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
            handle = mpi_ops.broadcast_async_(
                real,
                self._collectives.ranks[owner],
                f"{self._prefix}.{number}",
                self._collectives.process_set,
            )
            flying.append((handle, flat, [] if owner == self._collectives.place else tensors))
            if len(flying) == IN_FLIGHT:
                self._receive_whole(*flying.pop(0))
        for each in flying:
            self._receive_whole(*each)

    def _receive_whole(
        self, handle: int, flat: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> None:
        mpi_ops.synchronize(handle)
        if tensors:
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part)

    def _whole_messages(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Yield the place of an owner, and tensors of one dtype that it sends in one message."""
        filling: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p, owner in self._owners().items():
            tensor = in_memory_order(p.detach(), p)
            if not tensor.numel():
                continue
            message = filling.setdefault((owner, p.dtype, p.device), [])
            message.append(tensor)
            if sum(each.nbytes for each in message) >= BUCKET_BYTES:
                yield owner, list(message)
                message.clear()
        yield from ((key[0], message) for key, message in filling.items() if message)

    def unscale(self, unscale: Callable[[], Mapping[torch.device, torch.Tensor]]) -> Any:
        """See `Shards`: all ranks have the same gradients."""
        return unscale()

    def full_gradients(self) -> list[torch.Tensor | None]:
        """See `Shards`."""
        return [p.grad for p in self._reducer.parameters()]

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Shards`."""
        found = plain()
        every = allgather_object(
            self._collectives, found["state"], "hvdkit.shards.state", loads_on_own_gpu
        )
        found["state"] = {key: value for state in every for key, value in state.items()}
        return found

    def own_state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Shards`. Whole states on each rank; a collective."""
        return self.state_dict(plain)

    def part_of(self, value: torch.Tensor, parameter: torch.Tensor) -> None:
        """See `Shards`: no state is divided."""

    def empty_share(self, shape: Sequence[int], parameter: torch.Tensor) -> None:
        """See `Shards`: no state is divided."""

    def check_state(self) -> None:
        """See `Shards`: the ranks have state of different parameters."""

    def share_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """See `Shards`: the parameter itself is the key of its state."""
        return parameter

    def take_state(self) -> None:
        """Drop the state of the parameters of other owners. Not a collective."""
        owners, state = self._owners(), self._reducer.optimizer().state
        for p in self._reducer.parameters():
            if owners.get(p, 0) != self._collectives.place:
                state.pop(p, None)
