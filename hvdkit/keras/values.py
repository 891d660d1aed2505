"""Compare the values of variables between ranks, after the first batch of a `fit`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras

from hvdkit.core import values
from hvdkit.core.agreement import RanksDisagree
from hvdkit.core.collectives import Collectives
from hvdkit.keras import backend


def check_values(group: Collectives, variables: Sequence[tuple[Any, int]]) -> None:
    """Raise if a variable has another value on some rank. A collective.

    Args:
        group: of the ranks to compare.
        variables: `keras.Variable`s, the same ones in the same order on every rank, each with its
            `digest_of`.

    Raises:
        RanksDisagree: on every rank, naming the first variable that differs. Values that differ no
            more than by rounding are equal.
    """
    different = values.first_difference(
        group,
        [
            values.Value(variable.path, digest, partial(keras.ops.convert_to_numpy, variable))
            for variable, digest in variables
        ],
    )
    if different is None:
        return
    name, told = different
    raise RanksDisagree(
        f"ranks have different values of {name!r} after the first batch ({told}), and "
        f"nothing makes them equal from then on. Give fit a "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback(0), or call "
        f"hvd.broadcast_model(model, root_rank=0) before it. If ranks are to have different "
        f"values, pass check_parameters=False to hvd.DistributedOptimizer."
    )


def digest_of(variable: Any) -> int:
    """Return 64 bits that tell one value of a variable from another."""
    return values.digest_of(backend.read(variable))
