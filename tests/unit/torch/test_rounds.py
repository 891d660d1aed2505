"""Reduction rounds of wrapped optimizers on simulated ranks."""

from dataclasses import replace

import pytest
import torch

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.agreement.replicas import CheckSettings, ReplicaCheck
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.compression import Float16, NoCompression
from hvdkit.reduction.step_errors import BackwardFailed, GradientsChanged, PassesDiffer
from tests.simulated.optimizer import SimulatedOptimizer, rows
from tests.simulated.ranks import SimulatedGroup, on_every_rank, on_ranks, simulated
from tests.unit.agreement.test_replicas import replicas_of


def names_of(collectives, call):
    """Return the ends of the names of the small collectives that `call` starts."""
    before = len(collectives.names)
    call()
    return [name.rpartition(".")[2] for name in collectives.names[before:]]


def train(optimizer, value):
    """Make one ordinary step; return the value of all gradients."""
    optimizer.zero()
    optimizer.backward(value)
    optimizer.step()
    (found,) = {x for gradient in optimizer.stepped[-1] for x in gradient}
    return float(found)


def works(optimizer):
    """Return whether three ordinary steps give the mean, and the last one starts a header only."""
    collectives = optimizer.collectives
    size = len(collectives.ranks) - len(collectives.group.joined)
    values = [train(optimizer, 1.0) for _ in range(2)]
    names = names_of(collectives, lambda: values.append(train(optimizer, 4.0)))
    share = size / len(collectives.ranks)
    return values == [share, share, 4 * share] and names == ["header"]


# --- ordinary steps ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire_format", "names"),
    [(NoCompression(), ["header"]), (Float16(), ["header", "largest"])],
)
@simulated(3)
def test_a_pass_costs_one_header_and_the_step_after_it_nothing(collectives, wire_format, names):
    optimizer = SimulatedOptimizer(collectives, format=wire_format)
    train(optimizer, 1.0)
    seen = []
    for _ in range(3):
        optimizer.zero()
        seen.append(names_of(collectives, lambda: optimizer.backward(1.0)))
        seen.append(names_of(collectives, optimizer.synchronize))
        seen.append(names_of(collectives, optimizer.step))
    assert seen == [names, [], []] * 3


@simulated(2)
def test_names_are_the_same_in_every_round(collectives):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    backend = optimizer.gradients.parts[0].backend
    del backend.diary[:], collectives.names[:]
    for _ in range(3):
        optimizer.backward(1.0)
        optimizer.backward(2.0)
        optimizer.step()
    assert len(backend.diary) == 12
    assert len(set(backend.diary)) == 2
    assert len(set(collectives.names)) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_several_passes_per_step_give_what_one_process_gets(size, average, zero):
    def run(collectives):
        optimizer = SimulatedOptimizer(collectives, average=average)
        seen = []
        for passes in (1, 2, 3):
            if zero:
                optimizer.zero()
            for k in range(passes):
                optimizer.backward(10.0**k * (collectives.rank + 1))
                seen.append(optimizer.values[0])
            optimizer.step()
            assert optimizer.values == pytest.approx([seen[-1]] * 4)
        return seen

    factor = (size + 1) / 2 if average else size * (size + 1) / 2
    expected = [1, 1, 11, 1, 11, 111] if zero else [1, 2, 12, 13, 23, 123]
    for seen in on_ranks(size, run):
        assert seen == pytest.approx([factor * value for value in expected])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("average", [False, True])
@simulated("size")
def test_only_the_last_pass_of_a_window_communicates(collectives, size, mean, average):
    total = 333.0 * (1 if average else size) / (3 if mean else 1)
    optimizer = SimulatedOptimizer(collectives, window=Window(3, mean=mean), average=average)
    for _ in range(2):
        optimizer.zero()
        names = []
        for k in range(3):
            names.append(names_of(collectives, lambda k=k: optimizer.backward(3.0 * 10**k)))
            if mean or k == 2:
                optimizer.step()
    assert names == [[], [], ["header"]]
    assert optimizer.stepped == [optimizer.dense] * 2
    assert optimizer.values[0] == total


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("passes", [1, 2, 3])
@simulated("size")
def test_a_window_that_is_flushed_steps_with_the_mean_of_its_passes(collectives, size, passes):
    optimizer = SimulatedOptimizer(collectives, window=Window(3))
    for _ in range(2):
        optimizer.zero()
        for k in range(passes):
            optimizer.backward(6.0 * (k + 1))
            if k < 2:
                optimizer.step()
        assert optimizer.flush()
    optimizer.zero()
    # Without a pass there are no gradients for a step.
    assert not optimizer.flush()
    assert [step[0][0] for step in optimizer.stepped] == [3.0 * (passes + 1)] * 2


