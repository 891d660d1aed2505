"""`hvdkit bench step`: parse the arguments, measure the variants in turns, show the results."""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.bench import arguments, comparison, link, places, plot, software
from hvdkit.bench.allreduce.cases import parse_names
from hvdkit.bench.benchmark import Benchmark
from hvdkit.bench.figures import wide_console
from hvdkit.bench.jobs import Job, JobPlan
from hvdkit.bench.results import Results
from hvdkit.bench.step import table, variants
from hvdkit.bench.step.torch_models import MODELS
from hvdkit.bench.step.variants import BEFORE, SINGLE, STRATEGY, TORCH, Variant
from hvdkit.bench.turns import check_memory, in_turns
from hvdkit.console.flags import TYPES, add_options, flag
from hvdkit.errors import HvdkitError, UsageError

HELP = "measure training steps of a model, of hvdkit and of other libraries in turns"
EXAMPLE = """\
  hvdkit bench step -np 2
  hvdkit bench step -np 8 -H host1:4,host2:4 --models resnet50,transformer --json step.json
  hvdkit bench step -np 2 --variants hvdkit-gloo-int8,ddp-gloo-powersgd,alone --two-hosts 1Gbit/s
  hvdkit bench step -np 2 --framework keras --link 10Gbit/s
  hvdkit bench step -np 2 --stock stock/ --part backward"""

_TURNS = 10
_WARM_STEPS = 3
#: The parts of a step that can be measured, and their names in tables.
PARTS = {
    "step": "forward, backward, synchronization and update",
    "backward": "backward and synchronization",
}
_TENSORFLOW_BACKWARD = "forward, backward and synchronization"

#: The largest relative difference between the norms of two variants' gradients. A 16-bit wire
#: format changes the norm much less.
NORM_TOLERANCE = 0.02
# The other wire formats, int8 and PowerSGD, change the norm more than that.
_CHECKED_WIRES = ("fp32", "fp16", "bf16")


_OPTIONS = f"""
--models --model NAMES    some of {", ".join(MODELS)} (default: %(default)s)
--framework {{{",".join(variants.FRAMEWORKS)}}}  tensorflow is a loop with tf.GradientTape; keras is
                          `fit` on TensorFlow (default: %(default)s)
--batch-size N            samples of each rank in a backward pass (default: %(default)s)
--accumulate N            backward passes of a step, which reduces once (default: 1); with torch
--part {{{",".join(PARTS)}}}  the part of a step that is timed: all of it, or only the backward pass
                          and the reduction (tensorflow: with the forward pass)
--link RATE               the rate of the link between hosts, such as 10Gbit/s; with it, the table
                          shows the shortest time that the link permits (default with --two-hosts:
                          the rate that iperf3 measures, or that of --two-hosts if iperf3 is not
                          installed)
--bucket-mb MB            hvdkit's bucket_bytes (default: hvdkit's)
--before DIR              another checkout of hvdkit (`git worktree add DIR COMMIT`), for the
                          variants called before
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit bench step`."""
    defaults = {"framework": TORCH, "batch_size": 1, "accumulate": 1, "part": "step"}
    types = {**TYPES, "MB": float}
    add_options(verb, _OPTIONS, types, models="resnet50", **defaults)
    arguments.add_arguments(
        verb,
        "hvdkit in fp32, fp16 and int8, DDP in fp32 and with its fp16 hook, stock with --stock, "
        "alone (no reduction) and single (one rank)",
        _TURNS,
    )


