"""Drawn sequences of actions of simulated ranks, compared with one process."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hvdkit.errors import HvdkitError
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.compression import Float16, NoCompression
from tests.searching import search_settings
from tests.simulated.optimizer import SimulatedOptimizer, rows
from tests.simulated.ranks import SimulatedGroup, on_every_rank

PARAMETERS = 4


@dataclass(frozen=True)
class Setting:
    """The settings of all steps.

    Attributes:
        window: passes of the accumulation window.
        mean: see `Window`.
        find_unused: see `Reduction`.
    """

    ranks: int
    average: bool
    fp16: bool
    window: int
    mean: bool
    find_unused: bool


@dataclass(frozen=True)
class Actions:
    """The actions of one rank in one step, in this order.

    Attributes:
        before: the number of passes under `no_sync`.
        passes: passes with it, or of the window. With a mean, the ranks call `step()` after each of
            the window, also after those that only others make.
        after: passes without communication.
        fails: the last of `passes` raises, if it communicates.
        synchronizes: before the step.
        unused: a parameter that gets no gradient; PARAMETERS for none.
        stray_zero: removes the gradients at the start, maybe alone.
    """

    before: int = 0
    passes: int = 1
    after: int = 0
    fails: bool = False
    synchronizes: bool = False
    unused: int = PARAMETERS
    stray_zero: bool = False


@dataclass(frozen=True)
class Step:
    """The actions of all ranks in one step.

    Attributes:
        ranks: the actions of each rank.
        discarded: all make a pass, or a window of them, and remove the gradients.
        zero: all remove their gradients at the start.
        halved: all synchronize, and halve their gradients.
        flush: all end an open window instead of stepping.
        sparse: the rank whose gradients of the first parameter are sparse; None for no rank.
    """

    ranks: tuple[Actions, ...]
    discarded: bool = False
    zero: bool = True
    halved: bool = False
    flush: bool = False
    sparse: int | None = None

    @property
    def batches(self) -> int:
        """The number of batches before a flush."""
        return max(actions.passes for actions in self.ranks)

    @property
    def begins_at_zero(self) -> bool:
        """Whether all ranks remove their gradients at the start."""
        return self.zero or all(actions.stray_zero for actions in self.ranks)


def some(strategy, usual, rare=4):
    """Draw `usual` more often than `strategy`."""
    return st.one_of(*[st.just(usual)] * (rare - 1), strategy)


@st.composite
def scenarios(draw):
    """Draw a setting and steps."""
    window = draw(st.sampled_from([1, 1, 1, 2, 3]))
    setting = Setting(
        ranks=draw(st.integers(2, 4)),
        average=draw(st.booleans()),
        fp16=draw(st.booleans()),
        window=window,
        mean=window > 1 and draw(st.booleans()),
        find_unused=draw(st.booleans()),
    )
    return setting, tuple(draw(steps(setting)) for _ in range(draw(st.integers(1, 4))))


@st.composite
def steps(draw, setting):
    """Draw a step."""
    window = setting.window
    flush = setting.mean and draw(st.booleans())
    most = 3 if window == 1 else window - flush
    usual = draw(st.integers(0, most))
    kind = draw(st.sampled_from(["alike", "alike", "idle", "any"]))
    passes = {
        "alike": st.just(usual),
        "idle": st.sampled_from([0, usual]),
        "any": st.integers(0, most),
    }[kind]
    no_syncs = st.just(0) if flush else some(st.integers(0, 2), 0)
    after = draw(no_syncs)
    ranks = tuple(
        Actions(
            before=draw(no_syncs),
            passes=draw(passes),
            after=draw(some(no_syncs, after)),
            fails=draw(some(st.booleans(), False, 12)),
            synchronizes=draw(st.booleans()),
            unused=draw(some(st.integers(0, PARAMETERS), PARAMETERS)),
            stray_zero=draw(some(st.booleans(), False, 12)),
        )
        for _ in range(setting.ranks)
    )
    return Step(
        ranks,
        discarded=draw(some(st.booleans(), False)),
        zero=draw(st.booleans()),
        halved=not flush and draw(some(st.booleans(), False)),
        flush=flush,
        sparse=draw(some(st.integers(0, setting.ranks - 1), None, 6)),
    )


# --- on the ranks -------------------------------------------------------------------------------


def value(step, rank, number, parameter):
    """Return a gradient of a pass: small integers, whose sums are exact in float16."""
    return float((5 * step + 3 * rank + 7 * number + 11 * parameter) % 13 + 1)


def gradients(step, at, rank, number):
    """Return the gradients of a rank's pass in the step that has the number `at`."""
    found = {p: value(at, rank, number, p) for p in range(PARAMETERS)}
    found.pop(step.ranks[rank].unused, None)
    if step.sparse == rank and 0 in found:
        found[0] = rows([found[0]] * 2)
    return found


