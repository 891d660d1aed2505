"""The functions that all adapters use to implement `Collectives`."""

import pytest

from hvdkit.core.collectives import alltoall_in_rounds
from tests.core.simulated_ranks import on_every_rank


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_alltoall_in_rounds(size, most):
    def content(sender, receiver):
        return bytes([sender, receiver]) * (5 * sender + 11 * receiver)

    def run(collectives):
        largest = 0

        def send(pieces):
            nonlocal largest
            received = collectives.alltoall([bytes(piece) for piece in pieces], "pieces")
            largest = max(largest, sum(map(len, pieces)), sum(map(len, received)))
            return received

        parts = [content(collectives.rank, receiver) for receiver in range(size)]
        return alltoall_in_rounds(collectives, parts, "parts", send, most), largest

    for rank, (received, largest) in enumerate(on_every_rank(size, run)):
        assert received == [content(sender, rank) for sender in range(size)]
        # A rank sends at least one byte to each other rank.
        assert largest <= max(most, size)
