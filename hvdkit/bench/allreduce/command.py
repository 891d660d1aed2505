"""`hvdkit bench allreduce`: parse the arguments, measure all cases in turns, show the results."""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hvdkit.bench import arguments, comparison, link, places, plot, software
from hvdkit.bench.allreduce import table, variants
from hvdkit.bench.allreduce.cases import DTYPES, OPS, WIRES, Case, bus_factor, cases, parse_names
from hvdkit.bench.allreduce.variants import Variant
from hvdkit.bench.benchmark import Benchmark
from hvdkit.bench.figures import wide_console
from hvdkit.bench.jobs import Job
from hvdkit.bench.results import Results
from hvdkit.bench.sizes import parse_sizes, show_size
from hvdkit.bench.turns import in_turns
from hvdkit.console.flags import add_options
from hvdkit.errors import HvdkitError, UsageError

HELP = "measure time and bandwidth of allreduces, of hvdkit and of other libraries in turns"
EXAMPLE = """\
  hvdkit bench allreduce -np 2
  hvdkit bench allreduce -np 8 -H host1:4,host2:4 --sizes 1KiB..1GiBx4 --json cluster.json
  hvdkit bench allreduce -np 2 --dtypes float32,float16 --ops sum,max --sizes 4MB,25MB
  hvdkit bench allreduce -np 2 --wires none,fp16,int8 --two-hosts 1Gbit/s  # needs root
  hvdkit bench allreduce -np 2 --stock stock/ --variants 'hvdkit-*,stock-*,torch-gloo'"""

_SIZES = "1KiB..16MiBx4"
_TURNS = 5
# The shortest duration of a turn: fast calls are repeated, to have enough for a percentile.
_TURN_SECONDS = 0.05
_FEWEST_CALLS, _MOST_CALLS = 2, 100
_WARM_CALLS = 3
# The memory of a rank, in buffers: the source, the buffer, and copies that the library makes.
_BUFFERS = 4.0


_OPTIONS = f"""
--sizes SIZES             sizes of the buffer: 4MB,25MB or 1KiB..1GiB (each twice the one before) or
                          1KiB..1GiBx4 (four times); KB = 1000, KiB = K = 1024
                          (default: %(default)s)
--dtypes NAMES            some of {", ".join(DTYPES)} (default: %(default)s)
--ops NAMES               some of {", ".join(OPS)} (default: sum)
--wires NAMES             wire formats, for sums and averages of float32 and float64: some of
                          {", ".join(WIRES)} (default: none, the buffer's own dtype)
--calls N                 allreduces in a turn (default: as many as take 50 ms, at least 2, at most
                          100)
--engine NAME=DIR...      also measure hvdkit on the engine in DIR, as NAME-gloo and NAME-mpi
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit bench allreduce`."""
    add_options(verb, _OPTIONS, sizes=_SIZES, dtypes="float32", ops="sum", wires="none")
    arguments.add_arguments(
        verb,
        "hvdkit-gloo, torch-gloo, mpi4py, mpi4py-ring, and stock-gloo with --stock; there are also "
        "hvdkit-mpi, flat-gloo (HVDKIT_COLLECTIVES=flat), engine-gloo (Horovod's calls on the "
        "installed engine), and each over mpi",
        _TURNS,
    )


def run(options: argparse.Namespace) -> int:
    """Run `hvdkit bench allreduce`. Returns the exit status.

    Raises:
        HvdkitError: an argument is wrong, a rank failed, or a result was wrong.
    """
    planned = list(
        cases(
            parse_sizes(options.sizes),
            parse_names(options.dtypes, list(DTYPES), "--dtypes"),
            parse_names(options.ops, OPS, "--ops"),
            parse_names(options.wires, WIRES, "--wires"),
        )
    )
    if not planned:
        raise UsageError(
            f"--dtypes {options.dtypes} --ops {options.ops} --wires {options.wires} leave nothing "
            f"to measure: averages and wire formats need floating-point numbers, and a wire format "
            f"needs a sum or an average"
        )
    if options.calls is not None and options.calls < 1:
        raise UsageError(f"--calls is {options.calls}: expected at least 1")
    arguments.check(options)
    before = comparison.earlier(options.compare, "allreduce", table.key, table.turn_medians)
    engines = _engines(options)
    folders = arguments.engine_folders(options) | engines
    found = software.Software("torch", folders, options.mpirun)
    with places.opened(options, found.mpirun) as place:
        results = _Benchmark(options, found, list(engines), place, planned).run()
    table.show_summary(results, wide_console())
    for text in table.advice(results):
        print(f"# {text}")
    if before is not None:
        changes = comparison.compare(before, results, table.key, table.turn_medians)
        comparison.show(before, results, changes, wide_console())
    if options.plot is not None:
        _plot(results, options.plot)
    wrong = [row for row in results.rows if row["wrong"]]
    if wrong:
        names = ", ".join(" ".join(table.key(row)) for row in wrong[:5])
        raise HvdkitError(
            f"{len(wrong)} results are wrong (column #wrong), such as {names}. Do not train with "
            f"these variants here; report this with the output of `hvdkit doctor`"
        )
    return 0


