"""Pictures of the results. They need matplotlib."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The height of a bar, relative to the distance between the centres of two bars.
_BAR_HEIGHT = 0.8

#: Name -> points of a line: the place on the horizontal axis, and a value for each of two charts.
Series = Mapping[str, Sequence[tuple[int, float, float]]]


@contextlib.contextmanager
def _picture(path: Path, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and write the file."""
    # matplotlib reads a configuration in the current folder, where others may write.
    with contextlib.chdir("/"):
        import matplotlib

    matplotlib.use("Agg")
    # Write text as text, not as outlines, which need more bytes.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size)
    yield figure, axes
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


@contextlib.contextmanager
def _two_charts(
    path: Path, title: str, series: Series, factors: tuple[float, float]
) -> Iterator[tuple[Any, Any]]:
    """Draw both values of all points, multiplied by factors, and yield the axes."""
    with _picture(path, 2, (11, 4.5)) as (figure, (left, right)):
        for name, points in series.items():
            places, *both = zip(*points, strict=True)
            for axes, values, factor in zip((left, right), both, factors, strict=True):
                axes.plot(places, [value * factor for value in values], marker="o", label=name)
                axes.grid(visible=True, alpha=0.3)
        left.legend(fontsize="small")
        figure.suptitle(title)
        yield left, right


def allreduces(path: Path, title: str, series: Series) -> None:
    """Draw time and bus bandwidth against the size.

    Args:
        path: the file.
        title: above the picture.
        series: name -> (bytes, median seconds, bus bandwidth in bytes/s).
    """
    with _two_charts(path, title, series, (1e6, 1e-9)) as (left, right):
        left.set(yscale="log", ylabel="median time, us")
        right.set(ylabel="bus bandwidth, GB/s")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.set(xscale="log", xlabel="size, bytes")


def predictions(path: Path, title: str, series: Series) -> None:
    """Draw efficiency and time of a step against the number of ranks.

    Args:
        path: the file.
        title: above the picture.
        series: name -> (ranks, efficiency, seconds of a step).
    """
    with _two_charts(path, title, series, (100, 1e3)) as (left, right):
        left.set(ylabel="predicted efficiency, %", ylim=(0, 105))
        right.set(ylabel="predicted time of a step, ms")
        longest = max(seconds for points in series.values() for _, _, seconds in points)
        right.set_ylim(0, longest * 1.1e3)
        counts = sorted({count for points in series.values() for count, _, _ in points})
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.set(xlabel="ranks")


def steps(path: Path, title: str, medians: Mapping[str, float], alone: float | None) -> None:
    """Draw the time of a step of each variant.

    Args:
        path: the file.
        title: above the picture.
        medians: name -> seconds.
        alone: the seconds of a step without reduction; None if it was not measured.
    """
    names = list(medians)
    with _picture(path, 1, (8, 0.5 * len(names) + 1.5)) as (_, axes):
        milliseconds = [seconds * 1e3 for seconds in medians.values()]
        axes.barh(names, milliseconds, _BAR_HEIGHT, color="#4878a8")
        if alone is not None:
            axes.axvline(alone * 1e3, color="black", linestyle="--", label="without reduction")
            axes.legend(fontsize="small")
        axes.invert_yaxis()
        axes.set(xlabel="median time of a step, ms", title=title)
