"""Scripts with two open checkpointers, of which one is an archive, and their stops."""

import contextlib
import gc
import logging
import signal
import sys

import pytest

from hvdkit.checkpoint.checkpointers import Checkpointers, Stopped
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.signals import StopSignals
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.simulated.ranks import SimulatedCollectives, SimulatedGroup, on_every_rank
from tests.unit.checkpoint.simulated_state import Arrays

RANKS = 2
GENERATOR, CRITIC = object(), object()


@pytest.fixture(autouse=True)
def without_handlers(request, monkeypatch):
    """Only a main thread can install handlers, and simulated ranks are threads."""
    if "handlers" not in request.node.name:
        monkeypatch.setattr(StopSignals, "remove", lambda signals, keep=False: None)
        monkeypatch.setattr(StopSignals, "deliver", lambda signals: None)


def make(folder, collectives, name, subjects=(), keep_best=(), **given):
    keep_last = 1 if keep_best else 3
    return Manager(
        Store(str(folder / name), keep_best=keep_best, keep_last=keep_last),
        *(collectives, {"model": Arrays(1)}),
        **{"stop_signals": (), "subjects": subjects, **given},
    )


def steps(folder):
    return [info.step for info in Store(str(folder)).steps_of_newest_run()]


def send_signal(collectives):
    Checkpointers.of(collectives.rank).request.record(signal.SIGTERM)


def on_ranks(run):
    Checkpointers._of_ranks.clear()
    return on_every_rank(RANKS, run)


def test_a_second_checkpointer_of_another_model_is_refused(tmp_path):
    def run(collectives):
        with make(tmp_path, collectives, "generator", [GENERATOR]) as first:
            with pytest.raises(UsageError, match=r"generator is open.*one checkpointer for all"):
                make(tmp_path, collectives, "critic", [CRITIC])
            first.save(1)
        # Another phase of the training.
        with make(tmp_path, collectives, "critic", [CRITIC]) as second:
            second.save(2)

    assert on_ranks(run) == [None] * RANKS
    assert steps(tmp_path / "generator") == [1]
    assert steps(tmp_path / "critic") == [2]


@pytest.mark.parametrize("order", [("main", "archive"), ("archive", "main")])
@pytest.mark.parametrize(
    ("saves", "restored"),
    [
        # The archive saves less.
        ({"main": [GENERATOR, CRITIC], "archive": [GENERATOR]}, ()),
        ({"main": [GENERATOR, CRITIC], "archive": [GENERATOR]}, ("archive",)),
        # The job does not resume from the archive.
        ({"main": [GENERATOR], "archive": [GENERATOR]}, ("main",)),
    ],
)
def test_a_stop_saves_the_checkpointer_that_resumes_the_job(tmp_path, order, saves, restored):
    def run(collectives):
        with contextlib.ExitStack() as stack:
            made = {
                name: stack.enter_context(make(tmp_path, collectives, name, saves[name]))
                for name in order
            }
            for name in restored:
                made[name].restore()
            for step in range(1, 9):
                if step == 5 and collectives.rank == 1:
                    send_signal(collectives)
                for name in order:
                    made[name].maybe_save(step)

    ends = on_ranks(run)
    assert [type(each) for each in ends] == [Stopped] * RANKS, ends
    assert steps(tmp_path / "main") == [5]
    assert not (tmp_path / "archive").exists() or not steps(tmp_path / "archive")


@pytest.mark.parametrize("first", ["main", "archive"])
def test_a_signal_after_the_last_save_stops_a_job_with_an_archive(tmp_path, first):
    def run(collectives):
        main = make(tmp_path, collectives, "main", [GENERATOR, CRITIC])
        archive = make(tmp_path, collectives, "archive", [GENERATOR])
        main.save(3)
        send_signal(collectives)
        if first == "archive":
            archive.close()
        main.close()

    ends = on_ranks(run)
    assert [type(each) for each in ends] == [Stopped] * RANKS, ends
    assert [each.step for each in ends] == [3] * RANKS


def test_a_script_that_begins_again_after_an_exception_stops_for_an_earlier_signal(tmp_path):
    """The signal, such as SIGTERM, may also have ended a worker of a `DataLoader`: an exception."""

    def run(collectives):
        for trial in range(2):
            with (
                contextlib.suppress(RuntimeError),
                make(tmp_path, collectives, "main", [GENERATOR]) as main,
            ):
                main.restore()
                if trial == 0:
                    main.save(1)
                    if collectives.rank == 1:
                        send_signal(collectives)
                    raise RuntimeError("DataLoader worker is killed by signal: Terminated")
                main.maybe_save(2)

    ends = on_ranks(run)
    assert [type(each) for each in ends] == [Stopped] * RANKS, ends
    assert steps(tmp_path / "main") == [1, 2]


@pytest.mark.parametrize("step", [0, 3])
def test_a_restored_step_can_be_resumed(tmp_path, step):
    def run(collectives):
        manager = make(tmp_path, collectives, "main")
        if manager.restore() is None:
            manager.save(step)
        else:
            send_signal(collectives)
        manager.close()

    for expected in (type(None), Stopped):
        ends = on_ranks(run)
        assert all(isinstance(each, expected) for each in ends), ends


