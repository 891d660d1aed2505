"""Send pickled objects between ranks, and raise on every rank if one of them fails.

Any rank may fail: the sender cannot pickle its object, or a receiver has too little memory, or
cannot import the class of the object. So each function ends with a small sum of the failures.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np

from hvdkit.agreement.collectives import Collectives, broadcast_in_chunks, check_root
from hvdkit.agreement.consistency import RankMismatchError, all_equal, group_by_text
from hvdkit.agreement.rank_errors import attempt, raise_on_all_ranks, raise_together
from hvdkit.errors import UsageError

# Bytes. Before a broadcast of this size or more, the ranks check that each of them has the memory.
_LARGE = 1 << 26


class _Pickler(cloudpickle.CloudPickler):
    """Pickles classes and functions of the script by name, as `pickle` does.

    All ranks run the same script. cloudpickle would pickle them by value: then another process has
    a second class, so that members of an `Enum` and instances of a dataclass differ from its own.
    """

    def reducer_override(self, obj: Any) -> Any:
        return NotImplemented if _is_of_script(obj) else super().reducer_override(obj)


def _is_of_script(obj: Any) -> bool:
    """Return whether `obj` is a class or function that the script's module has under its name."""
    if not isinstance(obj, type | FunctionType) or obj.__module__ != "__main__":
        return False
    found: Any = sys.modules["__main__"]
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def dumps(obj: Any) -> bytes:
    """Pickle an object for another rank, or for another start of the job.

    Lambdas and local functions are pickled by value.
    """
    with io.BytesIO() as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
        return file.getvalue()


def broadcast_object(
    collectives: Collectives,
    obj: Any,
    root_rank: int,
    name: str,
    loads: Callable[[Any], Any] = pickle.loads,
) -> Any:
    """Broadcast an object of `root_rank`, pickled. A collective.

    Args:
        collectives: the collectives of the ranks. A rank that is alone in the set, or not in it,
            gets its own object back.
        obj: the object; ignored on other ranks.
        root_rank: the rank that sends.
        name: the beginning of the names of the collectives, for errors.
        loads: unpickles the bytes-like content.

    Returns:
        The object itself on `root_rank`, a copy on other ranks.

    Raises:
        HvdkitError: on every rank, if the object cannot be pickled on the root, or cannot be
            received or unpickled on another rank. The error names the rank and the cause.
        UsageError: on every rank, if the `root_rank` of one of them is not one of the ranks.
        RankMismatchError: on every rank, if `root_rank` differs between ranks.
    """
    if collectives.single_rank:
        return obj
    _, problem = attempt(check_root, root_rank, collectives.ranks)
    is_root = problem is None and collectives.rank == root_rank
    data, error = attempt(dumps, obj) if is_root else (None, None)
    root = -1 if problem else int(root_rank)
    own = [1, int(problem is not None), int(error is not None), root, root * root, len(data or b"")]
    # The sum tells all ranks the size, and whether a rank has failed.
    count, invalid, failed, roots, squares, size = collectives.sum(own, f"{name}.sz")
    if invalid:
        raise_together(collectives, problem, f"{name}: an argument is invalid", name, UsageError)
    if not all_equal(count, roots, squares):
        by_rank = "; ".join(group_by_text(collectives, f"root_rank is {root}", f"{name}.root"))
        raise RankMismatchError(
            f"{name}: ranks disagree about the rank that sends ({by_rank}). Pass the same "
            f"root_rank on every rank."
        )
    if failed:
        raise_together(collectives, error, f"{name}: the object cannot be pickled", name)
    # Writable also on the root, because frameworks do not accept read-only memory.
    make: Callable[[Any], Any] = bytearray if is_root else _allocate
    buffer, error = attempt(make, data if is_root else size)
    if size >= _LARGE:
        raise_on_all_ranks(
            collectives, error, f"{name}: a rank has too little memory for {size:,} bytes", name
        )
    elif error is not None:
        raise error
    content = np.frombuffer(buffer, np.uint8)
    broadcast_in_chunks(collectives, content, root_rank, f"{name}.t")
    result, error = (obj, None) if is_root else attempt(loads, buffer)
    raise_on_all_ranks(
        collectives, error, f"{name}: the object of rank {root_rank} cannot be unpickled", name
    )
    return result


def allgather_object(
    collectives: Collectives, obj: Any, name: str, loads: Callable[[Any], Any] = pickle.loads
) -> list[Any]:
    """Gather an object, pickled, from every rank. A collective.

    Args:
        collectives: the collectives of the ranks. A rank that is alone in the set, or not in it,
            gets `[obj]`.
        obj: this rank's object.
        name: the beginning of the names of the collectives, for errors.
        loads: unpickles the bytes-like content.

    Returns:
        One object for each rank, in the order of the ranks.

    Raises:
        HvdkitError: on every rank, if a rank cannot pickle its object, or cannot unpickle the
            object of another rank. The error names the rank and the cause.
    """
    if collectives.single_rank:
        return [obj]
    data, error = attempt(dumps, obj)
    # A pickled object has at least one byte, so no bytes mean a failure.
    gathered = collectives.allgather(data or b"", name)
    if not all(gathered):
        raise_together(collectives, error, f"{name}: an object cannot be pickled", name)
    objects, error = attempt(lambda parts: [loads(part) for part in parts], gathered)
    raise_on_all_ranks(collectives, error, f"{name}: a rank cannot unpickle the objects", name)
    return list(objects)


def _allocate(size: int) -> np.ndarray:
    return np.empty(size, np.uint8)
