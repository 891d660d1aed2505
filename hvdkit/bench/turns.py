"""Run jobs in turns: in each turn, every job works once, while the others are stopped."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import psutil

from hvdkit.bench.jobs import Job
from hvdkit.errors import HvdkitError

Result = TypeVar("Result")

# The next job may need as much memory as the largest job now, and half as much again later.
_SPARE_MEMORY = 1.5


def in_turns(
    jobs: Sequence[Job], turns: int, work: Callable[[Job], Result]
) -> Iterator[tuple[int, Job, Result]]:
    """Yield the turn, the job and the result of `work(job)`, for each turn and job.

    Args:
        jobs: the jobs.
        turns: the number of turns.
        work: called while the job runs.
    """
    for turn in range(turns):
        # A random order, so that no job always follows the same other one.
        for job in random.Random(turn).sample(jobs, len(jobs)):
            with job.turn():
                result = work(job)
            yield turn, job, result


def check_memory(started: Sequence[Job]) -> None:
    """Check that there is enough memory for one more job on this machine.

    Raises:
        HvdkitError: too little memory is available.
    """
    largest = max((job.unshared_memory() for job in started), default=0.0)
    available = psutil.virtual_memory().available
    if available < _SPARE_MEMORY * largest:
        raise HvdkitError(
            f"too little memory for all variants at once: {available / 1e9:.1f} GB left, with "
            f"{len(started)} started, the largest with {largest / 1e9:.1f} GB. Name fewer with "
            f"--variants"
        )
