import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdkit.checkpoint.errors import CheckpointError, WriterConflict
from hvdkit.checkpoint.posix import lock
from hvdkit.checkpoint.store import Store
from tests.unit.checkpoint.material import assert_newest_good, before_commit, save, snapshot

#: Opens a folder for writing, makes an unfinished step, prints `ready`, and waits.
HOLDER = """
import os, sys, time
from hvdkit.checkpoint.posix import lock
from hvdkit.checkpoint.store import Store
lock.BEAT_SECONDS = 0.1
writer = Store(sys.argv[1]).open_for_writing()
os.mkdir(sys.argv[1] + "/.writing-of-the-holder")
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Return a function that starts a process which holds a folder. End all processes."""
    started = []

    def start(folder, *arguments, before=()):
        process = subprocess.Popen(
            [*before, sys.executable, "-c", HOLDER, folder, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        process.said = []
        for line in process.stdout:
            if line == "ready\n":
                return process
            process.said.append(int(line))
        raise AssertionError("the holder has ended")

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()
        for child in process.said:
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "LEASE_TIMEOUT_SECONDS", 0.5)


def leave_lease(folder, **changes):
    """Write the lease of a writer on another host."""
    lease = dataclasses.asdict(lock.Lease.own())
    lease.update({"host": "elsewhere", "machine": "another", "token": "abc", **changes})
    folder.mkdir(exist_ok=True)
    # As a writer does, so that a reader never finds a truncated file.
    descriptor = os.open(folder / lock.LEASE_FILE, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, json.dumps(lease).ljust(lock.MAX_BYTES).encode(), 0)
    finally:
        os.close(descriptor)


def test_a_second_writer_in_this_process(tmp_path):
    store = Store(tmp_path)
    with store.open_for_writing() as writer:
        with pytest.raises(WriterConflict, match="already open for writing in this process"):
            store.open_for_writing()
        # The attempt has no effect on the first writer.
        writer.write(snapshot(1))
    with store.open_for_writing() as writer:
        writer.write(snapshot(2))
    writer.close()
    with pytest.raises(CheckpointError, match="is closed"):
        writer.write(snapshot(3))


def test_a_second_writer_on_this_host(tmp_path, holder):
    process = holder(tmp_path)
    with pytest.raises(WriterConflict, match=f"process {process.pid} on .* is writing"):
        Store(tmp_path).open_for_writing()
    assert (tmp_path / ".writing-of-the-holder").exists()
    process.kill()
    process.wait(timeout=30)
    began = time.monotonic()
    save(tmp_path, 1)
    assert time.monotonic() - began < lock.LEASE_TIMEOUT_SECONDS
    assert not (tmp_path / ".writing-of-the-holder").exists()


def test_a_copy_of_the_folder_of_a_live_writer(tmp_path, holder, impatient):
    """The copy has the lease of the writer, without its heartbeats."""
    holder(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    save(tmp_path / "copy", 1)
    with pytest.raises(WriterConflict, match="is writing"):
        Store(tmp_path / "run").open_for_writing()


def test_a_killed_writer_whose_child_lives_on(tmp_path, holder):
    """DataLoader workers are forked from the trainer, and outlive it for a while."""
    process = holder(tmp_path, "fork")
    process.kill()
    process.wait(timeout=30)
    os.kill(process.said[0], 0)
    save(tmp_path, 1)


def test_a_killed_writer_whose_lock_is_freed_a_little_later(tmp_path, impatient, monkeypatch):
    own = lock.Lease.own()
    leave_lease(tmp_path, machine=own.machine, pid=os.getppid(), started=own.started - 10**9)
    answers, take = [False, False, False], lock.FolderLock._lock
    monkeypatch.setattr(
        lock.FolderLock, "_lock", lambda self: answers.pop() if answers else take(self)
    )
    save(tmp_path, 1)
    assert not answers


def test_a_killed_writer_that_is_a_zombie(tmp_path, holder):
    process = holder(tmp_path)
    process.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    save(tmp_path, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of processes")
def test_a_writer_in_another_container_of_this_host(tmp_path, holder):
    """The writer's process ID in its container is unused here, or that of another process."""
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*apart, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("no namespaces of processes here")
    holder(tmp_path, before=apart)
    with pytest.raises(WriterConflict, match="is writing"):
        Store(tmp_path).open_for_writing()


def test_a_writer_on_another_host_with_heartbeats(tmp_path, impatient):
    leave_lease(tmp_path)
    stop = threading.Event()

    def live():
        beats = 0
        while not stop.wait(0.1):
            beats += 1
            leave_lease(tmp_path, beat=beats)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(WriterConflict, match="on elsewhere is writing"):
            Store(tmp_path).open_for_writing()
    finally:
        stop.set()
        thread.join()


def test_a_writer_on_another_host_without_heartbeats(tmp_path, impatient, caplog):
    caplog.set_level("INFO")
    leave_lease(tmp_path)
    save(tmp_path, 1)
    assert "on elsewhere; waiting 0 s for a heartbeat" in caplog.text
    assert_newest_good(Store(tmp_path), 1)


def test_a_writer_on_another_host_whose_lock_the_server_never_frees(
    tmp_path, impatient, monkeypatch
):
    leave_lease(tmp_path)
    monkeypatch.setattr(lock.FolderLock, "_lock", lambda self: False)
    save(tmp_path, 1)


def test_a_lock_without_a_lease_belongs_to_a_writer_that_starts(tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(lock.FolderLock, "_lock", lambda self: False)
    with pytest.raises(WriterConflict, match="another process is writing"):
        Store(tmp_path).open_for_writing()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\0" * 100, b'{"token": 1}'])
def test_an_incomplete_lease(tmp_path, impatient, content):
    (tmp_path / lock.LEASE_FILE).write_bytes(content)
    save(tmp_path, 1)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, impatient, monkeypatch, number):
    def none(descriptor, command):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", none)
    save(tmp_path, 1)


def test_of_two_writers_that_begin_at_once_without_locks_the_later_stays(
    tmp_path, impatient, monkeypatch
):
    monkeypatch.setattr(lock.FolderLock, "_lock", lambda self: None)
    sleep = time.sleep

    def meanwhile(seconds):
        sleep(seconds)
        leave_lease(tmp_path)

    monkeypatch.setattr(lock.time, "sleep", meanwhile)
    with pytest.raises(WriterConflict, match="elsewhere has taken over"):
        Store(tmp_path).open_for_writing()


def test_a_writer_that_was_taken_over_commits_nothing_more(tmp_path, impatient):
    store = save(tmp_path, 1)
    with store.open_for_writing() as writer:
        writer.write(snapshot(2))
        leave_lease(tmp_path)
        with pytest.raises(WriterConflict, match="on elsewhere has taken over"):
            writer.write(snapshot(3))
    # It does not delete the lease of the other writer either.
    assert json.loads((tmp_path / lock.LEASE_FILE).read_text())["token"] == "abc"
    assert [info.step for info in store.steps()] == [1, 2]


def test_a_writer_that_is_taken_over_while_it_writes(tmp_path, impatient, monkeypatch):
    store = save(tmp_path, 1)
    with store.open_for_writing() as writer:
        before_commit(monkeypatch, writer, lambda: leave_lease(tmp_path))
        with pytest.raises(WriterConflict, match="has taken over"):
            writer.write(snapshot(2))
    assert [info.step for info in store.steps()] == [1]


def test_heartbeats_are_written(tmp_path, impatient):
    with Store(tmp_path).open_for_writing():
        seen, deadline = set(), time.monotonic() + 30
        while len(seen) < 3:
            seen.add((tmp_path / lock.LEASE_FILE).read_bytes())
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not (tmp_path / lock.LEASE_FILE).exists()


def test_a_forked_child_does_not_write(tmp_path):
    with Store(tmp_path).open_for_writing() as writer:
        child = os.fork()
        if child == 0:
            try:
                writer.write(snapshot(1))
            except CheckpointError as error:
                os._exit(0 if "Write from the process that has opened it" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.write(snapshot(2))


def test_a_writer_that_was_taken_over_writes_no_more_heartbeats(tmp_path, impatient):
    writer = Store(tmp_path).open_for_writing()
    leave_lease(tmp_path)
    left = (tmp_path / lock.LEASE_FILE).read_bytes()
    time.sleep(10 * lock.BEAT_SECONDS)
    assert (tmp_path / lock.LEASE_FILE).read_bytes() == left
    writer.close()
    assert (tmp_path / lock.LEASE_FILE).read_bytes() == left


@pytest.mark.parametrize(("folder", "lock_file"), [(0o755, 0o600), (0o775, 0o660), (0o1777, 0o666)])
def test_only_who_may_write_to_the_folder_may_lock_it(tmp_path, folder, lock_file):
    """A process that may read the lock file could lock it, and keep all writers out."""
    place = tmp_path / "run"
    place.mkdir()
    place.chmod(folder)
    for _ in range(2):
        Store(str(place)).open_for_writing().close()
        assert (place / lock.LOCK_FILE).stat().st_mode & 0o777 == lock_file
        (place / lock.LOCK_FILE).chmod(0o644)  # as earlier versions have made it


@pytest.mark.parametrize("name", [lock.LOCK_FILE, lock.LEASE_FILE])
def test_a_hard_link_to_another_file_of_this_user(tmp_path, impatient, name):
    """Where the system permits it, whoever may write to the folder can make such a link."""
    private, place = tmp_path / "private", tmp_path / "run"
    private.write_text("secret")
    private.chmod(0o600)
    place.mkdir()
    place.chmod(0o1777)
    writer = Store(str(place)).open_for_writing()
    (place / name).unlink()
    if name == lock.LOCK_FILE:
        writer.close()
        (place / name).hardlink_to(private)
        Store(str(place)).open_for_writing().close()
    else:
        content = writer._writer._lock.lease.to_bytes(0)
        private.write_bytes(content)
        (place / name).hardlink_to(private)
        time.sleep(10 * lock.BEAT_SECONDS)
        writer.close()
        assert private.read_bytes() == content
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.stat().st_nlink == 1 + (place / name).exists()