@pytest.mark.parametrize("passes", [[2, 1], [2, 0, 1]])
def test_windows_with_different_passes_that_are_flushed_are_an_error(passes):
    def run(collectives):
        optimizer = SimulatedOptimizer(collectives, window=Window(3))
        # Without a pass there are no gradients for a step.
        assert not optimizer.flush()

        def passes_and_flush(count):
            for _ in range(count):
                optimizer.backward(1.0)
                optimizer.step()
            return optimizer.flush()

        with pytest.raises(PassesDiffer) as caught:
            passes_and_flush(passes[collectives.rank])
        assert str(caught.value).count("of its window") == sum(p > 0 for p in set(passes))
        optimizer.zero()
        assert passes_and_flush(2)
        return optimizer.values

    assert on_ranks(len(passes), run) == [[1.0] * 4] * len(passes)


@simulated(2)
def test_unused_parameters_keep_no_gradient_if_asked(collectives):
    optimizer = SimulatedOptimizer(collectives, find_unused=True, average=False)
    train(optimizer, 1.0)
    optimizer.zero()
    for used in ([0, 1], [1, 2]):
        optimizer.backward({used[collectives.rank]: 1.0})
        seen = optimizer.values
    optimizer.step()
    assert seen == [1.0, 2.0, 1.0, None]


# --- gradients that no pass has reduced --------------------------------------------------------


@simulated(3)
def test_a_pass_under_no_sync_starts_no_collective(collectives):
    optimizer = SimulatedOptimizer(collectives, average=False)
    for _ in range(2):
        optimizer.zero()
        if collectives.rank:
            assert names_of(collectives, lambda: optimizer.backward(100.0, no_sync=True)) == []
        optimizer.backward(1.0)
        optimizer.step()
    assert optimizer.values == [203.0] * 4


@pytest.mark.parametrize("idle", [False, True])
@simulated(2)
def test_an_assigned_gradient_is_reduced_if_no_round_has_come_before(collectives, idle):
    optimizer = SimulatedOptimizer(collectives, average=False)
    optimizer.parameters[0].grad = torch.full((2,), 10.0, dtype=torch.float64)
    if not idle:
        optimizer.backward({3: 1.0})
    optimizer.step()
    # From now on it counts as reduced.
    optimizer.parameters[0].grad = torch.full((2,), 30.0, dtype=torch.float64)
    optimizer.zero() if idle else None
    optimizer.backward({3: 1.0})
    optimizer.parameters[0].grad = torch.full((2,), 50.0, dtype=torch.float64)
    optimizer.backward({3: 1.0})
    optimizer.step()
    assert optimizer.stepped[0][0][0] == 20.0
    assert optimizer.values[0] == 50.0
    assert optimizer.values[3] == 4.0 if idle else 6.0


# --- ranks without a pass -----------------------------------------------------------------------


@simulated(3)
def test_a_step_without_a_pass_on_any_rank_costs_two_small_sums(collectives):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    optimizer.zero()
    seen = [names_of(collectives, optimizer.step) for _ in range(2)]
    optimizer.synchronize()
    seen.append(names_of(collectives, optimizer.step))
    # The same as with a plain optimizer.
    assert optimizer.values == [None] * 4
    assert seen == [["header", "slots"]] * 2 + [[]]
    assert works(optimizer)


