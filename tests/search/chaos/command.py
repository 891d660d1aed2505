"""Disturb training jobs at random moments, and compare them with jobs that nothing disturbs.

    scripts/chaos --minutes 60
    scripts/chaos --faults 25 --only "SIGKILL of all ranks" --framework torch --ranks 4
    scripts/chaos --jobs 1 --seed 17 --verbose    # the same choices as in the first job of a run

Each job of `hvdkit run` gets faults until it ends, in bursts of one to six: a rank, an agent or
the launcher is killed or stopped, a host reboots, a link is down, a disk is full, and so on. The
faults of a burst overlap: the next one comes after up to `--gap` seconds, or during the restart.
After each burst the job must train again within a minute (longer on a slow machine), by itself or
with the same command. The launcher must have named a rank or host at fault, and no other rank as
killed. At the end the weights must be those of an undisturbed job, and nothing may be left over.
Several hosts need root.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdkit.bench import namespaces
from tests.hosts import ssh_servers
from tests.search.chaos.settings import PROGRAMS, STARTS, Limits
from tests.search.chaos.trial import ALL, Event, References, Result, Trial
from tests.search.chaos.world import world

#: Of the launcher's output in a line of `--json`.
_SHOWN_BYTES = 2000


def main() -> int:
    """Run the command. Returns 1 after a problem."""
    args = _arguments()
    # The world is removed on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = args.seed if args.seed is not None else random.randrange(1 << 31)
    several = namespaces.missing() or ssh_servers.missing()
    most_hosts = 1 if several else max(args.hosts, default=4)
    if several and max(args.hosts, default=1) > 1:
        raise SystemExit(f"chaos: {several}")
    if args.store == ["s3"]:
        # The server of these tests listens on this machine's loopback interface.
        if max(args.hosts, default=1) > 1:
            raise SystemExit("chaos: --store s3 is for one host; use --checkpoints for several")
        args.hosts = [1]
    limits = Limits(
        tuple(args.framework),
        tuple(args.controller),
        tuple(args.hosts) or tuple(range(1, most_hosts + 1)),
        ("elsewhere",) if args.checkpoints else tuple(args.store),
        args.ranks,
        shutil.which("cc") is not None,
        tuple(args.start),
        args.passes,
    )
    print(f"--seed {seed}{f'; one host only: {several}' if several else ''}", flush=True)
    deadline = time.monotonic() + 60 * (args.minutes or float("inf"))
    results: list[Result] = []
    with world(most_hosts, "s3" in (args.store or ["s3"])) as made:
        made.elsewhere = args.checkpoints
        references = References(made)
        number = 0
        while (
            time.monotonic() < deadline
            and (left := (args.faults or float("inf")) - _count(results)) > 0
            and number < (args.jobs or float("inf"))
        ):
            # Each job has a seed of its own, so that it can be repeated alone.
            draw = random.Random(seed + number)
            setting = limits.draw(draw)
            gap = None if args.gap < 0 else args.gap
            about = {"seed": seed + number, "setting": str(setting)}
            record = functools.partial(_write_event, args.json, about)
            trial = Trial(setting, left, made, references, draw, args.only, gap, record)
            result = trial.run()
            results.append(result)
            _show(result, seed + number, args.verbose)
            end = {"faults": len(result.events), "problems": result.problems}
            _write(args.json, about | end)
            if args.keep and result.problems:
                shutil.copytree(
                    trial.job.folder, args.keep / str(seed + number), symlinks=True,
                    dirs_exist_ok=True,
                )  # fmt: skip
            number += 1
    print(f"\n{table(results)}\n")
    problems = [problem for result in results for problem in result.problems]
    print(f"{_count(results)} faults in {len(results)} jobs, {len(problems)} problems")
    return int(bool(problems))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="start no job after this time")
    parser.add_argument("--faults", type=int, help="start no job after this number of faults")
    parser.add_argument("--jobs", type=int, help="start no job after this number of jobs")
    parser.add_argument("--seed", type=int, help="of the random choices (default: a new one)")
    parser.add_argument("--only", action="append", default=[], choices=[k.name for k in ALL])
    parser.add_argument("--framework", action="append", default=[], choices=PROGRAMS)
    parser.add_argument("--controller", action="append", default=[], choices=["gloo", "mpi"])
    parser.add_argument("--hosts", action="append", default=[], type=int, metavar="N")
    parser.add_argument("--store", action="append", default=[], choices=["folder", "s3"])
    parser.add_argument("--checkpoints", metavar="PLACE", help="a folder or URL; empty there")
    parser.add_argument("--ranks", type=int, default=2, help="of a job on one host (default 2)")
    parser.add_argument("--start", action="append", default=[], choices=STARTS)
    parser.add_argument("--passes", type=int, default=150, help="of a job (default 150)")
    parser.add_argument(
        "--gap",
        type=float,
        default=1.5,
        metavar="S",
        help="the longest time between the faults of a burst; -1: no bursts (default 1.5)",
    )
    parser.add_argument("--json", type=Path, help="append a line for each fault and each job")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy jobs with problems there")
    parser.add_argument("--verbose", action="store_true", help="show what the launcher says")
    args = parser.parse_args()
    if not args.minutes and not args.faults and not args.jobs:
        args.jobs = 1
    return args


def _count(results: Sequence[Result]) -> int:
    return sum(len(result.events) for result in results)


def _show(result: Result, seed: int, verbose: bool) -> None:
    print(f"{result.setting} (--seed {seed})")
    shown = 0
    for event in result.events:
        named = {True: ", named", False: ", NOT NAMED", None: ""}[event.named]
        when = f"{event.burst}: {event.fault}, {event.moment}"
        print(f"  {when}: {event.outcome}, {event.seconds:.1f} s{named}")
        if verbose and event.burst > shown:
            print("".join(f"      {line}\n" for line in event.text.splitlines()), end="")
        shown = event.burst
    for problem in result.problems:
        print(f"  PROBLEM {problem}")
    sys.stdout.flush()


def table(results: Sequence[Result]) -> str:
    """Return a table of faults: how often, what they led to, and how long it took."""
    events = [event for result in results for event in result.events]
    outcomes = sorted({event.outcome for event in events})
    lines = [f"| fault | count | {' | '.join(outcomes)} | named | seconds (median, longest) |"]
    lines.append("|---" * (len(outcomes) + 4) + "|")
    for kind in ALL:
        own = [event for event in events if event.fault == kind.name]
        if not own:
            continue
        counts = Counter(event.outcome for event in own)
        cells = " | ".join(str(counts[outcome] or "") for outcome in outcomes)
        to_name = [event for event in own if event.named is not None]
        named = f"{sum(bool(e.named) for e in to_name)} of {len(to_name)}" if to_name else ""
        times = [event.seconds for event in own]
        spread = f"{statistics.median(times):.1f}, {max(times):.1f}"
        lines.append(f"| {kind.name} | {len(own)} | {cells} | {named} | {spread} |")
    return "\n".join(lines)


def _write_event(path: Path | None, about: Mapping[str, Any], event: Event) -> None:
    _write(path, asdict(event) | {"text": event.text[:_SHOWN_BYTES]} | about)


def _write(path: Path | None, line: Mapping[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
