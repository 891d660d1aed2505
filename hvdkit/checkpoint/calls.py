"""Check that all ranks have called the same method of a `Manager` or of an elastic state.

Each method begins with the same allreduce of 24 bytes. With different collectives, a rank in
`maybe_save` and a rank in another method would wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hvdkit.agreement.collectives import Collectives
from hvdkit.checkpoint.coordination import compare, exchange
from hvdkit.checkpoint.storage import check_number
from hvdkit.errors import UsageError

_BITS = 15
#: The counts in one word of 64 bits.
_COUNTS = 4

#: A save is due by the first rank's clock.
LATE = 1
#: A write has failed.
FAILED = 2

#: Seconds between two messages of the first rank to the others while it waits for a write.
WAIT_SECONDS = 60.0


class StepWord(NamedTuple):
    """Flags of each rank at the beginning of a call of the manager, summed over the ranks.

    Attributes:
        present: 1. A sum below the number of ranks shows that some have called `join`.
        due: 1 if a save is due by the steps.
        stops: 1 if this rank has a stop signal. For an elastic state: 1 if its hosts have changed.
        waiting: 1 if this rank is not at a step boundary.
        blocked: 1 if this rank must not save now for another reason.
        first: what only the first rank knows: the sum of `LATE` and `FAILED`.
        elsewhere: 1 if this rank is in another method of a manager than `maybe_save`.
        wrong: 1 if this rank's call is an error: the step is not a valid number, or is lower than
            in an earlier call; or the calls are never at a boundary.
        keeps: 1 if this rank can keep this step in the memory of its host, see `HostMemory.ready`.
        commits: 1 if this rank is in `commit` of an elastic state.
        checks: 1 if this rank is in `check_host_updates` of an elastic state.
    """

    present: int = 1
    due: int = 0
    stops: int = 0
    waiting: int = 0
    blocked: int = 0
    first: int = 0
    elsewhere: int = 0
    wrong: int = 0
    keeps: int = 0
    commits: int = 0
    checks: int = 0

    @property
    def calls(self) -> Sequence[int]:
        """The ranks in each call but `maybe_save`."""
        return self.elsewhere, self.commits, self.checks

    def sum(self, collectives: Collectives) -> "StepWord":
        """Return the sum of all ranks' words. A collective."""
        words = [_packed(self[k : k + _COUNTS]) for k in range(0, len(self), _COUNTS)]
        totals = collectives.sum(words, "hvdkit.checkpoint.step")
        counts = [count for total in totals for count in _unpacked(total)]
        return StepWord(*counts[: len(self)])


_ELSEWHERE = StepWord(elsewhere=1)


def begin(collectives: Collectives, call: str, own: StepWord = _ELSEWHERE) -> StepWord:
    """Begin a call other than `maybe_save`. A collective.

    Args:
        collectives: of the ranks.
        call: the name of the method that this rank is in.
        own: the word of this rank.

    Returns:
        The sum of all ranks' words.

    Raises:
        UsageError: on all ranks that are in a call: the calls differ, or a rank is in `join`.
    """
    agreed = own.sum(collectives)
    ranks = len(collectives.ranks)
    if agreed.present < ranks:
        raise UsageError(
            f"{call}() was called while {ranks - agreed.present} of {ranks} ranks wait in join(): "
            f"expected the call on all ranks. Call it before or after join()"
        )
    if list(agreed.calls) != [ranks * each for each in own.calls]:
        exchange_in_call(collectives, call)
    return agreed


def exchange_in_call(
    collectives: Collectives,
    call: str,
    message: Mapping[str, Any] | None = None,
    problem: Exception | None = None,
    consequence: str = "",
) -> list[dict[str, Any]]:
    """Return the messages of all ranks, as `exchange`. A collective.

    Args:
        collectives: of the ranks.
        call: the name of the method that this rank is in.
        message: see `exchange`.
        problem: see `exchange`.
        consequence: see `exchange`.

    Raises:
        UsageError: on all ranks: they are in different calls. Also as `exchange`.
        CheckpointError: see `exchange`.
    """
    told = exchange(collectives, {"call": call, **(message or {})}, problem, consequence)
    compare(collectives, [each.get("call") for each in told], "which method to call")
    return told


def check_step(collectives: Collectives, step: int, subject: str) -> None:
    """Raise UsageError on all ranks if a step is not valid, or differs. A collective."""
    problem: Exception | None = None
    try:
        check_number("step", step)
    except UsageError as error:
        problem = error
    told = exchange(collectives, {"step": repr(step)}, problem)
    compare(collectives, [each["step"] for each in told], subject)


def finish(
    collectives: Collectives,
    call: str,
    finished: Callable[[float], bool],
    consequence: str = "",
) -> None:
    """Wait for the current write, if any. A collective.

    The ranks communicate while they wait, so that Horovod does not report a stall.

    Args:
        collectives: of the ranks.
        call: the name of the calling method, the same on all ranks.
        finished: on the first rank, waits for some seconds, and returns whether no write is
            running.
        consequence: added to an error.
    """
    going_on = True
    while going_on:
        problem: Exception | None = None
        message: dict[str, Any] = {}
        try:
            if collectives.is_first:
                message["going on"] = not finished(WAIT_SECONDS)
        except Exception as error:
            problem = error
        told = exchange_in_call(collectives, call, message, problem, consequence)
        going_on = told[0]["going on"]


def _packed(counts: Sequence[int]) -> int:
    return sum(count << k * _BITS for k, count in enumerate(counts))


def _unpacked(word: int) -> list[int]:
    return [word >> k * _BITS & (1 << _BITS) - 1 for k in range(_COUNTS)]
