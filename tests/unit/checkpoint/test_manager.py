"""Saving and restoring together, on simulated ranks and a real folder."""

import errno
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.agreement.collectives import check_member
from hvdkit.checkpoint import background, calls, chunks, schedule, tensors
from hvdkit.checkpoint.background import BackgroundWriter
from hvdkit.checkpoint.broadcast import Broadcast
from hvdkit.checkpoint.checkpointers import Stopped
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.items import Plain
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.signals import StopSignals
from hvdkit.checkpoint.step_boundary import StepBoundary
from hvdkit.checkpoint.store import Search, Store
from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.runtime import progress, record_files
from tests.simulated.ranks import (
    SimulatedCollectives,
    SimulatedGroup,
    on_every_rank,
    simulated,
)
from tests.unit.checkpoint.material import as_version_1, forge, remove, step_folder
from tests.unit.checkpoint.simulated_state import Arrays, ArrayTensor, Own

# tests/unit/checkpoint/test_store.py tests the stores themselves.
pytestmark = pytest.mark.long_with("s3")

SIZE = 3


def on_ranks(function, size=SIZE):
    """Return the results of `function` on every rank; raise an exception of a rank."""
    results = on_every_rank(size, function)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def state(value):
    return Arrays(
        value,
        weights=np.full((5, 3), value, np.float32),
        steps=np.full((), value, np.int64),
        empty=np.empty((0, 2), np.float32),
    )


def same(part, value):
    return (
        part.value == value
        and (part.arrays["weights"] == value).all()
        and part.arrays["steps"] == value
    )


def make(collectives, folder, part=None, others=None, own=None, **how):
    # The other ranks get a folder that does not exist, because only the first rank may use it.
    place = folder if collectives.rank == 0 else folder / "of" / "nobody"
    return Manager(
        Store(str(place), keep_last=None),
        collectives,
        {"model": part or state(0), **(others or {})},
        rank_parts={"own": own} if own else None,
        **how,
    )


def steps(folder):
    return [info.step for info in Store(str(folder)).steps()]


def failing(step, number=errno.ENOSPC, after=0):
    """Make the system's `step` fail."""
    count = 0

    def before(name, file):
        nonlocal count
        if name == step:
            count += 1
            if count > after:
                raise OSError(number, os.strerror(number))

    return before


def test_parts_come_from_the_first_rank_and_rank_parts_from_each_rank(tmp_path):
    def run(collectives):
        part, own = state(collectives.rank + 1), Own([collectives.rank, b"x"])
        with make(collectives, tmp_path, part, own=own) as saving:
            saving.save(7, epoch=2, metrics={"loss": 0.5})
        part, own = state(9), Own(None)
        with make(collectives, tmp_path, part, own=own) as restoring:
            restored = restoring.restore()
        assert same(part, 1)
        assert own.value == [collectives.rank, b"x"]
        assert part.adopted == 1
        return restored.step, restored.epoch, restored.metrics, restored.world_size

    assert on_ranks(run) == [(7, 2, {"loss": 0.5}, SIZE)] * SIZE
    assert not (tmp_path / "of").exists()


def test_a_ranks_own_state_is_sent_to_the_first_rank_only(tmp_path):
    large = 100_000

    def run(collectives):
        received = []
        alltoall, exchange = collectives.alltoall, collectives.exchange

        def count(values):
            received.extend(len(value) for value in values if isinstance(value, bytes))
            return values

        collectives.alltoall = lambda parts, name: count(alltoall(parts, name))
        collectives.exchange = lambda value, name: count(exchange(value, name))
        own = Own(bytes([collectives.rank]) * large)
        with make(collectives, tmp_path, state(0), own=own) as saving:
            saving.save(1)
        saved = sum(received)
        received.clear()
        with make(collectives, tmp_path, state(0), own=own) as restoring:
            restoring.restore()
        assert own.value == bytes([collectives.rank]) * large
        return saved, sum(received)

    for rank, (saved, restored) in enumerate(on_ranks(run)):
        # The state is encoded in base64. The ranks also exchange messages.
        assert saved < (1.5 * SIZE * large if rank == 0 else 0.2 * large)
        assert large < restored < 1.5 * large


@pytest.mark.parametrize("count", [0, 1, SIZE + 1])
def test_a_step_without_a_line_for_each_rank_is_damaged(tmp_path, caplog, count):
    def run(collectives):
        part = state(1)
        with make(collectives, tmp_path, part, own=Own(0)) as saving:
            saving.save(1)
            saving.save(2)
        if collectives.rank == 0:
            forge(step_folder(Store(str(tmp_path)), 2), {"ranks.jsonl": b"{}\n" * count})
        collectives.sum([0], "it is damaged")
        with make(collectives, tmp_path, part, own=Own(0)) as restoring:
            return restoring.restore().step

    assert on_ranks(run) == [1] * SIZE
    assert f"it has {count} ranks instead of {SIZE}" in caplog.text


def test_a_metric_that_no_step_has(tmp_path, caplog):
    def run(collectives):
        with Manager(
            Store(str(tmp_path), keep_last=1, keep_best=KeepBest("val_acc")),
            collectives,
            {"model": state(1)},
        ) as saving:
            for step in (1, 2):
                saving.save(step, metrics={"val_accuracy": 0.5})
            # Steps without metrics are usual in the middle of an epoch.
            saving.save(3)

    on_ranks(run)
    warnings = [r.message for r in caplog.records if "keep_best" in r.message]
    assert warnings == [
        "keep_best ranks steps by the metric 'val_acc', but save() got only val_accuracy: "
        "keep_best does not keep this step"
    ]