# --- errors, on every rank ----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["in a backward pass", "at its step"])
def test_different_numbers_of_passes_are_an_error_that_names_the_ranks(call):
    def run(collectives):
        optimizer = SimulatedOptimizer(collectives)
        train(optimizer, 1.0)
        optimizer.zero()
        optimizer.backward(1.0)
        if collectives.rank != 1:
            optimizer.step()
        at_step = collectives.rank != 1 and call == "at its step"
        with pytest.raises(PassesDiffer) as caught:
            optimizer.step() if at_step else optimizer.backward(1.0)
        optimizer.zero()
        return str(caught.value), works(optimizer)

    for message, usable in on_ranks(3, run):
        assert f"ranks 0, 2: step 3, reduction 1, {call}; 4 of 4 parameters" in message
        assert "rank 1: step 2, reduction 2, in a backward pass; 4 of 4 parameters" in message
        assert usable


@pytest.mark.parametrize("others", ["in a pass", "at their step"])
@pytest.mark.parametrize("planned", [False, True])
def test_a_pass_that_raises_is_an_error_on_every_rank(others, planned):
    def run(collectives):
        optimizer = SimulatedOptimizer(collectives, format=Float16())
        if planned:
            train(optimizer, 1.0)
        optimizer.zero()
        in_pass = collectives.rank == 1 or others == "in a pass"
        with pytest.raises(BackwardFailed, match="raised on 1 of 3 ranks") as caught:
            optimizer.backward(1.0, fails=collectives.rank == 1) if in_pass else optimizer.step()
        optimizer.zero()
        return str(caught.value), [train(optimizer, 2.0) for _ in range(3)]

    for message, values in on_ranks(3, run):
        assert f"rank 1: step {1 + planned}, reduction 1, in a backward pass, which raised" in (
            message
        )
        assert values == [2.0] * 3


@simulated(2)
def test_a_pass_may_raise_on_all_ranks_and_before_it_has_a_gradient(collectives):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    with pytest.raises(BackwardFailed, match="raised on 2 of 2 ranks"):
        optimizer.backward({} if collectives.rank else 1.0, fails=True)
    optimizer.zero()
    assert works(optimizer)


@pytest.mark.parametrize("call", ["step", "pass"])
@simulated(2)
def test_gradients_changed_before_a_late_rank_takes_part_are_an_error(collectives, call):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    optimizer.zero()
    if collectives.rank:
        optimizer.backward(1.0)
        optimizer.parameters[2].grad *= 0.5
    with pytest.raises(GradientsChanged, match="differ between ranks"):
        optimizer.backward(1.0) if collectives.rank and call == "pass" else optimizer.step()
    optimizer.zero()
    assert works(optimizer)


@pytest.mark.parametrize("at_step", [False, True])
def test_parameters_that_need_gradients_on_some_ranks_only_are_an_error(at_step):
    def run(collectives):
        optimizer = SimulatedOptimizer(collectives)
        train(optimizer, 1.0)
        optimizer.zero()
        optimizer.parameters[1].requires_grad = collectives.rank != 1
        with pytest.raises(PassesDiffer, match="different parameters need gradients") as caught:
            optimizer.step() if at_step else optimizer.backward(1.0)
        optimizer.parameters[1].requires_grad = True
        optimizer.zero()
        return str(caught.value), works(optimizer)

    for message, usable in on_ranks(2, run):
        assert "rank 0: step 2, reduction 1, " in message
        assert "; 4 of 4 parameters need gradients" in message
        assert "; 3 of 4 parameters need gradients (not: p1)" in message
        assert usable


@simulated(2)
def test_ranks_in_different_positions_have_different_descriptions(collectives):
    optimizer = SimulatedOptimizer(collectives)
    rounds = optimizer.rounds
    seen = {(rounds.digest(), rounds.describe("at its step"))}
    for attribute in ("step", "rounds", "has_late_ranks"):
        rounds.position = replace(rounds.position, **{attribute: 1})
        seen.add((rounds.digest(), rounds.describe("at its step")))
    assert len(seen) == 4
    assert len(dict(seen)) == 4
    assert (len({text for _, text in seen})) == 4


@simulated(2)
def test_ranks_that_disagree_in_their_first_round_can_continue_after_they_agree(collectives):
    optimizer = SimulatedOptimizer(collectives)
    p = optimizer.parameters[0]
    p.data = p.data.to(torch.float32 if collectives.rank else torch.float64)
    with pytest.raises(RankMismatchError, match="'p0', float32"):
        optimizer.backward(1.0)
    p.data = p.data.float()
    optimizer.zero()
    assert works(optimizer)


