"""The tables of a step benchmark."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.bench.allreduce.cases import bus_factor
from hvdkit.bench.figures import new_table, quartiles, ratios, wide_console
from hvdkit.bench.step.variants import ALONE, SHARE_OF_FLOAT32, SINGLE, Variant, pairs


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what identifies a row."""
    return tuple(str(row[name]) for name in ("model", "framework", "part", "variant", "batch"))


def turns(row: Mapping[str, Any]) -> list[float]:
    """Return the seconds of each turn."""
    return list(row["turns"])


def link_limit(row: Mapping[str, Any], ranks: int, rate: float) -> float | None:
    """Return the seconds in which a ring sends the gradients over a link.

    Args:
        row: the row of a variant.
        ranks: the number of ranks.
        rate: the rate of the link, in bytes per second.

    Returns:
        None for a variant without a reduction, or with a wire format of unknown size.
    """
    share = SHARE_OF_FLOAT32.get(row["wire"])
    return None if share is None else bus_factor(ranks) * row["bytes"] * share / rate


def columns(rows: Sequence[Mapping[str, Any]], rate: float | None) -> list[dict[str, Any]]:
    """Return the columns of the rows of one model, for `--csv`. Times are in milliseconds.

    Args:
        rows: the rows of all variants.
        rate: of the link, in bytes per second; None if unknown.
    """
    by_name = {row["variant"]: row for row in rows}
    found = []
    for row in rows:
        low, middle, high = quartiles(turns(row))
        limit = None if rate is None else link_limit(row, row["ranks"], rate)
        exposed = efficiency = None
        if row["wire"] and ALONE in by_name:
            exposed = statistics.median(_differences(row, by_name[ALONE])) * 1e3
        if row["variant"] != SINGLE and SINGLE in by_name:
            efficiency = ratios(turns(by_name[SINGLE]), turns(row))[1]
        found.append(
            {
                "model": row["model"],
                "variant": row["variant"],
                "median_ms": middle * 1e3,
                "lower_ms": low * 1e3,
                "upper_ms": high * 1e3,
                "exposed_ms": exposed,
                "samples_per_second": row["samples"] / middle,
                "efficiency": efficiency,
                "cpu_ms": statistics.median(row["cpu"]) * 1e3,
                "idle_share": row["idle"],
                "peak_mb": None if row["peak"] is None else row["peak"] / 1e6,
                "limit_ms": None if limit is None else limit * 1e3,
                "median_per_limit": None if limit is None else middle / limit,
                "turns": len(row["turns"]),
            }
        )
    return found


def _differences(row: Mapping[str, Any], alone: Mapping[str, Any]) -> list[float]:
    return [a - b for a, b in zip(turns(row), turns(alone), strict=False)]


def show(rows: Sequence[Mapping[str, Any]], rate: float | None, what: str) -> None:
    """Print the times of one model, and the ratios of the pairs.

    Args:
        rows: the rows of all variants.
        rate: of the link, in bytes per second; None if unknown.
        what: the title: the model, its setup, and the part of the step that was measured.
    """
    headings = ["variant", "median ms", "quartiles", "exposed ms", "samples/s", "efficiency"]
    headings += ["CPU ms", "idle CPU", "peak MB"]
    if rate is not None:
        headings += ["limit ms", "/ limit"]
    table = new_table(what, headings)
    for values in columns(rows, rate):
        cells = [
            f"{values['median_ms']:.1f}",
            f"{values['lower_ms']:.1f} - {values['upper_ms']:.1f}",
            _optional(values["exposed_ms"], ".1f"),
            f"{values['samples_per_second']:.1f}",
            _optional(values["efficiency"], ".0%"),
            f"{values['cpu_ms']:.1f}",
            f"{values['idle_share']:.0%}",
            _optional(values["peak_mb"], ".0f"),
        ]
        if rate is not None:
            cells += [_optional(values["limit_ms"], ".1f")]
            cells += [_optional(values["median_per_limit"], ".2f")]
        table.add_row(values["variant"], *cells)
    wide_console().print(table)
    _show_pairs(rows)


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _show_pairs(rows: Sequence[Mapping[str, Any]]) -> None:
    by_variant = {
        Variant(row["framework"], row["optimizer"], row["controller"], row["wire"]): row
        for row in rows
    }
    title = "Ratio of the steps of two variants in the same turn"
    table = new_table(title, ("pair", "median ratio", "quartiles"))
    for first, second in pairs(list(by_variant)):
        low, middle, high = ratios(turns(by_variant[first]), turns(by_variant[second]))
        name = f"{first.name} / {second.name}"
        table.add_row(name, f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
    if table.row_count:
        wide_console().print(table)


def advice(rows: Sequence[Mapping[str, Any]], conditions: Mapping[str, Any]) -> list[str]:
    """Return sentences that say how to read the tables."""
    row, ranks = rows[0], conditions["ranks"]
    lines = [
        f"{row['parameters']} parameter tensors, {row['bytes'] / 1e6:.1f} MB of float32; "
        f"{len(row['turns'])} turns; {conditions['cores']} cores here.",
        f"exposed: the step minus that of {ALONE} in the same turn. efficiency: the step of one "
        f"rank ({SINGLE}) divided by this step, in the same turn; 100 % is perfect.",
        "CPU: of all ranks and threads. idle CPU: the part of one core that all ranks use "
        "together while the job does nothing. peak: of the rank with the most resident memory.",
    ]
    if conditions.get("link") is not None:
        lines.append(
            f"limit: the time in which a ring sends the gradients over a link of "
            f"{conditions['link']}: 2(n-1)/n = {bus_factor(ranks):g} times their bytes. "
            f"/ limit: median / limit. With several ranks per host, hvdkit sends less."
        )
    return lines
