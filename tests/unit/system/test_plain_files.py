"""Files that another user may have written."""

import errno
import io
import os
import tracemalloc

import pytest
from rich.table import Table

from hvdkit import cli
from hvdkit.console.tables import Console
from hvdkit.system.plain_files import (
    json_values,
    parse_json,
    printable,
    read_json,
    read_text,
    seconds,
    whole,
)


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
    [(link, errno.ELOOP), (pipe, errno.ENXIO), (folder, errno.ENXIO), (large, errno.EFBIG)],
)
def test_no_other_file_is_read(tmp_path, make, number):
    path = tmp_path / "rank-0.json"
    make(path)
    with pytest.raises(OSError) as raised:  # noqa: PT011
        read_text(path, longest=1000)
    assert raised.value.errno == number
    assert raised.value.filename == str(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 201 + "]" * 201, "1" * 100_000, "{"]
)
def test_json_that_is_no_json(text):
    with pytest.raises(ValueError, match=r"JSON|digits|Expecting"):
        parse_json(text)


def test_levels_of_json():
    assert parse_json("7") == 7
    content = parse_json("[" * 200 + "]" * 200)
    for _ in range(199):
        (content,) = content
    assert content == []


@pytest.mark.parametrize("unit", ["[]", '{"a":0}'])
def test_json_that_would_fill_the_memory(tmp_path, unit):
    """Without the limit, 16 MB of `[]` need 0.5 GB."""
    path = tmp_path / "error.json"
    path.write_text("[" + ",".join([unit] * (15_000_000 // (len(unit) + 1))) + "]")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has too many values"):
            read_json(path)
        assert tracemalloc.get_traced_memory()[1] < 64_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("escape", [rb"\a", rb"\\", rb"\\\"", rb"\u0061,"])
def test_values_are_counted_without_much_memory(escape):
    text = b'["' + escape * 300_000 + b'"' + b', "a,[{b"' * 30 + b"]"
    tracemalloc.start()
    try:
        assert json_values(text, 100) == 1 + 30
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_values_cannot_be_hidden_by_another_encoding(encoding):
    """U+2200 has a byte that is a quote in UTF-8."""
    text = f'["\u2200", {"[]," * 1000} 1]'
    with pytest.raises(ValueError, match=r"too many values|codec can't decode|Expecting value"):
        parse_json(text.encode(encoding), 100)


@pytest.mark.parametrize("number", [1e300, float("nan"), -1e11, 10**400, "x"])
def test_times_that_no_clock_shows(number):
    with pytest.raises(ValueError, match=r"not a time|could not convert"):
        seconds(number)


@pytest.mark.parametrize("number", [2**63, float("inf"), float("nan"), 10**400, "x"])
def test_numbers_of_more_than_64_bits(number):
    with pytest.raises(ValueError, match=r"64 bits|not a whole number|invalid literal"):
        whole(number)


def test_a_console_shows_no_control_characters(capsys):
    table = Table("\x1b[31mhost")
    table.add_row("\u202ea")
    console = Console()
    console.print(table)
    console.print("\x1b]0;x\x07")
    shown = capsys.readouterr().out
    assert "host" in shown
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_a_console_shows_markup_as_it_is():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    console.print("[link=http://a]b[/link] [/c] :bomb:", highlight=False)
    assert out.getvalue() == "[link=http://a]b[/link] [/c] :bomb:\n"


def test_errors_of_the_command_line_have_no_control_characters(capsys):
    assert cli.main(["why", "/\x1b]0;x\x07\udc9b"]) != 0
    assert "/\ufffd]0;x\ufffd\ufffd" in capsys.readouterr().err


def test_printable_text():
    assert printable("Rank 0:\tüber 3\u202fs\n") == "Rank 0:\tüber 3\u202fs\n"
    assert printable("a\tb\u00a0\n", one_line=True) == "a\ufffdb\u00a0\ufffd"
    assert printable("\x1b]0;x\x07 \x9b31m a\u202eb\x00 \r") == (
        "\ufffd]0;x\ufffd \ufffd31m a\ufffdb\ufffd \ufffd"
    )