_TRAIN_AND_SAVE = st.tuples(
    # Steps trained before the save; 0 saves the same step again.
    st.integers(0, 2),
    st.none() | st.integers(0, 9),
    # Whether a new process resumes after the save.
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(saves=st.lists(_TRAIN_AND_SAVE, min_size=1, max_size=8), keep_last=st.integers(1, 2))
def test_the_best_step_is_never_forgotten(tmp_path_factory, saves, keep_last):
    """A save of the same step without its metric, as at the end of a script, keeps the metric."""
    place = tmp_path_factory.mktemp("best")
    metrics, step = {}, 1

    def manager(collectives):
        store = Store(str(place), keep_last=keep_last, keep_best=KeepBest("accuracy"))
        return Manager(store, collectives, {"model": state(1)})

    def run(collectives):
        nonlocal step
        saving = manager(collectives)
        for trained, accuracy, restart in saves:
            step += trained
            if step in metrics:
                accuracy = None
            saving.save(step, metrics={} if accuracy is None else {"accuracy": accuracy})
            if accuracy is not None:
                metrics[step] = accuracy
            if restart:
                saving.close()
                saving = manager(collectives)
                assert saving.restore().step == step
            best = max(metrics.values(), default=None)
            newest = max((s for s in metrics if metrics[s] == best), default=None)
            if newest is not None:
                assert saving.best("accuracy") == newest
                assert newest in {saved.step for saved in saving.steps()}
        saving.close()

    on_ranks(run, 1)


@simulated(1)
def test_another_state_does_not_get_the_metrics_of_its_step(collectives, tmp_path):
    """A script that restores a step and counts its own steps from 0 may save this number again."""
    part = state(1)
    with make(collectives, tmp_path, part) as saving:
        saving.save(1, metrics={"accuracy": 0.9})
    with make(collectives, tmp_path, part) as saving:
        saving.restore()
        part.arrays["weights"][:] = 2
        saving.save(1)
        assert saving.steps()[-1].metrics == {}


def test_training_goes_on_while_the_copy_is_written(tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(disk, "before_step", lambda *_: go_on.wait(10))

    def run(collectives):
        part = state(1)
        with make(collectives, tmp_path, part) as saving:
            saving.save(1)
            assert not steps(tmp_path)
            part.arrays["weights"][:] = 2
            part.value = 2
            collectives.sum([1], "all have changed")
            go_on.set()
            saving.wait()
            assert steps(tmp_path) == [1]
            assert saving.restore().step == 1
        assert same(part, 1)

    on_ranks(run)


@simulated(SIZE)
def test_the_next_save_waits_for_the_one_before(collectives, place):
    part = state(0)
    with make(collectives, place, part) as saving:
        for step in range(1, 6):
            part.value = step
            part.arrays["weights"][:] = step
            part.arrays["steps"][()] = step
            saving.save(step)
    for step in range(1, 6):
        with make(collectives, place, part) as restoring:
            restoring.restore(step)
        assert same(part, step)


@simulated(SIZE)
def test_synchronous_saves_are_on_the_disk_at_once(collectives, tmp_path):
    with make(collectives, tmp_path, asynchronous=False) as saving:
        saving.save(1)
        assert steps(tmp_path) == [1]


@pytest.mark.parametrize("how", ["save", "maybe_save", "wait", "close"])
@simulated(SIZE)
def test_a_failed_write_is_raised_on_every_rank_at_the_next_call(
    collectives, tmp_path, monkeypatch, how
):
    saving = make(collectives, tmp_path)
    saving.save(1)
    saving.wait()
    if collectives.rank == 0:
        monkeypatch.setattr(disk, "before_step", failing("write"))
    saving.save(2)
    if collectives.rank == 0:
        while not saving._writer.failed:
            time.sleep(0.01)
        monkeypatch.setattr(disk, "before_step", None)
    calls = {
        "save": lambda: saving.save(3),
        "maybe_save": lambda: saving.maybe_save(3),
        "wait": saving.wait,
        "close": saving.close,
    }
    with pytest.raises(CheckpointError, match=r"rank 0: .*No space left"):
        calls[how]()
    assert steps(tmp_path) == [1]
    # The error is raised once. The next call works.
    if how != "close":
        saving.save(4)
        saving.close()
        assert steps(tmp_path) == [1, 4]


@simulated(SIZE)
def test_a_second_writer_is_refused_on_every_rank(collectives, place):
    with make(collectives, place) as first, make(collectives, place) as second:
        first.save(1)
        with pytest.raises(CheckpointError, match="rank 0: "):
            second.save(1)
        first.wait()
        assert second.restore().step == 1


@pytest.mark.parametrize("kind", [UsageError, ValueError, MemoryError])
@pytest.mark.parametrize("where", [0, 2])
def test_a_problem_of_one_rank_is_an_error_on_all(place, kind, where):
    class Broken(Own):
        def save(self):
            raise kind("cannot be told")

    def run(collectives):
        own = Broken(0) if collectives.rank == where else Own(0)
        with make(collectives, place, own=own) as saving:
            expected = UsageError if kind is UsageError else CheckpointError
            words = rf"rank {where}: .*cannot be told \(step 1 was not saved\)"
            with pytest.raises(expected, match=words) as caught:
                saving.save(1)
            assert isinstance(caught.value.__cause__, kind) == (collectives.rank == where)
            saving.wait()

    on_ranks(run)
    assert steps(place) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, rank: m.save(9 if rank == 2 else 10), "ranks 0, 1: 10; rank 2: 9"),
        (lambda m, rank: m.maybe_save(9 if rank == 2 else 10), "ranks 0, 1: 10; rank 2: 9"),
        (lambda m, rank: m.maybe_save("3" if rank == 1 else 3), "rank 1: step is '3': expected a"),
        (lambda m, rank: m.save(1, wait=rank == 0), "ranks disagree about whether to wait"),
        (lambda m, rank: m.restore(1 if rank else None), "disagree about the argument .step. of"),
        (lambda m, rank: m.restore(strict=rank != 1), "about the argument .strict. of restore"),
        *(
            (
                lambda m, rank, name=name, args=args: (
                    m.maybe_save(1) if rank else getattr(m, name)(*args)
                ),
                rf"which method to call \(rank 0: {name}; rank.* maybe_save".replace(
                    "close", "wait"
                ),
            )
            for name, *args in [
                *(("save", 1), ("close",), ("restore",), ("steps",), ("wait",), ("delete", 1))
            ]
        ),
        (lambda m, rank: m.wait() if rank else m.steps(), "which method to call"),
    ],
)
def test_ranks_that_disagree_are_an_error(place, call, said):
    def run(collectives):
        manager = make(collectives, place, every_steps=10)
        with pytest.raises(UsageError, match=said):
            call(manager, collectives.rank)
        manager.abandon()

    on_ranks(run)
    assert steps(place) == []


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (lambda rank: {"x": object()}, r"data\['x'\]"),
        (lambda rank: {"consumed": 5 + (rank == 1)}, r"'data' \(ranks 0, 2: \w+; rank 1: \w+\)"),
    ],
)
@simulated(SIZE)
def test_an_item_that_cannot_be_saved_or_that_differs_is_named(collectives, place, item, said):
    others = {"data": Plain(lambda: item(collectives.rank), print)}
    with (
        make(collectives, place, others=others) as saving,
        pytest.raises(UsageError, match=said),
    ):
        saving.save(1)


