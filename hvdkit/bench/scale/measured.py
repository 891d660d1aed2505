"""Read the files of `hvdkit bench allreduce` and `hvdkit bench step`, and fit links to them."""

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.bench import results
from hvdkit.bench.scale import fit
from hvdkit.bench.scale.prediction import Link
from hvdkit.bench.step.variants import ALONE, FLAT, HVDKIT, SINGLE
from hvdkit.core import bucketing
from hvdkit.errors import UsageError

_FEWEST_SIZES = 2
# The smallest bucket of hvdkit. A link may send smaller buffers faster than its rate.
_FITTED_BYTES = bucketing.FIRST_BUCKET_BYTES


@dataclass(frozen=True)
class Allreduces:
    """The allreduces of one variant in a file of `hvdkit bench allreduce`.

    Attributes:
        source: the name of the file, and the variant.
        ranks: the number of ranks.
        ranks_per_host: the number of ranks on each host.
        flat: whether all ranks formed one ring.
        sizes: the bytes of each buffer that is as large as a bucket.
        seconds: the median time of each.
    """

    source: str
    ranks: int
    ranks_per_host: int
    flat: bool
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks were on one host."""
        return self.ranks_per_host >= self.ranks

    @property
    def ring(self) -> int:
        """The number of members of the ring over the slowest link."""
        return self.ranks if self.flat or self.on_one_host else self.ranks // self.ranks_per_host


@dataclass(frozen=True)
class FittedLink:
    """A link that was fitted to allreduces.

    Attributes:
        link: its latency and bandwidth.
        overhead: the seconds of an allreduce of any size.
        error: the median relative error of the fit.
        source: what was fitted.
        rings: the numbers of members of the rings.
    """

    link: Link
    overhead: float
    error: float
    source: str
    rings: tuple[int, ...]


@dataclass(frozen=True)
class MeasuredStep:
    """A step that a file of `hvdkit bench step` has for several ranks."""

    variant: str
    wire: str
    flat: bool
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Steps:
    """The steps of one model in a file of `hvdkit bench step`.

    Attributes:
        source: the name of the file.
        model: the name of the model.
        nbytes: the bytes of the gradients in float32.
        ranks_per_host: the number of ranks on each host.
        one_rank: the median seconds of a step of one rank.
        alone: those of ranks that compute at the same time without a reduction; None if not
            measured.
        reduced: the steps with hvdkit's reduction.
    """

    source: str
    model: str
    nbytes: int
    ranks_per_host: int
    one_rank: float
    alone: float | None
    reduced: tuple[MeasuredStep, ...]


def read_allreduces(path: Path) -> Allreduces:
    """Read sums of float32 of hvdkit, or of the first variant of the file.

    Raises:
        UsageError: the file is of another kind, or has too few sizes.
    """
    found = results.load(path, "allreduce", "--allreduce")
    with _damaged(path, "--allreduce"):
        rows = [
            row
            for row in found.rows
            if row["dtype"] == "float32" and row["wire"] == "none" and row["op"] == "sum"
        ]
        names = list(dict.fromkeys(row["variant"] for row in rows))
        chosen = next((name for name in names if name.startswith("hvdkit-")), "".join(names[:1]))
        times = {
            int(row["bytes"]): _median([call for turn in row["turns"] for call in turn])
            for row in rows
            if row["variant"] == chosen and row["bytes"] >= _FITTED_BYTES
        }
        ranks, ranks_per_host = _ranks(found, path, "--allreduce")
    if len(times) < _FEWEST_SIZES:
        raise UsageError(
            f"--allreduce {path} has {len(times)} sizes of sums of float32 from "
            f"{_FITTED_BYTES / 1e6:g} MB; expected at least {_FEWEST_SIZES}: measure with the "
            f"default --sizes"
        )
    if ranks == 1:
        raise UsageError(f"--allreduce {path} has one rank; expected at least 2")
    flat = not chosen.startswith("hvdkit-")
    sizes = tuple(sorted(times))
    seconds = tuple(times[size] for size in sizes)
    return Allreduces(f"{path} ({chosen})", ranks, ranks_per_host, flat, sizes, seconds)


def read_steps(path: Path, model: str | None) -> Steps:
    """Read the steps of a model.

    Args:
        path: the file.
        model: the name of the model; None if the file has only one.

    Raises:
        UsageError: the file is of another kind, or lacks the model or the steps of one rank.
    """
    found = results.load(path, "step", "--step")
    with _damaged(path, "--step"):
        models = list(dict.fromkeys(row["model"] for row in found.rows))
        name = model or (models[0] if len(models) == 1 else None)
        if name not in models:
            given = f"not {model}" if model else "and --model names none of them"
            raise UsageError(
                f"--step {path} has the models {', '.join(models) or '(none)'}, {given}: give one "
                f"of them as --model"
            )
        rows = {row["variant"]: row for row in found.rows if row["model"] == name}
        if SINGLE not in rows or any(row["part"] != "step" for row in rows.values()):
            raise UsageError(
                f"--step {path} has no whole steps of one rank: measure with `--variants` that "
                f"contain {SINGLE}, and without `--part`"
            )
        _, ranks_per_host = _ranks(found, path, "--step")
        seconds = {variant: _median(row["turns"]) for variant, row in rows.items()}
        reduced = tuple(
            MeasuredStep(
                variant, row["wire"], row["optimizer"] == FLAT, row["ranks"], seconds[variant]
            )
            for variant, row in rows.items()
            if row["optimizer"] in HVDKIT
        )
        return Steps(
            source=str(path),
            model=str(name),
            nbytes=int(rows[SINGLE]["bytes"]),
            ranks_per_host=ranks_per_host,
            one_rank=seconds[SINGLE],
            alone=seconds.get(ALONE),
            reduced=reduced,
        )


def _ranks(found: results.Results, path: Path, option: str) -> tuple[int, int]:
    """Return the number of ranks, and that of each host."""
    if "ranks_per_host" not in found.conditions:
        raise UsageError(
            f"{option} {path} does not say how many ranks a host had, because an older hvdkit "
            f"wrote it: measure again"
        )
    ranks, ranks_per_host = found.conditions["ranks"], found.conditions["ranks_per_host"]
    if not 0 < ranks_per_host <= ranks or ranks % ranks_per_host:
        raise UsageError(
            f"{option} {path} has {ranks} ranks, and {ranks_per_host} on the first host; expected "
            f"the same number of ranks on each host"
        )
    return int(ranks), int(ranks_per_host)


def _median(seconds: Sequence[float]) -> float:
    found = float(statistics.median(seconds))
    if not 0 < found < float("inf"):
        raise ValueError(f"a time is {found}")
    return found


@contextlib.contextmanager
def _damaged(path: Path, option: str) -> Iterator[None]:
    """Say which file is damaged."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{option} {path} is damaged ({type(error).__name__}: {error}); expected a file of "
            f"--json"
        ) from error


