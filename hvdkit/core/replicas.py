"""Compare the ranks' replicas of parameters and optimizer state while they train.

All ranks apply the same reduced gradients, so their parameters stay equal to the last bit. They
differ after a fault of memory or of a processor, and after code that changes parameters, optimizer
state or a learning rate on some ranks only. Without a comparison, nobody notices the difference.

Every `interval` steps, and before each checkpoint, each rank computes a digest, and one small
allreduce compares the digests. If the digests differ, the ranks find out which tensors and elements
differ, and on which ranks.

A wrong gradient before the sum cannot be found this way: all ranks apply the same wrong sum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import (
    RankMismatchError,
    compare,
    error_text,
    first_difference,
    name_ranks,
)
from hvdkit.core.nonfinite import describe_weight
from hvdkit.errors import UsageError

#: The default number of steps between two comparisons.
INTERVAL = 100
# The step of the first comparison. Until the interval is over, the ranks also compare after twice,
# four times as many steps and so on: many mistakes show in the first steps, and a short job should
# not end without a comparison.
_FIRST = 10
#: What to do about a difference.
STOP, REPAIR = "stop", "repair"

# The largest difference that counts as rounding, relative to the largest element of the tensor.
# Ranks on different processors may round a step differently, by about 1e-7.
_ROUNDING = 1e-4
# Tensors that an error describes.
_SHOWN = 3

_OPTIONS_ADVICE = (
    "Ranks with different options train different models. Make the optimizer with the same options "
    "on all ranks. Change learning rates and other options on all ranks alike, or broadcast the "
    "optimizer's state of one rank (hvd.broadcast_optimizer_state of PyTorch)."
)
#: The end of an error about values.
VALUES_ADVICE = (
    "The reduced gradients were the same on all ranks. So memory or a processor of a host has "
    "failed, or code changes reduced gradients, parameters or optimizer state on some ranks only, "
    "for example in the forward pass (PyTorch: nn.Embedding(max_norm=...)). "
    "Restore a checkpoint of an earlier step. on_mismatch='repair' of hvd.DistributedOptimizer "
    "copies the values of the majority instead. If ranks should differ, pass check_interval=0."
)
_RATE_ADVICE = (
    "Ranks with different learning rates train different models. Change a learning rate on all "
    "ranks alike, for example in a callback that every rank has. Restore a checkpoint of an "
    "earlier step."
)
_JOIN_ADVICE = (
    " The ranks have called hvd.join() or hvd.init() since the last comparison. After such a "
    "call, broadcast the parameters and the optimizer state of one rank before you train or save."
)
_ROUNDING_ADVICE = (
    "The differences are small, as if processors round differently. The job continues, and logs "
    "this only once. on_mismatch='repair' of hvd.DistributedOptimizer keeps the ranks equal."
)
#: The number of parameters that `Replicas.small` returns.
SMALL = 8
#: The folder, in the working directory, in which each rank saves its tensors that differ.
FOLDER = "hvdkit-mismatch"

_log = logging.getLogger("hvdkit")


class Replicas(Protocol):
    """The tensors and settings of one rank that must be equal on all ranks."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the tensors."""
        ...

    @property
    def settings(self) -> Sequence[str]:
        """Lines of text that must be equal, such as learning rates and the names of tensors."""
        ...

    def digests(self) -> Sequence[int]:
        """Return a 64-bit digest of each tensor."""
        ...

    def small(self) -> Sequence[int]:
        """Return the indices of a few floating-point parameters, the smallest first."""
        ...

    def read(self, index: int) -> np.ndarray:
        """Return the bytes of a tensor as a one-dimensional uint8 array."""
        ...

    def write(self, index: int, data: np.ndarray) -> None:
        """Set a tensor to the bytes of a result of `read`."""
        ...

    def values(self, index: int, data: np.ndarray) -> np.ndarray:
        """Return the bytes of a tensor as its elements: float64, int64, complex128 or bool."""
        ...

    def save(self, indices: Sequence[int], path: Path) -> Path:
        """Write tensors to a file. Return its path, with the suffix of the format."""
        ...


