"""Sharded optimizers: each rank updates its share of the parameters (ZeRO, arXiv:1910.02054).

    step    each rank: the plain optimizer's step, on the shares of this rank
    send    the ranks send each other their new shares

The optimizer's state belongs to the shares, so each rank has 1/n of it. A share is a view of the
parameter's memory: it begins at a fixed place, whatever the buckets are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.consistency import gather
from hvdkit.errors import UsageError
from hvdkit.reduction.bucketing import BUCKET_BYTES, share
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.divided_gradients import DividedGradient, in_memory_order, is_dense
from hvdkit.torch.reduction.divided_memory import Buffers
from hvdkit.torch.reduction.optimizer_reducer import OptimizerReducer

_NOT_DENSE = (
    "a parameter of a sharded optimizer has the strides {strides} for the shape {shape}: expected "
    "elements that are contiguous in memory. Use p.data = p.data.contiguous()"
)

#: Messages that are sent while others are copied.
IN_FLIGHT = 3


@dataclass(frozen=True)
class _Columns:
    """Elements of a tensor that one message has: the same part of the share of each rank.

    Attributes:
        tensor: the tensor, in the order of its memory, of shape [elements].
        share: the number of elements of a share.
        begin: the first element, in each share.
        end: the end of the elements.
    """

    tensor: torch.Tensor
    share: int
    begin: int
    end: int

    def pairs(
        self, rows: torch.Tensor, at: int, place: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of the tensor, each with the view of a message that has its elements.

        Args:
            rows: the message, of shape [ranks, elements].
            at: the place of these columns in a row.
            place: the only rank whose elements are yielded; None for all.
        """
        width, full = self.end - self.begin, self.tensor.numel() // self.share
        columns = rows[:, at : at + width]
        if place is None and full:
            whole = self.tensor[: full * self.share].view(full, self.share)
            yield whole[:, self.begin : self.end], columns[:full]
        for row in range(full, len(rows)) if place is None else (place,):
            begin = row * self.share + self.begin
            part = self.tensor[begin : max(begin, min(begin + width, self.tensor.numel()))]
            if part.numel():
                yield part, columns[row, : part.numel()]


