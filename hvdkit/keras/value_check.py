"""Compare the values of variables between ranks, after the first batch of a `fit`.

Mean gradients never make different models equal. Without this check, a forgotten broadcast would
silently train a different model on each rank.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import xxhash

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import RankMismatchError, are_equal, group_by_text
from hvdkit.keras import backend

# Relative to the largest element of a variable. Ranks on different processors may round a step
# differently, by about 1e-7. Different initial values differ by about 1.
_TOLERANCE = 1e-4
# The number of elements of a variable that an error shows.
_SHOWN = 3


def check_values(
    group: Collectives, variables: Sequence[Any], digests: Sequence[int], advice: str = ""
) -> None:
    """Raise if the values of a variable differ between ranks. A collective.

    Args:
        group: the collectives of the ranks to compare.
        variables: `keras.Variable`s, in the same order on every rank.
        digests: their `backend.digests`.
        advice: the end of an error.

    Raises:
        RankMismatchError: on every rank, naming the first variable that differs by more than
            rounding.
    """
    if (found := find_difference(group, variables, digests)) is None:
        return
    variable, by_rank = found
    raise RankMismatchError(
        f"ranks have different values of {variable.path!r} after the first batch ({by_rank}), and "
        f"mean gradients never make them equal. Pass "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit, or call "
        f"hvd.broadcast_model(model, root_rank=0) before fit. If ranks should have different "
        f"values, pass check_parameters=False to hvd.DistributedOptimizer.{advice}"
    )


def find_difference(
    group: Collectives, variables: Sequence[Any], digests: Sequence[int] | None = None
) -> tuple[Any, str] | None:
    """Return the first variable whose values differ between ranks. A collective.

    Args:
        group: as for `check_values`.
        variables: as for `check_values`.
        digests: as for `check_values`; None to compute them.

    Returns:
        The variable that differs by more than rounding, and its first elements on each rank. None
        if there is no such variable.
    """
    numbers = backend.digests(variables) if digests is None else digests
    digest = xxhash.xxh64_intdigest(",".join(map(str, numbers)).encode()) & 0xFFFFFF
    if are_equal(group, digest, "hvdkit.keras.values"):
        return None
    differ = group.max(
        [int(_differs(group, variable)) for variable in variables], "hvdkit.keras.values.differ"
    )
    if not any(differ):
        return None
    variable = variables[differ.index(1)]
    told = group_by_text(group, _first_elements(variable), "hvdkit.keras.values.told")
    return variable, "; ".join(told)


def _differs(group: Collectives, variable: Any) -> bool:
    """Return whether a variable differs from that of the first rank. A collective."""
    own = _values(variable)
    if not own.size:
        return False
    data = group.broadcast(own.tobytes(), group.ranks[0], "hvdkit.keras.values.first")
    first = np.frombuffer(data, own.dtype)
    finite = np.isfinite(first)
    if np.any(finite != np.isfinite(own)):
        return True
    own, first = own[finite], first[finite]
    largest = np.max(np.abs(first), initial=0.0)
    return bool(np.max(np.abs(own - first), initial=0.0) > _TOLERANCE * largest)


def _first_elements(variable: Any) -> str:
    values = _values(variable)
    shown = ", ".join(f"{value:.6g}" for value in values[:_SHOWN])
    return f"{shown}, ..." if len(values) > _SHOWN else shown


def _values(variable: Any) -> np.ndarray:
    """Return the elements of a variable as a one-dimensional float64 array."""
    values = keras.ops.convert_to_numpy(variable)
    return np.asarray(values).reshape(-1).astype(np.float64)