@pytest.mark.parametrize(
    ("how", "call", "said"),
    [
        ({"every_steps": 0}, None, "every_steps is 0"),
        ({"every_steps": 2.5}, None, "every_steps is 2.5"),
        ({"every_minutes": 0}, None, "every_minutes is 0"),
        ({"stop_signals": [999]}, None, "stop_signals is"),
        ({"stop_signals": [signal.SIGKILL]}, None, "SIGKILL"),
        ({"others": {"my model": Plain(dict, print)}}, None, "'my model'; expected a letter"),
        *(
            ({}, lambda m, step=step: m.save(step), f"step is {step!r}")
            for step in (-1, None, True, 1.5, 10**12)
        ),
        ({}, lambda m: m.save(1, epoch=1.5), "epoch is 1.5: expected a whole number"),
        ({}, lambda m: m.save(1, epoch=-1), "epoch is -1: expected a whole number"),
        ({}, lambda m: m.save(1, metrics={3: 1.0}), "metrics has the name 3: expected a string"),
        ({}, lambda m: m.save(1, metrics=[1.0]), r"metrics is \[1.0\]: expected a dict"),
        *(
            ({}, lambda m, x=x: m.save(1, metrics={"loss": x}), "the metric 'loss' is .*: expected")
            for x in ("0.1", b"1", 10**400, None)
        ),
        ({}, lambda m: m.restore(step="2"), "expected a whole number"),
        ({}, lambda m: m.restore(run=1.5), "expected a whole number"),
        *(
            ({}, lambda m, call=call: (m.close(), m.close(), call(m)), "closed")
            for call in (
                *(Manager.restore, lambda m: m.save(1), lambda m: m.maybe_save(1)),
                Manager.__enter__,
            )
        ),
    ],
)
def test_invalid_arguments(place, how, call, said):
    def use(collectives):
        manager = make(collectives, place, **how)
        try:
            call(manager)
        finally:
            manager.abandon()

    def run(collectives):
        with pytest.raises(UsageError, match=said):
            use(collectives)

    on_ranks(run)


@pytest.mark.parametrize("call", ["save", "maybe_save"])
def test_an_unwritable_folder_is_an_error_at_the_first_step(tmp_path, call):
    (tmp_path / "file").write_text("")

    def run(collectives):
        with make(collectives, tmp_path / "file" / "folder", every_steps=1000) as saving:
            for _ in range(2):
                with pytest.raises(CheckpointError, match=r"rank 0: .*file"):
                    getattr(saving, call)(1)

    on_ranks(run)


@simulated(SIZE)
def test_saves_by_steps(collectives, place):
    with make(collectives, place, every_steps=4) as saving:
        # A loop may count by more than one.
        saved = [step for step in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13) if saving.maybe_save(step)]
    with make(collectives, place, every_steps=4) as restoring:
        assert restoring.restore().step == 12
        later = [step for step in range(13, 18) if restoring.maybe_save(step)]
    assert (saved, later) == ([4, 9, 12], [16])


def test_saves_by_the_first_ranks_clock(place, monkeypatch):
    class Clock:
        now = 0.0
        perf_counter = staticmethod(time.perf_counter)

        @classmethod
        def monotonic(cls):
            # The clocks of the other ranks jump far ahead at each call.
            return cls.now if threading.current_thread().name == "first" else time.monotonic() * 1e6

    monkeypatch.setattr(schedule, "time", Clock)

    def run(collectives):
        if collectives.rank == 0:
            threading.current_thread().name = "first"
        saved = []
        with make(collectives, place, every_minutes=2) as saving:
            for step in range(1, 9):
                if collectives.rank == 0:
                    Clock.now += 50
                if saving.maybe_save(step):
                    saved.append(step)
        return saved

    assert on_ranks(run) == [[3, 6]] * SIZE


def test_a_save_that_is_due_inside_a_window_happens_at_its_end(place, caplog):
    def run(collectives):
        passes = 0

        def one_more():
            nonlocal passes
            passes += 1
            return saving.maybe_save(passes)

        boundary = StepBoundary(lambda: (passes % 3,) if passes % 3 else None, lambda: passes // 3)
        with make(collectives, place, every_steps=1, boundary=boundary) as saving:
            saved = [passes for _ in range(90) if one_more()]
            passes += 1
            saving.save(91)
        return saved

    assert on_ranks(run) == [list(range(3, 91, 3))] * SIZE
    assert caplog.text.count("step 91 lacks the gradients of an accumulation window") == 1


@pytest.mark.parametrize(
    ("ranks", "steps_per_call", "places", "asked"),
    [
        ([{1}], 1, 1, 2),
        ([{0, 1, 2}], 1, 1, 2),
        # Each rank has calls at a boundary, but there is no such call of all ranks.
        ([{0}, {1}, {2}], 1, 1, 4),
        # The places of the calls differ, until they repeat.
        ([{0, 1, 2}], 1, 3, 4),
        # No step follows. The next call may be at a boundary.
        ([{0, 1, 2}], 0, 1, 20),
    ],
)
def test_calls_that_are_never_at_a_step_boundary_are_an_error(
    place, ranks, steps_per_call, places, asked
):
    def run(collectives):
        boundary = StepBoundary(
            lambda: (step % places + 1,) if collectives.rank in ranks[step % len(ranks)] else None,
            lambda: steps_per_call * step,
        )
        step = 0
        with make(collectives, place, every_steps=1, boundary=boundary) as saving:
            for step in range(1, 20):
                if step == asked:
                    with pytest.raises(UsageError, match="called between a backward pass"):
                        saving.maybe_save(step)
                    return
                assert not saving.maybe_save(step)

    on_ranks(run)


def test_a_due_save_that_never_happens_is_a_warning(place, caplog):
    def run(collectives):
        boundary = StepBoundary(lambda: (1,))
        with make(collectives, place, every_steps=1, boundary=boundary) as saving:
            for step in (1, 2):
                assert not saving.maybe_save(step)

    on_ranks(run)
    assert caplog.text.count("a save was due") == 1
    assert "each call of maybe_save up to step 2 came between" in caplog.text


def test_calls_before_a_restore_do_not_count(place):
    def run(collectives):
        boundary = StepBoundary(lambda: (1,), lambda: step)
        step = 0
        with make(collectives, place, every_steps=1, boundary=boundary) as saving:
            saving.save(1)
            assert not saving.maybe_save(1)
            step = 100  # as in an optimizer that is restored
            assert saving.restore()
            assert not saving.maybe_save(2)
            saving.save(3)

    on_ranks(run)


def test_a_job_that_is_asked_to_stop_saves_and_exits_resumable(place, caplog):
    def run(collectives):
        passes = 1
        boundary = StepBoundary(lambda: (1,) if passes % 2 else None)
        with make(collectives, place, boundary=boundary) as saving:
            if collectives.rank == 2:
                saving.request_stop("a test")
            assert not saving.maybe_save(1)
            passes = 2
            saving.maybe_save(2)

    results = on_every_rank(SIZE, run)
    assert [type(result) for result in results] == [Stopped] * SIZE
    assert {result.code for result in results} == {RESUMABLE} == {75}
    assert steps(place) == [2]
    assert "step 2 is saved, and the job can be resumed" in caplog.text


def test_nothing_is_saved_while_other_ranks_have_joined(place):
    def run(collectives):
        collectives.group.joined.add(1)
        if collectives.rank == 1:
            return None
        saving = make(collectives, place, every_steps=1)
        saved = saving.maybe_save(1)
        saving.abandon()
        return saved

    assert on_ranks(run) == [False, None, False]


def corrupt(folder, step, file="model.safetensors"):
    path = step_folder(Store(str(folder)), step) / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def saved(collectives, folder, *values):
    with make(collectives, folder, part := state(0)) as saving:
        for value in values:
            part.value = value
            part.arrays["weights"][:] = value
            part.arrays["steps"][()] = value
            saving.save(value)


def test_a_damaged_step_is_skipped_on_all_ranks(place, caplog):
    def run(collectives):
        saved(collectives, place, 1, 2)
        if collectives.rank == 0:
            corrupt(place, 2)
        with make(collectives, place, part := state(0)) as restoring:
            assert restoring.restore().step == 1
        assert same(part, 1)

    on_ranks(run)
    assert "model.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [(2, CheckpointError, "model.safetensors"), (5, UsageError, "5")],
)
@simulated(SIZE)
def test_a_step_that_cannot_be_restored_is_an_error_on_every_rank(
    collectives, place, wanted, kind, words
):
    saved(collectives, place, 1, 2)
    if collectives.rank == 0:
        corrupt(place, 2)
    with (
        make(collectives, place, part := state(0)) as restoring,
        pytest.raises(kind, match=words),
    ):
        restoring.restore(wanted)
    assert same(part, 0)


