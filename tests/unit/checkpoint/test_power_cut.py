"""A power cut at any moment loses no step that was reported as saved, and damages none."""

import os
import random
import shutil

import pytest

from hvdkit.checkpoint.posix import disk, lock
from hvdkit.checkpoint.store import Store
from tests.unit.checkpoint.material import assert_newest_good, snapshot
from tests.unit.checkpoint.power_cut import Disk, Recorder


@pytest.fixture(autouse=True)
def no_beats(monkeypatch):
    """Stop heartbeats, which come at any time, so that the calls are always the same."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 3600.0)


def program(folder, recorder):
    """Create the folder, save steps, save one again, delete some, and go back to an older step."""
    store = Store(folder, keep_last=2)
    with store.open_for_writing() as writer:
        # The two saves of step 3 have different epochs.
        for epoch, step in enumerate((1, 2, 3, 3)):
            writer.write(snapshot(step, epoch=epoch))
            recorder.mark((step, epoch))
    with store.newest_good(2) as opened:
        base = opened.manifest
    with store.open_for_writing() as writer:
        writer.continue_from(base)
        recorder.mark((2, 1))
        writer.write(snapshot(4, epoch=2))
        recorder.mark((4, 2))


def brief(folder, recorder):
    """Save twice, and delete the first."""
    with Store(folder, keep_last=1).open_for_writing() as writer:
        for step in (1, 2):
            writer.write(snapshot(step))
            recorder.mark((step, 1))


def record(tmp_path, program, skipped=None):
    root = tmp_path / "recorded"
    root.mkdir()
    with Recorder(root, skipped) as recorder:
        program(root / "a" / "b", recorder)
    return recorder


def survivors(recorder, count):
    """Choose the changes without fsync that survive a power cut: none, all, or any."""
    yield lambda change: False
    yield lambda change: True
    # A file system may write changes in any order: contents last, or one of several renames.
    yield lambda change: change[0] != "content"
    for name, *arguments in recorder.calls[:count]:
        if name == "rename":
            yield lambda change, lost=("rename", *arguments[1:]): change != lost
    drawn = random.Random(count)
    yield lambda change: drawn.random() < 0.5


def violations(tmp_path, recorder):
    """Describe each power cut after which a step is lost or damaged."""
    for count in range(len(recorder.calls) + 1):
        said = [saved for at, saved in recorder.marks if at <= count]
        under_way = next((saved for at, saved in recorder.marks if at > count), None)
        for number, survives in enumerate(survivors(recorder, count)):
            place = tmp_path / f"after-{count}-{number}"
            Disk(recorder.number, recorder.calls, count).after_power_cut(place, survives)
            store = Store(place / "a" / "b")
            damaged = [e.name for e in store.entries() if store.verify_entry(e)]
            steps = [(info.step, info.manifest.epoch) for info in store.steps()]
            newest = steps[-1] if steps else None
            expected = {said[-1] if said else None, under_way}
            if damaged or newest not in expected:
                yield f"after call {count}: {newest} of {expected}, damaged: {damaged}"
            shutil.rmtree(place)


def test_nothing_is_lost_at_a_power_cut(tmp_path):
    recorder = record(tmp_path, program)
    assert list(violations(tmp_path, recorder)) == []
    assert len(recorder.syncs) > 20
    # With all changes, the simulated disk has the real content.
    Disk(recorder.number, recorder.calls, len(recorder.calls)).after_power_cut(
        tmp_path / "whole", lambda change: True
    )
    assert_newest_good(Store(tmp_path / "whole" / "a" / "b"), 4)


@pytest.mark.parametrize("program", [brief, pytest.param(program, marks=pytest.mark.long)])
def test_each_sync_is_needed(tmp_path, program):
    """Without any one sync of the code, a power cut at some moment loses a step.

    A sync in the code may be called several times. At least one of these calls must be needed.
    """
    (tmp_path / "0").mkdir()
    syncs = record(tmp_path / "0", program).syncs
    unneeded = set(syncs)
    for skipped, place in enumerate(syncs, 1):
        if place not in unneeded:
            continue
        (folder := tmp_path / str(skipped)).mkdir()
        recorder = record(folder, program, skipped)
        if next(violations(folder, recorder), None) is not None:
            unneeded.remove(place)
        shutil.rmtree(folder)
    assert unneeded == set()


def test_what_was_written_is_read_back_from_the_disk(tmp_path, monkeypatch):
    """A file's pages are dropped from the page cache after the fsync and before they are read."""
    done = []
    forget = disk.forget
    monkeypatch.setattr(disk, "before_step", lambda step, file: done.append((step, file)))

    def note(descriptor, begin, end):
        done.append(("forget", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        assert begin == 0
        assert end == os.fstat(descriptor).st_size > 0
        forget(descriptor, begin, end)

    monkeypatch.setattr(disk, "forget", note)
    with Store(tmp_path).open_for_writing() as writer:
        writer.write(snapshot(1))
    files = {file for step, file in done if step == "create"}
    assert "model.safetensors" in files
    for file in files:
        order = [step for step, name in done if name == file]
        assert order[order.index("fsync") :][:3] == ["fsync", "forget", "read"]