def play(optimizer, step, at):
    """Perform the actions of the rank in a step."""
    rank = optimizer.collectives.rank
    actions, window = step.ranks[rank], optimizer.window.size
    if step.zero or actions.stray_zero:
        optimizer.zero()
    if step.discarded:
        for number in range(window):
            optimizer.backward(100.0)
            if optimizer.window.mean and number + 1 < window:
                optimizer.step()
        optimizer.zero()
    for number in range(actions.before):
        optimizer.backward(gradients(step, at, rank, number), no_sync=True)
    calls = 0
    if optimizer.window.mean and window > 1:
        calls = step.batches if step.flush else window
    for number in range(max(calls, actions.passes)):
        if number < actions.passes:
            last = number + 1 == actions.passes and window in (1, actions.passes)
            optimizer.backward(gradients(step, at, rank, 10 + number), fails=actions.fails and last)
        if number < calls - (not step.flush):
            optimizer.step()
    for number in range(actions.after):
        optimizer.backward(gradients(step, at, rank, 20 + number), no_sync=True)
    if step.flush:
        optimizer.flush()
        return
    if step.halved or actions.synchronizes:
        optimizer.synchronize()
    if step.halved:
        for p in optimizer.parameters:
            if p.grad is not None:
                p.grad.mul_(0.5)
    optimizer.step()


def on_a_rank(collectives, setting, drawn):
    """Return the name of the error, or None, and the gradients of all steps and of two more."""
    optimizer = SimulatedOptimizer(
        collectives,
        PARAMETERS,
        Window(setting.window, mean=setting.mean),
        average=setting.average,
        format=Float16() if setting.fp16 else NoCompression(),
        find_unused=setting.find_unused,
    )
    closing = Step(tuple(Actions(passes=setting.window) for _ in range(setting.ranks)))
    error = None
    try:
        for at, step in enumerate((*drawn, closing)):
            play(optimizer, step, at)
    except HvdkitError as raised:
        error = type(raised).__name__
        optimizer.stepped.clear()
        optimizer.zero()
    for at in range(2):
        play(optimizer, closing, at)
    optimizer.rounds.complete_deferred()
    return error, optimizer.stepped


# --- in one process -----------------------------------------------------------------------------


def in_one_process(setting, drawn):
    """Return the gradients of all steps: the mean or sum of all passes since the last zero."""
    held = np.zeros(PARAMETERS)
    stepped = []
    for at, step in enumerate(drawn):
        if step.begins_at_zero or step.discarded:
            held = np.zeros(PARAMETERS)
        total = np.zeros(PARAMETERS)
        for rank, actions in enumerate(step.ranks):
            numbers = [
                *range(actions.before),
                *range(10, 10 + actions.passes),
                *range(20, 20 + actions.after),
            ]
            for number in numbers:
                for p in range(PARAMETERS):
                    if p != actions.unused:
                        total[p] += value(at, rank, number, p)
        passes = step.batches if step.flush else setting.window
        if step.flush and not passes:
            continue
        total /= (setting.ranks if setting.average else 1) * (passes if setting.mean else 1)
        held = (held + total) * (0.5 if step.halved else 1.0)
        stepped.append(held)
    return stepped


def must_succeed(setting, step):
    """Return whether a step of ranks that are alike up to it is the same for all of them.

    If not, it may be an error.
    """
    ranks = step.ranks
    if any(a.fails or (a.stray_zero and not step.begins_at_zero) for a in ranks):
        return False
    alike = len({a.passes for a in ranks}) == 1
    in_round = [a.passes > 0 and setting.window in (1, a.passes) for a in ranks]
    if not step.discarded and not all(in_round):
        return True  # a rank was late in the first round, so all ranks wait at the step
    new = {
        a.after > 0 or (a.before + a.passes > 0 and not reduced)
        for a, reduced in zip(ranks, in_round, strict=True)
    }
    return alike and len(new) == 1


def check(setting, drawn):
    """Run a scenario on ranks and in one process, and compare."""
    group = SimulatedGroup(setting.ranks)
    results = on_every_rank(
        setting.ranks, lambda collectives: on_a_rank(collectives, setting, drawn), group
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert group.in_flight == []
    errors = {error for error, _ in results}
    assert len(errors) == 1, f"ranks end differently: {[error for error, _ in results]}"
    closing = Step(tuple(Actions(passes=setting.window) for _ in range(setting.ranks)))
    last = in_one_process(setting, [closing, closing])
    (error,) = errors
    if error is None:
        expected = in_one_process(setting, (*drawn, closing)) + last
    else:
        assert not all(must_succeed(setting, step) for step in drawn), error
        expected = last
    for _, stepped in results:
        found = [
            [[0.0, 0.0] if gradient is None else gradient for gradient in step] for step in stepped
        ]
        assert found == pytest.approx(np.repeat(np.array(expected)[..., None], 2, axis=-1))
    return error


def run_examples(count):
    """Check `count` drawn scenarios; return the number of scenarios with each error."""
    ends: dict[str | None, int] = {}

    @search_settings(count)
    @given(scenarios())
    def run(scenario):
        error = check(*scenario)
        ends[error] = ends.get(error, 0) + 1

    run()
    return ends


def test_sequences_of_steps_give_what_one_process_gets_or_one_error_on_all_ranks():
    ends = run_examples(120)
    assert ends.keys() == {None, "PassesDiffer", "BackwardFailed"}, ends


@pytest.mark.long
def test_many_sequences_of_steps():
    ends = run_examples(3000)
    assert min(ends.values()) > 50, ends
