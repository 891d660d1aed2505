"""Collectives of all kinds, drawn at random, against NumPy."""

import sys

import pytest

from tests.ranks.rank_pool import Configuration, start_ranks_of
from tests.ranks.torch import drawn_collectives

#: Bytes of the largest tensor.
SMALL, LARGE = 1 << 20, 64 << 20


@pytest.mark.parametrize("seed", [0, 1])
def test_collectives_equal_numpy(hvd, seed):
    assert drawn_collectives.run(hvd, seed, 30, SMALL) == []


def run(configuration, seed, draws, largest, **env):
    command = [sys.executable, "-m", "tests.ranks.torch.drawn_collectives"]
    arguments = [str(seed), str(draws), str(largest)]
    group = start_ranks_of(configuration, [*command, *arguments], env)
    results = group.wait(timeout=60 + 4 * draws)
    drawn_collectives.check([result.output for result in results], draws)


@pytest.mark.parametrize("size", [2, 4])
def test_without_shared_memory(size):
    run(Configuration("torch", "gloo", size), 2, 40, 8 << 20, HVDKIT_COLLECTIVES="flat")


@pytest.mark.long
@pytest.mark.parametrize("collectives", ["", "flat"])
@pytest.mark.parametrize(
    ("controller", "size"), [("gloo", 2), ("gloo", 3), ("gloo", 4), ("mpi", 4)]
)
def test_many(controller, size, collectives):
    env = {"HVDKIT_COLLECTIVES": collectives}
    run(Configuration("torch", controller, size), 10 + size, 800, LARGE, **env)
