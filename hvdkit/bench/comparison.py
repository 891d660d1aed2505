"""Compare two runs of a benchmark, and mark only what has changed beyond the noise of both.

The noise of a result is the range of its turns, without the lowest and the highest tenth. A result
is marked if the ranges of both runs do not overlap. If nothing has changed, and both runs have the
same noise, this happens by chance in fewer than 1 of 100 results with 5 turns each: in 2 of the 252
ways to divide 10 turns. Noise that lasts as long as a whole run cannot be seen by this rule.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.bench import results
from hvdkit.bench.figures import new_table, spread
from hvdkit.bench.results import Results
from hvdkit.console.tables import Console

#: With fewer turns, ranges that do not overlap are often chance.
FEWEST_TURNS = 4

#: Conditions that explain a change, if they differ.
_COMPARED = ("place", "ranks", "cores", "processor", "engines", "versions", "link")

RULE = (
    "Rule: a result has changed if the ranges of the turns of both runs do not overlap. Of 10 or "
    f"more turns, the lowest and the highest tenth do not count. Each needs {FEWEST_TURNS} turns."
)


_Key = Callable[[Mapping[str, Any]], tuple[str, ...]]
_Turns = Callable[[Mapping[str, Any]], Sequence[float]]


@dataclass(frozen=True)
class Change:
    """One result in both runs.

    Attributes:
        key: what identifies the result.
        before: the median of the earlier run, in seconds.
        now: the median of this run, in seconds.
        mark: `faster`, `slower` or empty.
    """

    key: tuple[str, ...]
    before: float
    now: float
    mark: str


def earlier(path: Path | None, benchmark: str, key: _Key, turns: _Turns) -> Results | None:
    """Return the results of `--compare`, whose rows can be compared; None without a file.

    Args:
        path: the file.
        benchmark: the expected benchmark.
        key: see `compare`.
        turns: see `compare`.

    Raises:
        UsageError: the file is damaged, or another command has written it.
    """
    if path is None:
        return None
    found = results.load(path, benchmark, "--compare")
    with results.damaged(path, "--compare"):
        found.conditions.get("date")
        for row in found.rows:
            name, times = " ".join(key(row)), turns(row)
            if not (times and all(0 < seconds < math.inf for seconds in times)):
                raise ValueError(f"{name}: the times are {times}")
    return found


def compare(before: Results, now: Results, key: _Key, turns: _Turns) -> list[Change]:
    """Return the results that both runs have.

    Args:
        before: the earlier run.
        now: this run.
        key: returns what identifies a row.
        turns: returns the seconds of a row, for each turn.
    """
    earlier = {key(row): turns(row) for row in before.rows}
    return [
        _change(key(row), earlier[key(row)], turns(row)) for row in now.rows if key(row) in earlier
    ]


def _change(key: tuple[str, ...], before: Sequence[float], now: Sequence[float]) -> Change:
    mark = ""
    if min(len(before), len(now)) >= FEWEST_TURNS:
        (low, high), (new_low, new_high) = spread(before), spread(now)
        mark = "slower" if new_low > high else "faster" if new_high < low else ""
    return Change(key, statistics.median(before), statistics.median(now), mark)


def show(before: Results, now: Results, changes: Sequence[Change], console: Console) -> None:
    """Print the changes that are marked, and the conditions that differ."""
    marked = [change for change in changes if change.mark]
    console.print(
        f"Compared with the run of {before.conditions.get('date')}: {len(marked)} of "
        f"{len(changes)} results changed beyond the noise."
    )
    for name in _COMPARED:
        old, new = before.conditions.get(name), now.conditions.get(name)
        if old != new and (old or name != "processor"):  # older files have no processor
            console.print(f"Different conditions: {name} was {old}, and is {new}.")
    if not before.complete:
        console.print("The earlier run ended early, and has only a part of its results.")
    if marked:
        table = new_table("", ("result", "before, us", "now, us", "now / before", ""))
        for change in marked:
            cells = [f"{seconds * 1e6:.1f}" for seconds in (change.before, change.now)]
            ratio = f"{change.now / change.before:.2f}"
            table.add_row(" ".join(change.key), *cells, ratio, change.mark)
        console.print(table)
    console.print(RULE)
