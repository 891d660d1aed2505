"""The gradients of a bucket that is divided among the ranks, and the memory of the bucket.

A buffer has a section for each rank, with this rank's share of each gradient: see `Bucket`. After a
round, `p.grad` is a `DividedGradient`, so that the whole gradient uses no memory.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.reduction.bucketing import Bucket, share
from hvdkit.torch import shared_memory
from hvdkit.torch.divided_gradients import DividedGradient, in_memory_order
from hvdkit.torch.reduction.casting import cast_scaled_all
from hvdkit.torch.reduction.memory import dtype_of_gradient


class Buffers:
    """Memory for buckets, which several of them use in turn."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory of shape [elements] for a bucket."""
        fitting = [
            each
            for each in self._free
            if each.dtype == dtype and each.device == device and each.numel() >= elements
        ]
        if fitting:
            found = min(fitting, key=torch.Tensor.numel)
            self._free = [each for each in self._free if each is not found]
            return found
        if device.type == "cpu":
            return shared_memory.empty(elements, dtype)
        return torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take back a result of `take`."""
        self._free.append(memory)


class DividedMemory:
    """`hvdkit.reduction.backend.RoundMemory` for a bucket with several sections.

    Args:
        bucket: the bucket.
        parameters: the bucket's parameters.
        collectives: the collectives of the ranks.
        buffers: where the memory is from.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Sequence[torch.Tensor],
        collectives: Any,
        buffers: Buffers,
    ) -> None:
        self._bucket = bucket
        self._parameters = parameters
        self._collectives = collectives
        self._buffers = buffers
        self._shares = [share(p.numel(), bucket.sections) for p in parameters]
        # The memory that this round uses, and whether the gradients are in it (`in_place`).
        self._used: list[torch.Tensor] = []
        self._in_place = False

    @property
    def dtype(self) -> str:
        """The name of the gradients' dtype, without `torch.`."""
        return self._bucket.dtype

    #: A changed gradient raises: see `DividedGradient`.
    is_changed = False

    def _packed(self, dtype: torch.dtype, factor: float) -> torch.Tensor:
        """Return a buffer with the gradients; padding is 0."""
        elements, device = self._bucket.elements, torch.device(self._bucket.device)
        self._used.append(self._buffers.take(elements, dtype, device))
        flat = self._used[-1][:elements]
        sections = flat.view(self._bucket.sections, -1)
        sources, targets = [], []
        for p, at, length in zip(self._parameters, self._bucket.offsets, self._shares, strict=True):
            place, gradient = sections[:, at : at + length], p.grad
            if (
                gradient is None
                or isinstance(gradient, DividedGradient)
                or gradient.shape != p.shape
            ):
                place.zero_()
                continue
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            source = in_memory_order(dense, p)
            full, rest = divmod(source.numel(), length) if length else (0, 0)
            if full:
                sources.append(source[: full * length].view(full, length))
                targets.append(place[:full])
            if full < len(place):
                place[full:].zero_()
            if rest:
                sources.append(source[full * length :])
                targets.append(place[full, :rest])
        cast_scaled_all(sources, targets, factor)
        return flat

    @torch.no_grad()
    def in_place(self, factor: float) -> torch.Tensor:
        """See `BucketMemory`. Frees the memory of the gradients."""
        flat = self._packed(getattr(torch, self._bucket.dtype), factor)
        self._in_place = True
        self._set(None)
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    @torch.no_grad()
    def pack(self, dtype: str, factor: float, keep: bool = True) -> torch.Tensor:  # noqa: ARG002
        """See `BucketMemory`."""
        return self._packed(getattr(torch, dtype), factor)

    @torch.no_grad()
    def scale(self, buffer: torch.Tensor, factor: float) -> None:
        buffer.mul_(factor)

    @torch.no_grad()
    def unpack(self, buffer: torch.Tensor, factor: float) -> None:
        """See `BucketMemory`. Reads the section of this rank."""
        section = self._section(buffer)
        own = torch.empty_like(section, dtype=getattr(torch, self._bucket.dtype))
        cast_scaled_all([section], [own], factor)
        self._set(own)

    @torch.no_grad()
    def end(self) -> None:
        """See `RoundMemory`: other buckets may use the memory."""
        if self._in_place:
            (memory,) = self._used
            self._set(self._section(memory[: self._bucket.elements]).clone())
        self.end_round(reduced=True)

    def end_round(self, reduced: bool) -> None:
        """Return the memory. After an error, collectives may still write into it."""
        if reduced:
            for memory in self._used:
                self._buffers.give_back(memory)
        self._used, self._in_place = [], False

    def _section(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self._bucket.sections, -1)[self._collectives.place]

    def _set(self, section: torch.Tensor | None) -> None:
        """Set the gradients to the shares in a section; None while they are reduced."""
        place = self._collectives.place
        for p, at, length in zip(self._parameters, self._bucket.offsets, self._shares, strict=True):
            if p.grad is None and not p.requires_grad:
                continue
            own = None
            if section is not None:
                here = max(0, min(length, p.numel() - place * length))
                own = section[at : at + here]
            p.grad = DividedGradient(p, own, self._collectives, dtype_of_gradient(p))

    def rows(self, factor: float) -> Any:
        """Raise an error: a bucket of a sparse gradient is not divided."""
        raise NotImplementedError

    set_rows = rows
