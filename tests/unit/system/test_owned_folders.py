"""Temporary folders that belong to a process."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdkit.system.owned_folders import OwnedFolder, TemporaryFolder, remove_abandoned, temporary

REPOSITORY = Path(__file__).parents[3]


def test_no_folder_is_made_where_others_could_replace_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert temporary() == tmp_path
    tmp_path.chmod(0o777)
    assert temporary() in (Path("/tmp"), Path("/dev/shm"))
    with TemporaryFolder("test-") as name:
        assert Path(name).parent == temporary()
    assert not Path(name).exists()
    tmp_path.chmod(0o1777)  # others may add files, but not replace those of this user
    assert temporary() == tmp_path


# A process that is killed after one of its calls, while it makes a folder.
KILLED = """
import fcntl, os, sys, tempfile
from pathlib import Path
from hvdkit.system.owned_folders import OwnedFolder
module, name = {"mkdtemp": (tempfile, "mkdtemp"), "flock": (fcntl, "flock")}[sys.argv[2]]
call = getattr(module, name)

def call_and_die(*args, **kwargs):
    call(*args, **kwargs)
    os._exit(9)

setattr(module, name, call_and_die)
OwnedFolder(Path(sys.argv[1]), "test-")
"""


def kill_at(call, parent):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(parent), call], timeout=60, check=False
    )
    assert done.returncode == 9
    assert len(list(parent.glob("test-*"))) == 1


def test_a_cleaner_of_old_files_finds_the_folder_locked(tmp_path):
    folder = OwnedFolder(tmp_path, "owned-")
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        folder.remove()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_a_folder_whose_owner_was_killed_before_the_lock_is_removed(tmp_path):
    for call in ("mkdtemp", "flock"):
        kill_at(call, tmp_path)
        folder = OwnedFolder(tmp_path, "test-")
        assert list(tmp_path.glob("test-*")) == [folder.path]
        folder.remove()


def test_a_folder_that_is_deleted_only_in_part_is_removed(tmp_path):
    (tmp_path / "test-old" / "content").mkdir(parents=True)
    OwnedFolder(tmp_path, "test-").remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_left_waits_for_its_next_owner(tmp_path):
    folder = OwnedFolder(tmp_path, "test-", "job")
    (folder.path / "content").touch()
    folder.leave()
    OwnedFolder(tmp_path, "test-").remove()
    adopted = OwnedFolder(tmp_path, "test-", "job")
    assert adopted.path == folder.path
    assert (adopted.path / "content").exists()
    adopted.leave()
    long_ago = time.time() - 100
    os.utime(adopted.path / "left", (long_ago, long_ago))
    OwnedFolder(tmp_path, "test-").remove()
    assert not list(tmp_path.iterdir())


def test_folders_in_use_and_links_stay(tmp_path):
    first = OwnedFolder(tmp_path, "test-")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "test-link").symlink_to(elsewhere)
    (tmp_path / "test-file").write_text("of another program")
    OwnedFolder(tmp_path, "test-").remove()
    assert first.path.exists()
    assert not list(elsewhere.iterdir())
    assert (tmp_path / "test-file").exists()
    first.remove()


def make_folders(parent: Path, name: str, count: int) -> None:
    """Make, use and delete folders; exit with status 1 if one is deleted while it is in use."""
    for number in range(count):
        folder = OwnedFolder(parent, "test-", name)
        (folder.path / "content").write_text(str(os.getpid()))
        if number % 3:
            OwnedFolder(parent, "test-").remove()
        if (folder.path / "content").read_text() != str(os.getpid()):
            sys.exit("two processes own this folder")
        if number % 2:
            folder.remove()
        else:
            folder._lock.close()  # as after a kill


def test_processes_that_make_folders_at_the_same_time(tmp_path):
    code = (
        "import sys; from pathlib import Path; "
        "from tests.unit.system.test_owned_folders import make_folders; "
        "make_folders(Path(sys.argv[1]), sys.argv[2], 200)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name], cwd=REPOSITORY)
        for name in ("", "", "fixed", "fixed")
    ]
    statuses = [process.wait(timeout=120) for process in processes]
    assert statuses == [0] * len(processes)
    OwnedFolder(tmp_path, "test-").remove()
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_if_there_is_no_space_for_the_lock(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        OwnedFolder(tmp_path, "test-")
    assert not list(tmp_path.iterdir())


def replace_with_link(folder, target):
    """Replace an empty folder, as another user may once its owner has deleted it."""
    folder.rmdir()
    folder.symlink_to(target)


def test_a_new_folder_that_another_user_replaces_is_not_used(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    make, made = tempfile.mkdtemp, []

    def make_and_replace(**options):
        made.append(make(**options))
        if len(made) == 1:
            replace_with_link(Path(made[0]), elsewhere)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_replace)
    folder = OwnedFolder(tmp_path, "test-")
    assert folder.path == Path(made[1])
    folder.remove()
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("adopts", [False, True])
def test_an_old_folder_that_another_user_replaces_is_left_alone(tmp_path, monkeypatch, adopts):
    elsewhere, old = tmp_path / "elsewhere", tmp_path / "test-old"
    elsewhere.mkdir()
    (elsewhere / "content").touch()
    old.mkdir(mode=0o700)
    usual = Path.open

    def open_late(self, *args, **options):
        if not old.is_symlink():
            replace_with_link(old, elsewhere)
        return usual(self, *args, **options)

    monkeypatch.setattr(Path, "open", open_late)
    if adopts:
        folder = OwnedFolder(tmp_path, "test-", "old")
        assert folder.path != old
        folder.remove()
    else:
        remove_abandoned(tmp_path, "test-")
    assert [file.name for file in elsewhere.iterdir()] == ["content"]
