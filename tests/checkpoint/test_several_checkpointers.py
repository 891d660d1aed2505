"""Scripts with several checkpointers that are asked to stop, or killed, at any moment.

Each script trains one to three numbers that depend on each other, and has a checkpointer for each.
Whatever happens, the job that is started again must end with the numbers of an undisturbed job.
"""

import contextlib
import functools
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.checkpoint.checkpointers import Checkpointers, Stopped
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.signals import StopSignals
from hvdkit.checkpoint.store import Store
from tests.checkpoint.simulated_state import Arrays
from tests.core.simulated_ranks import SimulatedCollectives, SimulatedGroup, on_every_rank
from tests.searching import search_settings

RANKS = 2
STEPS = 8


class Killed(BaseException):
    """A signal has ended this rank in its usual way."""


@dataclass(frozen=True)
class Use:
    """How a script uses one checkpointer.

    Attributes:
        every_steps: as for `Manager`.
        calls_every: the script calls `maybe_save` at the multiples of this number of steps.
        at_end: whether it calls `maybe_save` at the end of an iteration, after all training.
    """

    every_steps: int | None = 3
    calls_every: int = 1
    at_end: bool = False


@dataclass(frozen=True)
class Script:
    """A script, and what happens to it.

    Attributes:
        uses: for each checkpointer, how it is used.
        order: the order in which the numbers are trained and saved in an iteration.
        saves_at_end: whether the script calls `save` after the loop.
        moment: the number of events before the disturbance; None: nothing happens.
        again: the same for the second start.
        ranks: the ranks that get the signal; () if all ranks are killed instead.
    """

    uses: tuple[Use, ...] = (Use(), Use())
    order: tuple[int, ...] = (0, 1, 2)
    saves_at_end: bool = True
    moment: int | None = None
    again: int | None = None
    ranks: tuple[int, ...] = (0, 1)


class Job:
    """One start of a script on simulated ranks."""

    def __init__(self, script, folder):
        self.script, self.folder = script, folder
        self.events = [0] * RANKS

    def run(self):
        """Return the numbers at the end, or the exceptions, of each rank."""
        Checkpointers._of_ranks.clear()  # each start is a new process
        return on_every_rank(RANKS, self.rank)

    def event(self, rank):
        """Let the disturbance happen on a rank, if this is the moment."""
        self.events[rank] += 1
        if self.events[rank] != self.script.moment:
            return
        if not self.script.ranks:
            raise Killed
        if rank in self.script.ranks:
            request = Checkpointers.of(rank).request
            if request.end_process is not None and not Checkpointers.of(rank)._open:
                if not self.kept[rank]:
                    raise Killed
                request.end_process(signal.SIGTERM)
            request.record(signal.SIGTERM)

    def rank(self, collectives):
        script, rank = self.script, collectives.rank
        parts = [Arrays(n) for n in range(len(script.uses))]
        updates = [0] * len(parts)
        order = [n for n in script.order if n < len(parts)]
        with contextlib.ExitStack() as stack:
            managers = [
                stack.enter_context(
                    Manager(
                        Store(str(self.folder / f"{n}"), keep_last=1),
                        collectives,
                        {"model": part},
                        every_steps=use.every_steps,
                        stop_signals=(),
                        updates=functools.partial(updates.__getitem__, n),
                    )
                )
                for n, (part, use) in enumerate(zip(parts, script.uses, strict=True))
            ]
            self.event(rank)
            restored = [manager.restore() for manager in managers]
            first = {each and each.step for each in restored}
            if first == {None, 1}:
                # Killed in the first iteration, before the optimizer's first step of the other.
                raise Killed
            assert len(first) == 1, first
            for step in range((first.pop() or 0) + 1, STEPS + 1):
                late = []
                for n in order:
                    others = sum(part.value for part in parts)
                    parts[n].value = (31 * parts[n].value + others + step) % 10_007
                    updates[n] += 1
                    self.event(rank)
                    if step % script.uses[n].calls_every == 0:
                        if script.uses[n].at_end:
                            late.append(n)
                        else:
                            managers[n].maybe_save(step)
                for n in late:
                    self.event(rank)
                    managers[n].maybe_save(step)
            for n in order:
                self.event(rank)
                if script.saves_at_end:
                    managers[n].save(STEPS)
            self.event(rank)
        self.event(rank)  # an evaluation
        return [part.value for part in parts]


