"""`hvd.predict`: divide the rows of a prediction between ranks."""

import pickle
from typing import Any

import keras
import numpy as np

from hvdkit.agreement.consistency import RankMismatchError, check_consistency
from hvdkit.agreement.differences import find_difference
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.statistics import StatisticsAverage, compared_buffers, statistics_of
from hvdkit.keras.model_state import buffers_of, stateful_layers
from hvdkit.keras.models import distributions_of
from hvdkit.keras.replicas import keras_replicas


def predict(
    model: Any, x: Any, batch_size: int = 32, *, process_set: Any = None, **options: Any
) -> Any:
    """Predict a part of the rows with `model.predict` on each rank, and gather all predictions.

    A collective: every rank calls it with the same rows and an equal model. Moving statistics of
    `BatchNormalization`, which differ between ranks until `fit` averages them, are averaged first.

    Args:
        model: a Keras model.
        x: arrays of shape [rows, ...]: one array, or a list, tuple or dict, as the model expects.
        batch_size: rows per batch on each rank.
        process_set: the participating ranks; default: all. A rank outside the process set predicts
            all rows itself.
        options: further arguments of `model.predict`.

    Returns:
        The result of `model.predict(x)` for all rows, in their order, on every rank.

    Raises:
        UsageError: the arrays have different numbers of rows, or no rows; or a layer is stateful.
        RankMismatchError: on every rank, if ranks have different numbers of rows, or if the models'
            weights differ, except those of `local_layers` (see `PartialDistributedOptimizer`).
        HvdkitError: on every rank, if `model.predict` has raised on one of them.

    Example:
        probabilities = hvd.predict(model, images, batch_size=64, verbose=0)
    """
    arrays = keras.tree.flatten(x)
    shapes = [tuple(getattr(array, "shape", ())) for array in arrays]
    counts = sorted({int(shape[0]) for shape in shapes if shape})
    problem = ""
    if not arrays or not all(shapes):
        problem = (
            f"x is a {type(x).__name__}: expected arrays. For other data, call model.predict on "
            f"each rank with a part of the data"
        )
    elif len(counts) > 1 or not counts[0]:
        problem = f"the arrays of x have {counts} rows: expected the same number >= 1 in all arrays"
    rows = counts[0] if counts else 0
    group = backend.collectives(process_set)
    if not group.single_rank and (stateful := stateful_layers(model)):
        problem = problem or (
            f"the model has a stateful {type(stateful[0]).__name__}: its results depend on earlier "
            f"batches, so ranks cannot divide the rows. Call model.predict with all rows instead"
        )
    moving = {id(variable) for variable in statistics_of(model)}
    distributions = distributions_of(model)

    def is_local(variable: Any) -> bool:
        return any(d.is_local(variable) for d in distributions)

    shared = [*model.weights, *(v for v in buffers_of(model) if id(v) in moving)]
    shared += compared_buffers(model)
    weights = [v for v in shared if not is_local(v)]
    if not group.single_rank:
        check_consistency(
            group,
            [
                problem or "no problem",
                f"{rows} rows",
                f"{len(arrays)} arrays",
                *(
                    f"variable {i}, {v.dtype} {list(v.shape)}{' to average' * (id(v) in moving)}"
                    for i, v in enumerate(weights)
                ),
            ],
            "the data of predict and its model",
            "Pass all rows on every rank, and equal models; predict divides the rows.",
        )
    if problem:
        raise UsageError(problem)
    if group.single_rank:
        return model.predict(x, batch_size=batch_size, **options)
    compared = keras_replicas([v for v in weights if id(v) not in moving])
    found = find_difference(group, compared, "before hvd.predict")
    if found is not None and found.far:
        raise RankMismatchError(
            f"{found.text} So hvd.predict would mix predictions of different models. Call "
            f"hvd.broadcast_model(model, root_rank=0) before, or call model.predict on one rank."
        )
    StatisticsAverage(model, group, is_local).average(trains_one_model=True)
    ranks = list(group.ranks)
    index = ranks.index(group.rank)
    start, end = (rows * k // len(ranks) for k in (index, index + 1))
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
    errors = [
        f"rank {rank}: {text}" for rank, (text, _) in zip(ranks, gathered, strict=True) if text
    ]
    if errors:
        raise HvdkitError(
            f"model.predict has raised an error on {len(errors)} of {len(ranks)} ranks: "
            f"{'; '.join(errors)}"
        ) from cause
    parts = [part for _, part in gathered if part is not None]
    return keras.tree.map_structure(lambda *found: np.concatenate(found), *parts)
