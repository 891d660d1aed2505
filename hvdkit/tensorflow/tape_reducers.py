"""The reducers of gradient tapes, and the states of their wire formats."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.tensorflow import mpi_ops

from hvdkit.reduction.plan import Reduction
from hvdkit.tensorflow.compression import wire_format
from hvdkit.tensorflow.reduction.reducer import GradientReducer
from hvdkit.tensorflow.step_times import GraphTimes
from hvdkit.tensorflow.trial import TapeTrial, static_bytes
from hvdkit.training import trial
from hvdkit.training.trial import TrialPlan, with_candidate

#: Settings of a tape -> its reducer; and the restored states of reducers that do not exist yet.
_reducers: dict[str, GradientReducer] = {}
_saved_states: dict[str, Any] = {}


def reduction_state() -> dict[str, Any]:
    """Return the states of all tapes' wire formats; see `GradientReducer.state`."""
    return _saved_states | {key: reducer.state() for key, reducer in _reducers.items()}


def restore_reduction_state(state: Mapping[str, Any]) -> None:
    """Restore a state returned by `reduction_state`, possibly in another process."""
    _saved_states.clear()
    _saved_states.update(state)
    for key, reducer in _reducers.items():
        reducer.restore_state(_saved_states.pop(key, {}))


@functools.cache
def times_of(process_set: mpi_ops.ProcessSet) -> GraphTimes:  # noqa: ARG001
    """Return the times between the reductions of all tapes over these ranks."""
    return GraphTimes()


#: The trial of `hvdkit tune`, and the reducer whose reductions it counts.
_trial: tuple[TapeTrial, GradientReducer] | None = None


def trial_of(reducer: GradientReducer, gradients: Sequence[Any]) -> TapeTrial | None:
    """Return the trial that counts the reductions of `reducer`; None if there is none.

    A trial counts the reductions of the first tape that does not run in `fit` of Keras, which
    counts its batches itself.

    Args:
        reducer: the reducer of a tape.
        gradients: the gradients that it has reduced.
    """
    global _trial
    if (requested := TrialPlan.requested()) is None:
        return None
    trial.note_reduction(reducer.reduction, static_bytes(gradients))
    if _trial is None:
        if trial.counting():
            return None
        _trial = TapeTrial(requested, mpi_ops.rank()), reducer
    return _trial[0] if _trial[1] is reducer else None


@functools.cache
def reducer_of(
    compression: Any,
    average: bool,
    divisor: float | None,
    bucket_bytes: int,
    groups: tuple[tuple[int, ...], ...],
    sparse_as_dense: bool,
    process_set: mpi_ops.ProcessSet,
    check_parameters: bool,
    on_nonfinite: str,
    position: str,
) -> GradientReducer:
    """Return the reducer for these settings and this position in a graph.

    Cached, because a training loop makes a new tape in every step. Each position has its own
    reducer, because a graph may run the reductions of several positions concurrently.
    """
    reduction = with_candidate(
        Reduction(
            format=wire_format(compression),
            average=average,
            predivide=divisor,
            bucket_bytes=bucket_bytes,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
        ),
        wire_format,
    )
    context = [
        "DistributedGradientTape",
        f"check_parameters: {check_parameters}",
        f"on_nonfinite: {on_nonfinite}",
    ]
    reducer = GradientReducer(
        reduction,
        process_set,
        context,
        on_nonfinite=on_nonfinite,
        times=times_of(process_set) if check_parameters else None,
        of_tape=True,
    )
    # The key is a part of checkpoints.
    key = "; ".join([*reduction.describe(), f"ranks: {process_set.ranks}", f"place: {position}"])
    # Two names of one wire format make two reducers. Only the state of the first one is saved.
    if _reducers.setdefault(key, reducer) is reducer and key in _saved_states:
        reducer.restore_state(_saved_states.pop(key))
    return reducer
