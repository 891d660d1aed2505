"""Read the files of `hvdkit bench allreduce` and `hvdkit bench step`, and fit links to them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.bench import results
from hvdkit.bench.scale import fit
from hvdkit.bench.scale.prediction import Link
from hvdkit.bench.step.variants import ALONE, FLAT, HVDKIT, SHARE_OF_FLOAT32, SINGLE
from hvdkit.errors import UsageError
from hvdkit.reduction import bucketing
from hvdkit.system.plain_files import seconds, whole

_FEWEST_SIZES = 2
_NO_WIRE = "none"
# Smaller buffers are not fitted: most gradients are in larger buckets, and a link may send small
# buffers faster than its rate.
_FITTED_BYTES = 4 * bucketing.MB
_RANKS = ("ranks", "ranks_per_host")
# The limits of numbers in a file: no benchmark measures others.
_MOST_RANKS, _MOST_BYTES, _SHORTEST = 1_000_000, 10**15, 1e-12


@dataclass(frozen=True)
class Allreduces:
    """The allreduces of one variant in a file of `hvdkit bench allreduce`.

    Attributes:
        source: the name of the file, and the variant.
        ranks: the number of ranks.
        ranks_per_host: the number of ranks on each host.
        flat: whether all ranks formed one ring.
        sizes: the bytes of each buffer, in increasing order.
        seconds: the median seconds of an allreduce of each size.
        wires: wire format -> bytes of a buffer -> the median seconds of sums in this format.
    """

    source: str
    ranks: int
    ranks_per_host: int
    flat: bool
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    wires: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks were on one host."""
        return self.ranks_per_host >= self.ranks

    @property
    def ring(self) -> int:
        """The number of ranks or hosts in the ring over the slowest link."""
        return self.ranks if self.flat or self.on_one_host else self.ranks // self.ranks_per_host


@dataclass(frozen=True)
class FittedLink:
    """A link that was fitted to allreduces.

    Attributes:
        link: its latency and bandwidth.
        overhead: seconds that an allreduce of any size takes in addition.
        error: the median relative error of the fit.
        source: the files and variants that were fitted.
        rings: the different lengths of the rings, in ranks or hosts.
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
        alone: the median seconds of a step without a reduction, while all ranks compute. None if
            not measured.
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
        UsageError: the file was written by another command, or has too few sizes.
    """
    found = results.load(path, "allreduce", "--allreduce")
    with results.damaged(path, "--allreduce"):
        sums = [row for row in found.rows if (row["dtype"], row["op"]) == ("float32", "sum")]
        names = list(dict.fromkeys(row["variant"] for row in sums))
        chosen = next((name for name in names if name.startswith("hvdkit-")), "".join(names[:1]))
        by_wire: dict[str, dict[int, float]] = {_NO_WIRE: {}}
        for row in sums:
            if row["variant"] == chosen:
                calls = [call for turn in row["turns"] for call in turn]
                by_wire.setdefault(row["wire"], {})[_size(row["bytes"])] = _median(calls)
        times = by_wire.pop(_NO_WIRE)
        ranks, ranks_per_host = _ranks(found, path, "--allreduce")
    if (large := sum(size >= _FITTED_BYTES for size in times)) < _FEWEST_SIZES:
        raise UsageError(
            f"--allreduce {path} has {large} sizes of sums of float32 from "
            f"{_FITTED_BYTES / 1e6:g} MB; expected at least {_FEWEST_SIZES}: measure with the "
            f"default --sizes"
        )
    if ranks == 1:
        raise UsageError(f"--allreduce {path} has one rank; expected at least 2")
    flat = not chosen.startswith("hvdkit-")
    sizes = tuple(sorted(times))
    seconds = tuple(times[size] for size in sizes)
    source = f"{path} ({chosen})"
    return Allreduces(source, ranks, ranks_per_host, flat, sizes, seconds, by_wire)


def read_steps(path: Path, model: str | None) -> Steps:
    """Read the steps of a model.

    Args:
        path: the file.
        model: the name of the model; None if the file has only one.

    Raises:
        UsageError: the file was written by another command, or lacks the model or the steps of one
            rank.
    """
    found = results.load(path, "step", "--step")
    with results.damaged(path, "--step"):
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
                str(variant),
                row["wire"],
                row["optimizer"] == FLAT,
                _size(row["ranks"], _MOST_RANKS),
                seconds[variant],
            )
            for variant, row in rows.items()
            if row["optimizer"] in HVDKIT and row["wire"] in SHARE_OF_FLOAT32
        )
        return Steps(
            source=str(path),
            model=str(name),
            nbytes=_size(rows[SINGLE]["bytes"]),
            ranks_per_host=ranks_per_host,
            one_rank=seconds[SINGLE],
            alone=seconds.get(ALONE),
            reduced=reduced,
        )


def _ranks(found: results.Results, path: Path, option: str) -> tuple[int, int]:
    """Return the number of ranks, and the number of ranks of each host."""
    if "ranks_per_host" not in found.conditions:
        raise UsageError(
            f"{option} {path} does not say how many ranks a host had, because an older hvdkit "
            f"wrote it: measure again"
        )
    conditions = found.conditions
    ranks, ranks_per_host = (_size(conditions[each], _MOST_RANKS) for each in _RANKS)
    if ranks % ranks_per_host:
        raise UsageError(
            f"{option} {path} has {ranks} ranks, and {ranks_per_host} on the first host; expected "
            f"the same number of ranks on each host"
        )
    return ranks, ranks_per_host


