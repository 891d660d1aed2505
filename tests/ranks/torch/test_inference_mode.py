"""Collectives inside `torch.inference_mode()`."""

import pytest
import torch


def cases(hvd):
    """Return calls and their results on two ranks, of which rank r sends r + 1 everywhere."""
    rank = hvd.rank()
    rows = torch.full((rank + 1, 2), rank + 1.0)
    pair = torch.full((2, 1), rank + 1.0)
    gathered = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    return {
        "allgather": (lambda: hvd.allgather(rows), gathered),
        "grouped_allgather": (lambda: hvd.grouped_allgather([rows])[0], gathered),
        "alltoall": (lambda: hvd.alltoall(pair), [[1.0], [2.0]]),
        "reducescatter": (lambda: hvd.reducescatter(pair, op=hvd.Sum), [[3.0]]),
        "grouped_reducescatter": (
            lambda: hvd.grouped_reducescatter([pair], op=hvd.Sum)[0],
            [[3.0]],
        ),
        "allreduce": (lambda: hvd.allreduce(pair), [[1.5], [1.5]]),
    }


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_collectives_in_inference_mode(hvd, made):
    with torch.inference_mode(made == "inside"):
        calls = cases(hvd)
    for name, (call, expected) in calls.items():
        with torch.inference_mode():
            assert call().tolist() == expected, name


def test_objects_in_inference_mode(hvd):
    with torch.inference_mode():
        assert hvd.allgather_object(hvd.rank()) == [0, 1]
        assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
