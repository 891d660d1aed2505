"""Name ranks, the states of their processes, and collectives in texts for the user."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence

from hvdkit.faults.records import Call, Record

# The states of a rank's process that a verdict knows.
STOPPED = "stopped"
ENDED = "ended"
#: The rank is in `hvd.shutdown()`, or its script has ended, and its process still runs.
LEAVING = "leaving"
#: The rank has continued since its last record. What it does now is not known.
CONTINUED = "continued"
#: The rank is on another host, whose records are not known here. It may do anything.
ELSEWHERE = "elsewhere"

# The most ranks that are listed.
_SHOWN_RANKS = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a text such as `Ranks 0, 2`."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {shortened(ranks, _SHOWN_RANKS)}"


def shortened(items: Collection[object], most: int = 4, separator: str = ", ") -> str:
    """Return a text with the first items, such as `host1, host2 and 3 more`."""
    shown = separator.join(map(str, itertools.islice(items, most)))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


# The names of hvdkit's own collectives -> what they do.
_OWN = {
    re.compile(pattern): text
    for pattern, text in {
        r"hvdkit\.rounds\.": "the comparison of the ranks' states",
        r"hvdkit\.replicas": "the comparison of parameters and optimizer state",
        r"hvdkit\.agreement": "a consistency check",
        r"hvdkit\.[0-9a-f]{16}\.\d+\.used": "the number of ranks that use each gradient",
        r"hvdkit\.[0-9a-f]{16}\.\d+\.largest": "the magnitude of the sums",
        r"hvdkit\.checkpoint\.": "a call of the checkpointer",
        r"hvdkit\.keras\.(metrics|logs|loss)": "the reduction of metrics",
        r"hvdkit\.keras\.epoch": "the end of an epoch of fit",
        r"hvdkit\.keras\.": "the coordination of fit",
        r"hvdkit\.broadcast": "a broadcast of parameters or objects",
        r"hvdkit\.allgather_object": "allgather_object",
        r"hvdkit\.process_set\.add": "add_process_set",
        r"hvdkit\.process_set\.remove": "remove_process_set",
        r"hvdkit\.shard\.": "the comparison of the data's sizes",
        r"sync_batch_norm": "a layer SyncBatchNorm",
        r"^join": "join()",
    }.items()
}


def describe_call(call: Call, record: Record) -> str:
    """Return a text for a call of a collective: its name, and the number of the call."""
    return name_call(call, record) + (f", call {call.number:,}" if call.number > 1 else "")


def name_call(call: Call, record: Record) -> str:
    """Return a text for a collective, such as a bucket with its parameters."""
    is_known = record.label(call.name) is not None or is_internal(call)
    size = f", {call.bytes:,} bytes of {call.dtype}" if call.bytes and not is_known else ""
    return title(call, record) + size


def title(call: Call, record: Record) -> str:
    """Return a text for a collective, without the size of the rank's tensor."""
    text = record.label(call.name)
    if text is None:
        own = next((t for pattern, t in _OWN.items() if pattern.search(call.name)), None)
        name = call.name.removeprefix(f"{call.operation}.")
        text = f"{own} ({call.name})" if own else f"the {call.operation} {name!r}"
    return text + _of_process_set(call, record)


def is_internal(call: Call) -> bool:
    """Return whether hvdkit itself calls the collective."""
    return any(pattern.search(call.name) for pattern in _OWN)


def _of_process_set(call: Call, record: Record) -> str:
    """Return a text for the process set of a call; "" for that of all ranks."""
    if call.group == 0:
        return ""
    ranks = record.groups.get(call.group)
    return f" of process set {call.group}" + (f" ({name_ranks(ranks).lower()})" if ranks else "")
