"""Disturb training jobs at random moments, and compare them with jobs that nothing disturbs.

    scripts/chaos --minutes 60
    scripts/chaos --faults 25 --only "SIGKILL of all ranks" --framework torch --ranks 4
    scripts/chaos --faults 1 --seed 17 --verbose    # repeats the first job of a run

Each job of `hvdkit run` gets some faults, one after another: a rank, an agent or the launcher is
killed or stopped, a host reboots, a link is down, a disk is full, and so on. After each fault the
job must train again within a minute (longer on a slow machine), by itself or with the same command.
The launcher must have named the rank or host at fault. At the end its weights must be those of
an undisturbed job, and nothing may be left over. Several hosts need root.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hvdkit.bench import namespaces
from tests.chaos.settings import PROGRAMS, Limits
from tests.chaos.trial import ALL, References, Result, Trial
from tests.chaos.world import world
from tests.cluster import ssh_servers

_FAULTS_OF_A_JOB = (3, 7)


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
    )
    print(f"--seed {seed}{f'; one host only: {several}' if several else ''}", flush=True)
    deadline = time.monotonic() + 60 * (args.minutes or float("inf"))
    results: list[Result] = []
    with world(most_hosts, "s3" in (args.store or ["s3"])) as made:
        made.elsewhere = args.checkpoints
        references = References(made)
        number = 0
        while time.monotonic() < deadline and _count(results) < (args.faults or float("inf")):
            # Each job has a seed of its own, so that it can be repeated alone.
            draw = random.Random(seed + number)
            count = min(draw.randint(*_FAULTS_OF_A_JOB), args.faults or 100)
            setting = limits.draw(draw, count)
            result = Trial(setting, count, made, references, draw, args.only).run()
            results.append(result)
            _show(result, seed + number, args.verbose)
            if args.json:
                _write(args.json, seed + number, result)
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
    parser.add_argument("--seed", type=int, help="of the random choices (default: a new one)")
    parser.add_argument("--only", action="append", default=[], choices=[k.name for k in ALL])
    parser.add_argument("--framework", action="append", default=[], choices=PROGRAMS)
    parser.add_argument("--controller", action="append", default=[], choices=["gloo", "mpi"])
    parser.add_argument("--hosts", action="append", default=[], type=int, metavar="N")
    parser.add_argument("--store", action="append", default=[], choices=["folder", "s3"])
    parser.add_argument("--checkpoints", metavar="PLACE", help="a folder or URL; empty there")
    parser.add_argument("--ranks", type=int, default=2, help="of a job on one host (default 2)")
    parser.add_argument("--json", type=Path, help="append each job to this file, in a line")
    parser.add_argument("--verbose", action="store_true", help="show what the launcher says")
    args = parser.parse_args()
    if not args.minutes and not args.faults:
        args.faults = 5
    return args


def _count(results: Sequence[Result]) -> int:
    return sum(len(result.events) for result in results)


def _show(result: Result, seed: int, verbose: bool) -> None:
    print(f"{result.setting} (--seed {seed})")
    for event in result.events:
        named = {True: ", named", False: ", NOT NAMED", None: ""}[event.named]
        early = " at the start" if event.early else ""
        print(f"  {event.fault}{early}: {event.outcome}, {event.seconds:.1f} s{named}")
        if verbose:
            print("".join(f"      {line}\n" for line in event.text.splitlines()), end="")
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


def _write(path: Path, seed: int, result: Result) -> None:
    line = {
        "seed": seed,
        "setting": asdict(result.setting),
        "events": [asdict(event) | {"text": ""} for event in result.events],
        "problems": result.problems,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
