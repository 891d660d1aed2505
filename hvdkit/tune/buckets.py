"""Compare bucket sizes, wire formats, and the two ways to combine the ranks of a host.

A run of PyTorch measures all bucket sizes and wire formats by itself, in turns
(`hvdkit.training.tuning`). Flat or two-level is decided when Horovod starts, so this choice needs
runs of its own. Then runs of both kinds alternate, and each run is one turn.

A run of Keras or TensorFlow measures one candidate (`hvdkit.training.trial`), so each candidate
needs a run in each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from hvdkit.errors import HvdkitError
from hvdkit.runtime.host_collectives import VARIABLE
from hvdkit.training import tuning
from hvdkit.training.trial import TrialPlan
from hvdkit.training.tuning import Candidate
from hvdkit.tune.trials import Result, Runner

TWO_LEVEL, FLAT = "two-level", "flat"
#: The values of `--collectives`.
COLLECTIVES = (TWO_LEVEL, FLAT)

_NOTHING_TO_COMPARE = (
    "there is nothing to compare, because all bucket sizes make the same buckets: give other sizes "
    "(--bucket-mb), wire formats (--wire-formats), or two --collectives"
)
_ENDED_EARLY = (
    "the command has ended before the measurement did: expected a script with enough data for all "
    "steps, and with hvdkit's DistributedOptimizer of PyTorch, fit of Keras, or "
    "DistributedGradientTape. Give it more data, or measure less (--bucket-mb, --wire-formats, "
    "--collectives)"
)
_ONE_RANK = (
    "the measurement has ended early, because there is only one rank, or because a rank has called "
    "hvd.join(). Use two ranks or more, and data for all steps"
)
#: The turns within a run, if runs are turns, too.
_TURNS_IN_RUN = 3

#: How the ranks of a host are combined, and the other settings.
_Choice = tuple[str, Candidate]
_Alternative = TypeVar("_Alternative")


@dataclass(frozen=True)
class Measured:
    """The times of all runs.

    Attributes:
        current: the settings of the script.
        seconds: choice -> the time of a step in each turn.
        fingerprints: how the ranks of a host are combined -> the fingerprint of such a job; empty
            for Keras and TensorFlow, which have no `hvd.autotune`.
    """

    current: _Choice
    seconds: Mapping[_Choice, Sequence[float]]
    fingerprints: Mapping[str, str]

    @property
    def chosen(self) -> _Choice:
        """The settings to use."""
        return tuning.choose(self.seconds, self.current)

    def save(self, path: Path) -> None:
        """Write the choices to a file of `hvd.autotune`.

        A job reads the choice for the collectives that it uses.

        Raises:
            HvdkitError: the file cannot be written, or is another one.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for kind, fingerprint in self.fingerprints.items():
                seconds = {each: times for (k, each), times in self.seconds.items() if k == kind}
                chosen = tuning.choose(seconds, self.current[1])
                tuning.save(path, fingerprint, tuning.entry_of(chosen, seconds))
        except OSError as error:
            raise HvdkitError(
                f"cannot write {path}: {error.strerror}. Choose another file with --file"
            ) from error
        except (ValueError, TypeError) as error:
            raise HvdkitError(
                f"{path} is not a file of hvd.autotune ({error}). Choose another file with --file"
            ) from error

    def table(self) -> list[str]:
        """Return lines that show the times of all candidates."""
        usual = median(self.seconds[self.current])
        rows = []
        for (kind, each), times in sorted(self.seconds.items()):
            middle = median(times)
            is_current = (kind, each) == self.current
            change = "current" if is_current else f"{middle / usual - 1:+.0%}"
            turns = ", ".join(f"{t * 1e3:.1f}" for t in times)
            size = f"{each.bucket_bytes / 1e6:g} MB"
            rows.append(
                f"  {kind:9}  {size:>9}  {each.wire_format:5}  {middle * 1e3:8.1f} ms  "
                f"{change:>8}   turns: {turns}"
            )
        return rows


def measure(
    runner: Runner,
    plan: TrialPlan,
    kinds: Sequence[str],
    turns: int,
    say: Callable[[str], None],
) -> Measured:
    """Run the command, and return the times.

    Args:
        runner: runs the command.
        plan: the bucket sizes and wire formats to measure.
        kinds: some of `COLLECTIVES`. The first one is the current one.
        turns: the turns of each candidate.
        say: prints a message for the user.

    Raises:
        HvdkitError: a run failed, or measured nothing.
    """
    one = len(kinds) == 1
    in_run = turns if one else _TURNS_IN_RUN
    job = replace(plan, turns=in_run)
    runs = _in_turns(kinds, 1 if one else turns)
    seconds: dict[_Choice, list[float]] = {}
    fingerprints: dict[str, str] = {}
    for number, kind in enumerate(runs, 1):
        result = _run(runner, job, kind)
        report = result.first_report
        if report and "run" in report:
            return _measure_in_runs(runner, job, kinds, turns, say, result)
        measured = _times(report, in_run)
        if one and len(measured) == 1:
            raise HvdkitError(_NOTHING_TO_COMPARE)
        assert report is not None
        current = Candidate(*report["tuned"]["current"])
        fingerprints[kind] = str(report["fingerprint"])
        for each, times in measured.items():
            seconds.setdefault((kind, each), []).extend(times if one else [median(times)])
        fastest = min(measured, key=lambda each: median(measured[each]))
        say(
            f"run {number} of {len(runs)}, {kind}: {fastest} was the fastest in {report['steps']} "
            f"steps ({result.seconds:.0f} s)"
        )
    return Measured((kinds[0], current), seconds, fingerprints)


