"""Files that are written as a whole."""

import os
import resource
import threading
from pathlib import Path

import pytest

from hvdkit.whole_files import check_writable, create, replacing


def test_an_error_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "start.json"
    with replacing(path) as draft:
        draft.write_text("old")
        assert not path.exists()

    def full(draft):
        draft.write_text("new, but only a par")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), replacing(path) as draft:
        full(draft)
    assert path.read_text() == "old"
    # The draft could not be made.
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["start.json"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "page", tmp_path / "link"
    link.symlink_to("folder/page")
    for text in ("old", "new"):  # at first, the link leads to no file
        with replacing(link) as draft:
            draft.write_text(text)
        assert file.read_text() == text
    assert link.is_symlink()


def test_a_pipe_is_not_replaced(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    with replacing(pipe) as draft:
        draft.write_text("page")
    reader.join(timeout=20)
    assert found == ["page"]
    assert pipe.is_fifo()


def test_a_new_file_that_cannot_be_written_is_removed(tmp_path):
    path = tmp_path / "job.sh"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            create(path, b"more than 10 bytes")
        assert not path.exists()
        create(path, b"10 bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with pytest.raises(FileExistsError):
        create(path, b"new")
    assert path.read_bytes() == b"10 bytes"


def test_the_check_finds_what_writing_would_find(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # without a reader: opening it would wait
    for path in (tmp_path / "new", pipe, Path("/dev/null")):
        check_writable(path)
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "gone" / "file")
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]
