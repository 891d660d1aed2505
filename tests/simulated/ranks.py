"""Simulated ranks: threads of one process with collectives, without Horovod."""

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

_TIMEOUT = 10.0


class InFlight:
    """One rank's part in a collective that has been started."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self.done = False
        self.result: Any = None


class SimulatedGroup:
    """The shared state of the collectives of `size` simulated ranks.

    Args:
        size: the number of ranks.
        first: the global rank of the first one, for a process set that does not begin at rank 0.

    Attributes:
        held: while true, started collectives do not complete.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self.first = first
        self.lock = threading.Lock()
        self.slots: dict[tuple[str, int], dict[int, Any]] = {}
        self.arrived = threading.Condition(self.lock)
        self.joined: set[int] = set()
        self.held = False
        self._begun: dict[str, tuple[Callable[..., Any], dict[int, InFlight]]] = {}

    def exchange(self, rank: int, name: str, turn: int, value: Any) -> list[Any]:
        """Wait for all ranks that have not joined; return their values in the order of ranks."""
        key = (name, turn)
        with self.arrived:
            self.slots.setdefault(key, {})[rank] = value
            self.arrived.notify_all()
            everyone = set(range(self.size)) - self.joined
            if not self.arrived.wait_for(
                lambda: self.slots[key].keys() >= everyone, timeout=_TIMEOUT
            ):
                raise TimeoutError(f"rank {rank}: {name}: only {sorted(self.slots[key])} came")
            return [self.slots[key][r] for r in sorted(self.slots[key])]

    def begin(self, rank: int, name: str, value: Any, finish: Callable[..., Any]) -> InFlight:
        """Start a collective and return at once.

        It completes when the last rank has started it; `finish(values)` returns each rank's result.
        As in Horovod, a rank must not start a collective under a name that is in flight.
        """
        with self.arrived:
            _, waiting = self._begun.setdefault(name, (finish, {}))
            if rank in waiting:
                raise RuntimeError(f"rank {rank}: {name} is in flight already")
            waiting[rank] = InFlight(name, value)
            self._end_what_is_full()
            return waiting[rank]

    @property
    def in_flight(self) -> list[str]:
        """Return the names of collectives that some ranks have started and others have not."""
        return sorted(self._begun)

    def release(self) -> None:
        """Complete the collectives that were held back."""
        with self.arrived:
            self.held = False
            self._end_what_is_full()

    def wait(self, handle: InFlight) -> Any:
        """Wait for a started collective and return its result; drop references to its memory."""
        with self.arrived:
            if not self.arrived.wait_for(lambda: handle.done, timeout=_TIMEOUT):
                raise TimeoutError(f"{handle.name}: not all ranks came")
        result, handle.value, handle.result = handle.result, None, None
        return result

    def _end_what_is_full(self) -> None:
        everyone = set(range(self.size)) - self.joined
        full = [name for name, (_, waiting) in self._begun.items() if waiting.keys() >= everyone]
        if self.held:
            return
        for name in full:
            finish, waiting = self._begun.pop(name)
            handles = [waiting[rank] for rank in sorted(waiting)]
            results = finish([handle.value for handle in handles])
            for handle, result in zip(handles, results, strict=True):
                handle.result, handle.done = result, True
        self.arrived.notify_all()


class SimulatedCollectives:
    """`hvdkit.agreement.collectives.Collectives` of one simulated rank."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.generation = 1
        self.names: list[str] = []
        self.labels: dict[str, str] = {}
        self._turns: dict[str, int] = {}

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.group.first, self.group.first + self.group.size)

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    def exchange(self, value: Any, name: str) -> list[Any]:
        self.names.append(name)
        self._turns[name] = self._turns.get(name, 0) + 1
        return self.group.exchange(self.rank, name, self._turns[name], value)

    @property
    def single_rank(self) -> bool:
        return self.group.size == 1

    def describe(self, name: str, text: str) -> None:
        self.labels[name] = text

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        return [sum(column) for column in zip(*self.exchange(list(values), name), strict=True)]

    def max(self, values: Sequence[int], name: str) -> list[int]:
        assert all(value >= 0 for value in values)
        return [max(column) for column in zip(*self.exchange(list(values), name), strict=True)]

    def start_sum(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        return self._start(values, name, sum)

    def start_max(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        return self._start(values, name, max)

    def _start(self, values: Sequence[int], name: str, combine: Any) -> Callable[[], list[int]]:
        def finish(everyone: list[list[int]]) -> list[list[int]]:
            combined = [combine(column) for column in zip(*everyone, strict=True)]
            return [combined for _ in everyone]

        self.names.append(name)
        handle = self.group.begin(self.rank, name, list(values), finish)
        return lambda: self.group.wait(handle)

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        return self.exchange(data, name)

    def alltoall(self, parts: Sequence[bytes], name: str) -> list[bytes]:
        return [sent[self.rank] for sent in self.exchange(list(parts), name)]

    def broadcast(self, data: bytes, root_rank: int, name: str) -> bytes:
        return self.exchange(data, name)[root_rank]

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        sent = self.exchange(buffer.copy(), name)
        assert {len(other) for other in sent} == {len(buffer)}
        buffer[:] = sent[root_rank]


def on_every_rank(
    size: int,
    function: Callable[[SimulatedCollectives], Any],
    group: SimulatedGroup | None = None,
) -> list[Any]:
    """Call `function` on `size` simulated ranks; return the results or exceptions, by rank."""
    group = group or SimulatedGroup(size)
    results: list[Any] = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = function(SimulatedCollectives(group, rank))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_ranks(
    size: int, function: Callable[[SimulatedCollectives], Any], joined: Collection[int] = ()
) -> list[Any]:
    """Return the result of `function` on every rank that has not joined.

    Raises the error of a rank, or AssertionError if a collective is left in flight.
    """
    group = SimulatedGroup(size)
    group.joined = set(joined)
    results = on_every_rank(
        size,
        lambda collectives: None if collectives.rank in joined else function(collectives),
        group,
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert group.in_flight == []
    return [result for rank, result in enumerate(results) if rank not in joined]


def simulated(
    size: int | str, joined: Collection[int] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each simulated rank, see `on_ranks`. The test has the argument `collectives`.

    Args:
        size: the number of ranks, or the name of the parameter of the test that has it.
        joined: ranks that take part in sums only.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_every_one(**parameters: Any) -> None:
            count = parameters[size] if isinstance(size, str) else size
            on_ranks(count, lambda each: test(collectives=each, **parameters), joined)

        found = inspect.signature(test)
        left = [each for name, each in found.parameters.items() if name != "collectives"]
        on_every_one.__signature__ = found.replace(parameters=left)  # type: ignore[attr-defined]
        return on_every_one

    return decorate
