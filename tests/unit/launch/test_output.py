import errno
import io
import os
import random
import threading
import time

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.control import output as output_module
from hvdkit.launch.control.output import Output
from hvdkit.launch.control.readers import say


class Terminal(io.BytesIO):
    def isatty(self):
        return True


@pytest.fixture
def streams():
    return {"stdout": io.BytesIO(), "stderr": io.BytesIO()}


STATES = [(0, "stderr", b"\r%3d %%" % percent) for percent in range(0, 101, 10)]


@pytest.mark.parametrize(
    ("size", "pieces", "stdout", "stderr"),
    [
        # Each line has its rank.
        (2, [(0, "stdout", b"one\ntw"), (1, "stdout", b"other\n"), (0, "stdout", b"o\n"),
             (1, "stderr", b"oops\n")], b"[0] one\n[1] other\n[0] two\n", b"[1] oops\n"),
        # A line without an end is shown at the end, even if that of its rank is not reported.
        (2, [(1, "stderr", b"last words")], b"", b"[1] last words\n"),
        (1, [(0, "stdout", b"last words"), 0], b"[0] last words\n", b""),
        # Only the last state of a progress bar is shown.
        (1, [*STATES, (0, "stderr", b"\r\n")], b"", b"[0] 100 %\n"),
        # Only the first rank of a large job is shown.
        (17, [(0, "stdout", b"mine\n"), (16, "stdout", b"hidden\n")], b"[ 0] mine\n", b""),
    ],
)  # fmt: skip
def test_the_lines_of_the_ranks(streams, size, pieces, stdout, stderr):
    with Output(size, **streams) as output:
        for piece in pieces:
            if piece == 0:
                assert streams["stdout"].getvalue() == b""
                output.finish(piece)
            else:
                output.write(*piece)
        assert size < 17 or output.tail(16) == ["hidden"]
        output.status("running")  # there is no status line without a terminal
    assert (streams["stdout"].getvalue(), streams["stderr"].getvalue()) == (stdout, stderr)


def test_all_ranks_on_request(streams):
    with Output(17, shown=range(17), **streams) as output:
        output.write(16, "stdout", b"seen\n")
    assert streams["stdout"].getvalue() == b"[16] seen\n"


def test_a_progress_bar_is_shown_before_it_ends(streams, monkeypatch):
    """In a file, or in the log of a batch system."""
    monkeypatch.setattr(output_module, "_BARS_SECONDS", 0.0)
    with Output(2, **streams) as output:
        for percent in (10, 10, 20):
            output.write(1, "stderr", b"\r%3d %%" % percent)
            output.write(0, "stdout", b"\r      \rhalf of a bar, and" if percent == 10 else b"")
            output.status("running")
        output.write(1, "stderr", b"\r 30 %\nhalf of a line")
        output.status("running")
        assert output.tail(1) == [" 30 %"]
        monkeypatch.setattr(output_module, "_BARS_SECONDS", 60.0)
        output.write(1, "stderr", b"\n\r  1 %")
        output.status("running")
    assert streams["stderr"].getvalue().splitlines() == [
        *(b"[1]  10 %", b"[1]  20 %", b"[1]  30 %"),
        *(b"[1] half of a line", b"[1]   1 %"),
    ]
    assert streams["stdout"].getvalue().splitlines()[0] == b"[0] half of a bar, and"


def test_bars_add_lines_and_change_none(monkeypatch):
    """The output is drawn, with lines, bars and bytes that are no text, in pieces of any size."""
    monkeypatch.setattr(output_module, "_BARS_SECONDS", 0.0)
    parts = (b"\n", b"\r", b"\r\n", b"line", "█".encode(), b"\xff\0", b"  ", b"x" * 70_000)
    for seed in range(200):
        draw = random.Random(seed)
        text = b"".join(draw.choices(parts, [6, 6, 1, 4, 4, 2, 2, 0.2], k=draw.randint(0, 60)))
        stdout, at = io.BytesIO(), 0
        with Output(1, stdout=stdout, stderr=io.BytesIO()) as output:
            while at < len(text):
                size = draw.choice([1, 3, 10, 100_000])
                output.write(0, "stdout", text[at : at + size])
                at += size
                if draw.random() < 0.5:
                    output.status("running")
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in text.split(b"\n")]
        shown = iter(stdout.getvalue().split(b"\n"))
        # In this order, with others between them.
        assert all(b"[0] " + line in shown for line in lines if line), seed


