"""Ranks as threads of one process, for framework-free code: real concurrency, no Horovod."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


class SimulatedGroup:
    """What the collectives of `size` simulated ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.slots: dict[tuple[str, int], dict[int, Any]] = {}
        self.arrived = threading.Condition(self.lock)
        self.joined: set[int] = set()

    def exchange(self, rank: int, name: str, turn: int, value: Any) -> list[Any]:
        """Everyone's value, in the order of ranks, once all that have not joined are here."""
        key = (name, turn)
        with self.arrived:
            self.slots.setdefault(key, {})[rank] = value
            self.arrived.notify_all()
            everyone = set(range(self.size)) - self.joined
            if not self.arrived.wait_for(lambda: self.slots[key].keys() >= everyone, timeout=10):
                raise TimeoutError(f"rank {rank}: {name}: only {sorted(self.slots[key])} came")
            return [self.slots[key][r] for r in sorted(self.slots[key])]


class SimulatedCollectives:
    """`hvdkit.core.collectives.Collectives` of one simulated rank."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.generation = 1
        self.names: list[str] = []

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.group.size)

    def exchange(self, value: Any, name: str) -> list[Any]:
        self.names.append(name)
        return self.group.exchange(self.rank, name, self.names.count(name), value)

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        return [sum(column) for column in zip(*self.exchange(list(values), name), strict=True)]

    def max(self, values: Sequence[int], name: str) -> list[int]:
        return [max(column) for column in zip(*self.exchange(list(values), name), strict=True)]

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return self.exchange(data, name)


def on_every_rank(size: int, function: Callable[[SimulatedCollectives], Any]) -> list[Any]:
    """Call `function` on `size` simulated ranks; their results or exceptions, by rank."""
    group = SimulatedGroup(size)
    results: list[Any] = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = function(SimulatedCollectives(group, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
