"""The values that are stored without the key, in the protocol of Horovod's C++ `HTTPStore`."""

import re
import threading

from hvdkit.rendezvous.mesh import GLOBAL_SCOPE

# The limit of all values together, in bytes.
_MOST_BYTES = 1_000_000_000
# The memory of an entry in bytes, in addition to its path and its value.
_ENTRY_BYTES = 500
_PATH_OF_RANK = re.compile(rf"/{re.escape(GLOBAL_SCOPE)}/([0-9]{{1,6}})")


class Store:
    """Path -> value, up to a limit of the memory. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._used = 0
        self._ranks: set[int] = set()

    @property
    def ranks(self) -> set[int]:
        """The ranks that have stored a value, also if it was deleted since then."""
        with self._lock:
            return set(self._ranks)

    def get(self, path: str) -> bytes | None:
        """Return a value; None if there is none."""
        with self._lock:
            return self._values.get(path)

    def reserve(self, path: str, length: int) -> bool:
        """Reserve memory for a value of `length` bytes; return whether there is enough."""
        needed = _memory(path, length)
        with self._lock:
            fits = self._used + needed <= _MOST_BYTES
            self._used += needed if fits else 0
        return fits

    def release(self, path: str, length: int) -> None:
        """Free memory that was reserved."""
        with self._lock:
            self._used -= _memory(path, length)

    def put(self, path: str, value: bytes) -> None:
        """Store a value for which memory was reserved."""
        self.remove(path)
        with self._lock:
            self._values[path] = value
            if found := _PATH_OF_RANK.fullmatch(path):
                self._ranks.add(int(found[1]))

    def remove(self, path: str) -> None:
        """Delete a value, if there is one."""
        with self._lock:
            if (value := self._values.pop(path, None)) is not None:
                self._used -= _memory(path, len(value))


def _memory(path: str, length: int) -> int:
    return _ENTRY_BYTES + len(path) + length
