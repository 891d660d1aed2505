"""The form of a rule: a function that finds lines, and requests edits or gives advice.

To add a rule, write a function with the decorator `rule` in a module of `hvdkit/migrate/rules/` or
`hvdkit/migrate/ddp/`, and add it to `RULES` there. It calls `Script.edit` or `Script.advise`, and
changes only code that it understands. Then run `scripts/migration_rules`, which
writes docs/migration-rules.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

#: What a rule reads and edits: a `Script`, or a `Conversion` for the rules about DDP.
T = TypeVar("T")


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
    find: Callable[[Rule[T], T], None]
    setup: str = ""

    def __call__(self, target: T) -> None:
        """Request edits, or give advice, for all lines that the rule applies to."""
        self.find(self, target)


def rule(
    reason: str, *, before: str, after: str | None = None, setup: str = ""
) -> Callable[[Callable[[Rule[T], T], None]], Rule[T]]:
    """Make a rule of the decorated function. The rule gets the name of the function."""

    def make(find: Callable[[Rule[T], T], None]) -> Rule[T]:
        return Rule(find.__name__.replace("_", "-"), reason, before, after, find, setup)

    return make
