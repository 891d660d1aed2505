"""The limits of an elastic job, from the options of `hvdkit run`."""

from __future__ import annotations

import argparse

from hvdkit.errors import UsageError
from hvdkit.launch.elastic.job import ElasticLimits

#: The default of `--restarts` in an elastic job.
_RESTARTS = 3
#: The default of `--elastic-timeout`, as in Horovod.
_TIMEOUT = 600.0


def limits(options: argparse.Namespace) -> ElasticLimits:
    """Return the limits of an elastic job.

    Raises:
        UsageError: a number is out of range.
    """
    smallest = next((n for n in (options.min_np, options.num_proc) if n is not None), 1)
    first = smallest if options.num_proc is None else options.num_proc
    largest = options.max_np
    sizes = {"--min-np": smallest, "-np": first, "--max-np": largest}
    ordered = [size for size in sizes.values() if size is not None]
    if ordered != sorted(ordered) or smallest < 1:
        given_sizes = ", ".join(
            f"{name} {size}" for name, size in sizes.items() if size is not None
        )
        raise UsageError(f"{given_sizes}: expected 1 <= --min-np <= -np <= --max-np")
    cooldown = options.blacklist_cooldown_range
    if cooldown is not None and not 0 < cooldown[0] <= cooldown[1]:
        raise UsageError(
            f"--blacklist-cooldown-range is {cooldown[0]:g} {cooldown[1]:g}: expected "
            f"0 < MIN <= MAX"
        )
    return ElasticLimits(
        first,
        smallest,
        largest,
        _RESTARTS if options.restarts is None else options.restarts,
        options.reset_limit,
        options.elastic_timeout or _TIMEOUT,
        None if cooldown is None else (cooldown[0], cooldown[1]),
    )
