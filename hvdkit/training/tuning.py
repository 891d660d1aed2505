"""Choose the bucket size, and the wire format, in the first steps of a training.

`hvd.autotune` compares several candidates. The candidates are used in turns, each for a few steps
in each turn, because the speed of a machine changes with time. After the steps of a candidate, the
ranks compute the maximum of their median step times. All ranks get the same maxima, so they choose
the same candidate. A candidate replaces the current settings only if it was faster in every turn,
and by a few percent.
"""

import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import check_consistency
from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import read_json
from hvdkit.system.whole_files import check_writable, replacing

_NAME = "hvdkit.autotune"
#: Steps after a change that are not measured: in the first step the ranks plan the buckets, and in
#: the second step the memory of the buckets is still new.
WARM_UP = 2
# The part of the step time that a candidate must save. A smaller gain is not worth a change.
_GAIN = 0.03

_log = logging.getLogger("hvdkit")


@dataclass(frozen=True, order=True)
class Candidate:
    """The settings of a reduction that a tuner changes.

    Attributes:
        bucket_bytes: the largest size of a bucket of several gradients.
        wire_format: the name of the wire format.
    """

    bucket_bytes: int
    wire_format: str

    def __str__(self) -> str:
        return f"{self.bucket_bytes / 1e6:g} MB, {self.wire_format}"


@dataclass(frozen=True)
class TunerState:
    """The settings in use.

    Attributes:
        candidate: the settings.
        done: whether they are final.
        tuned: whether they were measured.
    """

    candidate: Candidate
    done: bool = False
    tuned: bool = False


_Choice = TypeVar("_Choice")


def choose(seconds: Mapping[_Choice, Sequence[float]], current: _Choice) -> _Choice:
    """Return the candidate to use: the current one, unless another one is clearly faster.

    If a candidate is only as fast as the current one, the probability that it is faster in each of
    five turns by chance is 1/32.

    Args:
        seconds: candidate -> the time of a step in each turn.
        current: the candidate to compare with.
    """
    best, best_ratio = current, 1 - _GAIN
    for candidate, times in seconds.items():
        ratios = [mine / usual for mine, usual in zip(times, seconds[current], strict=True)]
        ratio = statistics.median(ratios)
        if candidate != current and max(ratios) < 1 and ratio < best_ratio:
            best, best_ratio = candidate, ratio
    return best


def table(seconds: Mapping[Candidate, Sequence[float]], current: Candidate) -> list[str]:
    """Return lines that show the times of the candidates.

    Args:
        seconds: see `choose`.
        current: see `choose`.
    """
    lines = []
    usual = statistics.median(seconds[current])
    width = max(len(candidate.wire_format) for candidate in seconds)
    for candidate, times in sorted(seconds.items()):
        middle, each = statistics.median(times), ", ".join(f"{t * 1e3:.1f}" for t in times)
        note = "current" if candidate == current else f"{100 * (middle / usual - 1):+.0f} %"
        lines.append(
            f"{candidate.bucket_bytes / 1e6:7g} MB  {candidate.wire_format:{width}} "
            f"{middle * 1e3:9.1f} ms  {note:>8}   turns: {each}"
        )
    return lines


