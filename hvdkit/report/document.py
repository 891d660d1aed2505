"""The content of a report, before it becomes a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdkit.report import numbers
from hvdkit.report.theme import Chart


@dataclass(frozen=True)
class Value:
    """A number in a table. The page has all its digits, and shows a few.

    Attributes:
        number: the number; None if it is unknown.
        unit: its unit, as in `hvdkit.monitor.metrics`.
    """

    number: float | None
    unit: str = ""

    @property
    def text(self) -> str:
        """The shown text."""
        return numbers.with_unit(self.number, self.unit)


Cell = str | Value


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        head: the names of the columns.
        rows: the rows.
        caption: the title; empty for none.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: the title.
        sentences: the conclusions, and what the reader must know to read the charts.
        charts: the charts.
        tables: the tables.
        texts: title -> text that the reader may unfold, such as the output of `hvdkit why`.
    """

    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        title: the title.
        summary: the most important facts, in sentences.
        facts: a table of facts about the run or the runs.
        sections: the parts.
        notes: about the sources, and how the page was made.
    """

    title: str
    summary: Sequence[str]
    facts: Table
    sections: Sequence[Section]
    notes: Sequence[str]

    @property
    def charts(self) -> list[Chart]:
        """All charts."""
        return [chart for section in self.sections for chart in section.charts]
