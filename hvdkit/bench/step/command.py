"""`hvdkit bench step`: parse the arguments, measure the variants in turns, show the results."""

import argparse
import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.bench import arguments, comparison, link, places, plot, software
from hvdkit.bench.allreduce.cases import parse_names
from hvdkit.bench.figures import wide_console
from hvdkit.bench.jobs import Job, JobPlan
from hvdkit.bench.results import Results, conditions, kept_on_failure
from hvdkit.bench.step import probes, table, variants
from hvdkit.bench.step.torch_models import MODELS
from hvdkit.bench.step.variants import BEFORE, FLAT, SINGLE, STRATEGY, TORCH, Variant
from hvdkit.bench.turns import check_memory, in_turns
from hvdkit.console.flags import TYPES, add_options, flag
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.system.owned_folders import TemporaryFolder

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
--probe {{{",".join(probes.PROBES)}}}  measure instead, with torch on this machine: the cost of
                          synchronizing {probes.PARAMETERS} small parameters, the memory that
                          synchronization adds, or the time of hvdkit's checks of values
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
        benchmark = _Benchmark(options, found, place, models, given or place.link_rate)
        if options.probe is not None:
            benchmark.probe()
            return 0
        results = benchmark.run()
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
    cluster = options.two_hosts or options.hosts or options.hostfile
    if options.probe is not None and (options.framework != TORCH or cluster):
        raise UsageError("--probe needs --framework torch, and runs on this machine only")
    for name in ("json", "csv", "plot", "compare"):
        if options.probe is not None and getattr(options, name) is not None:
            raise UsageError(f"--probe prints its figures only: remove --{name}")