def _measure_in_runs(
    runner: Runner,
    plan: TrialPlan,
    kinds: Sequence[str],
    turns: int,
    say: Callable[[str], None],
    first: Result,
) -> Measured:
    """Run the command of Keras or TensorFlow, once in each turn for each candidate.

    Args:
        runner: see `measure`.
        plan: see `measure`.
        kinds: see `measure`.
        turns: see `measure`.
        say: see `measure`.
        first: a run with the settings of the script. It is not measured, because it may have been
            slower than later runs: files were not in memory.
    """
    current, _, gradient_bytes = _of_run(first)
    sizes = _distinct_sizes([current.bucket_bytes, *plan.bucket_bytes], gradient_bytes)
    formats = dict.fromkeys([current.wire_format, *plan.wire_formats])
    candidates = [Candidate(size, name) for name in formats for size in sizes]
    choices = [(kind, each) for kind in kinds for each in candidates]
    if len(choices) == 1:
        raise HvdkitError(_NOTHING_TO_COMPARE)
    runs = _in_turns(choices, turns)
    say(
        f"Each candidate needs its own runs, {len(runs)} in all, which take about "
        f"{max(1, round(len(runs) * first.seconds / 60))} minutes."
    )
    seconds: dict[_Choice, list[float]] = {choice: [] for choice in choices}
    for number, (kind, each) in enumerate(runs, 1):
        settings = (each.bucket_bytes, each.wire_format)
        result = _run(runner, replace(plan, candidate=settings), kind)
        _, time, _ = _of_run(result)
        seconds[kind, each].append(time)
        say(
            f"run {number} of {len(runs)}, {kind}, {each}: {time * 1e3:.1f} ms a step "
            f"({result.seconds:.0f} s)"
        )
    return Measured((kinds[0], current), seconds, {})


def _in_turns(alternatives: Sequence[_Alternative], turns: int) -> list[_Alternative]:
    """Return the alternatives of all turns, in an order that changes with each turn.

    The order changes, because the speed of a machine does.
    """
    return [each for turn in range(turns) for each in alternatives[:: -1 if turn % 2 else 1]]


def _run(runner: Runner, plan: TrialPlan, kind: str) -> Result:
    """Run the command once.

    Raises:
        HvdkitError: the run failed.
    """
    # An empty value is the default.
    result = runner.run(plan, variables={VARIABLE: FLAT if kind == FLAT else ""})
    if result.out_of_memory:
        raise HvdkitError(f"out of memory: {result.out_of_memory}")
    return result


def _of_run(result: Result) -> tuple[Candidate, float, int]:
    """Return the settings of a run, the seconds of a step, and the bytes of all gradients.

    Raises:
        HvdkitError: a rank has measured nothing.
    """
    runs = [report.get("run") for report in result.reports]
    if len(runs) == 1:
        raise HvdkitError(_ONE_RANK)
    if not runs or None in runs:
        raise HvdkitError(_ENDED_EARLY)
    found: list[Mapping[str, Any]] = [run for run in runs if run is not None]
    slowest = max(float(run["seconds"]) for run in found)
    return Candidate(*found[0]["settings"]), slowest, int(found[0]["gradient_bytes"])


def _distinct_sizes(sizes: Sequence[int], gradient_bytes: int) -> list[int]:
    """Return the sizes, only the first one of those that hold all gradients in one bucket."""
    found = list(dict.fromkeys(sizes))
    largest = [size for size in found if gradient_bytes and size >= gradient_bytes]
    return [size for size in found if size not in largest[1:]]


def _times(report: Mapping[str, Any] | None, turns: int) -> dict[Candidate, list[float]]:
    """Return candidate -> the time of a step in each turn.

    Raises:
        HvdkitError: the measurement ended early.
    """
    tuned = report.get("tuned") if report else None
    if not tuned:
        raise HvdkitError(_ENDED_EARLY)
    found = {Candidate(size, name): list(times) for size, name, times in tuned["seconds"]}
    if any(len(times) != turns for times in found.values()):
        raise HvdkitError(_ONE_RANK)
    return found