@dataclass(frozen=True)
class CheckSettings:
    """The settings of the comparison of replicas.

    Attributes:
        interval: the number of steps between two comparisons; 0 for none.
        on_mismatch: `stop` or `repair`.

    Raises:
        UsageError: a value is invalid.
    """

    interval: int = INTERVAL
    on_mismatch: str = STOP

    def __post_init__(self) -> None:
        if not isinstance(self.interval, int) or isinstance(self.interval, bool):
            raise UsageError(f"check_interval is {self.interval!r}: expected a number of steps")
        if self.interval < 0:
            raise UsageError(
                f"check_interval is {self.interval}: expected a number of steps, or 0 for no "
                f"comparison after the first one"
            )
        if self.on_mismatch not in (STOP, REPAIR):
            raise UsageError(
                f"on_mismatch is {self.on_mismatch!r}: expected {STOP!r} or {REPAIR!r}"
            )


@dataclass(frozen=True)
class _Difference:
    """One tensor that differs between ranks.

    Attributes:
        index: its index among the names.
        root: the first rank of the largest group of ranks that have equal values.
        ranks: the ranks that differ from `root`.
        majority: whether the largest group has more than half of the ranks.
    """

    index: int
    root: int
    ranks: Sequence[int]
    majority: bool


@dataclass(frozen=True)
class _Finding:
    """The result of comparing one tensor of this rank with that of another rank.

    Attributes:
        far: whether it differs by more than rounding.
        text: a text about the difference; empty if there is none.
        failure: why the tensor was not compared or repaired; empty if it was.
    """

    far: bool = False
    text: str = ""
    failure: str = ""