def fit_link(
    measured: Sequence[Allreduces], latency: float, within: Link | None = None
) -> FittedLink:
    """Fit latency, bandwidth and overhead to allreduces over one kind of link.

    Rings of one length do not tell the latency from the overhead, as both are the same for all
    sizes. `latency` is the latency then.

    Args:
        measured: the allreduces.
        latency: of a message, in seconds, if all rings have the same length.
        within: the link within the hosts, whose time is subtracted; None if there is none.

    Raises:
        UsageError: the times do not grow with the size.
    """
    rings, sizes, seconds = [], [], []
    for each in measured:
        local = within.ring if within and not each.on_one_host and not each.flat else None
        for size, time in zip(each.sizes, each.seconds, strict=True):
            inside = local(size, each.ranks_per_host) if local else 0.0
            rings.append(each.ring)
            sizes.append(size)
            seconds.append(max(time - inside, time / 2))
    hops = [2 * (n - 1) for n in rings]
    volumes = [hop / n * size for hop, n, size in zip(hops, rings, sizes, strict=True)]
    several = len(set(rings)) > 1
    columns: list[list[float]] = [[1.0] * len(sizes), volumes]
    if several:
        columns.append([float(hop) for hop in hops])
    constant, per_byte, *per_hop = fit.nonnegative(columns, seconds)
    if per_byte <= 0:
        raise UsageError(
            f"the times of {', '.join(each.source for each in measured)} do not grow with the "
            f"size: measure with larger --sizes"
        )
    found = Link(per_hop[0] if several else min(latency, constant / hops[0]), 1 / per_byte)
    overhead = constant if several else constant - hops[0] * found.latency
    errors = [
        abs((overhead + found.ring(size, n)) / time - 1)
        for size, n, time in zip(sizes, rings, seconds, strict=True)
    ]
    return FittedLink(
        link=found,
        overhead=overhead,
        error=statistics.median(errors),
        source=", ".join(each.source for each in measured),
        rings=tuple(sorted(set(rings))),
    )
