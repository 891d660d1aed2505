"""The list of a job's events, and the facts that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from hvdkit.launch.control.rank_records import RankRecords
from hvdkit.launch.ending.events import Event, JobPlan
from hvdkit.launch.ending.facts import Facts

_E = TypeVar("_E", bound=Event)


class Journal:
    """The events of a job, which are only added. A signal handler may add one at any time."""

    def __init__(self, plan: JobPlan) -> None:
        self.plan = plan
        self._events: list[Event] = []
        # Number of the first events -> their facts.
        self._facts = lru_cache(maxsize=1)(lambda count: Facts(plan, tuple(self._events[:count])))
        self._by_kind: dict[type, list[Any]] = {}
        #: The last records of the ranks.
        self.records = RankRecords()

    @property
    def events(self) -> Sequence[Event]:
        """The events, in the order in which the launcher has learnt of them."""
        return tuple(self._events)

    def add(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        self._by_kind.setdefault(type(event), []).append(event)

    def of(self, kind: type[_E]) -> Sequence[_E]:
        """Return the events of a kind, in the same order."""
        return self._by_kind.get(kind, [])

    @property
    def facts(self) -> Facts:
        """The facts that follow from the events until now."""
        return self._facts(len(self._events))