class Shards:
    """The shares of an optimizer's parameters that this rank updates.

    Args:
        reducer: reduces the gradients of the optimizer.

    Attributes:
        replaced: the parameters, while the optimizer has the shares in their place; else None.
    """

    def __init__(self, reducer: OptimizerReducer) -> None:
        self._reducer = reducer
        self.replaced: list[torch.nn.Parameter] | None = None
        self._buffers = Buffers()
        self._collectives: TorchCollectives = reducer.collectives
        self.take_state()

    # --- shares ---------------------------------------------------------------------------------

    def _bounds(self, elements: int) -> tuple[int, int]:
        """Return the first element of this rank's share, and its end."""
        length = share(elements, len(self._collectives.ranks))
        begin = min(self._collectives.place * length, elements)
        return begin, min(begin + length, elements)

    def _own(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        begin, end = self._bounds(tensor.numel())
        return in_memory_order(tensor, like)[begin:end]

    def share_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a parameter: the key of its optimizer state."""
        if not (parameter.is_contiguous() or is_dense(parameter)):
            raise UsageError(_NOT_DENSE.format(strides=parameter.stride(), shape=parameter.shape))
        record = self._reducer.gradients.records[id(parameter)]
        own = self._own(parameter.detach(), parameter)
        if record.share is None:
            record.share = torch.nn.Parameter(own, requires_grad=parameter.requires_grad)
        elif record.share.data_ptr() != own.data_ptr() or record.share.dtype != own.dtype:
            record.share.data = own
        return record.share

    def _gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        if isinstance(gradient, DividedGradient):
            return gradient.own
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        return self._own(dense, parameter)

    @contextmanager
    def in_place_of_parameters(self) -> Iterator[None]:
        """Context in which the optimizer has the shares and their gradients."""
        self._reducer.gradients.refresh()
        groups = self._reducer.optimizer().param_groups
        parameters = [group["params"] for group in groups]
        shares = list(map(self._shares_with_gradients, parameters))
        self.replaced = [p for each in parameters for p in each]
        try:
            for group, own in zip(groups, shares, strict=True):
                group["params"] = own
            yield
        finally:
            self.replaced = None
            for group, wholes in zip(groups, parameters, strict=True):
                group["params"] = wholes
            self._release(shares)

    def _shares_with_gradients(
        self, parameters: Sequence[torch.nn.Parameter]
    ) -> list[torch.Tensor]:
        shares = list(map(self.share_of, parameters))
        for each, p in zip(shares, parameters, strict=True):
            each.grad = self._gradient_of(p)
        return shares

    def _release(self, shares: Sequence[Sequence[torch.Tensor]]) -> None:
        for own in shares:
            for each in own:
                each.grad = None

    # --- messages -------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self) -> None:
        """Send the other ranks the new shares of all parameters. A collective."""
        parts = self._reducer.gradients.parts
        parameters = [record.parameter for part in parts for record in part.records]
        self._send([in_memory_order(p.detach(), p) for p in parameters], "parameters")

    def _send(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Complete tensors in which this rank has written its share. A collective.

        Args:
            tensors: of shape [elements], the same on every rank.
            name: the name of the messages.
        """
        place, ranks = self._collectives.place, len(self._collectives.ranks)
        flying: list[tuple[int, torch.Tensor, torch.Tensor, list[_Columns]]] = []
        for number, message in enumerate(self._messages(tensors, ranks)):
            width, first = sum(each.end - each.begin for each in message), message[0].tensor
            memory = self._buffers.take(ranks * width, first.dtype, first.device)
            rows = memory[: ranks * width].view(ranks, width)
            for source, target in _pairs(message, rows, place):
                target.copy_(source)
            handle = mpi_ops._allgather_async(
                rows[place],
                rows.view(-1),
                f"{self._prefix}.{name}.{number}",
                self._collectives.process_set,
            )
            flying.append((handle, memory, rows, message))
            if len(flying) == IN_FLIGHT:
                self._receive(*flying.pop(0))
        for each in flying:
            self._receive(*each)

    @property
    def _prefix(self) -> str:
        """The prefix of the messages' names, the same on all ranks."""
        first = self._reducer.gradients.parts[0].synchronizer
        return f"{first.name if first.planned else 'hvdkit'}.shards"

    def _receive(
        self, handle: int, memory: torch.Tensor, rows: torch.Tensor, message: Sequence[_Columns]
    ) -> None:
        mpi_ops.synchronize(handle)
        for target, source in _pairs(message, rows):
            target.copy_(source)
        self._buffers.give_back(memory)

    @staticmethod
    def _messages(tensors: Sequence[torch.Tensor], ranks: int) -> Iterator[list[_Columns]]:
        """Divide tensors into messages of one dtype and at most about `BUCKET_BYTES`."""
        filling: dict[tuple[torch.dtype, torch.device], list[_Columns]] = {}
        # Added up once for each tensor: a message may have many small ones.
        filled: Counter[tuple[torch.dtype, torch.device]] = Counter()
        for tensor in tensors:
            length, begin = share(tensor.numel(), ranks), 0
            if tensor.is_complex():  # the engine sends real numbers
                tensor, length = torch.view_as_real(tensor).view(-1), 2 * length
            elif tensor.element_size() == 1:  # such as bool and float8
                tensor = tensor.view(torch.uint8)
            most = max(BUCKET_BYTES // (ranks * tensor.element_size()), 1)
            kind = tensor.dtype, tensor.device
            message = filling.setdefault(kind, [])
            while begin < length:
                end = min(length, begin + most - filled[kind])
                if end > begin:
                    message.append(_Columns(tensor, length, begin, end))
                    filled[kind] += end - begin
                begin = end
                if begin < length:
                    yield list(message)
                    message.clear()
                    filled[kind] = 0
        yield from (message for message in filling.values() if message)

    def unscale(self, unscale: Callable[[], Mapping[torch.device, torch.Tensor]]) -> Any:
        """Unscale the gradients for a GradScaler. A collective.

        Args:
            unscale: does so; returns for each device whether a gradient is not finite.

        Returns:
            For each device, whether a gradient of any rank is not finite.
        """
        with self.in_place_of_parameters():
            found = unscale()
        process_set = self._collectives.process_set
        return {
            device: mpi_ops.allreduce(
                each, op=mpi_ops.Max, name=f"hvdkit.shards.found.{n}", process_set=process_set
            )
            for n, (device, each) in enumerate(found.items())
        }

    # --- whole gradients and state --------------------------------------------------------------

    @torch.no_grad()
    def full_gradients(self) -> list[torch.Tensor | None]:
        """Return the whole reduced gradient of each parameter. A collective."""
        found: list[torch.Tensor | None] = []
        for p in self._reducer.parameters():
            own = self._gradient_of(p)
            found.append(None if own is None else self._whole(own, p))
        self._send([in_memory_order(g, g) for g in found if g is not None], "gradients")
        return found

    def _whole(self, own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape of a parameter, in which only this rank's share is set."""
        whole = torch.empty_like(like, dtype=own.dtype, device=own.device)
        begin, end = self._bounds(whole.numel())
        in_memory_order(whole, whole)[begin:end].copy_(own)
        return whole

    @torch.no_grad()
    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the `state_dict` of the whole parameters. A collective.

        Args:
            plain: returns the `state_dict` of the plain optimizer.

        Raises:
            UsageError: on all ranks, if only some of them have loaded a state.
        """
        with self.in_place_of_parameters():
            found = plain()
        parameters = self._reducer.parameters()
        # Some optimizers have other entries, beside those of the parameters.
        state = {k: dict(v) for k, v in found["state"].items() if isinstance(k, int)}
        found["state"] = {**found["state"], **state}
        own = {
            (index, key): value
            for index, values in state.items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
            and value.shape == self.share_of(parameters[index]).shape
        }
        self.check_state()
        # Where a share has one element, a number of the state may have the same shape.
        found_on = gather(self._collectives, list(own), "hvdkit.shards.state").values()
        divided = set(own).intersection(*(map(tuple, each) for each in found_on))
        wholes = []
        for index, key in sorted(divided, key=lambda each: (each[0], str(each[1]))):
            whole = self._whole(own[index, key], parameters[index])
            state[index][key] = whole
            wholes.append(in_memory_order(whole, whole))
        self._send(wholes, "state")
        return found

    def _divided(self, values: Any, p: torch.nn.Parameter) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {
            key: self._own(value, p).clone()
            if isinstance(value, torch.Tensor) and value.shape == p.shape
            else value
            for key, value in values.items()
        }

    def check_state(self) -> None:
        """Check that all ranks have state of the same parameters. A collective.

        Raises:
            UsageError: on all ranks, if they have not.
        """
        state = self._reducer.optimizer().state
        shares = map(self.share_of, self._reducer.parameters())
        own = [sorted(map(str, state[each])) if each in state else [] for each in shares]
        if len(set(map(str, gather(self._collectives, own, "hvdkit.shards.keys").values()))) > 1:
            raise UsageError(
                "the ranks have the state of different parameters in a sharded optimizer, of which "
                "each rank has a share: expected load_state_dict() on all ranks, or on none"
            )

    def own_state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the `state_dict` with this rank's shares, for a checkpoint.

        Args:
            plain: returns the `state_dict` of the plain optimizer.

        Raises:
            UsageError: a parameter is not row-major.
        """
        for p in self._reducer.parameters():
            if not p.is_contiguous():
                raise UsageError(
                    f"a parameter of a sharded optimizer has the shape {list(p.shape)} and the "
                    f"strides {list(p.stride())}, and a checkpoint stores row-major shares: "
                    f"expected contiguous parameters. Use "
                    f"model.to(memory_format=torch.contiguous_format)"
                )
        with self.in_place_of_parameters():
            return plain()

    def part_of(self, value: torch.Tensor, parameter: torch.Tensor) -> int | None:
        """Return the place of the first element of a share in the state; None for other state."""
        if parameter.numel() < 2 or value.shape != self.share_of(parameter).shape:
            return None
        return self.first_of(parameter)

    def first_of(self, parameter: torch.Tensor) -> int:
        """Return the place of the first element of this rank's share."""
        return self._bounds(parameter.numel())[0]

    def empty_share(self, shape: Sequence[int], parameter: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor of the shape of a share, if state of a shape is divided; else None."""
        whole = tuple(shape) == tuple(parameter.shape) and parameter.numel() > 1
        divided = whole and parameter.is_contiguous()
        return torch.empty_like(self.share_of(parameter)) if divided else None

    def take_state(self) -> None:
        """Divide the state that the optimizer has for whole parameters. Not a collective."""
        state = self._reducer.optimizer().state
        for p in self._reducer.parameters():
            if p in state:
                values = state.pop(p)
                state[self.share_of(p)] = self._divided(values, p)


def check_dense(named: Mapping[torch.nn.Parameter, str]) -> None:
    """Check that shares of the parameters can be views of their memory.

    Raises:
        UsageError: the elements of a parameter are not contiguous.
    """
    for p, name in named.items():
        if not is_dense(p):
            raise UsageError(
                f"the parameter {name!r}: " + _NOT_DENSE.format(strides=p.stride(), shape=p.shape)
            )


def _pairs(
    message: Sequence[_Columns], rows: torch.Tensor, place: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    at = 0
    for each in message:
        yield from each.pairs(rows, at, place)
        at += each.end - each.begin
