"""Add and remove process sets: all ranks together, or none of them.

The engine waits without a limit until all ranks have asked for a process set. So the ranks first
call a small collective. If a rank does not call it, the verdict on the hang names this rank, and
the engine's stall limit ends the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.agreement.rank_errors import raise_on_all_ranks
from hvdkit.errors import UsageError


def other_ranks(reduced_over: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> str:
    """Return "NAME over ranks [R, S]" for each entry with other ranks than `ranks`; "" for none.

    Args:
        reduced_over: name of an optimizer -> the ranks that it reduces gradients over.
        ranks: the expected ranks.
    """
    wanted = sorted(ranks)
    found = {name: sorted(own) for name, own in reduced_over.items()}
    return ", ".join(f"{name} over ranks {own}" for name, own in found.items() if own != wanted)


def check_one_model(reduced_over: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> None:
    """Check that the ranks of a checkpointer train one model. Not a collective.

    Args:
        reduced_over: name of an optimizer -> the ranks that it reduces gradients over.
        ranks: the ranks of the checkpointer, which saves the state of the first of them.

    Raises:
        UsageError: an optimizer has other ranks. The models of its process sets differ.
    """
    if found := other_ranks(reduced_over, ranks):
        raise UsageError(
            f"gradients are not reduced over the ranks of the checkpoint ({found}), and a "
            f"checkpoint has one model, that of the first of its ranks {sorted(ranks)}: expected "
            f"optimizers over the same ranks. Use a checkpointer for the ranks of each process set "
            f"(hvd.Checkpointer: process_set=), with a folder of its own"
        )


@dataclass(frozen=True)
class ProcessSets:
    """Horovod's functions for process sets, on all ranks together.

    Attributes:
        horovod: the module `horovod.common.process_sets`.
        collectives: returns the collectives of all ranks.
        known: the ranks of each process set that was added here -> the set.
    """

    horovod: Any
    collectives: Callable[[], Collectives]
    known: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def add_process_set(self, process_set: Any | Sequence[int]) -> Any:
        """Add a process set, and return it. A collective of all ranks, also those outside the set.

        It needs HOROVOD_DYNAMIC_PROCESS_SETS=1.

        Args:
            process_set: a `ProcessSet`, or its ranks; the same on all ranks.

        Raises:
            ValueError: on every rank, if the set exists already, if a rank has passed something
                that is not a process set, or if the ranks have passed different sets.
        """
        kind = self.horovod.ProcessSet
        error = None
        try:
            process_set = process_set if isinstance(process_set, kind) else kind(process_set)
        except Exception as raised:
            error = raised
        raise_on_all_ranks(
            self.collectives(),
            error,
            "add_process_set: a rank has not passed a process set",
            "hvdkit.process_set.add",
            UsageError,
        )
        added = self.horovod.add_process_set(process_set)
        self.known[tuple(added.ranks)] = added
        return added

    def grid(self, **dimensions: int) -> dict[str, Any]:
        """Arrange all ranks in a grid, and return the process sets of this rank. A collective.

        The last dimension has neighbouring ranks. With 4 ranks and `grid(data=2, model=2)`, rank 1
        is in the sets `{"data": [1, 3], "model": [0, 1]}`.

        Process sets that do not exist are added, which needs HOROVOD_DYNAMIC_PROCESS_SETS=1, or
        `init(process_sets="dynamic")`.

        Args:
            dimensions: the length of each dimension by its name, on all ranks the same.

        Returns:
            Name of a dimension -> the process set of the ranks that differ from this one in this
            dimension only.

        Raises:
            UsageError: the product of the lengths is not the number of ranks.
            RankMismatchError: on the other ranks, if the lengths are wrong on some ranks.
            ValueError: on every rank, if process sets cannot be added.
        """
        collectives = self.collectives()
        size = len(collectives.ranks)

        def prepare() -> tuple[None, list[str]]:
            lengths = list(dimensions.values())
            valid = all(type(each) is int and each > 0 for each in lengths)
            if not dimensions or not valid or math.prod(lengths) != size:
                raise UsageError(
                    f"grid has {dimensions}, and the job has {size} ranks: expected a length for "
                    f"each dimension, such as grid(data={size}, model=1), whose product is {size}"
                )
            return None, [f"{name}={length}" for name, length in dimensions.items()]

        prepare_on_all_ranks(collectives, prepare, "the grid", "Pass the same on all ranks.")
        found = {}
        stride = size
        for name, length in dimensions.items():
            block, stride = stride, stride // length
            firsts = [rank for rank in range(size) if rank % block < stride]
            lines = [list(range(first, first + block, stride)) for first in firsts]
            sets = self.find_or_add(lines)
            found[name] = next(s for s in sets if collectives.rank in s.ranks)
        return found

    def find_or_add(self, parts: Sequence[Sequence[int]]) -> list[Any]:
        """Return a process set for each sequence of ranks. A collective if one does not exist.

        Adding one needs HOROVOD_DYNAMIC_PROCESS_SETS=1.
        """
        table = self.horovod._basics._get_process_set_ids_and_ranks()
        numbers = {tuple(ranks): number for number, ranks in table.items()}
        found = []
        for ranks in map(tuple, parts):
            number, known = numbers.get(ranks), self.known.get(ranks)
            if number == 0:
                known = self.horovod.global_process_set
            elif number is None:
                known = self.add_process_set(ranks)
            elif known is None or known.process_set_id != number:
                # It was an argument of `init`.
                known = self.known[ranks] = self.horovod.ProcessSet(ranks)
                known.process_set_id = number
            found.append(known)
        return found

    def remove_process_set(self, process_set: Any) -> bool:
        """Remove a process set. A collective of all ranks, also those outside the set.

        It needs HOROVOD_DYNAMIC_PROCESS_SETS=1.

        Returns:
            Whether it was removed: False for the global set, and for a set that was not added.

        Raises:
            ValueError: on every rank, if the set exists on some ranks only, if a rank has passed
                something that is not a process set, or if the ranks have passed different sets.
        """
        error: Exception | None = None
        if not isinstance(process_set, self.horovod.ProcessSet):
            error = UsageError(f"process_set is {process_set!r}: expected a hvd.ProcessSet")
        exists = error is None and process_set.process_set_id not in (None, 0)
        collectives = self.collectives()
        name = "hvdkit.process_set.remove"
        with_set, invalid, ranks = collectives.sum([int(exists), int(error is not None), 1], name)
        if invalid:
            text = "remove_process_set: a rank has not passed a process set"
            raise_on_all_ranks(collectives, error, text, name, UsageError)
        if 0 < with_set < ranks:
            error = None if exists else ValueError("it was not added, or was removed already")
            text = "remove_process_set: the process set exists on some ranks only"
            raise_on_all_ranks(collectives, error, text, name, UsageError)
        return self.horovod.remove_process_set(process_set) if exists else False
