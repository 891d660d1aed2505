"""Files that are written as a whole."""

import contextlib
import itertools
import os
import resource
import sys
import threading
from pathlib import Path

import pytest

from hvdkit.system.whole_files import check_writable, create, open_to_write, replacing


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


@contextlib.contextmanager
def before_line(number, attack):
    """Call `attack` before the line with this number that runs in the block, in any function.

    Yield a list, which has an entry if there was such a line.
    """
    lines, found = itertools.count(), []

    def trace(frame, event, argument):
        if event == "line" and next(lines) == number:
            found.append(frame)
            sys.settrace(None)
            attack()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
@pytest.mark.parametrize("how", ["replaced", "opened"])
@pytest.mark.parametrize("at_first", ["nothing", "a file", "a device"])
def test_a_link_that_appears_at_any_moment_is_not_followed(tmp_path, how, at_first):
    own, page = tmp_path / "own", tmp_path / "page"
    own.write_text("old")

    def attack():
        page.unlink(missing_ok=True)
        page.symlink_to(own)
        os.chown(page, 65534, 65534, follow_symlinks=False)

    for number in itertools.count():
        page.unlink(missing_ok=True)
        if at_first == "a file":
            page.write_text("page")
        elif at_first == "a device":
            page.symlink_to(os.devnull)
        with contextlib.suppress(OSError), before_line(number, attack) as attacked:
            if how == "replaced":
                with replacing(page) as draft:
                    draft.write_text("new")
            else:
                os.close(open_to_write(page, os.O_WRONLY | os.O_TRUNC))
        assert own.read_text() == "old", number
        if not attacked:
            assert number > 10
            return


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_is_not_opened_through_what_another_user_has_put_there(tmp_path, kind):
    own, planted, link = tmp_path / "own", tmp_path / "planted", tmp_path / "link"
    own.write_text("old")
    planted.symlink_to(own) if kind == "link" else os.mkfifo(planted)
    os.chown(planted, 65534, 65534, follow_symlinks=False)
    link.symlink_to(planted)
    for path in (planted, link):
        with pytest.raises(PermissionError, match=f"{kind} of another user"):
            open_to_write(path, os.O_RDWR)
    link.unlink()
    link.symlink_to("own")
    os.close(open_to_write(link, os.O_WRONLY | os.O_TRUNC))
    assert own.read_text() == ""


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_APPEND])
def test_a_hard_link_in_a_folder_of_others_is_not_opened(tmp_path, flags):
    """Where the system permits it, another user can link any file of this user there."""
    private, folder = tmp_path / "private", tmp_path / "shared"
    private.write_text("old")
    folder.mkdir()
    (folder / "page").hardlink_to(private)
    for mode in (0o777, 0o1777, 0o775):
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="second name, which another user may have made"):
            open_to_write(folder / "page", flags)
        os.close(open_to_write(folder / f"own-{mode}", flags))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(PermissionError, match="second name"):
            open_to_write(folder / "page", flags)
        os.chown(folder, 0, 0)
    assert private.read_text() == "old"
    os.close(open_to_write(folder / "page", flags))
    assert private.read_text() == ("" if flags & os.O_TRUNC else "old")


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
