"""Print the times of a benchmark."""

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.variants import Benchmark

#: Bytes of each wire format, relative to float32. int8 has a scale of 4 bytes for each 256 numbers.
_SHARE_OF_FLOAT32 = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 260 / 1024}


def console() -> Console:
    """Return a console that is wide enough for the tables."""
    return Console(width=max(Console().width, 100))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def show(benchmark: Benchmark, run: Mapping[str, Any]) -> None:
    """Print the times of one run, and the ratios of the pairs."""
    size, rate = run["size"], run.get("bytes_per_second")
    ring = 2 * (size - 1) / size * run["bytes"]
    where = run["network"]
    table = Table(title=f"{run['model']} over {where}, {size} ranks: {benchmark.step}, ms")
    table.add_column("variant")
    for column in ("median", "quartiles", "CPU", "CPU while idle"):
        table.add_column(column, justify="right")
    if rate:
        table.add_column("ring's limit", justify="right")
        table.add_column("median / limit", justify="right")
    for name, seconds in run["seconds"].items():
        low, middle, high = quartiles(seconds)
        cells = [f"{middle * 1e3:.1f}", f"{low * 1e3:.1f} - {high * 1e3:.1f}"]
        cells.append(f"{statistics.median(run['cpu'][name]) * 1e3:.1f}")
        cells.append(f"{run['idle'][name]:.0%}")
        if rate and name not in benchmark.alone:
            limit = ring / rate * _SHARE_OF_FLOAT32[name.rpartition("-")[2]]
            cells += [f"{limit * 1e3:.1f}", f"{middle / limit:.3f}"]
        table.add_row(name, *cells)
    console().print(table)

    pairs = Table(title="Ratio of the steps of two variants in the same turn")
    pairs.add_column("pair")
    pairs.add_column("median ratio", justify="right")
    pairs.add_column("quartiles", justify="right")
    for first, second in benchmark.pairs:
        if {first, second} <= set(run["seconds"]):
            both = zip(run["seconds"][first], run["seconds"][second], strict=True)
            low, middle, high = quartiles([a / b for a, b in both])
            pairs.add_row(f"{first} / {second}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
    if pairs.row_count:
        console().print(pairs)

    turns = len(next(iter(run["seconds"].values())))
    console().print(
        f"{run['parameters']} parameter tensors, {run['bytes'] / 1e6:.1f} MB of float32; {turns} "
        f"turns; {len(os.sched_getaffinity(0))} cores, load {run['load']:.1f} at the end."
    )
    if rate:
        console().print(
            f"iperf3 between the hosts, both ways at once: {rate * 8 / 1e6:.0f} Mbit/s. In a ring "
            f"each rank sends 2(n-1)/n = {2 * (size - 1) / size:g} times the bytes to its "
            f"neighbour. With ranks in the order of hosts, one neighbour per host and direction is "
            f"on the other host, so the link carries that many bytes."
        )
