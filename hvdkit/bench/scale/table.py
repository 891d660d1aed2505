"""The tables of a prediction."""

from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.bench.figures import new_table, wide_console
from hvdkit.bench.scale.prediction import Prediction


def columns(prediction: Prediction, ranks_per_host: int, wire: str, levels: str) -> dict[str, Any]:
    """Return the columns of a row, for `--json` and `--csv`. Times are in milliseconds."""
    return {
        "ranks": prediction.ranks,
        "hosts": max(1, prediction.ranks // ranks_per_host),
        "wire": wire,
        "levels": levels,
        "step_ms": prediction.seconds * 1e3,
        "efficiency": prediction.efficiency,
        "speedup": prediction.efficiency * prediction.ranks,
        "communication_ms": prediction.communication * 1e3,
        "exposed_ms": prediction.exposed * 1e3,
        "collectives": prediction.collectives,
    }


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print predictions."""
    headings = ["ranks", "hosts", "wire", "levels", "step ms", "efficiency", "speedup"]
    headings += ["communication ms", "exposed ms", "collectives"]
    table = new_table(title, headings, names=0)
    for row in rows:
        table.add_row(
            str(row["ranks"]),
            str(row["hosts"]),
            row["wire"],
            row["levels"],
            f"{row['step_ms']:.1f}",
            f"{row['efficiency']:.1%}",
            f"{row['speedup']:.1f}",
            f"{row['communication_ms']:.1f}",
            f"{row['exposed_ms']:.1f}",
            str(row["collectives"]),
        )
    wide_console().print(table)


def show_comparison(
    title: str, names: Sequence[str], rows: Sequence[tuple[Sequence[str], float, float]], form: str
) -> None:
    """Print predictions beside what was measured.

    Args:
        title: above the table.
        names: the headings of the first columns.
        rows: for each prediction, its first columns, the prediction, and the measured value.
        form: the format of both values.
    """
    table = new_table(title, [*names, "predicted", "measured", "error"], names=0)
    for first, predicted, measured in rows:
        error = f"{predicted / measured - 1:+.0%}"
        table.add_row(*first, format(predicted, form), format(measured, form), error)
    wide_console().print(table)