@dataclass(eq=False)
class Tuner:
    """Measure the candidates, and choose one. Every rank has a tuner with the same arguments.

    All ranks call `after_step` after the same steps.

    Attributes:
        collectives: the collectives of the ranks.
        candidates: the candidates, with the current one.
        current: the settings at the beginning.
        turns: the number of turns of each candidate.
        steps: the number of measured steps in each turn.
        apply: uses a candidate from the next step on. Not a collective.
        clock: returns seconds.
        report: called on the first rank when a candidate was chosen.
        state: the settings in use.
        seconds: candidate -> the time of a step in each turn, the maximum over the ranks.
    """

    collectives: Collectives
    candidates: Sequence[Candidate]
    current: Candidate
    turns: int
    steps: int
    apply: Callable[[Candidate], None]
    clock: Callable[[], float] = time.perf_counter
    report: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.state = TunerState(self.current)
        self.seconds: dict[Candidate, list[float]] = {each: [] for each in self.candidates}
        self._measuring = self._measure()

    @property
    def candidate(self) -> Candidate:
        """The settings in use."""
        return self.state.candidate

    @property
    def done(self) -> bool:
        """Whether the settings are final."""
        return self.state.done

    @property
    def tuned(self) -> bool:
        """Whether the settings were measured: in this job, or in an earlier job (`use`)."""
        return self.state.tuned

    @property
    def bucket_bytes(self) -> int:
        """The bucket size in use."""
        return self.candidate.bucket_bytes

    @property
    def wire_format(self) -> str:
        """The name of the wire format in use."""
        return self.candidate.wire_format

    @property
    def wire_formats(self) -> Collection[str]:
        """The names of the wire formats that may be used."""
        return {self.current.wire_format, *(each.wire_format for each in self.seconds)}

    def begin(self) -> None:
        """Begin with the first candidate. Not a collective."""
        next(self._measuring)

    def use(self, candidate: Candidate) -> None:
        """Use settings that were chosen before, and measure nothing. Not a collective."""
        self._use(TunerState(candidate, done=True, tuned=True))

    def cancel(self) -> None:
        """Return to the settings at the beginning, unless `done`. Not a collective."""
        if not self.done:
            self._use(TunerState(self.current, done=True))

    def after_step(self) -> None:
        """Record that a step has ended. After the steps of a candidate, a small collective."""
        if not self.done:
            next(self._measuring, None)

    def _measure(self) -> Iterator[None]:
        """Use all candidates in turns, and choose one. Each `yield` waits until a step has ended.

        After the steps of a candidate, a small collective.
        """
        for turn in range(self.turns):
            # A random order, the same on all ranks, so that a candidate does not follow the same
            # candidate in every turn.
            order = sorted(self.seconds)
            random.Random(turn).shuffle(order)
            for candidate in order:
                self._use(TunerState(candidate))
                ends = []
                for _ in range(WARM_UP + self.steps):
                    yield
                    ends.append(self.clock())
                times = [end - begin for begin, end in pairwise(ends[WARM_UP - 1 :])]
                own = round(statistics.median(times) * 1e6)
                # A rank in `join` adds zero. It would not take part in a change of the settings.
                (count,) = self.collectives.sum([1], f"{_NAME}.ranks")
                if count < len(self.collectives.ranks):
                    _log.warning(
                        "hvd.autotune has chosen nothing, because a rank has called hvd.join()"
                    )
                    self.cancel()
                    return
                (slowest,) = self.collectives.max([own], f"{_NAME}.microseconds")
                self.seconds[candidate].append(max(slowest, 1) / 1e6)
        self.use(choose(self.seconds, self.current))
        if self.collectives.is_first:
            self.report()

    def summary(self) -> str:
        """Return the times of all candidates, and the choice."""
        if self.candidate == self.current:
            result = f"nothing is clearly faster than the current settings ({self.candidate})"
        else:
            result = f"the settings from now on: {self.settings}"
        lines = table(self.seconds, self.current)
        return "\n".join([f"{result}. Times of a step, on the slowest rank:", *lines])

    @property
    def settings(self) -> str:
        """The chosen settings, as arguments of `hvd.DistributedOptimizer`."""
        arguments = [f"bucket_bytes={self.bucket_bytes}"]
        if self.wire_format != self.current.wire_format:
            arguments.append(f'compression="{self.wire_format}"')
        return ", ".join(arguments)

    def _use(self, state: TunerState) -> None:
        before, self.state = self.state, state
        if state.candidate != before.candidate:
            self.apply(state.candidate)


def load(
    collectives: Collectives, path: Path | None, fingerprint: str, wire_formats: Collection[str]
) -> Candidate | None:
    """Return the candidate that an earlier job has chosen; None if there is none. A collective.

    Args:
        collectives: the collectives of the ranks.
        path: the file, which only the first rank reads; None for no file.
        fingerprint: a digest of all that the choice depends on.
        wire_formats: the wire formats that may be used. A choice of another one is ignored, and so
            is a choice that was made without measuring all of them.

    Raises:
        RankMismatchError: on every rank, if only some have a file.
        HvdkitError: on every rank, if the file cannot be read or written.
    """
    check_consistency(collectives, [f"a file for the result: {path is not None}"], "hvd.autotune")
    if path is None:
        return None
    answer: dict[str, Any] = {"problem": "", "size": 0, "format": ""}
    allowed = set(wire_formats)
    first = collectives.ranks[0]
    if collectives.rank == first:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            entry = _read(path).get(fingerprint, {})
            if allowed <= set(entry.get("wire_formats", ())):
                answer["size"] = int(entry.get("bucket_bytes", 0))
                answer["format"] = str(entry.get("wire_format", ""))
            check_writable(path)
        except OSError as error:
            answer["problem"] = f"cannot write {path}: {error.strerror}. Choose another file"
        except Exception as error:  # any text may be in the file, and the other ranks wait
            answer["problem"] = f"{path} is not a file of hvd.autotune ({error}). Delete it"
    text = collectives.broadcast(json.dumps(answer).encode(), first, f"{_NAME}.file")
    answer = json.loads(text)
    if answer["problem"]:
        raise HvdkitError(str(answer["problem"]))
    found = Candidate(answer["size"], answer["format"])
    return found if found.bucket_bytes >= 1 and found.wire_format in allowed else None


def save(path: Path, fingerprint: str, entry: Mapping[str, object]) -> None:
    """Add a choice to the file. Not a collective.

    Args:
        path: the file.
        fingerprint: see `load`.
        entry: the result of `entry_of`.

    Raises:
        OSError: the file cannot be written.
    """
    content = {**_read(path), fingerprint: entry}
    with replacing(path) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def entry_of(chosen: Candidate, seconds: Mapping[Candidate, Sequence[float]]) -> dict[str, Any]:
    """Return a choice, for `save`.

    Args:
        chosen: the candidate that was chosen.
        seconds: see `choose`.
    """
    return {
        "bucket_bytes": chosen.bucket_bytes,
        "wire_format": chosen.wire_format,
        "wire_formats": sorted({each.wire_format for each in seconds}),
        "seconds": {str(each): list(times) for each, times in seconds.items()},
    }


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise TypeError("expected an object")
    return content
