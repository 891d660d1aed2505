"""Choose the bucket size in the first steps of a training.

`hvd.autotune` compares several bucket sizes, the candidates. The candidates are used in turns, each
for a few steps in each turn, because the speed of a machine changes with time. After the steps of a
candidate, the ranks compute the maximum of their median step times. All ranks get the same maxima,
so they choose the same candidate. A candidate replaces the current bucket size only if it was
faster in every turn, and by a few percent.
"""

import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import check_consistency
from hvdkit.errors import HvdkitError

_NAME = "hvdkit.autotune"
# Steps after a change that are not measured: in the first step the ranks plan the buckets, and in
# the second step the memory of the buckets is still new.
_WARM_UP = 2
# The part of the step time that a candidate must save. A smaller gain is not worth a change.
_GAIN = 0.03

_log = logging.getLogger("hvdkit")


def choose(seconds: Mapping[int, Sequence[float]], current: int) -> int:
    """Return the bucket size to use: the current one, unless another one is clearly faster.

    If a candidate is only as fast as the current size, the probability that it is faster in each of
    five turns by chance is 1/32.

    Args:
        seconds: bucket size -> the time of a step in each turn.
        current: the bucket size to compare with.
    """
    best, best_ratio = current, 1 - _GAIN
    for size, times in seconds.items():
        ratios = [mine / usual for mine, usual in zip(times, seconds[current], strict=True)]
        ratio = statistics.median(ratios)
        if size != current and max(ratios) < 1 and ratio < best_ratio:
            best, best_ratio = size, ratio
    return best


def table(seconds: Mapping[int, Sequence[float]], current: int) -> list[str]:
    """Return lines that show the times of the candidates.

    Args:
        seconds: see `choose`.
        current: see `choose`.
    """
    lines = []
    usual = statistics.median(seconds[current])
    for size, times in sorted(seconds.items()):
        middle, each = statistics.median(times), ", ".join(f"{t * 1e3:.1f}" for t in times)
        note = "current" if size == current else f"{100 * (middle / usual - 1):+.0f} %"
        lines.append(f"{size / 1e6:7g} MB {middle * 1e3:9.1f} ms  {note:>8}   turns: {each}")
    return lines