@pytest.fixture
def small_chunks(monkeypatch):
    """Divide the tensors of a small part into several chunks."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 48)
    monkeypatch.setattr(tensors, "_FIRST_BYTES", 8)


def test_an_older_step_is_restored_over_one_that_proves_to_be_damaged(place, small_chunks, caplog):
    def run(collectives):
        saved(collectives, place, 1, 2, 3)
        if collectives.rank == 0:
            corrupt(place, 2)
            corrupt(place, 3)
        with make(collectives, place, part := state(0)) as restoring:
            assert restoring.restore().step == 1
            assert same(part, 1)
            assert part.adopted == 1
            restoring.save(4)

    on_ranks(run)
    assert steps(place) == [1, 4]
    assert caplog.text.count("is damaged (model.safetensors: ") == 2
    assert len(Store(str(place)).quarantined()) == 2


@pytest.mark.parametrize("damaged", [False, True])
def test_steps_of_version_1_are_restored_and_continued(place, small_chunks, damaged):
    def run(collectives):
        saved(collectives, place, 1, 2, 3)
        if collectives.rank == 0:
            for step in (1, 2, 3):
                as_version_1(step_folder(Store(str(place)), step))
            if damaged:
                corrupt(place, 2)
        collectives.sum([1], "they are of version 1")
        with make(collectives, place, part := state(0)) as restoring:
            if damaged:
                with pytest.raises(CheckpointError, match=r"model.safetensors: .* bytes 0 to"):
                    restoring.restore(2)
                return
            # There is a newer step, so a new run begins with a copy of step 2.
            restoring.restore(2)
            assert same(part, 2)
            restoring.save(4)

    on_ranks(run)
    if not damaged:
        store = Store(str(place))
        assert [(info.manifest.run, info.step) for info in store.steps()][-2:] == [(2, 2), (2, 4)]
        assert not any(store.verify(step) for step in (1, 2, 3, 4))


@simulated(SIZE)
def test_a_storage_that_fails_after_a_damaged_chunk_is_an_error_on_every_rank(
    collectives, place, small_chunks, monkeypatch
):
    saved(collectives, place, 1, 2)
    if collectives.rank == 0:
        corrupt(place, 2)

        def is_same(storage, entry):
            raise CheckpointError("cannot look")

        monkeypatch.setattr(type(Store(str(place))._storage), "is_same", is_same)
    with (
        make(collectives, place) as restoring,
        pytest.raises(CheckpointError, match="rank 0: cannot look .*half restored"),
    ):
        restoring.restore()


@simulated(SIZE)
def test_two_steps_are_not_mixed_where_a_part_may_be_missing(collectives, place, small_chunks):
    """The older step lacks a part that the damaged step has."""
    saved(collectives, place, 1)
    with make(collectives, place, others={"more": state(0)}) as saving:
        saving.restore(strict=False)
        saving.save(2)
    if collectives.rank == 0:
        corrupt(place, 2)
    more = state(7)
    with make(collectives, place, part := state(0), others={"more": more}) as restoring:
        assert restoring.restore(strict=False).step == 1
    assert same(part, 1)
    assert same(more, 7)


@simulated(SIZE)
def test_a_step_that_is_removed_while_it_is_read_is_not_no_checkpoint(
    collectives, tmp_path, small_chunks, monkeypatch
):
    saved(collectives, tmp_path, 1)
    if collectives.rank == 0:
        corrupt(tmp_path, 1)
        note = Search._note

        def removed(search, entry, problems):
            remove(tmp_path / entry.name)
            return note(search, entry, problems)

        monkeypatch.setattr(Search, "_note", removed)
    with (
        make(collectives, tmp_path) as restoring,
        pytest.raises(CheckpointError, match="removed while it was read.*half restored"),
    ):
        restoring.restore()


@pytest.mark.parametrize("version", [1, 2])
@simulated(SIZE)
def test_a_part_of_empty_tensors_alone(collectives, place, version):
    part = Arrays(3, empty=np.empty((0, 2), np.float32))
    with make(collectives, place, part) as saving:
        saving.save(1)
    if collectives.rank == 0 and version == 1:
        as_version_1(step_folder(Store(str(place)), 1))
    collectives.sum([1], "it is of that version")
    part = Arrays(0, empty=np.empty((0, 2), np.float32))
    with make(collectives, place, part) as restoring:
        assert restoring.restore().step == 1
    assert part.value == 3


@pytest.mark.parametrize("wanted", [None, 2])
def test_if_all_steps_are_damaged_the_error_says_half_restored(place, small_chunks, wanted):
    def run(collectives):
        saved(collectives, place, 1, 2)
        if collectives.rank == 0:
            corrupt(place, 1)
            corrupt(place, 2)
        with (
            make(collectives, place, part := state(0)) as restoring,
            pytest.raises(CheckpointError, match="is damaged.*half restored: restore another step"),
        ):
            restoring.restore(wanted)
        assert part.adopted == 0

    on_ranks(run)
    assert Store(str(place)).quarantined() == []


@simulated(SIZE)
def test_an_older_step_that_does_not_fit_leaves_the_state_half_restored(
    collectives, place, small_chunks
):
    saved(collectives, place, 1)
    with make(collectives, place, others={"more": Plain(dict, print)}) as saving:
        saving.restore(only=("model",))
        saving.save(2)
    with make(collectives, place, run=1) as saving:
        saving.save(3)
    if collectives.rank == 0:
        corrupt(place, 2)
    with (
        make(collectives, place, others={"more": Plain(dict, print)}) as restoring,
        pytest.raises(CheckpointError, match="half restored"),
    ):
        restoring.restore(run=2)


@pytest.mark.parametrize("call", ["save", "maybe_save"])
def test_a_half_restored_state_is_not_saved(place, small_chunks, call):
    def run(collectives):
        saved(collectives, place, 1, 2)
        if collectives.rank == 0:
            corrupt(place, 1)
        with make(collectives, place, state(0), every_steps=1) as restoring:
            with pytest.raises(CheckpointError, match="half restored"):
                restoring.restore(1)
            with pytest.raises(UsageError, match="half restored, because restore"):
                getattr(restoring, call)(3)
            with pytest.raises(UsageError, match="there is no step 7"):
                restoring.restore(7)
            with pytest.raises(UsageError, match="half restored, because restore"):
                getattr(restoring, call)(3)
            assert restoring.restore(2).step == 2
            getattr(restoring, call)(3)

    on_ranks(run)
    assert [info.step for info in Store(str(place)).steps()] == [1, 2, 3]


@simulated(SIZE)
def test_steps_that_start_again_with_an_epoch_are_an_error(collectives, tmp_path):
    """Otherwise nothing would be saved after the first epoch."""
    with make(collectives, tmp_path, every_steps=4) as saving:
        for step in (0, 0, 1, 2, 3):
            assert not saving.maybe_save(step)
        expected = "rank 1: maybe_save.1. after step 3: expected the number of steps trained"
        with pytest.raises(UsageError, match=expected):
            saving.maybe_save(1 if collectives.rank == 1 else 3)
        saving.save(6)
        with pytest.raises(UsageError, match="after step 6"):
            saving.maybe_save(5)
        saving.save(5)
        assert saving.restore(5).step == 5
        assert not saving.maybe_save(5)
        saving.restore(6, only=("model",))
        assert saving.maybe_save(1) is False


def test_a_commit_before_the_newest_checkpoint(place):
    """An elastic job resumes from its last commit, which may be older than the checkpoint."""

    def newest(collectives):
        with make(collectives, place) as reading:
            return reading.restore().step

    def run(collectives):
        with make(collectives, place, every_steps=5) as saving:
            for step in range(1, 12):
                saving.maybe_save(step)
        with make(collectives, place, every_steps=5) as resumed:
            assert resumed.restore().step == 10
            resumed.state_replaced()
            # The commit was made after step 3.
            assert not resumed.maybe_save(4)
            resumed.wait()
            before = newest(collectives)
            saved = [step for step in range(5, 8) if resumed.maybe_save(step)]
            with pytest.raises(UsageError, match="after step 7"):
                resumed.maybe_save(6)
        return before, saved, newest(collectives)

    assert on_ranks(run) == [(10, [5], 5)] * SIZE
    assert steps(place) == [10, 5]


@pytest.mark.parametrize("commit", [9, 10])
def test_a_commit_after_the_newest_checkpoint(place, commit):
    def run(collectives):
        with make(collectives, place, every_steps=5) as saving:
            saving.save(10)
        with make(collectives, place, every_steps=5) as resumed:
            resumed.restore()
            resumed.state_replaced()
            return [step for step in range(commit + 1, 17) if resumed.maybe_save(step)]

    assert on_ranks(run) == [[15]] * SIZE


@pytest.mark.parametrize("resume_at", [3, 10, 12])
def test_a_run_continues_without_a_restore(place, resume_at):
    """A commit of an elastic job has restored the state: an older, the same or a newer one."""

    def run(collectives):
        with make(collectives, place, every_steps=5) as saving:
            saving.continue_at(0)
            saving.save(10)
        with make(collectives, place, every_steps=5) as resumed:
            resumed.continue_at(resume_at)
            return [step for step in range(resume_at + 1, 17) if resumed.maybe_save(step)]

    assert on_ranks(run) == [[step for step in (5, 10, 15) if step > resume_at]] * SIZE
    assert steps(place)[-1] == 15
    assert len({entry.run for entry in Store(str(place)).entries()}) == 1


@pytest.mark.parametrize(
    ("begins", "saves", "first", "later"),
    [
        ("restore()", (4, 5, 4, 5, 6), [True, True, False, False, True], [False] * 5),
        # A job that begins a run at each restart, and always fails.
        ("overwrite", (3, 6, 9), [True] * 3, [False] * 3),
        ("restore(3)", (3, 6, 9), [True] * 3, [False] * 3),
    ],
)
def test_a_step_that_is_saved_again_is_no_progress(
    tmp_path, monkeypatch, begins, saves, first, later
):
    """Otherwise, a job that always fails at the same place is restarted forever."""
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(tmp_path))
    told = tmp_path / record_files.SAVED

    def run(collectives):
        with make(collectives, tmp_path / "steps", overwrite=begins == "overwrite") as saving:
            if begins == "restore()":
                saving.restore()
                saving.state_replaced()
            elif begins == "restore(3)" and (tmp_path / "steps").exists():
                saving.restore(3)
            found = []
            for step in saves:
                told.unlink(missing_ok=True)
                saving.save(step, wait=True)
                found.append(told.exists())
        return found

    assert [on_ranks(run, size=1) for _ in range(3)] == [[first], [later], [later]]


@simulated(SIZE)
def test_a_folder_of_damaged_steps_alone_does_not_start_from_zero(collectives, place):
    saved(collectives, place, 1, 2)
    if collectives.rank == 0:
        corrupt(place, 1)
        store = Store(str(place))
        for entry in store.entries():
            store._storage.quarantine(entry)
    with (
        make(collectives, place) as restoring,
        pytest.raises(CheckpointError, match="only damaged ones in quarantine: .*step-0"),
    ):
        restoring.restore()


def test_a_signal_after_the_last_step_has_its_usual_effect_at_the_end(tmp_path):
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append("own"))
    got = []
    try:
        for stop in (False, True):
            collectives = SimulatedCollectives(SimulatedGroup(1), 0)
            try:
                with make(collectives, tmp_path / str(stop), every_steps=5) as saving:
                    signal.raise_signal(signal.SIGUSR1)
                    if stop:
                        saving.maybe_save(1)
                    saving.save(2)
                    assert got == []
            except Stopped:
                saving.close()
            assert got == ([] if stop else ["own"])
            got.clear()
        assert steps(tmp_path / "False") == [2]
        assert steps(tmp_path / "True") == [1]
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("wait", [True, False])
def test_a_synchronous_save_makes_no_copy(tmp_path, monkeypatch, wait):
    written = []
    begin = BackgroundWriter.begin

    def seen(writer, snapshot):
        given = snapshot.parts["model"].tensors["weights"][1]
        written.append(given() if callable(given) else given)
        begin(writer, snapshot)

    monkeypatch.setattr(BackgroundWriter, "begin", seen)

    def run(collectives):
        part = state(1)
        with make(collectives, tmp_path, part) as saving:
            saving.save(1, wait=wait)
            if collectives.rank == 0:
                shared = np.shares_memory(written[0], part.arrays["weights"])
                assert shared == wait

    on_ranks(run)


@pytest.mark.parametrize(("at", "wait"), [("start", True), ("start", False), ("ended", True)])
def test_a_save_that_is_interrupted_writes_nothing(tmp_path, monkeypatch, at, wait):
    """The caller may change the state before all of it is written."""
    reached, go_on = threading.Event(), threading.Event()

    def before(name, file):
        if (name, file) == ("fsync", "model.safetensors"):
            reached.set()
            go_on.wait(10)

    monkeypatch.setattr(disk, "before_step", before)
    function = getattr(background._Write, at)

    def interrupted(write, *_):
        if at == "start":
            function(write)
        reached.wait(10)
        raise KeyboardInterrupt

    def run(collectives):
        part = state(1)
        saving = make(collectives, tmp_path, part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(background._Write, at, interrupted)
            with pytest.raises(KeyboardInterrupt):
                saving.save(1, wait=wait)
        part.arrays["weights"][:] = 2
        go_on.set()
        with pytest.raises(CheckpointError, match="step 1 was not saved: .* was interrupted"):
            saving.save(2)
        assert steps(tmp_path) == []
        saving.save(2, wait=True)
        saving.close()

    on_ranks(run, size=1)
    assert steps(tmp_path) == [2]


def test_ranks_communicate_while_they_wait_for_a_write(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(
        disk, "before_step", lambda name, file: time.sleep(0.5 if name == "fsync" else 0)
    )
    exchanges = []
    exchange = calls.exchange
    monkeypatch.setattr(
        calls, "exchange", lambda *arguments: (exchanges.append(1), exchange(*arguments))[1]
    )

    def run(collectives):
        with make(collectives, tmp_path) as saving:
            saving.save(1)
            before = len(exchanges)
            saving.wait()
            assert len(exchanges) - before > 3 * SIZE

    on_ranks(run)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(("times", "saves"), [(1, True), (2, True), (3, False)])
def test_a_write_is_repeated_after_a_temporary_error(tmp_path, monkeypatch, caplog, times, saves):
    monkeypatch.setattr(background, "_PAUSES", (0.05, 0.05))
    left = [times]

    def before(step, file):
        if (step, file) == ("fsync", "model.safetensors") and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(disk, "before_step", before)

    def run(collectives):
        saving = make(collectives, tmp_path)
        saving.save(1)
        if saves:
            saving.close()
            return
        with pytest.raises(CheckpointError, match="rank 0: cannot write .*Stale file handle"):
            saving.close()

    on_ranks(run)
    assert steps(tmp_path) == ([1] if saves else [])
    assert caplog.text.count("Trying again in 0.05 s") == min(times, 2)


def test_a_write_that_hangs_is_an_error_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(background, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(background, "_NO_PROGRESS_SECONDS", 0.5)
    go_on = threading.Event()
    monkeypatch.setattr(
        disk, "before_step", lambda name, file: name == "fsync" and go_on.wait(20) and None
    )

    def run(collectives):
        saving = make(collectives, tmp_path)
        saving.save(1)
        with pytest.raises(CheckpointError, match="rank 0: step 1 .* nothing of it was stored for"):
            saving.wait()
        collectives.sum([1], "all have seen it")
        go_on.set()
        while True:
            try:
                saving.close()
                break
            except CheckpointError:
                continue

    on_ranks(run)


def test_a_slow_write_that_makes_progress_does_not_count_as_hung(monkeypatch):
    monkeypatch.setattr(background, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(background, "_NO_PROGRESS_SECONDS", 0.1)
    end = threading.Event()

    class SlowWriter:
        """Stores something between each two looks at its progress."""

        def __init__(self):
            self._stored = itertools.count()

        @property
        def progress(self):
            return next(self._stored)

        def write(self, snapshot):
            end.wait(20)

    write = background._Write(SlowWriter(), SimpleNamespace(step=1))
    write.start()
    try:
        assert not write.ended(0.3)
    finally:
        end.set()
    assert write.ended(20)
    assert write.failure is None


@simulated(SIZE)
def test_a_state_that_does_not_fit_one_rank_changes_none(collectives, place):
    saved(collectives, place, 1)
    part = state(0)
    if collectives.rank == 1:
        part.arrays["weights"] = np.zeros((3, 5), np.float32)
    with (
        make(collectives, place, part) as restoring,
        pytest.raises(UsageError, match=r"rank 1: .*\(nothing was restored\)"),
    ):
        restoring.restore()
    assert same(part, 0)
    assert part.adopted == 0


def test_parts_that_the_checkpoint_does_not_have_are_named(place, caplog):
    def run(collectives):
        saved(collectives, place, 1)
        others = {"scaler": Plain(dict, print), "reduction": Plain(dict, print)}
        with make(collectives, place, others=others, overwrite=True) as restoring:
            with pytest.raises(UsageError, match=r"step 1 has no scaler; it has model"):
                restoring.restore()
            restoring.save(2)
        with make(collectives, place) as restoring:
            assert restoring.restore().step == 2

    on_ranks(run)
    assert "step 2 also contains scaler, for which this checkpointer has no item" in caplog.text


@pytest.mark.parametrize("broken", ["write", "restore"])
def test_a_rank_that_cannot_restore_is_an_error_on_all_ranks(place, monkeypatch, broken):
    class Broken(Arrays):
        def restore(self, tree):
            raise ValueError("no room")

    def write(self, content, start=0):
        raise ValueError("no room")

    class BrokenTensors(Arrays):
        def plan_restore(self, tree):
            prepared = super().plan_restore(tree)
            tensor = prepared["weights"]
            tensor.__class__ = type("Broken", (ArrayTensor,), {"write": write})
            return prepared

    def run(collectives):
        saved(collectives, place, 1)
        part = state(0)
        if collectives.rank == 1:
            part.__class__ = Broken if broken == "restore" else BrokenTensors
        with (
            make(collectives, place, part) as restoring,
            pytest.raises(CheckpointError, match=r"rank 1: .*no room \(.*half restored"),
        ):
            restoring.restore()

    on_ranks(run)


def test_a_file_that_changes_during_a_restore_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    run_broadcast = Broadcast.run

    def change_first(self, collectives, *arguments):
        if collectives.rank == 0:
            corrupt(tmp_path, 1)
        run_broadcast(self, collectives, *arguments)

    monkeypatch.setattr(Broadcast, "run", change_first)

    def run(collectives):
        saved(collectives, tmp_path, 1)
        with (
            make(collectives, tmp_path, part := state(0)) as restoring,
            pytest.raises(CheckpointError, match="rank 0: .*half restored"),
        ):
            restoring.restore()
        assert part.adopted == 0

    on_ranks(run)


def test_a_job_of_another_size_does_not_restore_state_of_the_old_size(place, caplog):
    def run_of(size):
        def run(collectives):
            part, reduction, own = state(1), Own(0), Own(0)
            others = {"reduction": Plain(lambda: size, reduction.restore)}
            with make(collectives, place, part, others, own) as going_on:
                restored = going_on.restore()
                seen = restored and (restored.world_size, reduction.value, own.value)
                own.value = 10 * size + collectives.rank
                going_on.save(size)
            return seen

        return run

    assert on_ranks(run_of(2), 2) == [None] * 2
    assert on_ranks(run_of(2), 2) == [(2, 2, 20), (2, 2, 21)]
    assert not caplog.text
    assert on_ranks(run_of(4), 4) == [(2, 0, 0)] * 4
    assert caplog.text.count("step 2 was saved by 2 ranks, and this job has 4") == 1


def test_a_job_that_adds_in_another_order_warns_once(place, caplog):
    two, one = (
        json.dumps({"version": 1, "library": "gloo", "hosts": hosts})
        for hosts in ([[0], [1]], [[0, 1]])
    )

    def save(collectives, order):
        with make(collectives, place, overwrite=True, sum_order=lambda: order) as saving:
            saving.save(1)

    def restore(collectives, order):
        with make(collectives, place, sum_order=lambda: order) as restoring:
            restoring.restore()

    def warnings(saved, own):
        on_ranks(lambda collectives: save(collectives, saved), 2)
        caplog.clear()
        on_ranks(lambda collectives: restore(collectives, own), 2)
        return [record.message for record in caplog.records]

    assert warnings(one, one) == []
    assert warnings("", one) == warnings(one, "") == [], "an older checkpoint, another Horovod"
    (warning,) = warnings(two, one)
    assert "added gradients in another order" in warning
    assert "2 hosts with 1 ranks, gloo, version 1 of the order; this job: 1 host with 2" in warning
    (warning,) = warnings("of the future", one)
    assert "an order of another version of hvdkit; this job" in warning


def test_after_an_exception_a_rank_waits_only_for_its_write(place):
    def run(collectives):
        if collectives.rank == 0:
            with pytest.raises(ZeroDivisionError), make(collectives, place) as saving:
                saving.save(1 // (saving.save(1) or 0))
        else:
            with make(collectives, place) as saving:
                saving.save(1)
                saving.abandon()

    on_ranks(run)
    assert steps(place) == [1]


@pytest.mark.parametrize("chunk", [8, 64, 200, 1000, 1_000_000])
def test_tensors_are_broadcast_in_pieces_of_one_size(tmp_path, monkeypatch, chunk):
    """Chunks may end inside of tensors, and tensors inside of chunks."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk)
    lengths = (0, 1, 63, 64, 65, 1000, 0, 3, 130)

    def arrays(factor):
        wide = {f"wide{n}": factor * np.arange(n, dtype=np.int64) for n in lengths}
        return wide | {f"narrow{n}": factor * np.arange(n).astype(np.uint8) for n in lengths}

    def run(collectives):
        with make(collectives, tmp_path, Arrays(**arrays(1))) as saving:
            saving.save(1)
        part = Arrays(**arrays(0))
        with make(collectives, tmp_path, part) as restoring:
            restoring.restore()
        for name, array in arrays(1).items():
            assert (part.arrays[name] == array).all()
        return collectives.names.count("hvdkit.checkpoint.piece")

    (times,) = set(on_ranks(run))
    size = (tmp_path / "step-000000000001" / "model.safetensors").stat().st_size
    assert sum(lengths) * 9 / chunk <= times <= size / chunk + 1


