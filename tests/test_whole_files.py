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


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_another_user_has_put_there_is_not_written_to(tmp_path, kind):
    """A link may lead to any file of this user. A pipe sends the content to the other user."""
    own, planted, draft_of = tmp_path / "own", tmp_path / "page", []
    own.write_text("old")
    if kind == "link":
        planted.symlink_to(own)
    else:
        os.mkfifo(planted)
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    link = tmp_path / "link"
    link.symlink_to(planted)
    for path in (planted, link):
        with pytest.raises(PermissionError, match=f"{kind} of another user"):
            check_writable(path)
        with (
            pytest.raises(PermissionError, match=f"{kind} of another user"),
            replacing(path) as draft,
        ):
            draft_of.append(draft)
    assert (own.read_text(), draft_of) == ("old", [])


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
