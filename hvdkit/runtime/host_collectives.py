"""The engine's shared memory for the ranks of one host, and its paths between hosts.

The engine reduces buckets in memory that the ranks of a host share, without copying them through
sockets. Between hosts it can send them as 8-bit integers (`hvdkit/engine/sources/host_group.h`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.system.plain_files import parse_json

#: The value `flat` turns shared memory off. If one rank has this value, it is off on all ranks.
VARIABLE = "HVDKIT_COLLECTIVES"

#: Bytes of the smallest allocation. The engine itself copies smaller tensors to a shared page.
SMALLEST = 1025


class HostCollectives:
    """The engine's shared memory and its paths between hosts.

    Args:
        library: the loaded extension of Horovod.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def allocate(self, size: int) -> int | None:
        """Return the address of `size` zeroed bytes of shared memory.

        Returns None if a tensor of this size needs no shared memory, if shared memory is off (see
        `flat_reason`), or if too little is left.
        """
        allocate = self._function("allocate")
        if allocate is None or size < SMALLEST:
            return None
        allocate.restype = ctypes.c_void_p
        address: int | None = allocate(ctypes.c_size_t(size))
        return address

    def release(self, address: int) -> None:
        """Give memory of `allocate` back to the engine."""
        if release := self._function("release"):
            release(ctypes.c_void_p(address))

    def flat_reason(self) -> str:
        """Return why buckets are not reduced in shared memory; "" if they are."""
        describe = self._function("flat_reason")
        if describe is None:
            return "the engine was not built by `hvdkit build`, or by an older one"
        text = ctypes.create_string_buffer(1000)
        describe(text, ctypes.c_size_t(len(text)))
        return text.value.decode(errors="replace")

    def sum_order(self) -> str:
        """Return the facts that determine the order of additions, as JSON; "" if not available.

        The result is the same on all ranks. Jobs with different orders may get sums that differ in
        the last bits. `describe_sum_order` returns a readable text.
        """
        describe = self._function("sum_order")
        if describe is None:
            return ""
        describe.restype = ctypes.c_size_t
        length = describe(None, ctypes.c_size_t(0))
        text = ctypes.create_string_buffer(length + 1)
        describe(text, ctypes.c_size_t(len(text)))
        return text.value.decode()

    def sends_int8(self) -> bool:
        """Return whether tensors on the CPU named `int8_name(...)` are sent as 8-bit integers.

        The answer is the same on all ranks.
        """
        answer = self._function("has_int8")
        if answer is None:
            return False
        answer.restype = ctypes.c_bool
        return bool(answer())

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"horovod_hvdkit_{name}", None)


def describe_sum_order(order: str) -> str:
    """Return a readable text about a result of `HostCollectives.sum_order`."""
    try:
        fields = parse_json(order)
        version, library, hosts = fields["version"], fields["library"], fields["hosts"]
        sizes = [len(ranks) for ranks in hosts]
        numbers = [rank for ranks in hosts for rank in ranks]
    except (ValueError, KeyError, TypeError):
        return "an order of another version of hvdkit"
    if not hosts:
        place = "no shared memory"
    elif len(set(sizes)) == 1:
        place = f"{len(hosts)} host{'s' * (len(hosts) > 1)} with {sizes[0]} ranks"
    else:
        place = f"hosts with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
    if numbers != sorted(numbers):
        place += f" (ranks {hosts[0]} on the first)"
    return f"{place}, {library}, version {version} of the order"


def int8_name(name: str) -> str:
    """Return the name of a float32 sum that the engine sends as 8-bit integers.

    Args:
        name: a name that begins with `hvdkit.`.
    """
    return f"hvdkit.int8.{name.removeprefix('hvdkit.')}"


def check_choice(environ: MutableMapping[str, str] = os.environ) -> None:
    """Check the environment variable HVDKIT_COLLECTIVES.

    Raises:
        UsageError: the variable has a value other than `flat`.
    """
    choice = environ.get(VARIABLE, "")
    if choice not in ("", "flat"):
        raise UsageError(
            f"{VARIABLE} is {choice!r}: expected flat. To reduce in the shared memory of a "
            f"host, unset {VARIABLE}."
        )
