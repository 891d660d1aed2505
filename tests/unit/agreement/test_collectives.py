"""The functions that all adapters use to implement `Collectives`."""

import pytest

from hvdkit.agreement.collectives import Collectives, alltoall_in_rounds
from tests.simulated.ranks import on_every_rank


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


@pytest.mark.parametrize(
    ("length", "count"), [(0, 1), (1, 1), (4088, 1), (4089, 2), (9088, 2), (9089, 3), (20_000, 5)]
)
def test_a_short_broadcast_is_one_collective(monkeypatch, length, count):
    """Each collective takes about a millisecond, and an elastic job may commit often."""
    monkeypatch.setattr("hvdkit.agreement.collectives._CHUNK_BYTES", 5000)

    def content(rank):
        return bytes([rank]) * (length if rank == 1 else 6000)

    def run(collectives):
        calls = []

        class Counted(type(collectives)):
            def broadcast_into(self, buffer, root_rank, name):
                calls.append(name)
                super().broadcast_into(buffer, root_rank, name)

        collectives.__class__ = Counted
        taken = Collectives.broadcast(collectives, content(collectives.rank), 1, "one")
        return taken, len(calls)

    assert on_every_rank(3, run) == [(content(1), count)] * 3