class _Benchmark:
    """A run of the benchmark."""

    def __init__(
        self,
        options: argparse.Namespace,
        found: software.Software,
        place: places.Place,
        models: Sequence[str],
        rate: float | None,
    ) -> None:
        self._options = options
        self._place = place
        self._models = models
        self._rate = rate
        self._software = found
        self._variants, left_out = software.choose(
            variants.known(options.framework),
            options.variants,
            lambda v: variants.by_default(v) and (v.optimizer != "stock" or options.stock),
            self._lacks,
        )
        for text in left_out:
            print(f"# {text}", flush=True)
        self._results = Results(
            "step",
            conditions(
                place=place.describe(),
                ranks=place.size,
                ranks_per_host=place.ranks_per_host,
                engines={n: e.version for n, e in sorted(self._software.engines.items())},
                link=None if rate is None else link.show_rate(rate),
                link_rate=rate,
            ),
            expected=options.turns * len(models),
            unit="turns",
        )

    def _lacks(self, variant: Variant) -> str | None:
        if variant.optimizer == BEFORE and self._options.before is None:
            return "--before is not given"
        if variant.optimizer == STRATEGY and not self._place.shares_files:
            return "it needs files that all ranks share, and cannot be measured with -H"
        if self._options.accumulate > 1 and variant.optimizer == variants.KERAS_OPTIMIZER:
            return "it has no --accumulate"
        return self._software.lacks(variant.needs, self._place.controllers)

    def run(self) -> Results:
        """Measure all models, and print their tables."""
        with kept_on_failure(self._results, self._options, self._save):
            for model in self._models:
                self._measure(model)
        self._results.complete = True
        self._save()
        return self._results

    def _measure(self, model: str) -> None:
        options = self._options
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryFolder("hvdkit-bench-")))
            running: list[Job] = []
            for variant in self._variants:
                print(f"{model}: starting {variant.name}", file=sys.stderr, flush=True)
                check_memory(running)
                job = Job(self._plan(variant, model), self._place, folder)
                stack.callback(job.close)
                job.start()
                running.append(job)
                if not options.keep_running:
                    job.pause()
            norms = {job.name: self._first(job) for job in running}
            if options.accumulate == 1:
                check_consistency({v: norms[v.name] for v in self._variants})
            rows = self._rows(model, running)
            stack.callback(self._show, list(rows.values()))
            turns = in_turns(running, options.turns, self._step, options.keep_running)
            for turn, job, (seconds, cpu) in turns:
                rows[job.name]["turns"].append(seconds)
                rows[job.name]["cpu"].append(cpu)
                if min(len(row["turns"]) for row in rows.values()) == turn + 1:
                    self._end_turn(model, turn + 1)
            for job in running:
                job.finish()
                rows[job.name]["peak"] = job.peak
            self._save()

    def _first(self, job: Job) -> list[float]:
        """Make the first steps, which are slower. Return the norms of the first gradients."""
        if not self._options.keep_running:
            job.resume()
        norms = [float(answer["norm"]) for answer in job.ask("first")]
        for _ in range(_WARM_STEPS):
            job.ask("step")
        if not self._options.keep_running:
            job.pause()
        return norms

    def _rows(self, model: str, running: Sequence[Job]) -> dict[str, dict[str, Any]]:
        """Append an empty row for each variant."""
        options = self._options
        rows = {}
        for job, variant in zip(running, self._variants, strict=True):
            samples = options.batch_size * options.accumulate * job.plan.size
            idle = job.idle_share()
            if not options.keep_running:
                job.pause()
            rows[job.name] = {
                **dataclasses.asdict(variant),
                "model": model,
                "part": options.part,
                "variant": variant.name,
                "batch": f"{options.batch_size}x{options.accumulate}",
                "ranks": job.plan.size,
                "samples": samples,
                "parameters": job.facts[0]["parameters"],
                "bytes": job.facts[0]["bytes"],
                "idle": idle,
                "peak": None,  # known when the ranks end
                "turns": [],
                "cpu": [],
            }
        self._results.rows += rows.values()
        return rows

    def _end_turn(self, model: str, turn: int) -> None:
        self._results.done += 1
        self._save()
        if turn % 5 == 0 or turn == self._options.turns:
            text = f"{model}: turn {turn} of {self._options.turns}"
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
        part = PARTS[self._options.part]
        if self._options.framework != TORCH and self._options.part == "backward":
            part = _TENSORFLOW_BACKWARD
        row = same[0]
        where = self._place.describe()
        title = f"{row['model']}, {row['framework']}, batch {row['batch']}, {where}: {part}"
        table.show(same, self._rate, title)
        for text in table.advice(same, self._results.conditions):
            wide_console().print(text)

    def _save(self) -> None:
        self._results.save(self._options, self._columns)

    def _columns(self) -> list[dict[str, Any]]:
        rows = [row for row in self._results.rows if row["turns"]]
        found = []
        for model in self._models:
            found += table.columns([row for row in rows if row["model"] == model], self._rate)
        return found

    def _plan(self, variant: Variant, model: str) -> JobPlan:
        options = self._options
        spec = {
            "model": model,
            "batch": options.batch_size,
            "accumulate": options.accumulate,
            "part": options.part,
        }
        module = "torch_rank" if variant.framework == TORCH else "tensorflow_rank"
        size = 1 if variant.optimizer == SINGLE else self._place.size
        return self._job_plan(variant, f"hvdkit.bench.step.{module}", size, spec)

    def _job_plan(
        self, variant: Variant, module: str, size: int, spec: Mapping[str, Any]
    ) -> JobPlan:
        megabytes = self._options.bucket_mb
        further = {
            "variant": dataclasses.astuple(variant),
            "bucket_bytes": None if megabytes is None else int(megabytes * 1_000_000),
        }
        before = self._options.before
        return JobPlan(
            name=variant.name,
            module=module,
            controller=variant.needs.controller,
            size=size,
            spec={**spec, **further},
            engine=self._software.engine(variant.needs),
            hvdkit=before / "hvdkit" if variant.optimizer == BEFORE else None,
            env={"HVDKIT_COLLECTIVES": "flat"} if variant.optimizer == FLAT else {},
        )

    def probe(self) -> None:
        """Run the probe of each variant, each in a job of its own, and print the answers."""
        probe: str = self._options.probe
        answers: dict[str, Any] = {}
        for variant in self._variants:
            if not variant.reduces or variant.controller != "gloo":
                continue
            if probe == "checks" and variant.optimizer not in variants.HVDKIT:
                continue
            for size in probes.sizes(probe):
                print(f"{probe}: {variant.name}, ranks: {size}", file=sys.stderr, flush=True)
                plan = self._job_plan(
                    variant, "hvdkit.bench.step.probes", size, {"steps": probes.STEPS}
                )
                if probe == "memory":
                    plan = dataclasses.replace(plan, env={**plan.env, **probes.MEMORY_ENVIRONMENT})
                answers[f"{variant.name}, {size}"] = self._answer(plan, probe)
        probes.show(probe, answers, wide_console())

    def _answer(self, plan: JobPlan, probe: str) -> dict[str, Any]:
        """Return the answer with the highest cost: in training, all ranks wait for the slowest."""
        with TemporaryFolder("hvdkit-bench-") as folder:
            job = Job(plan, self._place, Path(folder))
            try:
                job.start()
                found = max(job.ask(probe), key=lambda answer: float(answer["cost"]))
                job.finish()
            finally:
                job.close()
        return found


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
        plot.bars(name, f"{model}: {results.conditions['place']}", medians, alone)
