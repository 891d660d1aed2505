"""Files that another user may have written."""

import errno
import os

import pytest

from hvdkit.plain_files import parse_json, printable, read_json, read_text


def test_a_regular_file(tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_bytes(b'{"rank": 0, "host": "\xff"}')
    assert read_json(path) == {"rank": 0, "host": "\N{REPLACEMENT CHARACTER}"}


def link(path):
    path.symlink_to("/etc/hostname")


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def large(path):
    path.touch()
    os.truncate(path, 10**12)


@pytest.mark.parametrize(
    ("make", "number"),
    [(link, errno.ELOOP), (pipe, errno.EINVAL), (folder, errno.EINVAL), (large, errno.EFBIG)],
)
def test_no_other_file_is_read(tmp_path, make, number):
    path = tmp_path / "rank-0.json"
    make(path)
    with pytest.raises(OSError) as raised:  # noqa: PT011
        read_text(path, longest=1000)
    assert raised.value.errno == number
    assert raised.value.filename == str(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "{"])
def test_json_that_is_no_json(text):
    with pytest.raises(ValueError, match=r"JSON|digits|Expecting"):
        parse_json(text)


def test_printable_text():
    assert printable("Rank 0:\tüber 3 s\n") == "Rank 0:\tüber 3 s\n"
    assert printable("\x1b]0;x\x07 \x9b31m a\u202eb\x00 \r") == (
        "\ufffd]0;x\ufffd \ufffd31m a\ufffdb\ufffd \ufffd"
    )
