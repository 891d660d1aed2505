"""Failures while a step is written: no good step is lost, and all listed steps are good."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.posix import disk, lock
from hvdkit.checkpoint.store import Store
from tests.unit.checkpoint import material
from tests.unit.checkpoint.material import Steps, assert_newest_good, leftovers, save, snapshot

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True, timeout=30
    )
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=False, timeout=30, capture_output=True)


def two_steps(folder):
    """Return a folder with two steps: with `keep_last=2` the next commit deletes one."""
    save(folder, 1, 2, keep_last=2)
    return folder


@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        *(pytest.param(n, marks=pytest.mark.long) for n in (errno.EIO, errno.EROFS, errno.ESTALE)),
    ],
)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from_then_on"])
def test_any_system_call_that_fails_loses_nothing(tmp_path, monkeypatch, number, lasting):
    template = two_steps(tmp_path / "template")
    with monkeypatch.context() as patch:
        steps = Steps(patch)
        save(shutil.copytree(template, tmp_path / "good"), 3, keep_last=2)
    errors = []
    for failing in range(1, len(steps.seen) + 1):
        folder = shutil.copytree(template, tmp_path / str(failing))
        store = Store(folder, keep_last=2)

        def act(at, step, file, failing=failing):
            if at == failing or (lasting and at > failing):
                raise OSError(number, os.strerror(number))

        with store.open_for_writing() as writer:
            with monkeypatch.context() as patch:
                Steps(patch, act)
                try:
                    writer.write(snapshot(3))
                except CheckpointError as error:
                    errors.append(str(error))
            for info in store.steps():
                assert store.verify(info.step) == []
            assert_newest_good(store, store.steps()[-1].step)
            assert store.steps()[-1].step in (2, 3)
            # The disk works again.
            writer.write(snapshot(4))
        with store.open_for_writing():
            assert leftovers(folder) == [lock.LEASE_FILE]
        assert_newest_good(store, 4)
    # Some failures are no errors: a read is tried again, and a delete after the commit only warns.
    assert len(errors) > len(steps.seen) / 3
    assert all(os.strerror(number) in error for error in errors)


def test_a_failing_delete_is_only_a_warning(tmp_path, monkeypatch, caplog):
    def act(at, step, file):
        if step == "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    Steps(monkeypatch, act)
    store = save(tmp_path, 1, 2, 3, keep_last=1)
    assert [info.step for info in store.steps()] == [3]
    assert "step-000000000001 could not be deleted: Input/output error" in caplog.text
    monkeypatch.undo()
    with store.open_for_writing():
        assert leftovers(tmp_path) == [lock.LEASE_FILE]


def test_content_that_the_disk_has_changed_is_not_committed(tmp_path, monkeypatch):
    store = save(tmp_path, 1)
    write = os.write

    def worn(descriptor, data):
        content = bytearray(data)
        if len(content) > 100:
            content[50] ^= 1
        return write(descriptor, content)

    with store.open_for_writing() as writer:
        monkeypatch.setattr(os, "write", worn)
        with pytest.raises(
            CheckpointError, match="step 2 was written .* and reading it back gave other content"
        ):
            writer.write(snapshot(2))
        monkeypatch.undo()
        assert leftovers(tmp_path) == [lock.LEASE_FILE]
    assert_newest_good(store, 1)


@root
def test_a_full_disk(small_disk):
    store = Store(small_disk / "runs", keep_last=None)
    with store.open_for_writing() as writer:
        with pytest.raises(CheckpointError, match="No space left on device.*Free some space"):
            list(map(writer.write, map(snapshot, range(1000))))
        there = [info.step for info in store.steps()]
        assert len(there) > 5
        assert leftovers(Path(store.location)) == [lock.LEASE_FILE]
        assert all(store.verify(step) == [] for step in there)
        shutil.rmtree(store.steps()[0].location)
        writer.write(snapshot(2000))
    assert_newest_good(store, 2000)


@root
def test_a_read_only_folder_is_read_and_not_written(small_disk, caplog):
    store = save(small_disk / "runs", 1, 2)
    (material.step_folder(store, 2) / "state.json").write_text("{}")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=30)
    with pytest.raises(CheckpointError, match="cannot write to .*: Read-only file system"):
        store.open_for_writing()
    assert_newest_good(store, 1)
    assert "step 2 in" in caplog.text
    assert "could not be quarantined: cannot rename" in caplog.text


@root
def test_a_file_system_that_is_unmounted(small_disk):
    store = save(small_disk, 1)
    with store.open_for_writing() as writer:
        subprocess.run(["umount", "--lazy", small_disk], check=True, timeout=30)
        with pytest.raises(CheckpointError, match="is now another folder"):
            writer.write(snapshot(2))
    assert list(small_disk.iterdir()) == []


def test_a_folder_that_vanishes(tmp_path):
    store = save(tmp_path / "runs", 1)
    with store.open_for_writing() as writer:
        Path(store.location).rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="is gone"):
            writer.write(snapshot(2))
        with pytest.raises(CheckpointError, match="is gone"):
            writer.write(snapshot(3))
        assert not Path(store.location).exists()
        (tmp_path / "elsewhere").rename(Path(store.location))
        writer.write(snapshot(4))
    assert_newest_good(store, 4)


def test_a_folder_that_vanishes_while_it_is_written(tmp_path, monkeypatch):
    store = save(tmp_path / "runs", 1)

    def act(at, step, file):
        if step == "create" and file == "state.json":
            shutil.rmtree(Path(store.location))

    with store.open_for_writing() as writer:
        Steps(monkeypatch, act)
        with pytest.raises(CheckpointError, match="cannot write .*No such file or directory"):
            writer.write(snapshot(2))
    assert not Path(store.location).exists()
    assert store.newest_good() is None


def test_a_clock_that_jumps_changes_nothing_but_ages(tmp_path, monkeypatch):
    store = Store(tmp_path, keep_last=2)
    with store.open_for_writing() as writer:
        for step, now in enumerate([2e9, 1e9, 0.0, 3e9, -5.0, 1.5e9]):
            monkeypatch.setattr("time.time", lambda now=now: now)
            writer.write(snapshot(step))
            assert_newest_good(store, step)
    assert [info.step for info in store.steps()] == [4, 5]


def test_a_rename_whose_reply_was_lost_counts(tmp_path, monkeypatch):
    """NFS repeats a rename without a reply. The second rename fails, as the folder has moved."""
    rename = disk.rename

    def lost(old, new, parent):
        rename(old, new, parent)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with Store(tmp_path).open_for_writing() as writer:
        monkeypatch.setattr(disk, "rename", lost)
        writer.write(snapshot(1))
    monkeypatch.undo()
    assert_newest_good(Store(tmp_path), 1)


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    def act(at, step, file):
        if step == "fsync folder":
            monkeypatch.setattr(os, "fsync", refuse)

    def refuse(descriptor):
        monkeypatch.setattr(os, "fsync", fsync)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    fsync = os.fsync
    Steps(monkeypatch, act)
    assert_newest_good(save(tmp_path, 1), 1)


def test_going_back_to_an_older_step_loses_nothing_wherever_it_fails(tmp_path, monkeypatch):
    template = Path(save(tmp_path / "template", 1, 2, 3).location)
    with Store(template).newest_good(2) as opened:
        base = opened.manifest
    good = shutil.copytree(template, tmp_path / "good")
    with Store(good).open_for_writing() as writer, monkeypatch.context() as patch:
        steps = Steps(patch)
        writer.continue_from(base)
    assert {"link", "rename", "fsync folder"} <= {name for name, _ in steps.seen}
    for failing in range(1, len(steps.seen) + 1):
        folder = shutil.copytree(template, tmp_path / str(failing))
        store = Store(folder)

        def act(at, step, file, failing=failing):
            if at >= failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with store.open_for_writing() as writer:
            with monkeypatch.context() as patch:
                Steps(patch, act)
                with pytest.raises(CheckpointError):
                    writer.continue_from(base)
            assert [info.step for info in store.steps()][:3] == [1, 2, 3]
            writer.continue_from(base)
        assert_newest_good(store, 2)
        assert leftovers(folder) == []
