"""The folder for records is removed, also after its process was killed."""

import resource
import tempfile
from types import SimpleNamespace

import pytest

from hvdkit.faults import record_folder
from hvdkit.faults.record_folder import PREFIX, RecordFolder
from hvdkit.runtime import record_files
from hvdkit.runtime.recorder import FOLDER_VARIABLE, Recorder


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed(parent):
    folder = RecordFolder()
    assert folder.path.name.startswith(PREFIX)
    folder.remove()
    assert not list(parent.iterdir())


def test_notes_of_shutdowns(parent):
    folder, other = RecordFolder(), RecordFolder()
    own = folder.path / "shutdown-1.json"
    own.write_text("of rank 1")
    assert list(folder.changed_notes()) == [(1, "of rank 1")]
    other.write_note(1, "of rank 1")
    assert (other.path / own.name).read_text() == "of rank 1"
    # A copy is not a new note.
    assert list(other.changed_notes()) == list(folder.changed_notes()) == []
    own.unlink()
    assert list(folder.changed_notes()) == [(1, "")]
    other.write_note(1, "")
    assert not (other.path / own.name).exists()
    folder.remove()
    other.remove()


def test_a_full_disk_does_not_hide_how_far_init_is(parent):
    """The launcher would end the job, because a rank seems to be late."""
    folder, rank = RecordFolder(), Recorder(SimpleNamespace())
    environ = {FOLDER_VARIABLE: str(folder.path)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert folder.init_state() == (0, False, False)
        for call in (1, 2):
            rank.note_init(record_files.ENTERED, call, environ)
            assert folder.init_state() == (call, False, False)
            rank.note_init(record_files.CONNECTED, call, environ)
            assert folder.init_state() == (call, True, False)
            rank.note_init(record_files.LEAVING, call, environ)
            assert folder.init_state() == (call, True, True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.remove()


def test_a_record_that_cannot_be_read_is_returned_by_the_next_call(parent, monkeypatch):
    folder = RecordFolder()
    for rank in range(2):
        (folder.path / f"rank-{rank}.json").write_text(str(rank))

    def fails(*_, **_options):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(record_folder, "read_text", fails)
        assert not list(folder.changed())
    assert list(folder.changed()) == ["0", "1"]
    assert not list(folder.changed())
    folder.remove()
