"""Colours of charts, and the conversion of a chart to SVG and PNG. Needs matplotlib.

An SVG in a page gets its colours from the page, for light and dark mode and for paper. So it is
drawn with stand-ins, which `svg` replaces by variables of CSS.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from hvdkit.errors import HvdkitError
from hvdkit.system.whole_files import replacing

_WIDTH = 5.0  # inches
_DPI = 160
_REQUIREMENT = "hvdkit[plot]"


@dataclass(frozen=True)
class Theme:
    """Colours.

    Attributes:
        text: of text.
        muted: of axes and less important text.
        grid: of the grid.
        background: behind the chart.
        alarm: of restarts and NaN.
        series: of lines and sections, in their order.
    """

    text: str
    muted: str
    grid: str
    background: str
    alarm: str
    series: tuple[str, ...]


# The colours of lines are those of Okabe and Ito (2008), which people with a colour vision
# deficiency can tell apart. They are darker in light mode and lighter in dark mode, for a contrast
# of at least 3:1 with the background.
LIGHT = Theme(
    text="#1f2328",
    muted="#6b7280",
    grid="#d9dde2",
    background="#ffffff",
    alarm="#b42318",
    series=("#0063a6", "#c2570c", "#00805e", "#a4447f", "#0b7fa8", "#8a6d00", "#5b5f66"),
)
DARK = Theme(
    text="#e6e8eb",
    muted="#9aa1ab",
    grid="#3a4048",
    background="#1b1f24",
    alarm="#ff8a80",
    series=("#6cb6f5", "#f0934a", "#3cc79b", "#e08bbd", "#7fd3f0", "#e3c64b", "#b3b8bf"),
)
_STAND_INS = Theme(
    text="#010001",
    muted="#010002",
    grid="#010003",
    background="#010004",
    alarm="#010005",
    series=tuple(f"#0100{number:02x}" for number in range(0x10, 0x10 + len(LIGHT.series))),
)


def variables(theme: Theme) -> dict[str, str]:
    """Return name of a CSS variable -> colour."""
    found: dict[str, str] = {}
    for each in fields(theme):
        value = getattr(theme, each.name)
        if each.name == "series":
            found |= {f"--series-{number}": color for number, color in enumerate(value)}
        else:
            found[f"--{each.name}"] = value
    return found


_REPLACED = {color: f"var({name})" for name, color in variables(_STAND_INS).items()}


def check_installed() -> None:
    """Raise HvdkitError if matplotlib is not installed."""
    try:
        # matplotlib reads a configuration in the current folder, where others may write.
        with contextlib.chdir("/"):
            import matplotlib  # noqa: F401
    except ImportError as error:
        raise HvdkitError(
            f"matplotlib is not installed, which `hvdkit report` needs: install it with\n"
            f"  {sys.executable} -m pip install '{_REQUIREMENT}'"
        ) from error


class Chart(Protocol):
    """A chart that is drawn with matplotlib; see `hvdkit.report.charts`.

    Attributes:
        key: a name for files.
        title: the title.
        height: in inches.
    """

    @property
    def key(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def height(self) -> float: ...

    def draw(self, axes: Any, theme: Theme) -> None:
        """Draw the chart, without its title."""
        ...


def svg(chart: Chart, number: int) -> str:
    """Return a chart as an `svg` element for a page. Its ids begin with `c` and `number`."""
    file = io.StringIO()
    _save(chart, _STAND_INS, file, "svg")
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Only tags: a name may look like an id or a colour.
    text = re.sub(r"<[^>]*>", lambda tag: _for_page(tag[0], number), text)
    text = re.sub(r"\n\s*", "\n", text)
    return text.strip()


def _for_page(tag: str, number: int) -> str:
    """Return a tag with ids of its own, with the colours and in the size that the page sets."""
    tag = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>c{number}-", tag)
    tag = re.sub(r"#0100[0-9a-f]{2}", lambda color: _REPLACED.get(color[0], color[0]), tag)
    if tag.startswith("<svg"):
        return re.sub(r' (?:width|height)="[^"]*"', "", tag)
    # The font is that of the page.
    return re.sub(r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", tag)


def png(chart: Chart, path: Path) -> None:
    """Write a chart as a picture on white ground."""
    with replacing(path) as draft, open(draft, "wb") as file:
        _save(chart, LIGHT, file, "png")


def _save(chart: Chart, theme: Theme, file: Any, format: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "hvdkit",
        "text.parse_math": False,
        "font.size": 10,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.text,
        "axes.titlecolor": theme.text,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.text,
        "ytick.labelcolor": theme.text,
        "lines.linewidth": 1.6,
        "legend.fontsize": 9,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A font may lack characters of a name. The reader's browser has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(_WIDTH, chart.height), layout="constrained")
        axes = figure.add_subplot()
        chart.draw(axes, theme)
        if format == "png":
            axes.set_title(chart.title)
            figure.patch.set_facecolor(theme.background)
        else:
            figure.patch.set_alpha(0.0)
        axes.patch.set_alpha(0.0)
        metadata = {"Date": None} if format == "svg" else {}
        figure.savefig(file, format=format, dpi=_DPI, metadata=metadata)