@simulated(2)
def test_a_comparison_is_made_in_the_first_round_after_each_init_and_join(collectives):
    values = [1.0 + collectives.rank]
    check = ReplicaCheck(collectives, CheckSettings(0), lambda: replicas_of(values))
    optimizer = SimulatedOptimizer(collectives, replicas=check)
    # A comparison that fails is repeated in the next round.
    for _ in range(2):
        with pytest.raises(RankMismatchError, match="different values at the first comparison"):
            optimizer.backward(1.0)
        optimizer.zero()
    values[0] = 1.0
    collectives.names.clear()
    for _ in range(3):
        train(optimizer, 1.0)
    collectives.generation += 1
    train(optimizer, 1.0)
    assert collectives.names.count("hvdkit.replicas") == 2


@pytest.mark.parametrize("in_place", [False, True])
@simulated(2)
def test_a_gradient_that_was_changed_and_kept_over_a_step_is_not_reduced_again(
    collectives, in_place
):
    optimizer = SimulatedOptimizer(collectives, average=False)
    for _ in range(3):
        optimizer.backward({0: 4.0, 3: 1.0})
        for p in optimizer.parameters:
            if in_place:
                p.grad *= 0.5
            else:
                p.grad = p.grad * 0.5
        optimizer.step()
    optimizer.backward({3: 1.0})
    optimizer.step()
    # 8 / 2, (4 + 8) / 2 and (6 + 8) / 2.
    assert optimizer.values == [7.0, 0.0, 0.0, 3.75]


# --- parameters that change ---------------------------------------------------------------------


@pytest.mark.parametrize("idle", [set(), {1}, {0, 1}])
@simulated(2)
def test_parameters_that_have_another_dtype_on_all_ranks_get_new_buckets(collectives, idle):
    value = [2.0, 1.0, None][len(idle)]
    optimizer = SimulatedOptimizer(collectives, average=False)
    train(optimizer, 1.0)
    optimizer.zero()
    for p in optimizer.parameters:
        p.data = p.data.float()
    assert optimizer.rounds.plan_outdated
    if collectives.rank not in idle:
        optimizer.backward(1.0)
    optimizer.step()
    values, left = optimizer.values, train(optimizer, 1.0)
    assert {p.grad.dtype for p in optimizer.parameters} == {torch.float32}
    assert not optimizer.rounds.plan_outdated
    assert values == [value] * 4
    assert left == 2.0
    assert names_of(collectives, lambda: train(optimizer, 1.0)) == ["header"]


@simulated(3)
def test_parameters_that_have_another_dtype_on_some_ranks_are_an_error(collectives):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    optimizer.zero()
    for p in optimizer.parameters:
        p.data = p.data.to(torch.float32 if collectives.rank else torch.float64)
    with pytest.raises(PassesDiffer):
        optimizer.step() if collectives.rank == 2 else optimizer.backward(1.0)
    for p in optimizer.parameters:
        p.data = p.data.float()
    optimizer.zero()
    assert works(optimizer)


@pytest.mark.parametrize("idle", [set(), {1}])
@simulated(2)
def test_parameters_that_begin_to_need_gradients_are_reduced_in_the_same_round(collectives, idle):
    optimizer = SimulatedOptimizer(collectives, frozen=2, average=False)
    for _ in range(2):
        optimizer.zero()
        optimizer.backward(1.0)
        optimizer.step()
    assert optimizer.values == [None, None, 2.0, 2.0]
    for p in optimizer.parameters:
        p.requires_grad = True
    optimizer.zero()
    if collectives.rank not in idle:
        optimizer.backward(1.0)
        optimizer.backward(10.0)
    optimizer.step()
    values = optimizer.values
    assert len(optimizer.gradients.parts) == 2
    assert values == [11.0 * (2 - len(idle))] * 4
    assert train(optimizer, 1.0) == 2.0
    assert names_of(collectives, lambda: train(optimizer, 1.0)) == ["header"]


