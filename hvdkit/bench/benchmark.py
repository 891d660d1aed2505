"""A run of a benchmark: its variants, their jobs, and the results that it keeps."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

from hvdkit.bench import software
from hvdkit.bench.jobs import Job, JobPlan
from hvdkit.bench.places import Place
from hvdkit.bench.results import Results, conditions, kept_on_failure
from hvdkit.bench.software import FLAT, STOCK, AnyVariant, Software
from hvdkit.system.owned_folders import TemporaryFolder


class Benchmark(Generic[AnyVariant]):
    """Choose the variants, measure, and keep the results in the files of the command line.

    Subclasses define `measure` and `columns`.

    Args:
        name: `allreduce` or `step`.
        options: see `hvdkit.bench.arguments`.
        found: the engines of this machine.
        place: where the ranks run.
        known: all variants.
        by_default: returns whether a variant is measured if `--variants` is not given.
        further: further conditions of the results.

    Attributes:
        variants: the chosen variants.
        results: the results.

    Raises:
        UsageError: a variant that was named cannot be measured, or none can.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        found: Software,
        place: Place,
        known: Sequence[AnyVariant],
        by_default: Callable[[AnyVariant], bool],
        **further: Any,
    ) -> None:
        self.options, self.place, self.software = options, place, found
        self.variants, left_out = software.choose(
            known,
            options.variants,
            lambda each: by_default(each) and (each.needs.engine != STOCK or bool(options.stock)),
            self.lacks,
        )
        for text in left_out:
            print(f"# {text}", flush=True)
        here = conditions(
            place=place.describe(),
            ranks=place.size,
            ranks_per_host=place.ranks_per_host,
            engines={n: e.version for n, e in sorted(found.engines.items())},
            **further,
        )
        self.results = Results(name, here)

    def lacks(self, variant: AnyVariant) -> str | None:
        """Return why a variant cannot be measured; None if it can."""
        return self.software.lacks(variant.needs, self.place.controllers)

    def run(self) -> Results:
        """Measure, and save the results, also if the run fails or is interrupted."""
        with kept_on_failure(self.results, self.options, self.save):
            self.measure()
        self.results.complete = True
        self.save()
        return self.results

    def measure(self) -> None:
        """Measure all variants, and print the results."""
        raise NotImplementedError

    def columns(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the table, for `--csv`."""
        raise NotImplementedError

    def save(self) -> None:
        """Write the files of `--json` and `--csv`."""
        self.results.save(self.options, self.columns)

    @contextlib.contextmanager
    def started(self, plans: Sequence[JobPlan], title: str = "") -> Iterator[list[Job]]:
        """Start jobs, which end with the context.

        Args:
            plans: the programs of the jobs.
            title: the beginning of the lines about the starts.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryFolder("hvdkit-bench-")))
            jobs: list[Job] = []
            for plan in plans:
                print(f"{title}starting {plan.name}", file=sys.stderr, flush=True)
                job = Job(plan, self.place, folder)
                stack.callback(job.close)
                self.check(jobs)
                job.start()
                jobs.append(job)
            yield jobs

    def check(self, started: Sequence[Job]) -> None:
        """Check the memory before the start of a further job."""

    def plan(
        self, variant: AnyVariant, module: str, spec: Mapping[str, Any], **further: Any
    ) -> JobPlan:
        """Return the program of a variant's job; see `JobPlan`."""
        settings = {"size": self.place.size, **further}
        return JobPlan(
            name=variant.name,
            module=module,
            controller=variant.needs.controller,
            spec=spec,
            engine=self.software.engine(variant.needs),
            env={"HVDKIT_COLLECTIVES": "flat"} if variant.name.startswith(f"{FLAT}-") else {},
            **settings,
        )
