"""The picture of a prediction. Needs matplotlib."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(path: Path, title: str, series: Mapping[str, Sequence[tuple[int, float, float]]]) -> None:
    """Draw efficiency and time of a step against the number of ranks.

    Args:
        path: the file.
        title: above the picture.
        series: name -> (ranks, efficiency, seconds of a step).
    """
    # matplotlib reads a configuration in the current folder, where others may write.
    with contextlib.chdir("/"):
        import matplotlib

    matplotlib.use("Agg")
    # Write text as text, not as outlines, which need more bytes.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for name, points in series.items():
        ranks = [count for count, _, _ in points]
        left.plot(ranks, [share * 100 for _, share, _ in points], marker="o", label=name)
        right.plot(ranks, [seconds * 1e3 for _, _, seconds in points], marker="o", label=name)
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
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