@pytest.fixture
def kept(monkeypatch):
    """Simulate handlers, which only a main thread can install. Return rank -> whether kept."""
    found = {}

    def remove(signals, keep=False):
        (rank,) = (r for r, c in Checkpointers._of_ranks.items() if c.request is signals.request)
        found[rank] = keep

    def deliver(signals):
        if signals.request.unanswered is not None:
            raise Killed

    monkeypatch.setattr(StopSignals, "remove", remove)
    monkeypatch.setattr(StopSignals, "deliver", deliver)
    monkeypatch.setattr(Job, "kept", found, raising=False)


def steps(folder):
    return [info.step for info in Store(str(folder)).steps_of_newest_run()]


def check(script):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        undisturbed = Job(replace(script, moment=None), Path(made) / "undisturbed")
        right = undisturbed.run()
        assert all(isinstance(each, list) for each in right), right
        folder, stopped = Path(made) / "disturbed", []
        for moment in (script.moment, script.again, None):
            ends = Job(replace(script, moment=moment), folder).run()
            have = [steps(folder / str(n)) for n in range(len(script.uses))]
            common = set.intersection(*map(set, have))
            if isinstance(ends[0], Killed) and not script.ranks and moment is None:
                return
            if isinstance(ends[0], CheckpointError):
                # A job that was killed may have left no step that all folders have.
                assert not stopped
                assert not common
                assert "no step is in all" in str(ends[0])
                return
            stopped = [each for each in ends if isinstance(each, Stopped)]
            if moment is not None and script.ranks:
                # A signal never kills a job that can be resumed.
                killed = [each for each in ends if isinstance(each, Killed)]
                assert not killed or not common, (ends, have)
                assert all(isinstance(each, Stopped | Killed | list) for each in ends), ends
                # Ranks only differ in the evaluation, where they do not communicate.
                assert len(stopped) in (0, RANKS) or list in map(type, ends), (ends, have)
                if stopped and all(use.calls_every == 1 for use in script.uses):
                    assert common
        assert ends == right, (ends, right)


USES = st.builds(
    Use, st.sampled_from([None, 1, 2, 3, 5]), st.sampled_from([1, 1, 2, 4]), st.booleans()
)
SCRIPTS = st.builds(
    Script,
    st.integers(1, 3).flatmap(lambda n: st.tuples(*[USES] * n)),
    st.permutations(range(3)).map(tuple),
    st.booleans(),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 30)),
    st.sampled_from([(0,), (1,), (0, 1), ()]),
)


@pytest.mark.parametrize(
    "script",
    [
        # A start that has nothing left to train.
        Script((Use(None),), moment=9, again=1, ranks=(0,)),
        # Two folders name a third one, and not each other.
        Script((Use(None, 2), Use(1, 4), Use(1, 1)), (1, 0, 2), False, 1, None, (0,)),
        # Killed before the first save of a network that was called.
        Script((Use(None, 1), Use(1, 4)), (1, 0, 2), False, 1, 9, ()),
    ],
)
def test_scripts_that_have_failed(kept, script):
    check(script)


def test_a_disturbed_script_ends_as_an_undisturbed_one(kept, request):
    @search_settings(600 if request.config.getoption("--long") else 20)
    @given(SCRIPTS)
    def search(script):
        check(script)

    search()


def both(stack, collectives, folder, names, **given):
    """Return two checkpointers without handlers, which `stack` closes."""
    return [
        stack.enter_context(
            Manager(
                *(Store(str(folder / name)), collectives, {"model": Arrays(1)}),
                stop_signals=(),
                **given,
            )
        )
        for name in names
    ]


