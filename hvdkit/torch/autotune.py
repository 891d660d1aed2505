"""`hvd.autotune`: choose the settings of an optimizer's buckets in the first steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hvdkit.agreement.consistency import check_consistency, digest
from hvdkit.errors import UsageError
from hvdkit.reduction import bucketing
from hvdkit.reduction.wire_format import WireFormat
from hvdkit.torch import runtime
from hvdkit.torch.compression import wire_format
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer, wrapped
from hvdkit.training import tuning
from hvdkit.training.tuning import Candidate, Tuner

_log = logging.getLogger("hvdkit.torch")

_MB = bucketing.MB
#: The bucket sizes that are measured by default, in bytes.
SIZES = (5 * _MB, 25 * _MB, 100 * _MB)


def autotune(
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str] | None = None,
    *,
    bucket_bytes: Sequence[int] = SIZES,
    wire_formats: Sequence[Any] = (),
    turns: int = 5,
    steps: int = 10,
) -> Tuner:
    """Choose the bucket size of an optimizer in the first steps of the training.

    Every rank calls this function before the first step. It measures each candidate for some steps,
    several times. The time of a step is that of the slowest rank. Afterwards all ranks use the
    fastest candidate. They keep the current settings, unless the candidate was faster in every
    turn, and by more than 3 % (median). Rank 0 prints the times.

    The wire format stays the same, unless `wire_formats` names others. The bucket size may change
    the last bits of sums, see docs/performance.md. A checkpoint contains the choice. Call this
    function before `Checkpointer.restore`, which then uses the choice and ends the measurement. So
    the resumed run has the same sums.

    This function cannot be used in elastic jobs. If a rank calls `hvd.join()` during the
    measurement, all ranks return to the settings that they had before.

    Args:
        optimizer: a result of `hvd.DistributedOptimizer`.
        path: a file for the result. Later jobs with the same gradients, settings, ranks, hosts and
            engine read it, and measure nothing.
        bucket_bytes: the bucket sizes to measure, in bytes. The optimizer's current bucket size is
            always measured. A size that makes the same buckets as an earlier one is left out.
        wire_formats: wire formats to measure beside the optimizer's own, as for `compression` of
            `hvd.DistributedOptimizer`. A wire format changes the accuracy of gradients, so name
            only formats with which the training may continue. Each is measured with each size.
        turns: the number of times that each candidate is measured, at least 3.
        steps: the measured steps in each turn. The two steps before them are not measured.

    Returns:
        An object with the attributes `done`, `bucket_bytes`, `wire_format` (its name) and
        `seconds`.

    Raises:
        UsageError: an argument is invalid; nothing has been communicated.
        RankMismatchError: on every rank, if the arguments differ between ranks.
        HvdkitError: on every rank, if the file cannot be read or written.

    Example:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.autotune(optimizer, "run/tuning.json", wire_formats=["bf16"])
    """
    own = wrapped(optimizer)
    for name, value, least in (("turns", turns, 3), ("steps", steps, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name} is {value!r}: expected a whole number >= {least}")
    sizes = list(bucket_bytes) if isinstance(bucket_bytes, Sequence) else [bucket_bytes]
    for size in sizes:
        bucketing.check_bucket_bytes(size)
    formats = formats_of(own, wire_formats)
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise UsageError(
            "hvd.autotune was called in an elastic job, in which new ranks would measure alone: "
            "pass bucket_bytes and compression to hvd.DistributedOptimizer"
        )
    if own.hvdkit_tuner is not None or own.hvdkit_steps:
        raise UsageError(
            f"hvd.autotune was called {'twice' if own.hvdkit_tuner else 'too late'}: expected one "
            f"call before the first step, and {own.hvdkit_steps} steps were made"
        )
    if any(state is not None for state in own.reducer.reduction_states()):
        raise UsageError(
            "hvd.autotune was called after Checkpointer.restore. The checkpoint may contain a "
            "bucket size: call hvd.autotune before Checkpointer.restore"
        )
    collectives = own.reducer.collectives
    file = None if path is None else Path(path)
    tuner = make_tuner(own, sizes, formats, turns, steps)
    # `hvdkit tune` measures by itself.
    if collectives.single_rank or own.hvdkit_trial is not None:
        tuner.cancel()
        own.hvdkit_tuner = tuner
        return tuner
    candidates = [str(each) for each in tuner.seconds]
    lines = [f"candidates: {candidates}", f"turns: {turns}", f"steps: {steps}"]
    check_consistency(collectives, lines, "hvd.autotune", "Pass the same arguments on every rank.")
    if len(candidates) == 1:
        tuner.cancel()
        own.hvdkit_tuner = tuner
        return tuner
    key = fingerprint(own)
    known = tuning.load(collectives, file, key, formats)
    own.hvdkit_tuner = tuner
    if known is not None:
        tuner.use(known)
        return tuner

    def report() -> None:
        print(f"hvdkit: {tuner.summary()}", flush=True)
        if file is not None:
            try:
                tuning.save(file, key, tuning.entry_of(tuner.candidate, tuner.seconds))
            except (OSError, ValueError, TypeError) as error:
                _log.warning("the result of hvd.autotune was not saved to %s: %s", file, error)

    tuner.report = report
    tuner.begin()
    return tuner


def make_tuner(
    optimizer: WrappedOptimizer,
    sizes: Sequence[int],
    formats: dict[str, WireFormat],
    turns: int,
    steps: int,
) -> Tuner:
    """Return a tuner that has not begun. Not a collective.

    Args:
        optimizer: the optimizer.
        sizes: bucket sizes to measure beside the current one.
        formats: name -> wire format to measure, with the current one.
        turns: see `Tuner`.
        steps: see `Tuner`.
    """
    gradients = optimizer.reducer.gradients
    current = Candidate(gradients.reduction.bucket_bytes, gradients.reduction.format.name)
    candidates = [
        Candidate(size, name)
        for name, each in formats.items()
        for size in gradients.distinct_bucket_bytes([current.bucket_bytes, *sizes], each)
    ]

    def apply(candidate: Candidate) -> None:
        optimizer.reducer.set_buckets(candidate.bucket_bytes, formats[candidate.wire_format])

    return Tuner(optimizer.reducer.collectives, candidates, current, turns, steps, apply)


def formats_of(optimizer: WrappedOptimizer, wire_formats: Any) -> dict[str, WireFormat]:
    """Return name -> wire format, with the optimizer's own as the first.

    Raises:
        UsageError: an element is not a wire format.
    """
    if isinstance(wire_formats, str) or not isinstance(wire_formats, Iterable):
        raise UsageError(
            f"wire_formats is {wire_formats!r}: expected a list, such as ['none', 'bf16']"
        )
    own = optimizer.reducer.gradients.reduction.format
    formats = {own.name: own}
    for each in map(wire_format, wire_formats):
        formats.setdefault(each.name, each)
    return formats


def fingerprint(optimizer: WrappedOptimizer) -> str:
    """Return a digest of all that the fastest settings depend on, the same on every rank."""
    return digest(
        [
            *optimizer.reducer.gradients.reduction_lines(),
            f"ranks: {list(optimizer.reducer.collectives.ranks)}",
            f"hosts: {runtime.host_collectives.sum_order()}",
            f"engine: {runtime.engine.version}",
        ]
    ).hex()[:32]
