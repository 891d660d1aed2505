"""The comparison of replicas on simulated ranks whose values are NumPy arrays."""

import contextlib
import logging
import os
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.agreement.differences import Item, Replicas, find_difference
from hvdkit.agreement.replicas import REPAIR, CheckSettings, ReplicaCheck
from tests.simulated.ranks import SimulatedCollectives, SimulatedGroup, on_every_rank


class Arrays:
    """The access to NumPy arrays."""

    def digests(self, values):
        return [xxhash.xxh64_intdigest(value.tobytes()) for value in values]

    def read(self, value):
        return value.view(np.uint8)

    def write(self, value, data):
        value.view(np.uint8)[:] = data

    def elements(self, value, data):
        return data.copy().view(value.dtype)


def replicas_of(*rows, options=()):
    """Return replicas of arrays, named 'v0' and so on."""
    arrays = [np.array(row) for row in rows]
    items = [
        Item(f"'v{k}'", f"v{k}, {array.dtype} {len(array)}", array, len(array))
        for k, array in enumerate(arrays)
    ]
    return Replicas(Arrays(), items, options)


def texts(errors):
    """Return the text of the error that all ranks have raised."""
    assert all(isinstance(error, RankMismatchError) for error in errors), errors
    (text,) = {str(error) for error in errors}
    return text


def compared(size, values_of, step=3, settings=None, joined=(), begun=True, **how):
    """Compare arrays on simulated ranks, and return the result of each rank and the arrays."""
    own = {rank: replicas_of(*values_of(rank)) for rank in range(size)}

    def run(collectives):
        if collectives.rank in joined:
            return
        check = ReplicaCheck(
            *(collectives, settings or CheckSettings(), lambda: own[collectives.rank]),
            advice="later",
            first_advice="first",
            has_begun=lambda: begun,
        )
        check.compare(step, **how)

    group = SimulatedGroup(size)
    group.joined = set(joined)
    return on_every_rank(size, run, group), own


@pytest.mark.parametrize(
    ("interval", "due"),
    [
        (0, [0]),
        (1, range(301)),
        (7, range(0, 301, 7)),
        (100, [0, 10, 20, 40, 80, 100, 200, 300]),
        (1000, [0, 10, 20, 40, 80, 160]),
    ],
)
def test_the_schedule(interval, due):
    settings = CheckSettings(interval)
    assert [step for step in range(301) if settings.is_due(step)] == [*due]


@given(st.integers(1, 40), st.integers(1, 120))
def test_steps_that_end_together_skip_no_comparison(together, interval):
    settings = CheckSettings(interval)
    ends = range(together, 20 * together, together)
    found = [settings.is_due(end, together) for end in ends]
    expected = [any(settings.is_due(s) for s in range(end - together + 1, end + 1)) for end in ends]
    assert found == expected


def test_a_comparison_of_large_parameters_makes_no_copy_of_them():
    """Each save compares. With a copy, it would need several times the memory of the state."""
    value = np.zeros(8_000_000)
    value[5] = np.nan
    replicas = Replicas(Arrays(), [Item("'v'", "v", value, len(value))], ())
    check = ReplicaCheck(SimulatedCollectives(SimulatedGroup(1), 0), CheckSettings(), None)
    tracemalloc.start()
    check._warn_of_nonfinite("after step 3", replicas)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert check.done == {"nonfinite"}
    assert peak < value.nbytes / 4


@pytest.mark.parametrize("size", [1, 2, 5])
def test_equal_replicas_take_one_collective(size):
    def run(collectives):
        assert find_difference(collectives, replicas_of([1.0]), "now") is None
        return collectives.names

    assert on_every_rank(size, run) == [["hvdkit.replicas"]] * size


@pytest.mark.parametrize("odd", range(3))
def test_the_rank_that_differs_from_the_majority_is_named(odd, tmp_path):
    with contextlib.chdir(tmp_path):
        errors, _ = compared(3, lambda rank: ([1.0, 2.0 + (rank == odd)], [5.0]))
    text = texts(errors)
    base = 1 if odd == 0 else 0
    assert f"Ranks have different values after step 3: 'v0' on rank {odd} (host " in text
    assert f"1 of 2 elements from rank {base}: element 1 is 3.0, and 2.0 on rank {base}" in text
    assert "majority" not in text
    assert " later " in text
    assert "'v1'" not in text
    saved = sorted(path.name for path in (tmp_path / "hvdkit-mismatch").iterdir())
    assert saved == sorted(f"step-3-rank-{rank}.npz" for rank in (base, odd))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