class ReplicaCheck:
    """Compare the replicas of one optimizer. Every rank has one, with the same settings.

    Args:
        collectives: the collectives of the ranks to compare.
        settings: the settings.
        replicas: returns this rank's tensors.
        steps: returns the number of steps that this rank has made, or another number that changes
            with each step; 0 as long as the ranks need not be equal.
        advice: the end of an error about values.
    """

    def __init__(
        self,
        collectives: Collectives,
        settings: CheckSettings,
        replicas: Callable[[], Replicas],
        steps: Callable[[], int],
        advice: str = VALUES_ADVICE,
    ) -> None:
        self._collectives = collectives
        self._settings = settings
        self._replicas = replicas
        self._steps = steps
        self._advice = advice
        self._compared_steps = 0
        self._generation = collectives.generation
        # Whether a repair has saved the tensors. Later repairs do not, to keep the disk free.
        self._repaired = False
        self._logged = self._logged_nonfinite = False

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that are compared."""
        return self._collectives.ranks

    @property
    def settings(self) -> CheckSettings:
        """The settings."""
        return self._settings

    def has_stepped(self) -> bool:
        """Return whether this rank has made a step since the last comparison.

        Ranks that have called `join` may return different results.
        """
        return self._steps() not in (0, self._compared_steps)

    def is_due(self, step: int, together: int = 1) -> bool:
        """Return whether to compare after `step` steps. The same on all ranks.

        Args:
            step: the number of steps.
            together: the number of the last steps that have ended together.
        """
        return any(map(self._is_due_after, range(step - together + 1, step + 1)))

    def _is_due_after(self, step: int) -> bool:
        interval = self._settings.interval
        if not interval or step <= 0:
            return False
        multiple, rest = divmod(step, _FIRST)
        is_early = step < interval and not rest and multiple.bit_count() == 1
        return is_early or step % interval == 0

    def compare(self, step: int, consequence: str = "") -> None:
        """Compare the replicas. A collective.

        Args:
            step: the number of steps that were made, for the error.
            consequence: a sentence for the error.

        Raises:
            RankMismatchError: on every rank, naming the tensors, the ranks and the elements.
        """
        joined = self._collectives.generation != self._generation
        self._generation = self._collectives.generation
        try:
            self._compare(step)
        except RankMismatchError as error:
            text = f"{error}{_JOIN_ADVICE if joined else ''}"
            raise RankMismatchError(f"{text} {consequence}" if consequence else text) from None
        self._compared_steps = self._steps()

    def _compare(self, step: int) -> None:
        """Implement `compare`."""
        own = self._replicas()
        digests = np.array(own.digests(), np.uint64)
        text = "\n".join(own.settings)
        content = hashlib.sha256(text.encode() + digests.tobytes()).digest()
        equal, joined = compare(self._collectives, content, "hvdkit.replicas")
        if equal:
            self._warn_of_nonfinite(step, own)
        # Ranks in `join` take part in reductions only, so nothing can be gathered. The difference
        # is found at the next comparison.
        if equal or joined:
            return
        texts = self._gather(text.encode(), "names")
        if len(set(texts.values())) > 1:
            by_rank = {rank: data.decode().split("\n") for rank, data in texts.items()}
            raise RankMismatchError(
                f"{first_difference(by_rank, f'the optimizer after step {step}')} {_OPTIONS_ADVICE}"
            )
        self._handle(step, own, self._differences(digests))

    def _warn_of_nonfinite(self, step: int, own: Replicas) -> None:
        """Log if the parameters of all ranks contain NaN or infinity. Not a collective.

        This happens after a step in which the loss was NaN on one rank. Such a loss makes all
        parameters NaN that the loss depends on, so only a few small parameters are read.
        """
        for index in () if self._logged_nonfinite else own.small():
            values = own.values(index, own.read(index))
            if np.isfinite(values).all():
                continue
            self._logged_nonfinite = True
            weight = describe_weight(
                own.names[index], bool(np.isnan(values).any()), f"After step {step}"
            )
            self._log(
                f"{weight} on_nonfinite='raise' of hvd.DistributedOptimizer raises in the first "
                f"such step, and names the rank."
            )
            return

    def _gather(self, data: bytes, name: str) -> dict[int, bytes]:
        """Return rank -> its data. A collective."""
        gathered = self._collectives.allgather(data, f"hvdkit.replicas.{name}")
        return dict(zip(self._collectives.ranks, gathered, strict=True))

    def _differences(self, digests: np.ndarray) -> list[_Difference]:
        """Return the tensors that differ, and on which ranks. A collective."""
        gathered = self._gather(digests.tobytes(), "digests")
        table = {rank: np.frombuffer(data, np.uint64) for rank, data in gathered.items()}
        found = []
        for index in range(len(digests)):
            ranks_of: dict[int, list[int]] = {}
            for rank, row in table.items():
                ranks_of.setdefault(int(row[index]), []).append(rank)
            if len(ranks_of) > 1:
                # If several groups are the largest, take the one with the lowest rank.
                largest = max(ranks_of.values(), key=lambda ranks: (len(ranks), -ranks[0]))
                others = [rank for rank in table if rank not in largest]
                found.append(_Difference(index, largest[0], others, len(largest) > len(others)))
        return found

    def _handle(self, step: int, own: Replicas, differences: Sequence[_Difference]) -> None:
        """Describe differences; then repair them, log them or raise. A collective."""
        repairs = self._settings.on_mismatch == REPAIR and all(d.majority for d in differences)
        if repairs and not self._repaired:
            self._repaired = True
            self._save(step, own, differences)
        found = [self._examine(own, difference, repairs) for difference in differences]
        answer = {
            "host": socket.gethostname(),
            "processor": _processor(),
            "far": any(each.far for each in found),
            "failure": next((each.failure for each in found if each.failure), ""),
            "texts": [each.text for each in found[:_SHOWN]],
        }
        gathered = self._gather(json.dumps(answer).encode(), "values")
        answers = {rank: json.loads(data) for rank, data in gathered.items()}
        text = self._describe(step, own, differences, answers)
        failures = {rank: answer["failure"] for rank, answer in answers.items()}
        for rank in (rank for rank, failure in failures.items() if failure):
            text += f" Rank {rank} cannot copy the values of the majority: {failures[rank]}."
        if repairs and not any(failures.values()):
            self._log(f"{text} The values of the majority were copied to these ranks.")
        elif not any(answer["far"] or answer["failure"] for answer in answers.values()):
            if not self._logged:
                self._log(f"{text}{_processors(answers)} {_ROUNDING_ADVICE}")
            self._logged = True
            # Ranks may have NaN with different bits.
            self._warn_of_nonfinite(step, own)
        else:
            self._save(step, own, differences)
            ranks = sorted({rank for d in differences for rank in (d.root, *d.ranks)})
            rates = any(own.names[d.index].endswith("learning_rate'") for d in differences)
            advice = _RATE_ADVICE if rates else self._advice
            raise RankMismatchError(
                f"{text} {advice} In their working directories, {name_ranks(ranks)} have "
                f"saved their versions of the tensors as {FOLDER}/step-{step}-rank-N.*."
            )

    def _examine(self, own: Replicas, difference: _Difference, repairs: bool) -> _Finding:
        """Compare one tensor with that of `difference.root`, and repair it. A collective."""
        data = own.read(difference.index)
        root = difference.root
        theirs = np.frombuffer(
            self._collectives.broadcast(data.tobytes(), root, "hvdkit.replicas.tensor"), np.uint8
        )
        if self._collectives.rank not in difference.ranks:
            return _Finding()
        if len(theirs) != len(data):
            text = f"has {len(data):,} bytes, and {len(theirs):,} on rank {root}"
            return _Finding(True, text, "the sizes differ" if repairs else "")
        far, text = True, f"differs from rank {root}"
        try:
            far, text = _compare(
                own.values(difference.index, data), own.values(difference.index, theirs), root
            )
            if repairs:
                own.write(difference.index, theirs)
        except Exception as error:
            # Any error: the other ranks wait in the next collective. PyTorch raises a RuntimeError
            # if elements of a tensor share memory.
            return _Finding(True, text, error_text(error))
        return _Finding(far, text)

    def _describe(
        self,
        step: int,
        own: Replicas,
        differences: Sequence[_Difference],
        answers: dict[int, dict[str, Any]],
    ) -> str:
        parts = []
        for k, difference in enumerate(differences[:_SHOWN]):
            name = own.names[difference.index]
            for rank in difference.ranks[:_SHOWN]:
                host, text = answers[rank]["host"], answers[rank]["texts"][k]
                parts.append(f"{name} on rank {rank} (host {host}) {text}")
            if len(difference.ranks) > _SHOWN:
                more = len(difference.ranks) - _SHOWN
                parts.append(f"{name} differs on {more} more ranks")
        more = len(differences) - _SHOWN
        rest = f" {more} more tensors differ." if more > 0 else ""
        if not all(difference.majority for difference in differences):
            rest += " No majority of ranks agrees, so either value may be the wrong one."
        return f"Ranks have different values after step {step}: {'; '.join(parts)}.{rest}"

    def _save(self, step: int, own: Replicas, differences: Sequence[_Difference]) -> None:
        """Save this rank's version of the tensors. Not a collective."""
        rank = self._collectives.rank
        indices = [d.index for d in differences if rank == d.root or rank in d.ranks]
        if not indices:
            return
        try:
            Path(FOLDER).mkdir(exist_ok=True)
            own.save(indices, Path(FOLDER) / f"step-{step}-rank-{rank}")
        except Exception as error:
            # Any error: the other ranks wait in the next collective. torch.save raises a
            # RuntimeError if the disk is full.
            _log.warning("rank %d cannot save the tensors that differ: %s", rank, error)

    def _log(self, text: str) -> None:
        if self._collectives.rank == self._collectives.ranks[0]:
            _log.warning("%s", text)