def test_a_later_second_signal_has_its_original_effect(monkeypatch):
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append("own"))
    try:
        signals = StopSignals([signal.SIGUSR1])
        signals.install()
        signal.raise_signal(signal.SIGUSR1)
        assert signals.request.asked == "SIGUSR1"
        # A terminal and a launcher may both forward the signal.
        signal.raise_signal(signal.SIGUSR1)
        assert got == []
        monkeypatch.setattr("hvdkit.checkpoint.signals._SAME_SECONDS", -1.0)
        signal.raise_signal(signal.SIGUSR1)
        assert got == ["own"]
        signals.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert got == ["own"] * 2
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_objects_removed_in_any_order_restore_the_first_handler(order):
    def own(number, frame):
        """A handler of the script."""

    previous = signal.signal(signal.SIGUSR1, own)
    try:
        both = [StopSignals([signal.SIGUSR1]), StopSignals([signal.SIGUSR1])]
        for each in both:
            each.install()
        both[order[0]].remove()
        signal.raise_signal(signal.SIGUSR1)
        assert both[order[1]].request.asked == "SIGUSR1"
        both[order[1]].remove()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("removed", [True, False])
def test_a_signal_from_a_handler_of_the_script_has_its_original_effect(monkeypatch, removed):
    """The script's handler calls the handler that it replaced."""
    got = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: got.append("before"))
    try:
        signals = StopSignals([signal.SIGUSR1])
        signals.install()
        ours = signal.signal(signal.SIGUSR1, lambda *of: (got.append("own"), ours(*of)))
        if removed:
            signals.remove()
        else:
            signal.raise_signal(signal.SIGUSR1)
            assert got == ["own"]
            got.clear()
            monkeypatch.setattr("hvdkit.checkpoint.signals._SAME_SECONDS", -1.0)
        signal.raise_signal(signal.SIGUSR1)
        assert got == (["own", "before"] if removed else ["own", "own", "before"])
    finally:
        signal.signal(signal.SIGUSR1, previous)