@pytest.mark.parametrize(
    ("counts", "every_steps", "signal_at"),
    [
        ("the same steps", 1, 6),
        ("the same steps", 1000, 10),
        ("their own steps", 1, 10),
        ("their own steps", 1000, 8),
    ],
)
def test_a_stop_saves_a_generator_with_the_critic_of_its_inner_loop(
    kept, tmp_path, monkeypatch, counts, every_steps, signal_at
):
    """The critic makes five steps for each of the generator. The signal comes in iteration 2."""
    # However long an iteration takes.
    monkeypatch.setattr("hvdkit.checkpoint.checkpointers.STOP_SECONDS", 0.0)

    def run(collectives):
        with contextlib.ExitStack() as stack:
            names = ("critic", "generator")
            critic, generator = both(stack, collectives, tmp_path, names, every_steps=every_steps)
            request, passes = Checkpointers.of(collectives.rank).request, 0
            for step in range(1, 5):
                for _ in range(5):
                    passes += 1
                    if passes == signal_at and collectives.rank == 1:
                        request.record(signal.SIGTERM)
                    critic.maybe_save(step if counts == "the same steps" else passes)
                generator.maybe_save(step)

    Checkpointers._of_ranks.clear()
    ends = on_every_rank(RANKS, run)
    assert all(isinstance(each, Stopped) for each in ends), ends
    assert steps(tmp_path / "generator")[-1:] == [2]
    assert steps(tmp_path / "critic")[-1:] == [2 if counts == "the same steps" else 10]


@pytest.mark.parametrize("call", ["save", "maybe_save"])
def test_a_stop_does_not_wait_for_an_archive(kept, tmp_path, call):
    def run(collectives):
        with contextlib.ExitStack() as stack:
            subjects = () if call == "save" else ["the model"]
            main, best = both(stack, collectives, tmp_path, ("main", "best"), subjects=subjects)
            for step in range(1, 100):
                if step == 51:
                    Checkpointers.of(collectives.rank).request.record(signal.SIGTERM)
                main.maybe_save(step)
                if step == 50:
                    getattr(best, call)(1)

    Checkpointers._of_ranks.clear()
    ends = on_every_rank(RANKS, run)
    assert all(isinstance(each, Stopped) for each in ends), ends
    assert steps(tmp_path / "main") == [51]


@pytest.mark.parametrize("step", [0, 3])
def test_a_restored_step_can_be_resumed(kept, tmp_path, step):
    def run(collectives):
        store = Store(str(tmp_path))
        manager = Manager(store, collectives, {"model": Arrays(1)}, stop_signals=())
        if manager.restore() is None:
            manager.save(step)
        else:
            Checkpointers.of(collectives.rank).request.record(signal.SIGTERM)
        manager.close()

    for expected in (type(None), Stopped):
        Checkpointers._of_ranks.clear()
        ends = on_every_rank(RANKS, run)
        assert all(isinstance(each, expected) for each in ends), ends


def test_a_folder_that_cannot_be_read_at_the_end_leaves_a_training_complete(
    kept, tmp_path, monkeypatch, caplog
):
    def unreadable(stores):
        raise CheckpointError("the server is away")

    monkeypatch.setattr("hvdkit.checkpoint.manager.can_restore", unreadable)

    def run(collectives):
        with Manager(
            Store(str(tmp_path)), collectives, {"model": Arrays(1)}, stop_signals=()
        ) as manager:
            manager.save(1)

    Checkpointers._of_ranks.clear()
    assert on_every_rank(RANKS, run) == [None] * RANKS
    assert "the server is away" in caplog.text


@pytest.mark.parametrize("schedule", [None, 1000])
def test_a_signal_before_the_next_checkpointer_records_signals_is_not_lost(tmp_path, schedule):
    previous = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    Checkpointers._of_ranks.clear()

    def make(name, schedule):
        ranks = SimulatedCollectives(SimulatedGroup(1), 0)
        store = Store(str(tmp_path / name))
        return Manager(store, ranks, {"model": Arrays(1)}, every_steps=schedule)

    try:
        with make("first", 1) as first:
            first.maybe_save(1)
        second = make("second", schedule)
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGUSR1)
        assert stopped.value.step == 1
        second.abandon()
    finally:
        signal.signal(signal.SIGUSR1, previous)
        Checkpointers._of_ranks.clear()


