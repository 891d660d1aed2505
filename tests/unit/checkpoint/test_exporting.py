"""An exported file or folder appears once it is complete."""

import errno
import os
from pathlib import Path

import pytest

from hvdkit.checkpoint.exporting import exporting
from hvdkit.errors import HvdkitError


def test_a_file_is_replaced_at_the_end(tmp_path):
    target = tmp_path / "out"
    target.write_text("old")
    with exporting(target) as beside:
        beside.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_appears_at_the_end(tmp_path):
    target = tmp_path / "out"
    with exporting(target) as beside:
        beside.mkdir()
        (beside / "file").write_text("new")
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_an_error_leaves_no_content(tmp_path, make):
    def fail():
        with exporting(tmp_path / "out") as beside:
            make(beside)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(HvdkitError, match="cannot write .*out: No space left on device"):
        fail()
    assert os.listdir(tmp_path) == []


def test_a_pipe_in_place_of_the_file_is_an_error(tmp_path):
    target = tmp_path / "out"

    def replace():
        with exporting(target) as beside:
            os.mkfifo(beside)
            # Otherwise, opening the pipe would wait for a writer.
            writers.append(os.open(beside, os.O_RDWR))

    writers: list[int] = []
    with pytest.raises(HvdkitError, match="cannot write .*out: not a regular file"):
        replace()
    os.close(writers[0])
    assert os.listdir(tmp_path) == []