# In a new program, because forking this one with its threads may hang.
FORKED = """
import multiprocessing, signal, sys, time
from hvdkit.checkpoint.signals import StopSignals

def run(pipe):
    signal.raise_signal(signal.SIGINT)
    pipe.send("survived SIGINT")
    time.sleep(60)

StopSignals().install()
fork = multiprocessing.get_context("fork")
here, there = fork.Pipe()
child = fork.Process(target=run, args=(there,), daemon=True)
child.start()
print(here.recv())
if sys.argv[1] == "terminate":
    child.terminate()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize(("how", "said"), [("terminate", ["-15"]), ("exit", [])])
def test_a_forked_child_ends_after_sigterm(how, said):
    """At its end, a program terminates its daemon processes and waits for them."""
    command = [sys.executable, "-c", FORKED, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.splitlines() == ["survived SIGINT", *said]


def test_outside_the_main_thread_signals_are_not_handled_with_a_warning(caplog):
    signals = StopSignals()
    thread = threading.Thread(target=signals.install)
    thread.start()
    thread.join()
    signals.remove()
    assert "used outside the main thread" in caplog.text


def test_only_the_first_rank_logs(place, caplog):
    caplog.set_level(logging.INFO)

    def run(collectives):
        with make(collectives, place) as saving:
            saving.save(1)

    on_ranks(run)
    assert caplog.text.count("written in") == 1


def test_a_run_without_a_restore_does_not_save_into_the_folder_of_another(tmp_path):
    def run(collectives):
        saved(collectives, tmp_path, 8, 9)
        for save in (lambda m: m.save(1), lambda m: m.maybe_save(1)):
            expected = pytest.raises(UsageError, match=r"newest of step 9, .*overwrite=True")
            with make(collectives, tmp_path, every_steps=1) as anew, expected:
                save(anew)
        with make(collectives, tmp_path / "other") as anew:
            assert anew.restore() is None
            anew.save(1)

    on_ranks(run)
    assert steps(tmp_path) == [8, 9]


def test_a_run_that_overwrites_deletes_nothing_and_is_the_newest(tmp_path):
    def run(collectives):
        saved(collectives, tmp_path, 8, 9)
        place = tmp_path if collectives.rank == 0 else tmp_path / "of" / "nobody"
        store = Store(place, keep_last=1)
        with Manager(store, collectives, {"model": state(0)}, overwrite=True) as anew:
            for step in (1, 2, 3):
                anew.save(step)
        with make(collectives, tmp_path) as restoring:
            assert restoring.restore().step == 3
            restoring.save(4)
        with make(collectives, tmp_path) as restoring:
            assert restoring.restore(9).step == 9

    on_ranks(run)
    assert steps(tmp_path) == [8, 9, 3, 4]


def test_a_run_that_went_back_is_the_newest_from_its_next_step_on(place):
    def run(collectives):
        saved(collectives, place, 1, 2, 3)
        with make(collectives, place) as looking:
            assert looking.restore(2).step == 2
        with make(collectives, place) as looking:
            # Opening an older step has changed nothing.
            assert looking.restore().step == 3
        back = make(collectives, place, every_steps=100)
        assert back.restore(2).step == 2
        assert not back.maybe_save(3)
        back.abandon()  # as if it were killed before its first save
        with make(collectives, place, part := state(0)) as restoring:
            assert restoring.restore().step == 2
            assert same(part, 2)
            restoring.save(3)
            # Within a run, too.
            restoring.save(4)
            assert restoring.restore(3).step == 3
            restoring.save(5)
        with make(collectives, place) as restoring:
            assert restoring.restore().step == 5

    on_ranks(run)
    assert steps(place) == [1, 2, 3, 2, 3, 4, 3, 5]


def test_a_writing_thread_that_ends_is_an_error(place, monkeypatch):
    def ended(*_):
        raise SystemExit(1)

    monkeypatch.setattr("hvdkit.checkpoint.writing.contents", ended)

    def run(collectives):
        saving = make(collectives, place)
        saving.save(1)
        with pytest.raises(CheckpointError, match=r"step 1 was not saved: SystemExit\(1\)"):
            saving.close()

    on_ranks(run)


def test_a_rank_outside_of_the_process_set():
    class Outside:
        def included(self):
            return False

        def size(self):
            return 2

    with pytest.raises(UsageError, match="this rank does not belong to process_set"):
        check_member(Outside())


def test_a_program_waits_for_its_write_before_it_ends(tmp_path):
    """The write may use a thread pool, as uploads do."""
    program = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from hvdkit.checkpoint.background import BackgroundWriter
from hvdkit.checkpoint.broadcast import Broadcast
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.store import Search, Store
from tests.unit.checkpoint.material import snapshot

def slow(step, file):
    with ThreadPoolExecutor() as pool:
        pool.submit(time.sleep, 0.05).result()

disk.before_step = slow
writer = BackgroundWriter(Store(sys.argv[1]), overwrite=False)
writer.open()
writer.begin(snapshot(1))
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
    assert steps(tmp_path) == [1]


def test_steps_are_listed_alike_on_all_ranks(place):
    def run(collectives):
        with make(collectives, place, state(0)) as saving:
            assert (saving.steps(), saving.latest(), saving.best("loss")) == ([], None, None)
            saving.save(0, metrics={"val_loss": float("nan")})
            assert saving.best("val_loss") is None
            with pytest.raises(UsageError, match="has the metric 'loss': expected one of val_loss"):
                saving.best("loss")
            saving.delete(0)
            for step, loss in ((1, 0.5), (2, 0.25), (3, float("nan")), (4, 0.25)):
                saving.save(step, epoch=7, metrics={"loss": loss})
            found = saving.steps()
            assert [each.step for each in found] == [1, 2, 3, 4]
            assert (found[0].epoch, found[0].metrics) == (7, {"loss": 0.5})
            assert found[0].location.startswith(str(place))
            assert (saving.latest(), saving.best("loss"), saving.best("loss", "max")) == (4, 4, 1)
            with pytest.raises(UsageError, match="the name of the metric does not tell"):
                saving.best("score")
            saving.delete(4)
            assert saving.best("loss") == 2
            with pytest.raises(
                UsageError, match="there is no step 9 in .*expected one of: 1, 2, 3"
            ):
                saving.delete(9)
            with pytest.raises(UsageError, match="ranks disagree about the step to delete"):
                saving.delete(1 + collectives.rank)
        # Without having saved anything.
        with make(collectives, place, state(0)) as other:
            other.delete(3)
            return [each.step for each in other.steps()]

    assert on_ranks(run) == [[1, 2]] * SIZE