class _Benchmark(Benchmark[Variant]):
    """A run of the benchmark."""

    def __init__(
        self,
        options: argparse.Namespace,
        found: software.Software,
        engines: Sequence[str],
        place: places.Place,
        planned: Sequence[Case],
    ) -> None:
        rate = None if place.link_rate is None else link.show_rate(place.link_rate)
        known = variants.known(engines)
        super().__init__("allreduce", options, found, place, known, variants.by_default, link=rate)
        self._cases = [case for case in planned if self._variants_of(case)]
        if not self._cases:
            raise UsageError("none of the variants can reduce these dtypes and wire formats")
        self._check_memory(psutil.virtual_memory().available, "this machine")
        self.results.expected = sum(len(self._variants_of(case)) for case in self._cases)

    def measure(self) -> None:
        """Measure all cases. Print a line for each result."""
        module = "hvdkit.bench.allreduce.rank"
        plans = [self.plan(v, module, {"variant": dataclasses.astuple(v)}) for v in self.variants]
        with self.started(plans) as jobs:
            self.check(jobs)
            place, turns = self.place.describe(), self.options.turns
            print(
                f"# hvdkit bench allreduce: {place}, {turns} turn{'s' * (turns > 1)}\n#", flush=True
            )
            print(table.header(), flush=True)
            for case in self._cases:
                names = [variant.name for variant in self._variants_of(case)]
                self._measure(case, [job for job in jobs if job.name in names])
            for job in jobs:
                job.finish()

    def _variants_of(self, case: Case) -> list[Variant]:
        found = []
        for variant in self.variants:
            engine = self.software.engine(variant.needs)
            if variant.supports(case, has_bfloat16=engine is not None and engine.ours):
                found.append(variant)
        return found

    def check(self, started: Sequence[Job]) -> None:
        """Check the memory of all hosts of the last job that has started."""
        if started:
            least = min(started[-1].facts, key=lambda fact: fact["available"])
            self._check_memory(least["available"], least["host"])

    def _check_memory(self, available: int, where: str) -> None:
        largest = max(self._cases, key=lambda case: case.nbytes)
        ranks = len(self._variants_of(largest)) * self.place.most_ranks_per_machine
        needed = ranks * _BUFFERS * largest.nbytes
        if needed > available:
            raise UsageError(
                f"--sizes has {show_size(largest.nbytes)}, which needs about {needed / 1e9:.1f} GB "
                f"of memory for {ranks} ranks of all variants on {where}, and "
                f"{available / 1e9:.1f} GB are available. Give smaller --sizes or fewer --variants"
            )

    def _measure(self, case: Case, jobs: Sequence[Job]) -> None:
        """Measure one case with all its variants."""
        calls: dict[str, int] = {}
        wrong: dict[str, int] = {}
        times: dict[str, list[list[float]]] = {job.name: [] for job in jobs}
        for job in jobs:
            with job.turn():
                job.ask("allocate", case=dataclasses.asdict(case))
                warm = _slowest(job.ask("call", count=_WARM_CALLS))
                calls[job.name] = self.options.calls or _count(warm[-1])
                wrong[job.name] = _wrong(job)

        def work(job: Job) -> list[float]:
            return _slowest(job.ask("call", count=calls[job.name]))

        for _, job, seconds in in_turns(jobs, self.options.turns, work):
            times[job.name].append(seconds)
        for job in jobs:
            with job.turn():
                wrong[job.name] += _wrong(job)
                job.ask("free")
            row = {
                "variant": job.name,
                "dtype": case.dtype,
                "op": case.op,
                "wire": case.wire,
                "bytes": case.nbytes,
                "turns": times[job.name],
                "wrong": wrong[job.name],
            }
            self.results.rows.append(row)
            self.results.done += 1
            print(table.line(row, self.place.size), flush=True)
        self.save()

    def columns(self) -> list[dict[str, Any]]:
        """Return the rows of the table."""
        return [table.columns(row, self.place.size) for row in self.results.rows]


def _engines(options: argparse.Namespace) -> dict[str, Path | None]:
    """Return the folders of the engines of `--engine`, by name.

    Raises:
        UsageError: an argument is not NAME=DIR, or its name is that of another variant.
    """
    found: dict[str, Path | None] = {}
    taken = {variant.library for variant in variants.known(())}
    for text in options.engine:
        name, _, folder = text.partition("=")
        if not name.isidentifier() or not folder or name in taken or name in found:
            raise UsageError(
                f"--engine is {text!r}: expected NAME=DIR, with a new name of letters and digits"
            )
        found[name] = Path(folder)
    return found


def _slowest(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds of the slowest rank, for each call."""
    return [max(call) for call in zip(*(answer["seconds"] for answer in answers), strict=True)]


def _count(seconds: float) -> int:
    """Return the number of calls in a turn."""
    return max(_FEWEST_CALLS, min(_MOST_CALLS, round(_TURN_SECONDS / seconds)))


def _wrong(job: Job) -> int:
    """Return the number of wrong elements on all ranks."""
    return sum(answer["wrong"] for answer in job.ask("check"))


def _plot(results: Results, path: Path) -> None:
    ranks = results.conditions["ranks"]
    series: dict[str, list[tuple[int, float, float]]] = {}
    for row in results.rows:
        name = " ".join(table.key(row)[:-1])
        median = statistics.median(table.turn_medians(row))
        rate = row["bytes"] / median * bus_factor(ranks)
        series.setdefault(name, []).append((row["bytes"], median, rate))
    plot.allreduces(path, f"allreduce: {results.conditions['place']}", series)
