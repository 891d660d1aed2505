"""Write a report as one HTML page without scripts, and without anything from a network.

A text is escaped unless it is `Markup`, which only this module makes.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import hvdkit
from hvdkit.report import theme
from hvdkit.report.document import Cell, Document, Section, Table, Value
from hvdkit.report.style import STYLE
from hvdkit.system.plain_files import printable

#: A longer text in a table may have several lines.
_LONG = 40
#: The most characters of a text. A file may have a reason or a name of many megabytes.
_LONGEST = 30_000


class Markup(str):
    """Text that is HTML."""


def element(name: str, *content: str, **attributes: str) -> Markup:
    """Return an element. Text that is not `Markup` is escaped.

    An attribute's name may end with an underscore, such as `class_`.
    """
    begin = "".join(
        f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items() if value
    )
    return Markup(f"<{name}{begin}>{join(content)}</{name}>")


def join(content: Iterable[str], separator: str = "") -> Markup:
    """Return texts as one. Text that is not `Markup` is escaped."""
    return Markup(
        separator.join(
            each if isinstance(each, Markup) else html.escape(_shown(each)) for each in content
        )
    )


def _shown(text: str) -> str:
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def write(document: Document) -> str:
    """Return a report as a page."""
    sections = []
    number = 0
    for section in document.sections:
        sections.append(_section(section, number))
        number += len(section.charts)
    summary = element("ul", *(element("li", each) for each in document.summary), class_="summary")
    notes = [*document.notes, f"Made by hvdkit {hvdkit.__version__}. Times are UTC."]
    body = [
        element("header", element("h1", document.title), summary, _table(document.facts, "facts")),
        element("main", *sections),
        element("footer", element("h2", "About this page"), *(element("p", n) for n in notes)),
    ]
    head = [
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        # Nothing is loaded and nothing runs, whatever the names of metrics contain.
        Markup(
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        element("title", document.title),
        element("style", Markup(_style())),
    ]
    page = element("html", element("head", *head), element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _style() -> str:
    def colors(each: theme.Theme) -> str:
        return " ".join(f"{name}: {color};" for name, color in theme.variables(each).items())

    return STYLE.replace("LIGHT_COLORS", colors(theme.LIGHT)).replace(
        "DARK_COLORS", colors(theme.DARK)
    )


def _section(section: Section, number: int) -> Markup:
    charts = [
        element(
            "figure",
            element("figcaption", chart.title),
            Markup(theme.svg(chart, number + place).replace("<svg", _labelled(chart.title), 1)),
        )
        for place, chart in enumerate(section.charts)
    ]
    texts = [
        element("details", element("summary", title), element("pre", text))
        for title, text in section.texts.items()
    ]
    return element(
        "section",
        element("h2", section.title),
        *([element("p", section.sentences[0], class_="conclusion")] if section.sentences else []),
        *([element("p", " ".join(section.sentences[1:]))] if section.sentences[1:] else []),
        *([element("div", *charts, class_="charts")] if charts else []),
        *(_table(table) for table in section.tables),
        *texts,
    )


def _labelled(title: str) -> str:
    return f'<svg role="img" aria-label="{html.escape(_shown(title))}"'


def _table(table: Table, kind: str = "") -> Markup:
    caption = [element("caption", table.caption)] if table.caption else []
    first = table.rows[0] if table.rows else ()
    kinds = ["number" if isinstance(cell, Value) else "" for cell in first]
    columns = zip_longest(table.head, kinds, fillvalue="")
    head = element("tr", *(element("th", t, scope="col", class_=kind) for t, kind in columns))
    rows = [element("tr", *_cells(row)) for row in table.rows]
    thead = [element("thead", head)] if any(table.head) else []
    body = element("tbody", *rows)
    return element("div", element("table", *caption, *thead, body, class_=kind), class_="table")


def _cells(row: Sequence[Cell]) -> list[Markup]:
    cells = []
    for place, cell in enumerate(row):
        if isinstance(cell, Value):
            exact = "" if cell.number is None else repr(cell.number)
            content = element("data", cell.text, value=exact)
            cells.append(element("td", content, class_="number"))
        elif place == 0:
            cells.append(element("th", cell, scope="row"))
        else:
            cells.append(element("td", cell, class_="long" if len(cell) > _LONG else ""))
    return cells
