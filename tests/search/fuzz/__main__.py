"""Fuzz the parsers and the listeners of hvdkit.

    python -m tests.search.fuzz --seconds 60                       # each target for a minute
    python -m tests.search.fuzz --seconds 600 --seed 7 records s3  # two targets

An input may raise only the documented errors, and needs less than 64 MB of memory and 5 s of
processor time. Listeners must still serve own clients. The process ends at the first input that
breaks this, and writes it to a file.
"""

from __future__ import annotations

import argparse
import base64
import random
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from tests.search.fuzz.limits import Cost, measured
from tests.search.fuzz.listeners import LISTENERS, drawn, send
from tests.search.fuzz.mutations import mutated
from tests.search.fuzz.parsers import PARSERS

#: A listener is checked after so many inputs.
_BATCH = 20


class Broken(Exception):
    """An input has broken a target."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


def fuzz_parser(name: str, seconds: float, draw: random.Random, cost: Cost) -> int:
    """Parse the seeds and then changed ones, for some seconds. Return the number of inputs."""
    parser = PARSERS[name]
    seeds = parser.seeds()
    # Changes of large seeds find little and are slow.
    changed = [seed for seed in seeds if len(seed) < 1_000_000] or list(seeds)
    count = 0
    with (
        tempfile.TemporaryDirectory(prefix="hvdkit-fuzz-") as folder,
        parser.opened(Path(folder)) as parse,
    ):
        with_imports = Cost()
        deadline = 0.0
        while not deadline or time.monotonic() < deadline:
            data = seeds[count] if count < len(seeds) else mutated(draw, changed)
            try:
                if count == 0:
                    # The first input imports modules.
                    parse(data)
                with measured(cost if count else with_imports):
                    parse(data)
            except parser.errors:
                pass
            except BaseException as error:
                raise Broken(data) from error
            count += 1
            if count == len(seeds):
                deadline = time.monotonic() + seconds
    return count


def fuzz_listener(name: str, seconds: float, draw: random.Random, cost: Cost) -> int:
    """Send inputs to a listener for some seconds. Return the number of inputs."""
    failed: list[threading.ExceptHookArgs] = []
    threading.excepthook = failed.append
    deadline = time.monotonic() + seconds
    count = 0
    held: list = []
    with (
        tempfile.TemporaryDirectory(prefix="hvdkit-fuzz-") as folder,
        LISTENERS[name](Path(folder)) as listening,
    ):
        listening.check()
        while not count or time.monotonic() < deadline:
            batch = [drawn(draw) for _ in range(_BATCH)]
            try:
                with measured(cost):
                    for data in batch:
                        send(listening.port, data, held, draw)
                    listening.check()
                assert not failed, failed[0]
            except BaseException as error:
                if failed:
                    error.__cause__ = failed[0].exc_value
                raise Broken(b"\n----\n".join(batch)) from error
            count += len(batch)
        for line in held:
            line.close()
    return count


def main() -> int:
    """Fuzz targets one after the other. Returns 1 if one is broken."""
    names = [*PARSERS, *(f"listener:{name}" for name in LISTENERS)]
    parser = argparse.ArgumentParser(prog="python -m tests.search.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    status = 0
    for name in args.targets or names:
        draw, cost, began = random.Random(f"{seed} {name}"), Cost(), time.monotonic()
        fuzz = fuzz_listener if name.startswith("listener:") else fuzz_parser
        try:
            count = fuzz(name.removeprefix("listener:"), args.seconds, draw, cost)
        except Broken as broken:
            traceback.print_exception(broken.__cause__)
            status = 1
            with tempfile.NamedTemporaryFile(
                prefix=f"hvdkit-fuzz-{name.replace(':', '-')}-", delete=False
            ) as file:
                file.write(broken.data)
            print(f"{name}: broken by {file.name} (--seed {seed}), {len(broken.data)} bytes:")
            print(base64.b64encode(broken.data[:1000]).decode(), flush=True)
            continue
        print(
            f"{name}: {count} inputs in {time.monotonic() - began:.0f} s, at most "
            f"{cost.seconds:.2f} s and {cost.memory / 1e6:.0f} MB",
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
