"""The form of a rule: a function that finds lines, requests edits, and yields what it has found.

To add a rule, write a function with the decorator `rule` in a module of `hvdkit/migrate/rules/` or
`hvdkit/migrate/ddp/`. It yields `Change`, such as that which `Script.edit` returns, `Advice` or
`Note`, and changes only code that it understands. Then run `scripts/migration_rules`, which writes
docs/migration-rules.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hvdkit.migrate.script import Advice, Change, Finding, Note, Script


class Target(Protocol):
    """The object that a rule reads and edits: a `Script`, or a `Conversion` (rules about DDP)."""

    @property
    def script(self) -> Script:
        """The script."""
        ...


T = TypeVar("T", bound=Target)


Findings = Iterator[Finding]


def lower(reason: str) -> str:
    """Return a reason as the end of another sentence."""
    return (reason[0].lower() + reason[1:]).removesuffix(".")


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One rule.

    docs/migration-rules.md lists all rules, and the tests migrate `before` and expect `after`.
    """

    name: str
    #: Why the line has to change: one sentence, which users see.
    reason: str
    #: Code that the rule applies to, after the lines `setup`.
    before: str
    #: The same code after the rule; None if the rule only gives advice.
    after: str | None
    find: Callable[[T], Findings]
    setup: str = ""

    def __call__(self, target: T) -> None:
        """Request edits, or give advice, for all lines that the rule applies to."""
        script = target.script
        report = {Change: script.change, Advice: script.advise, Note: script.note}
        for found in self.find(target):
            report[type(found)](self.name, found.node, found.text or self.reason)


class Rules(list[Rule[T]]):
    """The rules of a module, in the order in which they are applied.

    Args:
        setup: the lines before the example of a rule that has no `setup` of its own.
    """

    def __init__(self, setup: str = "") -> None:
        super().__init__()
        self._setup = setup

    def add(
        self, reason: str, *, before: str, after: str | None = None, setup: str | None = None
    ) -> Callable[[Callable[[T], Findings]], Rule[T]]:
        """Make a rule of the decorated function, whose name it gets. See `Rule`."""

        def make(find: Callable[[T], Findings]) -> Rule[T]:
            name = find.__name__.replace("_", "-")
            lines = self._setup if setup is None else setup
            self.append(Rule(name, reason, before, after, find, lines))
            return self[-1]

        return make