@pytest.mark.parametrize("schedule", [None, 1000])
def test_handlers_are_kept_until_the_next_checkpointer_records_signals(tmp_path, schedule):
    previous = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    given = {"stop_signals": [signal.SIGUSR1]}
    ranks = SimulatedCollectives(SimulatedGroup(1), 0)
    try:
        with make(tmp_path, ranks, "first", every_steps=1, **given) as first:
            first.maybe_save(1)
        second = make(tmp_path, ranks, "second", every_steps=schedule, **given)
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGUSR1)
        assert stopped.value.step == 1
        second.abandon()
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("archive", [False, True])
def test_an_exception_after_the_shutdown_is_not_replaced(tmp_path, archive):
    """A restart on other hosts ends the ranks with a status that the launcher needs."""

    class ShutDown(SimulatedCollectives):
        @property
        def rank(self):
            if hasattr(self, "is_shut_down"):
                raise ValueError("Horovod has not been initialized")
            return 0

        @rank.setter
        def rank(self, value):
            pass

    collectives = ShutDown(SimulatedGroup(1), 0)

    def train():
        with contextlib.ExitStack() as stack:
            main = stack.enter_context(make(tmp_path, collectives, "main", [GENERATOR, CRITIC]))
            if archive:
                stack.enter_context(make(tmp_path, collectives, "archive", [GENERATOR]))
            main.save(1)
            collectives.is_shut_down = True
            sys.exit("the hosts have changed")

    with pytest.raises(SystemExit, match="the hosts have changed"):
        train()


@pytest.fixture
def without_collections():
    gc.disable()
    yield
    gc.enable()


def test_a_checkpointer_that_nothing_refers_to_is_not_open(tmp_path, without_collections):
    """A garbage collection may come at another time on each rank."""

    def run(collectives):
        first = make(tmp_path, collectives, "generator", [GENERATOR])
        first.restore()
        del first
        make(tmp_path, collectives, "critic", [CRITIC]).close()

    assert on_ranks(run) == [None] * RANKS


def test_a_checkpointer_that_nothing_refers_to_has_no_handlers(tmp_path, without_collections):
    caught = []
    previous = signal.signal(signal.SIGUSR1, lambda *signals: caught.append(signals[0]))
    ranks = SimulatedCollectives(SimulatedGroup(1), 0)
    try:
        first = make(tmp_path, ranks, "first", stop_signals=[signal.SIGUSR1])
        first.record_signals()
        del first
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert caught == [signal.SIGUSR1]


@pytest.mark.parametrize("last", ["main", "archive"])
@pytest.mark.parametrize("comes", ["between", "after"])
def test_handlers_end_a_saved_job_after_its_checkpointers(tmp_path, last, comes):
    previous = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    given = {"stop_signals": [signal.SIGUSR1]}
    Checkpointers._of_ranks.clear()
    ranks = SimulatedCollectives(SimulatedGroup(1), 0)
    try:
        made = {
            "main": make(tmp_path, ranks, "main", [GENERATOR, CRITIC], **given),
            "archive": make(tmp_path, ranks, "archive", [GENERATOR], **given),
        }
        for each in made.values():
            each.record_signals()
        made["main"].save(3)
        final = made.pop(last)
        made.popitem()[1].close()
        if comes == "between":
            signal.raise_signal(signal.SIGUSR1)
            with pytest.raises(Stopped) as stopped:
                final.close()
        else:
            final.close()
            with pytest.raises(Stopped) as stopped:
                signal.raise_signal(signal.SIGUSR1)
        assert stopped.value.step == 3
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_an_archive_continues_beside_a_job_that_resumes_at_an_earlier_step(tmp_path):
    def run(collectives, last):
        main = make(tmp_path, collectives, "main", [GENERATOR, CRITIC], every_steps=5)
        archive = make(
            *(tmp_path, collectives, "archive", [GENERATOR]),
            every_steps=2,
            keep_best=KeepBest("accuracy"),
        )
        restored = main.restore()
        step = restored.step if restored else 0
        archive.continue_at(step)
        for now in range(step + 1, last + 1):
            main.maybe_save(now)
            archive.maybe_save(now, metrics={"accuracy": now})
        main.close()
        archive.close()

    assert on_ranks(lambda collectives: run(collectives, 9)) == [None] * RANKS
    assert steps(tmp_path / "main") == [5]
    assert on_ranks(lambda collectives: run(collectives, 7)) == [None] * RANKS
    # Step 8 is of the first start, and step 6 of the second.
    assert steps(tmp_path / "archive") == [8, 6]


def test_the_restore_of_an_archive_is_a_warning(tmp_path, caplog):
    def run(collectives):
        main = make(tmp_path, collectives, "main", [GENERATOR, CRITIC])
        archive = make(tmp_path, collectives, "archive", [GENERATOR])
        archive.restore()
        main.restore()
        main.close()
        archive.close()

    with caplog.at_level(logging.WARNING):
        assert on_ranks(run) == [None] * RANKS
    assert [each.getMessage() for each in caplog.records if "is restored" in each.message] == [
        f"{tmp_path / 'archive'} is restored, but is an archive beside another open checkpointer. "
        f"After a stop signal, only the other one saves. If its training has ended, close() it. To "
        f"continue an archive, call continue_at(step) instead of restore()"
    ]


@pytest.mark.parametrize("given", [(-1, -1), (3, 4), (None, 3)])
def test_an_invalid_step_to_continue_at_is_an_error_on_all_ranks(tmp_path, given):
    def run(collectives):
        with make(tmp_path, collectives, "archive") as archive:
            archive.continue_at(given[collectives.rank])

    assert [type(each) for each in on_ranks(run)] == [UsageError] * RANKS
