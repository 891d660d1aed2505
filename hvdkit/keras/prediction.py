"""Predict with all ranks."""

import pickle
from typing import Any

import keras
import numpy as np

from hvdkit.core.consistency import check_consistency
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.keras import backend


def predict(
    model: Any, x: Any, batch_size: int = 32, *, process_set: Any = None, **options: Any
) -> Any:
    """Predict with `model.predict`, a part of the rows on each rank.

    A collective: every rank calls it with the same rows, and an equal model.

    Args:
        model: a Keras model.
        x: arrays of shape [rows, ...]: one, or a list, tuple or dict of them, as the model takes
            them.
        batch_size: rows that a rank predicts at a time.
        process_set: the ranks that take part. Other ranks predict all rows.
        options: what else `model.predict` takes.

    Returns:
        What `model.predict(x)` returns on one rank, in the order of the rows, on every rank.

    Raises:
        UsageError: the arrays have different numbers of rows, or none.
        RankMismatchError: on every rank, when ranks have different numbers of rows.
        HvdkitError: on every rank, when `model.predict` has raised on one.

    Example:
        probabilities = hvd.predict(model, images, batch_size=64, verbose=0)
    """
    arrays = keras.tree.flatten(x)
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    counts = sorted({int(shape[0]) for shape in shapes if shape})
    problem = ""
    if not arrays or not all(shapes):
        problem = (
            f"x is a {type(x).__name__}: expected arrays. Give each rank its part of other data, "
            f"and call model.predict"
        )
    elif len(counts) > 1 or not counts[0]:
        problem = f"the arrays of x have {counts} rows: expected one number, at least 1"
    rows = counts[0] if counts else 0
    group = backend.collectives(process_set)
    if not group.alone:
        check_consistency(
            group,
            [problem or "no problem", f"{rows} rows", f"{len(arrays)} arrays"],
            "the data of predict",
            "Give every rank all rows; predict takes a part of them on each.",
        )
    if problem:
        raise UsageError(problem)
    if group.alone:
        return model.predict(x, batch_size=batch_size, **options)
    ranks = list(group.ranks)
    place = ranks.index(group.rank)
    start, end = (rows * k // len(ranks) for k in (place, place + 1))
    own = None
    cause: Exception | None = None
    try:
        if start < end:
            part = keras.tree.map_structure(lambda array: array[start:end], x)
            own = model.predict(part, batch_size=batch_size, **options)
    except Exception as raised:
        cause = raised
    error = f"{type(cause).__name__}: {cause}" if cause else ""
    gathered = [
        pickle.loads(data)
        for data in group.allgather(pickle.dumps((error, own)), "hvdkit.keras.predict")
    ]
    errors = {rank: said for rank, (said, _) in zip(ranks, gathered, strict=True) if said}
    if errors:
        told = "; ".join(f"rank {rank}: {said}" for rank, said in errors.items())
        raise HvdkitError(f"model.predict has raised on {len(errors)} ranks. {told}") from cause
    parts = [part for _, part in gathered if part is not None]
    return keras.tree.map_structure(lambda *found: np.concatenate(found), *parts)