@simulated(2)
def test_parameters_that_need_no_gradients_any_more_cost_nothing_and_get_none(collectives):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    optimizer.parameters[0].requires_grad = False
    optimizer.zero()
    names = names_of(collectives, lambda: optimizer.backward(1.0))
    optimizer.step()
    assert optimizer.values == [None, 1.0, 1.0, 1.0]
    assert names == ["header"]


@pytest.mark.parametrize("idle", [None, 0])
@pytest.mark.parametrize("passes", [1, 2])
@simulated(2)
def test_a_gradient_that_is_sparse_on_one_rank_becomes_sparse_on_all(collectives, idle, passes):
    if idle is None:
        # Rank 0 has a dense gradient of ones in the first two steps.
        one = [([6.0, 1.0], [2.0, 2.0])] * 2 + [([10.0, 0.0], [2.0, 2.0])]
    else:
        one = [([5.0, 0.0], [1.0, 1.0])] * 3
    steps = [tuple([x * passes for x in gradient] for gradient in step) for step in one]
    optimizer = SimulatedOptimizer(collectives, average=False)
    train(optimizer, 1.0)
    kinds = []
    for step in range(3):
        optimizer.zero()
        if collectives.rank != idle:
            for _ in range(passes):
                sparse = collectives.rank == 1 or step == 2
                optimizer.backward({3: 1.0, 0: rows([5.0]) if sparse else 1.0})
        optimizer.step()
        kinds.append(optimizer.parameters[0].grad.is_sparse)
    names = names_of(collectives, lambda: optimizer.backward({0: rows([1.0])}))
    assert kinds == [True] * 3
    assert [(step[0], step[3]) for step in optimizer.stepped[1:]] == steps
    assert names == ["header"]


@pytest.mark.parametrize("sparse", [False, True])
@simulated(2)
def test_an_assigned_gradient_is_not_reduced_again_by_a_later_pass_of_the_step(collectives, sparse):
    optimizer = SimulatedOptimizer(collectives, average=False)
    train(optimizer, 1.0)
    optimizer.zero()
    optimizer.backward({3: 1.0, 1: 1.0, 0: rows([1.0]) if sparse else 1.0})
    optimizer.parameters[1].grad = torch.full((2,), 50.0, dtype=torch.float64)
    optimizer.backward({3: 1.0})
    optimizer.step()
    assert optimizer.values == [2.0, 50.0, 0.0, 4.0]


# --- ranks that have joined ---------------------------------------------------------------------


@simulated(4, joined={2, 3})
def test_a_rank_without_a_pass_beside_ranks_that_have_joined(collectives):
    optimizer = SimulatedOptimizer(collectives, average=False)
    train(optimizer, 1.0)
    for _ in range(2):
        optimizer.zero()
        if collectives.rank:
            optimizer.backward(1.0)
            optimizer.backward(1.0)
        optimizer.step()
    assert optimizer.values == [2.0] * 4


@pytest.mark.parametrize("error", [PassesDiffer, BackwardFailed])
@simulated(3, joined={2})
def test_an_error_gathers_nothing_if_ranks_have_joined(collectives, error):
    optimizer = SimulatedOptimizer(collectives)
    train(optimizer, 1.0)
    optimizer.backward(1.0)
    fails = error is BackwardFailed and collectives.rank == 0
    if error is PassesDiffer and collectives.rank == 0:
        optimizer.step()
    with pytest.raises(error, match=r"1 ranks have called join\(\)"):
        optimizer.backward(1.0, fails=fails)
    assert "who" not in [name.rpartition(".")[2] for name in collectives.names]
    optimizer.zero()
    assert works(optimizer)


def test_ranks_compare_again_after_others_return_from_join():
    group = SimulatedGroup(2)
    group.joined = {1}
    turns = {}

    def run(collectives):
        optimizer = SimulatedOptimizer(collectives)
        if collectives.rank == 0:
            assert train(optimizer, 2.0) == 1.0
            optimizer.backward(2.0)
            optimizer.step()
            turns.update(collectives._turns)
            group.joined = set()
        collectives.exchange(None, "all are back")
        # The rank in `join` takes part in these collectives too.
        collectives._turns = dict(turns)
        collectives.generation += 1
        optimizer.zero()
        return works(optimizer)

    assert on_every_rank(2, run, group) == [True] * 2
    assert group.in_flight == []
