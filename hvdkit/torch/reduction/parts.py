"""Parameters that are planned together: those at first, and each set that was added later."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.plan import Reduction
from hvdkit.reduction.synchronizer import Synchronizer
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.dtensors import local_parameter
from hvdkit.torch.reduction.backend import TorchBackend
from hvdkit.torch.reduction.memory import spec
from hvdkit.torch.reduction.records import Record

# Returns the properties that a bucket depends on and that `parameter.data = ...` can change.
_layout: Callable[[torch.Tensor], Any] = operator.attrgetter(
    "dtype", "device", "shape", *(["grad_dtype"] if hasattr(torch.Tensor, "grad_dtype") else [])
)


class Part:
    """Records that share a synchronizer.

    Args:
        records: the records; the constructor sets their `part` and `index`.
        collectives: the collectives of the ranks to reduce over.
        reduction: the settings of the reduction, without groups.
        window: the accumulation window.
        context: lines that must be the same on every rank.
        make_backend: makes the backend for parameters and collectives.
    """

    def __init__(
        self,
        records: Sequence[Record],
        collectives: TorchCollectives,
        reduction: Reduction,
        window: Window,
        context: Sequence[str],
        make_backend: Callable[..., TorchBackend] = TorchBackend,
    ) -> None:
        self.records = records
        #: Whether a new part must replace it: the optimizer does not have a parameter any more, or
        #: the ranks have found that they describe the parameters differently.
        self.is_stale = False
        for index, record in enumerate(records):
            record.part, record.index = self, index
        parameters = [local_parameter(record.parameter) for record in records]
        self.backend = make_backend(parameters, collectives)
        self.synchronizer: Synchronizer[torch.Tensor, Any] = Synchronizer(
            [spec(r.name, p) for r, p in zip(records, parameters, strict=True)],
            self.backend,
            collectives,
            replace(reduction, groups=groups_of(records)),
            window,
            context,
        )
        self._collectives = collectives
        self._find_unused = reduction.find_unused
        self._parameters = parameters
        self._layouts = list(map(_layout, parameters))
        # With `find_unused`: for each parameter, 1 if this rank has a gradient, before packing
        # fills missing ones; and a function that returns the sum over the ranks.
        self._used: list[int] | None = None
        self._counts: Callable[[], list[int]] | None = None

    @property
    def outdated(self) -> bool:
        """Whether parameters have another dtype, device or shape than the buckets."""
        if (plan := self.synchronizer.plan) is not None and not plan.buckets:
            return False
        # In C, and without a list of tuples, which would start garbage collections.
        return not all(map(operator.eq, map(_layout, self._parameters), self._layouts))

    def changed_layouts(self) -> list[Record]:
        """Return the records of such parameters."""
        both = zip(self.records, self._parameters, self._layouts, strict=True)
        return [record for record, p, layout in both if _layout(p) != layout]

    def pack(self) -> None:
        """Pack the buckets that `send` starts. If memory is lacking, this raises. No collective."""
        self._used = self._used_here()
        self.synchronizer.pack()

    def send(self) -> None:
        """Start a few of the buckets that have not started."""
        if self._find_unused and self._counts is None:
            used = self._used_here() if self._used is None else self._used
            self._counts = self._collectives.start_sum(used, f"{self.synchronizer.name}.used")
        self.synchronizer.send()

    def wait(self) -> None:
        """Wait for all buckets. With `find_unused`, remove gradients that no rank has."""
        self.synchronizer.wait()
        counts = self._counts
        self.forget_counts()
        if counts is not None:
            for record, count in zip(self.records, counts(), strict=True):
                if not count:
                    record.parameter.grad = None

    def forget_counts(self) -> None:
        """Forget the counts of a round that cannot be completed."""
        self._used = self._counts = None

    def synchronize(self) -> None:
        """Reduce all gradients, in the round in which the part was made. A collective."""
        if not self.synchronizer.planned:
            self.synchronizer.make_plan()
        self.send()
        self.wait()

    def needs_sparse_bucket(self) -> bool:
        """Return whether a sparse gradient has a dense bucket."""
        plan = self.synchronizer.plan
        return plan is not None and self.backend.has_sparse_in(plan)

    def make_sparse(self, name: str) -> None:
        """Make gradients that are sparse on some rank sparse on all ranks. A collective."""
        dims = self._collectives.max(self.backend.sparse_seen, name)
        assert self.synchronizer.plan is not None
        if self.backend.make_sparse(dims, self.synchronizer.plan):
            self.synchronizer.forget()

    def _used_here(self) -> list[int]:
        return [int(record.has_gradient) for record in self.records] if self._find_unused else []


def groups_of(records: Sequence[Record]) -> list[list[int]]:
    """Return the indices of the records of each group, see `bucketing.plan`."""
    groups: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        if record.group is not None:
            groups.setdefault(record.group, []).append(index)
    return [groups[number] for number in sorted(groups)]