def test_the_values_are_not_saved_through_a_link_of_another_user(tmp_path, caplog):
    own, link = tmp_path / "own", tmp_path / "hvdkit-mismatch" / "step-3-rank-0.npz"
    own.write_text("old")
    link.parent.mkdir()
    link.symlink_to(own)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with contextlib.chdir(tmp_path):
        compared(3, lambda rank: ([1.0, 2.0 + (rank == 1)],))
    assert own.read_text() == "old"
    assert "rank 0 cannot save the tensors that differ" in caplog.text


@pytest.mark.parametrize("how", [{"step": 0, "first": True}, {"step": 1, "first": True}])
@pytest.mark.parametrize("distance", [0.0, 1e-7, 1.0])
def test_only_a_first_comparison_before_the_first_step_is_exact(tmp_path, how, distance):
    """Nothing is repaired: the majority may have missed a broadcast."""
    with contextlib.chdir(tmp_path):
        errors, own = compared(
            3,
            lambda rank: ([1.0 + distance * (rank == 0)],),
            settings=CheckSettings(3, REPAIR),
            **how,
        )
    if distance == 1.0 or (distance and not how["step"]):
        assert "different values at the first comparison: 'v0' on rank 0" in texts(errors)
        assert texts(errors).endswith(" first")
    else:
        assert errors == [None] * 3
    assert own[0].items[0].value == 1.0 + distance
    assert not [*tmp_path.iterdir()]


def test_few_tensors_are_sent_if_they_show_the_difference(tmp_path):
    def run(collectives):
        own = replicas_of(*([1.0 + collectives.rank] for _ in range(50)))
        found = find_difference(collectives, own, "now")
        assert found is not None
        assert found.text.endswith(
            "47 more tensors differ. No majority of ranks agrees, so either "
            "value may be the wrong one."
        )
        return collectives.names.count("hvdkit.replicas.tensor")

    assert on_every_rank(2, run) == [3, 3]


@given(
    st.integers(2, 4).flatmap(
        lambda size: st.lists(
            st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.0 + 1e-7, 2.0]), min_size=5, max_size=5),
            min_size=size,
            max_size=size,
        )
    )
)
def test_a_difference_beyond_rounding_is_found_wherever_it_is(rows):
    """The first tensors may differ by rounding only."""

    def run(collectives):
        own = replicas_of(*([value] for value in rows[collectives.rank]))
        return find_difference(collectives, own, "now")

    (found,) = {result and (result.text, result.far) for result in on_every_rank(len(rows), run)}
    columns = [set(column) for column in zip(*rows, strict=True)]
    assert (found is not None) == any(len(column) > 1 for column in columns)
    if found is not None:
        assert found[1] == any(2.0 in column and len(column) > 1 for column in columns)


def test_a_repair_copies_all_tensors_of_the_majority(tmp_path):
    with contextlib.chdir(tmp_path):
        errors, own = compared(
            *(3, lambda rank: ([1.0 + (rank == 1)],) * 7), settings=CheckSettings(3, REPAIR)
        )
    assert errors == [None] * 3
    assert all(item.value == 1.0 for rank in own for item in own[rank].items)


def test_options_that_differ_are_named():
    def run(collectives):
        own = replicas_of([1.0], options=[f"lr is {collectives.rank}"])
        ReplicaCheck(collectives, CheckSettings(), lambda: own).compare(3)

    assert "after step 3. First difference: rank 0: lr is 0; rank 1: lr is 1." in texts(
        on_every_rank(2, run)
    )


def test_before_the_first_step_ranks_may_differ():
    errors, _ = compared(2, lambda rank: ([1.0 + rank],), step=0, begun=False)
    assert errors == [None] * 2


@pytest.mark.parametrize("first", [False, True])
def test_ranks_that_joined_are_not_compared(first):
    """They take part in reductions only. A later comparison, if any, finds the difference."""
    errors, _ = compared(3, lambda rank: ([1.0 + rank],), joined=[2], step=0, first=first)
    if first:
        assert "is unknown, because 1 of 3 ranks have called hvd.join(). first" in texts(errors[:2])
    else:
        assert errors == [None] * 3


def test_a_difference_that_does_not_raise_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "hvdkit"):
        errors, _ = compared(
            2, lambda rank: ([1.0 + rank],), raises=False, consequence="An error later."
        )
    assert errors == [None] * 2
    (record,) = caplog.records
    assert record.getMessage().endswith("later An error later.")
