"""Pictures of the results. They need matplotlib."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

# The height of a bar, relative to the distance between the centres of two bars.
_BAR_HEIGHT = 0.8


def lines(path: Path, title: str, series: Mapping[str, Sequence[tuple[int, float, float]]]) -> None:
    """Draw time and bus bandwidth against the size.

    Args:
        path: the file.
        title: above the picture.
        series: name -> (bytes, median seconds, bus bandwidth in bytes/s).
    """
    # matplotlib reads a configuration in the current folder, where others may write.
    with contextlib.chdir("/"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for name, points in series.items():
        sizes = [size for size, _, _ in points]
        left.plot(sizes, [seconds * 1e6 for _, seconds, _ in points], marker="o", label=name)
        right.plot(sizes, [rate / 1e9 for _, _, rate in points], marker="o", label=name)
    left.set(yscale="log", ylabel="median time, us")
    right.set(ylabel="bus bandwidth, GB/s")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="size, bytes")
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def bars(path: Path, title: str, medians: Mapping[str, float], alone: float | None) -> None:
    """Draw the time of a step of each variant.

    Args:
        path: the file.
        title: above the picture.
        medians: name -> seconds.
        alone: the seconds of a step without reduction; None if it was not measured.
    """
    # matplotlib reads a configuration in the current folder, where others may write.
    with contextlib.chdir("/"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(medians)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(names) + 1.5))
    axes.barh(names, [seconds * 1e3 for seconds in medians.values()], _BAR_HEIGHT, color="#4878a8")
    if alone is not None:
        axes.axvline(alone * 1e3, color="black", linestyle="--", label="without reduction")
        axes.legend(fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="median time of a step, ms", title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