class Trained:
    """Two checkpointers of a script that trains both networks, and calls one at times only."""

    def __init__(self, folder, every=20, called=("maybe_save", "maybe_save"), trains=(1, 1)):
        self.folder, self.every, self.called, self.trains = folder, every, called, trains

    def run(self, signal_at=None, last=99, **given):
        """Return the exceptions of the ranks. Simulate SIGKILL after step `last`."""
        self.restored = {}
        Checkpointers._of_ranks.clear()
        return on_every_rank(RANKS, functools.partial(self._rank, signal_at, last, given))

    def _rank(self, signal_at, last, given, collectives):
        updates = [0, 0]
        with contextlib.ExitStack() as stack:
            often, seldom = (
                stack.enter_context(
                    Manager(
                        *(Store(str(self.folder / name)), collectives, {"model": Arrays(1)}),
                        stop_signals=(),
                        updates=functools.partial(updates.__getitem__, number),
                        **given,
                    )
                )
                for number, name in enumerate(("often", "seldom"))
            )
            found = [manager.restore() for manager in (often, seldom)]
            self.restored[collectives.rank] = [each and each.step for each in found]
            for step in range(1 + (found[0].step if found[0] else 0), last + 1):
                if step == signal_at:
                    Checkpointers.of(collectives.rank).request.record(signal.SIGTERM)
                updates[:] = [u + t for u, t in zip(updates, self.trains, strict=True)]
                getattr(often, self.called[0])(step)
                if step % self.every == 0:
                    getattr(seldom, self.called[1])(step)
            raise Killed


def test_a_stop_waits_for_the_first_save_of_a_trained_network(kept, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hvdkit.checkpoint.checkpointers.STOP_SECONDS", 0.0)
    ends = Trained(tmp_path).run(signal_at=5)
    assert all(isinstance(each, Stopped) for each in ends), ends
    assert steps(tmp_path / "often")[-1:] == steps(tmp_path / "seldom") == [20]
    assert "seldom was not saved: the stop waits for their next save" in caplog.text


def test_a_stop_does_not_wait_for_a_network_of_a_later_phase(kept, tmp_path):
    job = Trained(tmp_path, trains=(1, 0))
    assert all(isinstance(each, Stopped) for each in job.run(signal_at=5))
    assert steps(tmp_path / "often") == [5]
    job.run()
    assert job.restored[0] == [5, None]


def test_a_killed_job_does_not_begin_one_network_anew(kept, tmp_path):
    Trained(tmp_path).run(last=15, every_steps=5)
    for end in Trained(tmp_path).run():
        assert isinstance(end, CheckpointError)
        assert "belong together" in str(end)
        assert "seldom has no step" in str(end)


def test_a_stop_ends_a_script_that_saves_one_network_with_save(kept, tmp_path):
    ends = Trained(tmp_path, every=1, called=("maybe_save", "save")).run(signal_at=5)
    assert all(isinstance(each, Stopped) for each in ends), ends
    assert steps(tmp_path / "often")[-1:] == steps(tmp_path / "seldom")[-1:]
    assert steps(tmp_path / "often")[-1] <= 6


def test_a_stop_that_waits_no_longer_resumes_both_from_one_step(
    kept, tmp_path, monkeypatch, caplog
):
    """The job must end before the batch system kills it."""
    monkeypatch.setattr("hvdkit.checkpoint.checkpointers.STOP_SECONDS", 0.0)
    job = Trained(tmp_path)
    ends = job.run(signal_at=45, every_steps=10)
    assert all(isinstance(each, Stopped) for each in ends), ends
    assert "seldom was not saved: the next start resumes from the newest step of all" in caplog.text
    job.run()
    assert job.restored[0] == [40, 40]


@pytest.mark.parametrize("kills", [(19,), (20, 35, 57)])
def test_a_folder_keeps_the_newest_step_that_others_have(kept, tmp_path, kills):
    """The newest 3 steps of one do not reach back to the newest step of the other."""
    job = Trained(tmp_path, every=10)
    for last in kills:
        job.run(last=last, every_steps=2)
    job.run()
    assert job.restored[0] == [kills[-1] // 10 * 10] * 2
    assert len(steps(tmp_path / "often")) <= 3 + 2
