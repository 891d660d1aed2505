"""The gradients of a bucket that is divided among the ranks, and the memory that they are packed into.

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


class DividedMemory:
    """`hvdkit.reduction.backend.RoundMemory` for a bucket with several sections.

    Args:
        bucket: the bucket.
        parameters: the bucket's parameters.
        collectives: the collectives of the ranks.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.Tensor], collectives: Any) -> None:
        self._bucket = bucket
        self._parameters = parameters
        self._collectives = collectives
        self._shares = [share(p.numel(), bucket.sections) for p in parameters]
        self._kept: dict[torch.dtype, torch.Tensor] = {}
        # The buffer of `in_place`, during a round.
        self._sent: torch.Tensor | None = None

    @property
    def dtype(self) -> str:
        """The name of the gradients' dtype, without `torch.`."""
        return self._bucket.dtype

    #: A changed gradient raises: see `DividedGradient`.
    is_changed = False

    def _buffer(self, dtype: torch.dtype, keep: bool = True) -> torch.Tensor:
        flat = self._kept.get(dtype)
        if flat is None:
            device = torch.device(self._bucket.device)
            if keep and device.type == "cpu":
                flat = shared_memory.empty(self._bucket.elements, dtype).zero_()
            else:
                flat = torch.zeros(self._bucket.elements, dtype=dtype, device=device)
            if keep:
                self._kept[dtype] = flat
        return flat

    def _fill(self, flat: torch.Tensor, factor: float) -> torch.Tensor:
        """Pack the gradients. The padding of a buffer is 0 and stays so."""
        sections = flat.view(self._bucket.sections, -1)
        sources, targets = [], []
        for p, at, length in zip(
            self._parameters, self._bucket.offsets, self._shares, strict=True
        ):
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
            if rest:
                sources.append(source[full * length :])
                targets.append(place[full, :rest])
        cast_scaled_all(sources, targets, factor)
        return flat

    @torch.no_grad()
    def in_place(self, factor: float) -> torch.Tensor:
        """See `BucketMemory`. Frees the memory of the gradients."""
        self._sent = flat = self._fill(self._buffer(getattr(torch, self._bucket.dtype)), factor)
        self._set(None)
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    @torch.no_grad()
    def pack(self, dtype: str, factor: float, keep: bool = True) -> torch.Tensor:
        """See `BucketMemory`."""
        return self._fill(self._buffer(getattr(torch, dtype), keep), factor)

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
    def end_round(self, reduced: bool) -> None:
        sent, self._sent = self._sent, None
        if sent is not None and reduced:
            self._set(self._section(sent).clone())

    def _section(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(self._bucket.sections, -1)[self._collectives.place]

    def _set(self, section: torch.Tensor | None) -> None:
        """Set the gradients to the shares in a section; None while they are reduced."""
        place = self._collectives.place
        for p, at, length in zip(
            self._parameters, self._bucket.offsets, self._shares, strict=True
        ):
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
