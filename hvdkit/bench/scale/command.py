"""`hvdkit bench scale`: parse the arguments, predict, show the results."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.bench import arguments, plot, results
from hvdkit.bench.allreduce.cases import parse_names
from hvdkit.bench.scale import profile, table
from hvdkit.bench.scale.layers import MODELS
from hvdkit.bench.scale.prediction import FLAT, GROUPINGS, LEVELS, TWO_LEVELS, predict
from hvdkit.bench.sizes import parse_ranks
from hvdkit.bench.step.variants import SHARE_OF_FLOAT32
from hvdkit.console.flags import add_options, flag
from hvdkit.errors import UsageError
from hvdkit.system.plain_files import printable

HELP = "predict the time of a training step on more ranks than there are here"
EXAMPLE = """\
  hvdkit bench scale --ranks 8..1024 --step step.json --allreduce cluster.json
  hvdkit bench scale --ranks 8..1024 --model resnet50 --backward-ms 170 --bandwidth 25Gbit/s \\
      --ranks-per-host 8"""

_RANKS = "8..1024"
_FORMAT = 1


_OPTIONS = f"""
--ranks N                 numbers of ranks: 8..1024 (each twice the one before), 8..512x4 (four
                          times), or 8,24,96 (default: %(default)s)
--ranks-per-host COUNT    ranks of each host (default: those of the file of --step, or 1)
--wires NAMES             wire formats: some of {", ".join(SHARE_OF_FLOAT32)} (default: %(default)s)
--levels NAMES            some of {", ".join(LEVELS)}: how ranks of several hosts reduce: first
                          within each host ({TWO_LEVELS}, as hvdkit on CPUs), or in one ring
                          ({FLAT}) (default: %(default)s)
--buckets {{{",".join(GROUPINGS)}}}  the gradients of one collective. hvdkit: a bucket of hvdkit;
                          fusion: those that are ready, as in Horovod; parameter: one gradient; one:
                          all, after the backward pass (default: %(default)s)
--bucket-mb MB            hvdkit's bucket_bytes (default: hvdkit's)
[step]
--step FILE               a file of `hvdkit bench step --json`, which measured the variant `single`
--model NAME              one of {", ".join(MODELS)}
--backward-ms MS          the time of the backward pass of one rank
--forward-ms MS           the time of the forward pass (default: half of the backward pass)
--update-ms MS            the time of the optimizer (default: 0)
--jitter SHARE            the standard deviation of the passes of a rank, such as 0.02: a step waits
                          for the slowest rank (default: 0)
[network]
--allreduce FILE...       a file of `hvdkit bench allreduce --json`. A run on several hosts gives
                          the link between hosts, and a run on one host gives the link within a
                          host. May be repeated
--bandwidth RATE          the rate of a host's link, such as 25Gbit/s
--latency TIME            the latency of a message between hosts (default:
                          {profile.show_seconds(profile.LATENCY)}, or fitted)
--host-bandwidth RATE     the rate between the ranks of a host, such as 80Gbit/s
--overhead TIME           the time that a collective of any size takes in addition (default: 0, or
                          fitted)
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit bench scale`."""
    types = {"FILE": Path, "COUNT": int, "MB": float, "MS": float, "SHARE": float}
    defaults = {"ranks": _RANKS, "wires": "fp32", "levels": TWO_LEVELS, "buckets": GROUPINGS[0]}
    add_options(verb, _OPTIONS, types, jitter=0.0, **defaults)
    arguments.add_file_arguments(verb, "write the predictions and the assumptions to FILE")


def run(options: argparse.Namespace) -> int:
    """Run `hvdkit bench scale`. Returns the exit status.

    Raises:
        UsageError: an argument is wrong, or a file was written by another command.
    """
    arguments.check_files(options)
    _check(options)
    ranks = parse_ranks(options.ranks)
    wires = parse_names(options.wires, list(SHARE_OF_FLOAT32), "--wires")
    levels = parse_names(options.levels, LEVELS, "--levels")
    found = profile.build(options, ranks)
    ranks_per_host = found.network.ranks_per_host
    texts = list(found.assumptions)
    rows = []
    for level in levels:
        network = found.network.with_levels(level)
        if ranks_per_host > 1:
            texts.append(profile.LEVELS_TEXT[level])
        for wire in wires:
            reduction, of_wire = profile.reduction(options, wire, found.encoding)
            texts += [text for text in of_wire if text not in texts]
            for count in ranks:
                prediction = predict(found.step, network, reduction, count)
                rows.append(table.columns(prediction, ranks_per_host, wire, level))
    each = f"{ranks_per_host} rank{'s' * (ranks_per_host > 1)} per host"
    title = f"{found.model}, predicted with {each}"
    table.show(rows, title)
    print("Assumptions:")
    for text in texts:
        print(printable(f"- {text}"))
    _compare(options, found)
    _write(options, found.model, texts, rows)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check the numbers.

    Raises:
        UsageError: one is out of its range.
    """
    for option in ("backward_ms", "bucket_mb", "ranks_per_host"):
        value = getattr(options, option)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{flag(option)} is {value:g}: expected more than 0")
    for option in ("forward_ms", "update_ms"):
        value = getattr(options, option)
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{flag(option)} is {value:g}: expected 0 or more")
    if not 0 <= options.jitter < 1:
        raise UsageError(f"--jitter is {options.jitter:g}: expected a share below 1, such as 0.02")


def _compare(options: argparse.Namespace, found: profile.Profile) -> None:
    """Predict the steps that the file of `--step` has measured, and print both times."""
    if not found.reduced or options.ranks_per_host not in (None, found.measured_ranks_per_host):
        return
    rows = []
    for each in found.reduced:
        network = found.network.with_levels(FLAT if each.flat else TWO_LEVELS)
        reduction, _ = profile.reduction(options, each.wire, found.encoding)
        predicted = predict(found.step, network, reduction, each.ranks).seconds
        rows.append(((each.variant, str(each.ranks)), predicted * 1e3, each.seconds * 1e3))
    table.show_comparison(f"Steps of {options.step}, in ms", ("variant", "ranks"), rows, ".1f")


def _write(
    options: argparse.Namespace, model: str, texts: Sequence[str], rows: Sequence[dict[str, Any]]
) -> None:
    if options.json is not None:
        content = {
            "format": _FORMAT,
            "benchmark": "scale",
            "hvdkit": hvdkit.__version__,
            "model": model,
            "assumptions": texts,
            "rows": rows,
        }
        results.write(options.json, json.dumps(content) + "\n")
    if options.csv is not None:
        results.write_csv(options.csv, rows)
    if options.plot is not None:
        series: dict[str, list[tuple[int, float, float]]] = {}
        for row in rows:
            point = (row["ranks"], row["efficiency"], row["step_ms"] / 1e3)
            series.setdefault(f"{row['wire']}, {row['levels']}", []).append(point)
        plot.predictions(options.plot, f"{model}: predicted", series)
