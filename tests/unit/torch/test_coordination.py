"""Several optimizers on simulated ranks, whose passes reach different optimizers."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError
from hvdkit.reduction.compression import Float16, NoCompression
from hvdkit.reduction.step_errors import BackwardFailed, GradientsChanged, PassesDiffer
from tests.searching import search_settings
from tests.simulated import ranks as simulated_ranks
from tests.simulated.optimizer import SimulatedOptimizer, backward
from tests.simulated.ranks import SimulatedGroup, on_every_rank, on_ranks, simulated
from tests.unit.torch.test_rounds import names_of

PARAMETERS = 12  # of each optimizer, in 6 buckets: more than `send` starts


class Script:
    """The optimizers of one simulated rank, and passes that reach several of them."""

    def __init__(self, collectives, count=2, **how):
        self.collectives = collectives
        self.optimizers = [self.add(**how) for _ in range(count)]

    def add(self, **how):
        return SimulatedOptimizer(self.collectives, PARAMETERS, **how)

    def backward(self, reached, value, fails=False):
        """Make a pass that reaches the optimizers with these numbers; no pass without numbers."""
        passed = {self.optimizers[number]: value for number in sorted(reached)}
        if passed:
            backward(passed, fails=fails)

    def zero(self):
        for optimizer in self.optimizers:
            optimizer.zero()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    @property
    def values(self):
        """Return the gradient of the first parameter of each optimizer."""
        return [optimizer.values[0] for optimizer in self.optimizers]


FORMATS = {"none": NoCompression(), "fp16": Float16()}


@simulated(2)
def test_an_ordinary_pass_costs_one_header_for_all_optimizers(collectives):
    script = Script(collectives, 3)
    seen = []
    for _ in range(2):
        script.zero()
        seen.append(names_of(collectives, lambda: script.backward({0, 1, 2}, 1.0)))
        seen.append(names_of(collectives, script.step))
    assert seen[2:] == [["header"], []]


@simulated(2)
def test_an_optimizer_that_one_rank_has_freed(collectives):
    script = Script(collectives, 1)
    if collectives.rank:
        del script.optimizers[0]
        script.optimizers.append(script.add())
    else:
        script.optimizers.append(script.add())
        del script.optimizers[0]
    script.optimizers.append(script.add())
    for reached in ({0}, {collectives.rank}, {0, 1}):
        script.zero()
        script.backward(reached, 1.0)
        script.step()
    assert script.values == [1.0, 1.0]


@simulated(2)
def test_a_rank_that_has_started_later_does_not_know_the_first_optimizers(collectives):
    script = Script(collectives, 1)
    if collectives.rank == 0:
        script.optimizers = [script.add()]
    script.backward({0}, 1.0)
    assert script.values == [1.0]


@simulated(2)
def test_different_numbers_of_optimizers_are_an_error(collectives):
    script = Script(collectives, 1 + collectives.rank)
    with pytest.raises(PassesDiffer, match="different numbers of optimizers"):
        script.backward({0}, 1.0)


@simulated(2)
def test_a_pass_that_raises_invalidates_the_optimizers_that_it_has_reached(collectives):
    script = Script(collectives, 3)
    script.backward({0, 1, 2}, 1.0)
    script.step()
    script.zero()
    reached, fails = ({0, 1}, False) if collectives.rank else ({0, 2}, True)
    with pytest.raises(BackwardFailed, match="raised on 1 of 2 ranks"):
        script.backward(reached, 1.0, fails)
    script.zero()
    script.backward({0, 1, 2}, 3.0)
    assert script.values == [3.0] * 3


@pytest.mark.parametrize("begun", [False, True])
@simulated(2)
def test_an_engine_that_has_ended_voids_the_gradients(collectives, begun):
    script = Script(collectives, 1)
    script.backward({0}, 1.0)
    script.step()

    def start_sum(values, name):
        def fail():
            raise RuntimeError("a rank has died")

        return fail if begun else fail()

    collectives.start_sum = start_sum
    for call in (lambda: script.backward({0}, 1.0), script.optimizers[0].synchronize):
        script.zero()
        script.optimizers[0].gradients.invalid_reason = ""
        with pytest.raises(RuntimeError):
            call()
        assert script.optimizers[0].gradients.invalid_reason == "a rank has died"


@simulated(2)
def test_an_error_of_one_optimizer_leaves_the_round_of_another(collectives):
    script = Script(collectives, 1)
    script.optimizers.append(script.add(bucket_bytes=32 + collectives.rank))
    with pytest.raises(RankMismatchError, match="bucket_bytes"):
        script.backward({0, 1}, 1.0 + collectives.rank)
    assert script.optimizers[0].values[0] == 1.5


@pytest.mark.parametrize("everywhere", [False, True])
def test_gradients_that_have_been_changed_before_a_round_that_a_rank_did_not_expect(everywhere):
    def run(collectives):
        script = Script(collectives, 2)
        script.backward({0, 1}, 1.0)
        script.step()
        script.zero()
        script.backward({0, 1}, 1.0)
        if everywhere or collectives.rank == 0:
            for p in script.optimizers[0].parameters:
                p.grad *= 0.5
        reached = {0, 1} if collectives.rank else {1}
        if everywhere:
            script.backward(reached, 1.0)
            return script.values
        with pytest.raises(GradientsChanged):
            script.backward(reached, 1.0)
        script.zero()
        script.backward({0, 1}, 4.0)
        return script.values

    expected = [1.0, 2.0] if everywhere else [4.0, 4.0]
    assert on_ranks(2, run) == [expected] * 2


def test_errors_name_the_global_ranks_of_a_process_set():
    def run(collectives):
        script = Script(collectives, 1)
        with pytest.raises(BackwardFailed, match=r"rank 3: step 1.*rank 4: .* which raised"):
            script.backward({0}, 1.0, fails=collectives.rank == 1)

    assert on_every_rank(2, run, SimulatedGroup(2, first=3)) == [None] * 2


@simulated(2)
def test_steps_in_different_orders_are_an_error(collectives):
    script = Script(collectives, 2)
    script.backward({0, 1}, 1.0)
    script.step()
    with pytest.raises(PassesDiffer, match="optimizer 0: step 2, reduction 1, at its step"):
        script.optimizers[collectives.rank].synchronize()


@simulated(3, joined={0})
def test_passes_of_several_optimizers_beside_ranks_that_have_joined(collectives):
    script = Script(collectives, 2, average=False)
    for _ in range(2):
        script.zero()
        script.backward({collectives.rank - 1}, 1.0)
        script.step()
    assert script.values == [1.0, 1.0]


# --- drawn scripts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iteration:
    """One iteration of a drawn training loop.

    Attributes:
        program: of each rank: "pass", or the number of an optimizer to step, in order.
        reached: for each pass, the optimizers that each rank's reaches.
        idle: ranks that make no pass.
        zero: whether all gradients are removed at the start.
    """

    program: tuple[object, ...]
    reached: tuple[tuple[frozenset[int], ...], ...]
    idle: frozenset[int]
    zero: bool


@st.composite
def loops(draw):
    """Draw the number of ranks and of optimizers, the wire format and some iterations."""
    ranks, count = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    subsets = st.sets(st.integers(0, count - 1), min_size=1).map(frozenset)
    iterations = []
    for _ in range(draw(st.integers(1, 4))):
        passes = draw(st.integers(1, 3))
        early = draw(st.permutations(range(count)))[: draw(st.integers(0, count - 1))]
        steps = [*early, *(number for number in range(count) if number not in early)]
        program = ["pass"] * passes
        for number in early:
            program.insert(draw(st.integers(1, len(program))), number)
        program += steps[len(early) :]
        alike = draw(st.booleans())
        reached = []
        for _ in range(passes):
            same = draw(subsets)
            reached.append(tuple(same if alike else draw(subsets) for _ in range(ranks)))
        idle = draw(st.one_of(st.just(set()), st.sets(st.integers(0, ranks - 1))))
        iterations.append(
            Iteration(tuple(program), tuple(reached), frozenset(idle), draw(st.booleans()))
        )
    return ranks, count, draw(st.sampled_from(sorted(FORMATS))), tuple(iterations)


def amount(iteration, number, rank, optimizer):
    """Return the gradient of a pass: small integers, whose sums are exact in float16."""
    return float((5 * iteration + 3 * rank + 7 * number + 11 * optimizer) % 13 + 1)


def play(collectives, count, wire_format, iterations):
    """Return the gradients that each step has used, or the name of an error."""
    script = Script(collectives, count, average=False, format=FORMATS[wire_format])
    stepped = []
    for at, iteration in enumerate(iterations):
        if iteration.zero:
            script.zero()
        number = 0
        for item in iteration.program:
            if item != "pass":
                script.optimizers[item].step()
                stepped.append(script.optimizers[item].values)
                continue
            rank = collectives.rank
            if rank not in iteration.idle:
                # Different values for each optimizer, to detect gradients that are mixed up.
                reached = sorted(iteration.reached[number][rank])
                backward({script.optimizers[k]: amount(at, number, rank, k) for k in reached})
            number += 1
    for optimizer in script.optimizers:
        optimizer.rounds.complete_deferred()
    return stepped


def in_one_process(ranks, count, iterations):
    """Return the gradient that each step uses: the sum of all passes since the last zero."""
    held = np.zeros(count)
    stepped = []
    for at, iteration in enumerate(iterations):
        if iteration.zero:
            held[:] = 0
        number = 0
        for item in iteration.program:
            if item != "pass":
                stepped.append([held[item]] * PARAMETERS)
                continue
            for rank in set(range(ranks)) - iteration.idle:
                for k in iteration.reached[number][rank]:
                    held[k] += amount(at, number, rank, k)
            number += 1
    return stepped


def run_examples(examples, monkeypatch):
    monkeypatch.setattr(simulated_ranks, "_TIMEOUT", 20.0)
    ends = {"right": 0, "error": 0}

    @search_settings(examples)
    @given(loops())
    def run(drawn):
        ranks, count, wire_format, iterations = drawn
        group = SimulatedGroup(ranks)
        results = on_every_rank(
            ranks, lambda each: play(each, count, wire_format, iterations), group
        )
        errors = {type(each) for each in results if isinstance(each, BaseException)}
        if errors:
            (error,) = errors
            assert issubclass(error, HvdkitError), results
            assert all(isinstance(each, BaseException) for each in results), results
            # A rank without a pass cannot distinguish gradients of the last step from new ones.
            assert any(each.idle and not each.zero for each in iterations), drawn
            ends["error"] += 1
        else:
            expected = in_one_process(ranks, count, iterations)
            for stepped in results:
                found = [[value or 0.0 for value in step] for step in stepped]
                assert found == pytest.approx(np.array(expected))
            ends["right"] += 1
        assert group.in_flight == []

    run()
    return ends


def test_drawn_loops_give_what_one_process_gets(monkeypatch):
    ends = run_examples(80, monkeypatch)
    assert ends["right"] > 50, ends


@pytest.mark.long
def test_many_drawn_loops(monkeypatch):
    ends = run_examples(3000, monkeypatch)
    assert ends["right"] > 2500, ends


@pytest.mark.parametrize("first", [True, False])
@simulated(2)
def test_an_engine_that_ends_in_the_first_reduction(collectives, first):
    """Perhaps the other ranks have not wrapped their optimizers."""
    script = Script(collectives, 1)
    if not first:
        script.backward({0}, 1.0)
        script.zero()

    def fail():
        raise RuntimeError("other ranks have ended")

    collectives.start_sum = lambda *_: fail
    with pytest.raises(RuntimeError) as caught:
        script.backward({0}, 1.0)
    (note,) = caught.value.__notes__
    assert ("each rank calls hvd.DistributedOptimizer" in note) == first