def run(options: argparse.Namespace) -> int:
    """Run `hvdkit bench step`. Returns the exit status.

    Raises:
        HvdkitError: an argument is wrong, or a rank failed.
    """
    arguments.check(options)
    before = comparison.earlier(options.compare, "step", table.key, table.turns)
    models = parse_names(options.models, list(MODELS), "--models")
    _check(options)
    engine = variants.engine_framework(options.framework)
    found = software.Software(engine, arguments.engine_folders(options), options.mpirun)
    given = None if options.link is None else link.parse_rate(options.link, "--link")
    with places.opened(options, found.mpirun) as place:
        results = _Benchmark(options, found, place, models, given or place.link_rate).run()
    if before is not None:
        changes = comparison.compare(before, results, table.key, table.turns)
        comparison.show(before, results, changes, wide_console())
    if options.plot is not None:
        _plot(results, models, options.plot)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check the arguments of this benchmark.

    Raises:
        UsageError: one is wrong.
    """
    for option in ("batch_size", "accumulate"):
        if (value := getattr(options, option)) < 1:
            raise UsageError(f"{flag(option)} is {value}: expected at least 1")
    if options.accumulate > 1 and options.framework != TORCH:
        raise UsageError("--accumulate needs --framework torch")
    if options.part == "backward" and options.framework == variants.KERAS:
        raise UsageError(
            "--part is backward with --framework keras: expected step, because `fit` makes whole "
            "steps"
        )
    if options.bucket_mb is not None and not 0 < options.bucket_mb < math.inf:
        raise UsageError(f"--bucket-mb is {options.bucket_mb:g}: expected more than 0")
    if options.before is not None and not (options.before / "hvdkit/__init__.py").is_file():
        raise UsageError(f"--before: there is no hvdkit in {options.before}")


class _Benchmark(Benchmark[Variant]):
    """A run of the benchmark."""

    def __init__(
        self,
        options: argparse.Namespace,
        found: software.Software,
        place: places.Place,
        models: Sequence[str],
        rate: float | None,
    ) -> None:
        self._models = models
        self._rate = rate
        shown = None if rate is None else link.show_rate(rate)
        known = variants.known(options.framework)
        super().__init__(
            *("step", options, found, place, known, variants.by_default),
            link=shown,
            link_rate=rate,
        )
        self.results.expected, self.results.unit = options.turns * len(models), "turns"

    def lacks(self, variant: Variant) -> str | None:
        """Return why a variant cannot be measured; None if it can."""
        if variant.optimizer == BEFORE and self.options.before is None:
            return "--before is not given"
        if variant.optimizer == STRATEGY and not self.place.shares_files:
            return "it needs files that all ranks share, and cannot be measured with -H"
        if self.options.accumulate > 1 and variant.optimizer == variants.KERAS_OPTIMIZER:
            return "it has no --accumulate"
        return super().lacks(variant)

    def check(self, started: Sequence[Job]) -> None:
        """Check that there is enough memory for one more job."""
        check_memory(started)

    def measure(self) -> None:
        """Measure all models, and print their tables."""
        for model in self._models:
            self._measure(model)

    def _measure(self, model: str) -> None:
        options = self.options
        plans = [self._plan_of(variant, model) for variant in self.variants]
        with self.started(plans, f"{model}: ") as running:
            norms = {job.name: self._first(job) for job in running}
            if options.accumulate == 1:
                check_consistency({v: norms[v.name] for v in self.variants})
            rows = self._rows(model, running)
            try:
                for turn, job, (seconds, cpu) in in_turns(running, options.turns, self._step):
                    rows[job.name]["turns"].append(seconds)
                    rows[job.name]["cpu"].append(cpu)
                    if min(len(row["turns"]) for row in rows.values()) == turn + 1:
                        self._end_turn(model, turn + 1)
                for job in running:
                    rows[job.name]["peak"] = job.finish()
                self.save()
            finally:
                self._show(list(rows.values()))

    def _first(self, job: Job) -> list[float]:
        """Make the first steps, which are slower. Return the norms of the first gradients."""
        with job.turn():
            norms = [float(answer["norm"]) for answer in job.ask("first")]
            for _ in range(_WARM_STEPS):
                job.ask("step")
        return norms

    def _rows(self, model: str, running: Sequence[Job]) -> dict[str, dict[str, Any]]:
        """Append an empty row for each variant."""
        options = self.options
        rows = {}
        for job, variant in zip(running, self.variants, strict=True):
            rows[job.name] = {
                **dataclasses.asdict(variant),
                "model": model,
                "part": options.part,
                "variant": variant.name,
                "batch": f"{options.batch_size}x{options.accumulate}",
                "ranks": job.plan.size,
                "samples": options.batch_size * options.accumulate * job.plan.size,
                "parameters": job.facts[0]["parameters"],
                "bytes": job.facts[0]["bytes"],
                "idle": job.idle_share(),
                "peak": None,  # known when the ranks end
                "turns": [],
                "cpu": [],
            }
        self.results.rows += rows.values()
        return rows

    def _end_turn(self, model: str, turn: int) -> None:
        self.results.done += 1
        self.save()
        if turn % 5 == 0 or turn == self.options.turns:
            text = f"{model}: turn {turn} of {self.options.turns}"
            print(text, file=sys.stderr, flush=True)

    def _step(self, job: Job) -> tuple[float, float]:
        """Make a step. Return the seconds of the slowest rank, and the CPU seconds of all ranks."""
        answers = job.ask("step")
        return max(float(a["seconds"]) for a in answers), sum(float(a["cpu"]) for a in answers)

    def _show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of one model, also of a run that ends early."""
        complete = min(len(row["turns"]) for row in rows)
        if not complete:
            return
        # A variant may have made a step of a turn that was interrupted.
        same = [
            {**row, "turns": row["turns"][:complete], "cpu": row["cpu"][:complete]} for row in rows
        ]
        part = PARTS[self.options.part]
        if self.options.framework != TORCH and self.options.part == "backward":
            part = _TENSORFLOW_BACKWARD
        row = same[0]
        where = self.place.describe()
        title = f"{row['model']}, {row['framework']}, batch {row['batch']}, {where}: {part}"
        table.show(same, self._rate, title)
        for text in table.advice(same, self.results.conditions):
            wide_console().print(text)

    def columns(self) -> list[dict[str, Any]]:
        """Return the rows of the tables."""
        rows = [row for row in self.results.rows if row["turns"]]
        found = []
        for model in self._models:
            found += table.columns([row for row in rows if row["model"] == model], self._rate)
        return found

    def _plan_of(self, variant: Variant, model: str) -> JobPlan:
        options = self.options
        megabytes = options.bucket_mb
        spec = {
            "model": model,
            "batch": options.batch_size,
            "accumulate": options.accumulate,
            "part": options.part,
            "variant": dataclasses.astuple(variant),
            "bucket_bytes": None if megabytes is None else int(megabytes * 1_000_000),
        }
        module = "torch_rank" if variant.framework == TORCH else "tensorflow_rank"
        further = {"size": 1} if variant.optimizer == SINGLE else {}
        if variant.optimizer == BEFORE:
            further = {"hvdkit": options.before / "hvdkit"}
        return self.plan(variant, f"hvdkit.bench.step.{module}", spec, **further)