class BucketTuner:
    """Measure the candidates, and choose one. Every rank has a tuner with the same arguments.

    All ranks call `after_step` after the same steps.

    Args:
        collectives: the collectives of the ranks.
        candidates: bucket sizes in bytes, with the current one.
        current: the current bucket size.
        turns: the number of turns of each candidate.
        steps: the number of measured steps in each turn.
        apply: changes the bucket size, before the next step. Not a collective.
        clock: returns seconds.

    Attributes:
        bucket_bytes: the bucket size in use.
        done: whether the bucket size is final.
        tuned: whether the bucket size was measured: in this job, or in an earlier job (`use`).
        seconds: bucket size -> the time of a step in each turn, the maximum over the ranks.
    """

    def __init__(
        self,
        collectives: Collectives,
        candidates: Sequence[int],
        current: int,
        turns: int,
        steps: int,
        apply: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.bucket_bytes = self._current = current
        self.done = self.tuned = False
        self.seconds: dict[int, list[float]] = {size: [] for size in candidates}
        self._collectives = collectives
        self._turns, self._steps = turns, steps
        self._apply = apply
        self._clock = clock
        # The candidates in the order in which they are used.
        self._plan: list[int] = []
        self._made = 0  # steps with the current candidate
        self._times: list[float] = []
        self._last = 0.0
        #: Called on the first rank with the result.
        self.report: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Begin with the first candidate. Not a collective."""
        for turn in range(self._turns):
            # A random order, the same on all ranks, so that a candidate does not follow the same
            # candidate in every turn.
            order = sorted(self.seconds)
            random.Random(turn).shuffle(order)
            self._plan += order
        self._use(self._plan[0])

    def use(self, size: int) -> None:
        """Use a bucket size that was chosen before, and measure nothing. Not a collective."""
        self._end(size)
        self.tuned = True

    def cancel(self) -> None:
        """Return to the bucket size at the beginning, unless `done`. Not a collective."""
        if not self.done:
            self._end(self._current)

    def after_step(self) -> None:
        """Record that a step has ended. After the steps of a candidate, a small collective."""
        if self.done:
            return
        now = self._clock()
        self._made += 1
        if self._made > _WARM_UP:
            self._times.append(now - self._last)
        self._last = now
        if len(self._times) < self._steps:
            return
        own = round(statistics.median(self._times) * 1e6)
        size = self._plan.pop(0)
        # A rank in `join` adds zero. It would not take part in a change of the bucket size.
        (count,) = self._collectives.sum([1], f"{_NAME}.ranks")
        if count < len(self._collectives.ranks):
            _log.warning("the bucket size was not tuned, because a rank has called hvd.join()")
            self.cancel()
            return
        (slowest,) = self._collectives.max([own], f"{_NAME}.microseconds")
        self.seconds[size].append(max(slowest, 1) / 1e6)
        if self._plan:
            self._use(self._plan[0])
            return
        self._end(choose(self.seconds, self._current))
        self.tuned = True
        if self._collectives.rank == self._collectives.ranks[0]:
            self.report()

    def summary(self) -> str:
        """Return the times of all candidates, and the choice."""
        chosen = f"{self.bucket_bytes / 1e6:g} MB"
        if self.bucket_bytes == self._current:
            result = f"no bucket size is clearly faster than the current {chosen}: it stays"
        else:
            result = f"buckets have {chosen} from now on (bucket_bytes={self.bucket_bytes})"
        lines = table(self.seconds, self._current)
        return "\n".join([f"{result}. Times of a step, on the slowest rank:", *lines])

    def _use(self, size: int) -> None:
        self._made, self._times = 0, []
        self._last = self._clock()
        if size != self.bucket_bytes:
            self.bucket_bytes = size
            self._apply(size)

    def _end(self, size: int) -> None:
        self._plan = []
        self._use(size)
        self.done = True


def load(collectives: Collectives, path: Path | None, fingerprint: str) -> int | None:
    """Return the bucket size that an earlier job has chosen; None if there is none. A collective.

    Args:
        collectives: the collectives of the ranks.
        path: the file, which only the first rank reads; None for no file.
        fingerprint: a digest of all that the choice depends on.

    Raises:
        RankMismatchError: on every rank, if only some have a file.
        HvdkitError: on every rank, if the file cannot be read or written.
    """
    check_consistency(collectives, [f"a file for the result: {path is not None}"], "hvd.autotune")
    if path is None:
        return None
    answer: dict[str, Any] = {"problem": "", "size": 0}
    first = collectives.ranks[0]
    if collectives.rank == first:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = _read(path)
            answer["size"] = int(content.get(fingerprint, {}).get("bucket_bytes", 0))
            _write(path, content)
        except OSError as error:
            answer["problem"] = f"cannot write {path}: {error.strerror}. Choose another file"
        except (ValueError, TypeError, AttributeError) as error:
            answer["problem"] = f"{path} is not a file of hvd.autotune ({error}). Delete it"
    text = collectives.broadcast(json.dumps(answer).encode(), first, f"{_NAME}.file")
    answer = json.loads(text)
    if answer["problem"]:
        raise HvdkitError(str(answer["problem"]))
    return int(answer["size"]) or None


def save(path: Path, fingerprint: str, tuner: BucketTuner) -> None:
    """Add a choice to the file. Not a collective.

    Raises:
        OSError: the file cannot be written.
    """
    content = _read(path)
    content[fingerprint] = {
        "bucket_bytes": tuner.bucket_bytes,
        "seconds": {str(size): times for size, times in tuner.seconds.items()},
    }
    _write(path, content)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError("expected an object")
    return content


def _write(path: Path, content: Mapping[str, object]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
