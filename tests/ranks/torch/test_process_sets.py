"""Process sets on which the ranks do not agree are refused on all ranks, and the job continues."""

import re
import sys

import pytest
import torch

from hvdkit.errors import HvdkitError
from hvdkit.ranks import RanksFailed
from tests.ranks.rank_pool import Configuration, start_ranks_of

LONG = pytest.mark.long


def need_four(hvd):
    if hvd.size() < 4:
        pytest.skip("needs four ranks")


def works(hvd, process_set):
    """Check a sum over a process set."""
    if process_set.included():
        total = hvd.allreduce(torch.ones(5), op=hvd.Sum, name="one", process_set=process_set)
        assert total.eq(process_set.size()).all()
    hvd.barrier()


def check_the_job(hvd):
    works(hvd, hvd.global_process_set)
    process_set = hvd.add_process_set([0, 2])
    works(hvd, process_set)
    assert hvd.remove_process_set(process_set)


@pytest.mark.parametrize(
    ("first", "others", "error"),
    [
        ([0, 7], [0, 7], "contains rank 7, but the job has 4 ranks"),
        ([-1, 0], [-1, 0], "contains rank -1, but the job has 4 ranks"),
        ([0, 0], [0, 0], "contains rank 0 twice"),
        ([0, 2], [0, 1], "have passed different process sets"),
        ([0], [0, 1], "have passed different process sets"),
        ([], [0, 1], "have passed different process sets"),
        ([0, 7], [0, 1], "have passed different process sets"),
    ],
    ids=str,
)
def test_adding_a_process_set_is_refused_on_all_ranks(hvd, first, others, error):
    need_four(hvd)
    own = others if hvd.rank() else first
    with pytest.raises(ValueError, match=f"{error}.*This rank has passed {re.escape(str(own))}"):
        hvd.add_process_set(own)
    check_the_job(hvd)


def test_a_grid_has_the_sets_of_its_rows_and_columns(hvd):
    from hvdkit.torch.process_sets import find_or_add

    need_four(hvd)
    grid = hvd.grid(data=2, model=2)
    row, column = divmod(hvd.rank(), 2)
    assert {name: each.ranks for name, each in grid.items()} == {
        "data": [column, column + 2],
        "model": [2 * row, 2 * row + 1],
    }
    for each in grid.values():
        works(hvd, each)
    assert hvd.grid(data=2, model=2) == grid
    assert hvd.grid(data=1, model=4)["model"] is hvd.global_process_set
    for each in find_or_add([[0, 2], [1, 3], [0, 1], [2, 3], [0], [1], [2], [3]]):
        hvd.remove_process_set(each)


@pytest.mark.parametrize("wrong", [{"data": 2, "model": 3}, {"data": -4}, {"data": 4.0}, {}])
def test_a_grid_that_is_wrong_on_one_rank_is_an_error_on_all(hvd, wrong):
    need_four(hvd)
    with pytest.raises(HvdkitError, match="expected a length for each dimension"):
        hvd.grid(**(wrong if hvd.rank() == 1 else {"data": 2, "model": 2}))
    with pytest.raises(HvdkitError, match="ranks disagree about the grid"):
        hvd.grid(**({"data": 4} if hvd.rank() == 1 else {"data": 2, "model": 2}))


def test_removing_different_process_sets_is_refused_on_all_ranks(hvd):
    need_four(hvd)
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
    with pytest.raises(ValueError, match="have removed different process sets"):
        hvd.remove_process_set(sets[hvd.rank() % 2])
    for process_set in sets:
        works(hvd, process_set)
        assert hvd.remove_process_set(process_set)
    check_the_job(hvd)


def test_a_rank_that_passes_no_process_set_raises_on_all_ranks(hvd):
    need_four(hvd)
    own = ["x"] if hvd.rank() == 1 else [0, 2]
    with pytest.raises(ValueError, match=r"has not passed a process set \(rank 1: ValueError: "):
        hvd.add_process_set(own)
    check_the_job(hvd)


def test_removing_a_process_set_that_some_ranks_have_removed_raises_on_all_ranks(hvd):
    need_four(hvd)
    process_set = hvd.add_process_set([0, 1])
    own = hvd.ProcessSet([0, 1]) if hvd.rank() == 1 else process_set
    with pytest.raises(ValueError, match="exists on some ranks only .rank 1: ValueError: it was"):
        hvd.remove_process_set(own)
    assert hvd.remove_process_set(process_set)
    assert not hvd.remove_process_set(process_set)
    check_the_job(hvd)


INIT = """
import os, sys, time
import horovod.torch as hvd
rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
first, others = eval(sys.argv[1])
try:
    hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in (others if rank else first)])
except ValueError:
    time.sleep(2)  # mpirun ends the other ranks as soon as one has failed
    raise
"""


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("first", "others", "error"),
    [
        ([], [[0, 1]], "different numbers of process sets. This rank has passed {0}"),
        pytest.param(
            [[0, 1], [2]], [[0, 1], [1]], "different process sets", marks=pytest.mark.long
        ),
        pytest.param([[3]], [[3]], "contains rank 3", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_init_with_process_sets_is_refused_on_all_ranks(controller, first, others, error):
    command = [sys.executable, "-c", INIT, repr((first, others))]
    group = start_ranks_of(Configuration("torch", controller, 3), command)
    with pytest.raises(RanksFailed) as caught:
        group.wait(timeout=60, failure_grace=30)
    assert not caught.value.timed_out
    for rank, result in enumerate(caught.value.results):
        assert "Horovod could not be initialized" in result.output
        assert error.format(len(others if rank else first)) in result.output
        assert "terminate called" not in result.output