def _size(number: Any, most: int = _MOST_BYTES) -> int:
    """Return a number of bytes or ranks.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not 0 < (found := whole(number)) <= most:
        raise ValueError(f"a number of bytes or ranks is {found}")
    return found


def _median(times: Sequence[float]) -> float:
    found = statistics.median(map(seconds, times))
    if not found > _SHORTEST:
        raise ValueError(f"a time is {found}")
    return found


def fit_link(
    measured: Sequence[Allreduces], latency: float, within: Link | None = None
) -> FittedLink:
    """Fit latency, bandwidth and overhead to allreduces over one kind of link.

    The bandwidth is fitted to buffers as large as buckets. The time of the smallest buffer is that
    of a collective without data: the overhead, and one latency for each step of the ring. If all
    rings have the same length, the two cannot be separated, and the result has the given `latency`.

    Args:
        measured: the allreduces.
        latency: the latency of a message in seconds. Used only if all rings have the same length.
        within: the link within the hosts, whose time is subtracted first; None: subtract nothing.

    Raises:
        UsageError: the times do not grow with the size.
    """
    times = [_between(each, within) for each in measured]
    rows = [
        (file, Link(0.0, 1.0).ring(size, each.ring), seconds)
        for file, each in enumerate(measured)
        for size, seconds in zip(each.sizes, times[file], strict=True)
        if size >= _FITTED_BYTES
    ]
    volumes = [volume for _, volume, _ in rows]
    _, per_byte = fit.nonnegative([[1.0] * len(rows), volumes], [seconds for _, _, seconds in rows])
    constants = [
        max(0.0, times[file][0] - per_byte * Link(0.0, 1.0).ring(each.sizes[0], each.ring))
        for file, each in enumerate(measured)
    ]
    # A large buffer takes longer than a small one, except on a link that shapes its traffic.
    remaining = [max(seconds - constants[file], seconds / 2) for file, _, seconds in rows]
    (per_byte,) = fit.nonnegative([volumes], remaining)
    slow = [each for file, each in enumerate(measured) if times[file][-1] <= 2 * constants[file]]
    if per_byte <= 0 or slow:
        names = ", ".join(each.source for each in slow or measured)
        raise UsageError(
            f"the times of {names} hardly grow with the size: measure with larger --sizes"
        )
    hops = [2 * (each.ring - 1) for each in measured]
    overhead, latency = _overhead(hops, constants, latency)
    found = Link(latency, 1 / per_byte)
    errors = [
        abs((overhead + found.ring(size, each.ring)) / seconds - 1)
        for each, of_file in zip(measured, times, strict=True)
        for size, seconds in zip(each.sizes, of_file, strict=True)
        if size >= _FITTED_BYTES
    ]
    return FittedLink(
        link=found,
        overhead=overhead,
        error=statistics.median(errors),
        source=", ".join(each.source for each in measured),
        rings=tuple(sorted({each.ring for each in measured})),
    )


def _between(each: Allreduces, within: Link | None) -> list[float]:
    """Return the seconds of each allreduce between hosts, without the seconds within a host."""
    if within is None or each.on_one_host or each.flat or each.ranks_per_host == 1:
        return list(each.seconds)
    return [
        max(seconds - within.ring(size, each.ranks_per_host), seconds / 2)
        for size, seconds in zip(each.sizes, each.seconds, strict=True)
    ]


def _overhead(
    hops: Sequence[int], constants: Sequence[float], latency: float
) -> tuple[float, float]:
    """Return overhead and latency of collectives without data.

    Args:
        hops: the number of messages of each collective, which are sent one after another.
        constants: the seconds of each collective.
        latency: the latency in seconds. Used only if all collectives have the same
            number of messages.
    """
    if len(set(hops)) == 1:
        constant = statistics.fmean(constants)
        latency = min(latency, constant / hops[0])
        return constant - hops[0] * latency, latency
    known = [(count, seconds) for count, seconds in zip(hops, constants, strict=True) if seconds]
    overhead, fitted = fit.nonnegative(
        [[1.0] * len(known), [float(count) for count, _ in known]],
        [seconds for _, seconds in known],
    )
    return overhead, fitted


def fit_encoding(
    measured: Sequence[Allreduces], wire: str, sending: Callable[[Allreduces, int], float]
) -> float | None:
    """Return the seconds to encode and decode a byte of float32 in a wire format.

    Args:
        measured: the allreduces.
        wire: the wire format.
        sending: returns the predicted seconds of an allreduce of some bytes of float32 in this
            format, if encoding takes no time.

    Returns:
        The median over all large buffers; None if none was measured.
    """
    costs = [
        max(0.0, seconds - sending(each, size)) / size
        for each in measured
        for size, seconds in each.wires.get(wire, {}).items()
        if size >= _FITTED_BYTES
    ]
    return statistics.median(costs) if costs else None
