"""The records of an optimizer's parameters, and the plans of their buckets."""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, replace
from itertools import chain
from typing import Any

import torch

from hvdkit.reduction import bucketing
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.wire_format import WireFormat
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.reduction import holders
from hvdkit.torch.reduction.backend import TorchBackend
from hvdkit.torch.reduction.parts import Part, groups_of
from hvdkit.torch.reduction.records import Record
from hvdkit.torch.reduction.settings import Settings

# Returns the hooks of a parameter.
_hooks: Callable[[torch.Tensor], Any] = operator.attrgetter("_backward_hooks")


@dataclass(eq=False)
class Parameters:
    """The records of an optimizer's parameters. A parameter is planned if its record has a part.

    The arguments `names`, the names of the parameters at first, and `groups`, parameters that share
    a bucket, are not kept: a parameter that the script removes must be freed.

    Attributes:
        reducer: the `OptimizerReducer` of the optimizer.
        collectives: the collectives of the ranks to reduce over.
        settings: the settings of the optimizer.
        window: the accumulation window.
        make_backend: see `Part`.
        reduction: how gradients are reduced, with the present bucket size and wire format.
        records: the id of each parameter of the optimizer -> its record, in order.
        parts: the planned records.
    """

    reducer: "weakref.ref[Any]"
    collectives: TorchCollectives
    settings: Settings
    window: Window
    names: InitVar[dict[torch.nn.Parameter, str]]
    groups: InitVar[Sequence[Sequence[torch.nn.Parameter]]] = ()
    make_backend: Callable[..., TorchBackend] = TorchBackend

    def __post_init__(
        self,
        names: dict[torch.nn.Parameter, str],
        groups: Sequence[Sequence[torch.nn.Parameter]],
    ) -> None:
        self.reduction = self.settings.reduction
        self._number = itertools.count()
        self._added = itertools.count(len(names))
        group_of = {p: number for number, group in enumerate(groups) for p in group}
        self.records = {
            id(p): Record(self.reducer, p, name, next(self._number), group_of.get(p))
            for p, name in names.items()
        }
        self.parts: list[Part] = []
        # The ids and the contents of the parameters at the last `refresh`.
        self._seen: list[int] = []
        self.refresh()
        self.plan_new()

    def _owner(self) -> Any:
        reducer = self.reducer()
        assert reducer is not None
        return reducer

    @property
    def _planned(self) -> Sequence[Record]:
        """The records of all parts."""
        if len(self.parts) == 1:
            return self.parts[0].records
        return [record for part in self.parts for record in part.records]

    @property
    def newest(self) -> int:
        """The largest number of a planned record; -1 without one."""
        return max((record.number for record in self._planned), default=-1)

    def _unplanned(self) -> Iterator[Record]:
        return (record for record in self.records.values() if record.part is None)

    def refresh(self) -> None:
        """Make records for parameters that the script has added, and register missing hooks.

        The script may add, remove, unfreeze and convert parameters at any time.
        """
        parameters = self._owner().parameters()
        # Compare in C, because this runs several times in each step.
        seen = [*map(id, parameters), *map(holders.address, parameters)]
        unchanged = seen == self._seen and all(map(_hooks, parameters))
        if unchanged or self._owner().wrapped_again:
            return
        known, self.records = self.records, {}
        for p in parameters:
            record = known.get(id(p))
            if record is None:
                name = f"added.parameter{next(self._added)}"
                record = Record(self.reducer, p, name, next(self._number))
            self.records[id(p)] = record
            if not (p.dtype.is_floating_point or p.dtype.is_complex):
                seen = []  # its dtype may change
            elif record.hooks_lost:
                converted = record.content is not None
                record.register_hooks()
                if converted:
                    self._note_conversion(record)
        for key, record in known.items():
            if self.records.get(key) is not record and record.part is not None:
                record.part.is_stale = True
        self._seen = seen

    def remove_hooks(self) -> None:
        """Remove all hooks: later backward passes are not reduced."""
        for record in chain(self._planned, self._unplanned()):
            record.remove_hooks()

    def _note_conversion(self, record: Record) -> None:
        """Handle that a conversion of a parameter has removed its hooks."""

    def plan_new(self, frozen: bool = False) -> Sequence[Record]:
        """Make a part of the parameters without one; return their records.

        Args:
            frozen: include frozen parameters with a gradient, which the script has assigned. In a
                round, the ranks have compared them (`signature`).
        """
        added = [
            record
            for record in self._unplanned()
            if record.parameter.requires_grad or (frozen and record.parameter.grad is not None)
        ]
        if added or not self.parts:
            self._plan(added)
        return added

    def _plan(self, records: Sequence[Record]) -> None:
        self.parts.append(
            Part(
                records,
                self.collectives,
                self.reduction,
                self.window,
                self._consistency_lines(),
                self.make_backend,
            )
        )

    def _consistency_lines(self) -> list[str]:
        """Return lines that must be the same on every rank."""
        return [
            f"optimizer: {self.settings.optimizer}",
            *(
                f"parameter {i} of the optimizer is {record.name!r}, "
                f"{str(record.parameter.dtype).removeprefix('torch.')} "
                f"{list(record.parameter.shape)}, requires_grad={record.parameter.requires_grad}"
                for i, record in enumerate(self.records.values())
            ),
            f"the optimizer has {len(self.records)} parameters",
            *self.settings.lines(),
        ]

    def _is_removed(self, record: Record) -> bool:
        return self.records.get(id(record.parameter)) is not record

    def plan_outdated(self) -> bool:
        """Return whether parameters have another dtype, device or shape than the buckets.

        Also true if the script has removed parameters from the optimizer.
        """
        return self._has_removed() or any(part.outdated for part in self.parts)

    def _has_removed(self) -> bool:
        # Do not refresh: a pass without hooks may have added to gradients of converted parameters.
        present = list(map(id, self._owner().parameters()))
        if present == list(self.records):
            return any(part.is_stale for part in self.parts)
        return not {id(record.parameter) for record in self._planned}.issubset(present)

    def replan(self) -> None:
        """Make new parts for the parameters as they are now. Not a collective.

        Free the parameters that the script has removed from the optimizer, or replaced there. For
        example, a pruned layer, or the points of a scene whose number has changed.
        """
        self.refresh()
        kept = [[r for r in part.records if not self._is_removed(r)] for part in self.parts]
        self.parts.clear()
        for records in kept:
            if records:
                self._plan(records)

    def set_buckets(self, size: int, wire_format: WireFormat) -> None:
        """Make new buckets of another size or format, before the next round. Not a collective.

        Keep a restored state that no round has used yet.
        """
        self.forget_removed()
        synchronizers = [part.synchronizer for part in self.parts]
        restored = [None if each.planned else each.state for each in synchronizers]
        self.reduction = replace(self.reduction, bucket_bytes=size, format=wire_format)
        self.replan()
        for part, state in zip(self.parts, restored, strict=True):
            part.synchronizer.resume(state)

    def forget_removed(self) -> None:
        """Make new parts if the script has removed parameters. Not a collective."""
        if self._has_removed():
            self.replan()

    def distinct_bucket_bytes(self, sizes: Sequence[int], wire_format: WireFormat) -> list[int]:
        """Return `sizes` without those that make the same buckets as an earlier one."""
        if wire_format.tensor_by_tensor:
            return list(sizes[:1])
        plans: dict[tuple[str, ...], int] = {}
        for size in sizes:
            key = tuple(
                bucketing.plan(
                    part.synchronizer.specs,
                    size,
                    groups=groups_of(part.records),
                    kind=wire_format.kind,
                ).digest
                for part in self.parts
            )
            plans.setdefault(key, size)
        return list(plans.values())

    def reduction_lines(self) -> list[str]:
        """Return lines that describe the gradients and the settings, without the bucket size."""
        lines = replace(self.reduction, bucket_bytes=1).describe()
        return lines + [
            line for part in self.parts for line in bucketing.describe(part.synchronizer.specs)
        ]
