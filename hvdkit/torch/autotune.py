"""`hvd.autotune`: choose the bucket size of an optimizer in the first steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hvdkit.core import bucketing, tuning
from hvdkit.core.consistency import check_consistency, digest
from hvdkit.core.tuning import BucketTuner
from hvdkit.errors import UsageError
from hvdkit.torch import runtime
from hvdkit.torch.wrapped_optimizer import wrapped

_log = logging.getLogger("hvdkit.torch")

_MB = bucketing.MB


def autotune(
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str] | None = None,
    *,
    bucket_bytes: Sequence[int] = (5 * _MB, 25 * _MB, 100 * _MB),
    turns: int = 5,
    steps: int = 10,
) -> BucketTuner:
    """Choose the bucket size of an optimizer in the first steps of the training.

    Every rank calls this function before the first step. It measures each candidate for some steps,
    several times. The time of a step is that of the slowest rank. Afterwards all ranks use the
    fastest candidate. They keep the current bucket size, unless the candidate was faster in every
    turn, and by more than 3 % (median). Rank 0 prints the times.

    The wire format stays the same. The bucket size may change the last bits of sums, see
    docs/performance.md. A checkpoint contains the chosen bucket size. Call this function before
    `Checkpointer.restore`, which then sets this bucket size and ends the measurement. So the
    resumed run has the same sums.

    This function cannot be used in elastic jobs. If a rank calls `hvd.join()` during the
    measurement, all ranks return to the bucket size that they had before.

    Args:
        optimizer: a result of `hvd.DistributedOptimizer`.
        path: a file for the result. Later jobs with the same gradients, settings, ranks, hosts and
            engine read it, and measure nothing.
        bucket_bytes: the candidates, in bytes. The optimizer's current bucket size is always a
            candidate. A candidate that makes the same buckets as an earlier candidate is left out.
        turns: the number of times that each candidate is measured, at least 3.
        steps: the measured steps in each turn. The two steps before them are not measured.

    Returns:
        An object with the attributes `done`, `bucket_bytes` and `seconds`.

    Raises:
        UsageError: an argument is invalid; nothing has been communicated.
        RankMismatchError: on every rank, if the arguments differ between ranks.
        HvdkitError: on every rank, if the file cannot be read or written.

    Example:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.autotune(optimizer, "run/tuning.json")
    """
    own = wrapped(optimizer)
    for name, value, least in (("turns", turns, 3), ("steps", steps, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} is {value!r}: expected a whole number >= {least}")
    sizes = list(bucket_bytes) if isinstance(bucket_bytes, Sequence) else [bucket_bytes]
    for size in sizes:
        bucketing.check_bucket_bytes(size)
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise UsageError(
            "hvd.autotune was called in an elastic job, in which new ranks would measure alone: "
            "pass bucket_bytes to hvd.DistributedOptimizer"
        )
    if own.tuner is not None or own.steps:
        raise UsageError(
            f"hvd.autotune was called {'twice' if own.tuner else f'after {own.steps} steps'}: "
            f"expected one call before the first step"
        )
    if any(state is not None for state in own.reduction_states()):
        raise UsageError(
            "hvd.autotune was called after Checkpointer.restore. The checkpoint may contain a "
            "bucket size: call hvd.autotune before Checkpointer.restore"
        )
    collectives = own._collectives
    current = own.bucket_bytes
    candidates = own.distinct_bucket_bytes([current, *sizes])
    tuner = BucketTuner(collectives, candidates, current, turns, steps, own.set_bucket_bytes)
    own.tuner = tuner
    if collectives.single_rank:
        tuner.cancel()
        return tuner
    lines = [f"bucket_bytes: {candidates}", f"turns: {turns}", f"steps: {steps}"]
    check_consistency(collectives, lines, "hvd.autotune", "Pass the same arguments on every rank.")
    if len(candidates) == 1:
        tuner.cancel()
        return tuner
    file = None if path is None else Path(path)
    fingerprint = _fingerprint(own)
    known = tuning.load(collectives, file, fingerprint)
    if known is not None:
        tuner.use(known)
        return tuner

    def report() -> None:
        print(f"hvdkit: {tuner.summary()}", flush=True)
        if file is not None:
            try:
                tuning.save(file, fingerprint, tuner)
            except (OSError, ValueError, TypeError) as error:
                _log.warning("the bucket size was not saved to %s: %s", file, error)

    tuner.report = report
    tuner.begin()
    return tuner


def _fingerprint(optimizer: Any) -> str:
    """Return a digest of all that the fastest bucket size depends on, the same on every rank."""
    return digest(
        [
            *optimizer.reduction_lines(),
            f"ranks: {list(optimizer._collectives.ranks)}",
            f"hosts: {runtime.host_collectives.sum_order()}",
            f"engine: {runtime.engine.version}",
        ]
    ).hex()[:32]