def _compare(own: np.ndarray, theirs: np.ndarray, root: int) -> tuple[bool, str]:
    """Return whether values differ by more than rounding, and a text about the difference."""
    equal = (own == theirs) | ((own != own) & (theirs != theirs))
    where = np.flatnonzero(~equal)
    if not where.size:
        return False, f"has other bits than on rank {root} in elements that are zero or NaN"
    first = int(where[0])
    text = (
        f"differs in {where.size:,} of {own.size:,} elements from rank {root}: element {first:,} "
        f"is {own[first]}, and {theirs[first]} on rank {root}"
    )
    if own.dtype.kind not in "fc" or not np.all(
        np.isfinite(own[where]) & np.isfinite(theirs[where])
    ):
        return True, text
    if own.size == 1 and own[0] == np.rint(own[0]) and theirs[0] == np.rint(theirs[0]):
        # A counter, such as Adam's number of steps. A large one hides a difference of 1.
        return True, text
    largest = np.max(np.abs(theirs[np.isfinite(theirs)]), initial=0.0)
    return bool(np.max(np.abs(own[where] - theirs[where])) > _ROUNDING * largest), text


def _processor() -> str:
    """Return the name of this host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _processors(answers: dict[int, dict[str, Any]]) -> str:
    """Return a sentence with the processors of the ranks, if these differ."""
    names = {answer["processor"]: rank for rank, answer in reversed(answers.items())}
    if len(names) < 2:
        return ""
    listed = ", ".join(f"{name} (rank {rank})" for name, rank in sorted(names.items())[:_SHOWN])
    return f" The processors are {listed}."