def test_an_error_that_a_file_reports_at_its_end(streams, tmp_path, said):
    """NFS reports a full disk or a quota when a file is closed."""

    class Full(io.FileIO):
        def close(self):
            super().close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with Output(2, directory=tmp_path, **streams) as output:
        for name in output._files._files:
            output._files._files[name] = Full(tmp_path / name, "ab")
        output.write(1, "stdout", b"one\n")
    assert [text.partition(". ")[0] for text in said] == [
        f"--output-dir {tmp_path}: Disk quota exceeded"
    ]


def test_a_progress_bar_without_line_ends_does_not_fill_the_memory(streams):
    with Output(1, **streams) as output:
        for _ in range(100):
            output.write(0, "stderr", b"\r" + b"#" * 10000)
        assert sum(map(len, output._unfinished.values())) < 100_000


def test_nothing_of_a_long_line_is_lost(streams):
    text = bytes(range(97, 123)) * 100_000
    with Output(1, **streams) as output:
        for begin in range(0, len(text), 60_000):
            output.write(0, "stdout", text[begin : begin + 60_000])
        output.write(0, "stdout", b"\n")
        assert sum(map(len, output.tail(0))) < 100_000
    lines = streams["stdout"].getvalue().splitlines()
    assert b"".join(line.removeprefix(b"[0] ") for line in lines) == text
    assert len(lines) == 3
    assert all(line.startswith(b"[0] ") for line in lines)


def test_the_last_lines_of_a_rank_are_kept(streams):
    with Output(1, **streams) as output:
        output.write(0, "stdout", b"".join(b"line %d\n" % n for n in range(110)))
        output.write(0, "stderr", b"\xff\n")
        assert output.tail(0) == [*(f"line {n}" for n in range(11, 110)), "\ufffd"]


def test_a_file_for_each_rank_byte_for_byte(streams, tmp_path):
    folder = tmp_path / "new" / "logs"
    with Output(11, directory=folder, **streams) as output:
        output.write(3, "stdout", b"a\rb\xff")
        output.write(10, "stderr", b"ten\n")
    assert (folder / "rank.03.log").read_bytes() == b"a\rb\xff"
    assert (folder / "rank.10.log").read_bytes() == b"ten\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be tried by root")
def test_a_link_of_another_user_is_not_followed(streams, tmp_path):
    own, link = tmp_path / "own", tmp_path / "rank.0.log"
    own.write_text("old")
    link.symlink_to(own)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(UsageError, match="link of another user"):
        Output(1, directory=tmp_path, **streams)
    assert own.read_text() == "old"


def test_an_unwritable_directory(streams, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir .*file/logs: Not a directory"):
        Output(1, directory=tmp_path / "file" / "logs", **streams)


def test_the_status_line_is_drawn_on_a_terminal_and_cleared_before_output(monkeypatch):
    monkeypatch.setattr(output_module, "_BARS_SECONDS", 0.0)
    stderr, stdout = Terminal(), io.BytesIO()
    with Output(1, stdout=stdout, stderr=stderr) as output:
        output.write(0, "stderr", b"\repoch 1")
        output.status("1 of 1 ranks running")
        assert b"1 of 1 ranks running  epoch 1" in stderr.getvalue()
        assert b"[0]" not in stderr.getvalue()  # no bar is printed
        output.write(0, "stdout", b"line\n")
        assert stderr.getvalue().endswith(b"\r\x1b[2K")


def test_a_closed_terminal_does_not_end_the_job(tmp_path):
    class Gone(io.BytesIO):
        def write(self, data):
            raise OSError(errno.EIO, "Input/output error")

    with Output(1, directory=tmp_path, stdout=Gone(), stderr=Gone()) as output:
        output.write(0, "stdout", b"one\n")
        output.write(0, "stdout", b"two\n")
    assert (tmp_path / "rank.0.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("buffering", [-1, 0], ids=["", "unbuffered"])
@pytest.mark.parametrize("size", [100, 100_000])
def test_nothing_is_lost_if_the_stream_does_not_block(size, buffering):
    """The reader begins when the pipe is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    lines = [b"%*d" % (size, number) for number in range(1_000_000 // size)]
    received = []

    def read():
        time.sleep(0.2)
        while data := os.read(reader, 65536):
            received.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    with open(writer, "wb", buffering) as stream:
        output = Output(1, stdout=stream, stderr=io.BytesIO())
        for line in lines:
            output.write(0, "stdout", line + b"\n")
    thread.join()
    os.close(reader)
    assert b"".join(received) == b"".join(b"[0] " + line + b"\n" for line in lines)


def test_a_message_has_no_control_characters(capfd):
    say("/data/\udc9b is full:\n\x1b]0;x\x07 \x9b31m \u202e")
    assert capfd.readouterr().err == (
        "hvdkit run: /data/\ufffd is full:\n\ufffd]0;x\ufffd \ufffd31m \ufffd\n"
    )
