"""A job whose ports strangers attack; see measure.py."""

import pytest

from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.search.strangers.measure import measure

#: In bytes. The launcher may keep some threads and buffers for connections.
_MEMORY = 150_000_000


def expect_undisturbed(found):
    assert found.status == 0, found.output
    assert found.output.count("trained") == 2
    lines = [line for line in found.output.splitlines() if "trained" in line]
    assert len({line.split("trained")[1] for line in lines}) == 1
    assert found.memory[1] - found.memory[0] < _MEMORY
    # Only the rendezvous listens, and gives nothing to strangers.
    assert list(found.ports.values()) == ["the launcher"]
    assert sum(found.attacks.values()) > 0


def test_a_job_trains_while_strangers_attack_its_ports():
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    expect_undisturbed(measure(seconds=4, connections=200, seed=1, phase=0.8))


@pytest.mark.long
def test_a_job_with_thousands_of_connections_of_strangers():
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    found = measure(seconds=60, connections=5000, seed=2)
    expect_undisturbed(found)
    assert found.held > 500