def check_consistency(norms: Mapping[Variant, Sequence[float]]) -> None:
    """Check that all variants compute the same reduced gradients.

    Args:
        norms: for each variant, the norm of the first reduced gradients on each rank.

    Raises:
        HvdkitError: they differ.
    """
    known = {
        variant: of_ranks
        for variant, of_ranks in norms.items()
        if variant.wire in _CHECKED_WIRES and not any(map(math.isnan, of_ranks))
    }
    if not known:
        return
    first, of_first = next(iter(known.items()))
    for variant, of_ranks in known.items():
        for rank, norm in enumerate(of_ranks):
            if not math.isclose(norm, of_first[0], rel_tol=NORM_TOLERANCE):
                raise HvdkitError(
                    f"{variant.name} computes other gradients than {first.name}: their norm on "
                    f"rank {rank} is {norm:g}; expected {of_first[0]:g}"
                )


def _plot(results: Results, models: Sequence[str], path: Path) -> None:
    for model in models:
        rows = [row for row in results.rows if row["model"] == model]
        medians = {row["variant"]: statistics.median(row["turns"]) for row in rows}
        name = path if len(models) == 1 else path.with_stem(f"{path.stem}-{model}")
        alone = medians.pop(variants.ALONE, None)
        plot.steps(name, f"{model}: {results.conditions['place']}", medians, alone)
