"""The values of all ranks pass through one sum of integers, with all of their bits."""

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.monitor.exchange import Contribution, decode, encode, exchange_names, is_complete
from tests.simulated.ranks import SimulatedGroup, on_every_rank
from tests.unit.monitor.simulated import same

NAMES = ["a", "b", "c"]
VALUES = st.dictionaries(st.sampled_from([*NAMES, "later"]), st.floats(), max_size=4)


@given(st.lists(st.none() | VALUES, min_size=1, max_size=4))
def test_every_rank_reads_all_values(by_rank):
    """None: the rank is in `join`, and contributes zeros."""
    ranks = [10 + place for place in range(len(by_rank))]
    summed = [0] * len(encode(Contribution(0, 0, 0, {}), NAMES, 0, len(ranks)))
    for place, values in enumerate(by_rank):
        if values is not None:
            own = encode(Contribution(7, 3, place, values), NAMES, place, len(ranks))
            summed = [a + b for a, b in zip(summed, own, strict=True)]
    decoded = decode(summed, NAMES, ranks)
    taking_part = {ranks[k]: values for k, values in enumerate(by_rank) if values is not None}
    assert decoded.present == {rank: (7, 3, rank - 10) for rank in taking_part}
    assert is_complete(summed, NAMES) == all(
        "later" not in values for values in taking_part.values()
    )
    for name in NAMES:
        expected = {rank: values[name] for rank, values in taking_part.items() if name in values}
        found = decoded.values.get(name, {})
        assert found.keys() == expected.keys()
        assert all(same(found[rank], expected[rank]) for rank in expected)


def test_all_ranks_learn_all_names_in_sums_only():
    own = {0: ["a"], 1: [], 2: ["b"], 3: [f"{'ü' * 95}{k}" for k in range(30)]}
    group = SimulatedGroup(4)

    def exchange(collectives):
        found = exchange_names(collectives, own[collectives.rank], "names")
        assert set(collectives.names) == {"names"}
        return found

    expected = sorted({name for names in own.values() for name in names})
    assert on_every_rank(4, exchange, group) == [expected] * 4
