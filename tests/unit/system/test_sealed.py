"""Sealed connections, with a process between the two ends that does what it likes."""

import io
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from hvdkit.system.sealed import (
    BrokenSeal,
    Refused,
    SealedConnection,
    WrongKey,
    greet,
    introduce,
    read_line,
)

KEY = b"0123456789abcdef"
SECONDS = 20
#: The bytes of a piece of data before the data.
HEAD = 36


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


class Path:
    """A connection with a process on the way. It has passed the handshake on.

    Attributes:
        hello: the fields and the knowledge of the end that connects, as the other end sees them.
        connects, listens: the two ends.
        from_connects, from_listens: the sockets of the process on the way.
        lines: the lines of the handshake.
    """

    def __init__(self, stack, change=lambda number, line: line, keys=(KEY, KEY), refused=""):
        one, self.from_connects = socket.socketpair()
        other, self.from_listens = socket.socketpair()
        for end in (one, other, self.from_connects, self.from_listens):
            stack.enter_context(end)
            end.settimeout(SECONDS)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        listens = pool.submit(self._listen, other, keys[1], refused)
        connects = pool.submit(introduce, one, keys[0], {"rank": 3}, SECONDS)
        self.lines = []
        way = [self.from_listens, self.from_connects]
        for number in range(3):
            self.lines.append(change(number, read_line(way[0])))
            way[1].sendall(self.lines[-1] + b"\n")
            way.reverse()
        self.listens = listens.result(SECONDS)
        self.connects = connects.result(SECONDS)

    def _listen(self, connection, key, refused):
        self.hello = greet(connection, key)
        if refused or not self.hello.known:
            self.hello.refuse(refused)
            return None
        return self.hello.accept()

    def pieces(self, *texts):
        """Return the bytes that the end that connects sends for each text."""
        for text in texts:
            self.connects.write(text)
        return [self.from_connects.recv(HEAD + len(text)) for text in texts]


def test_data_arrive_in_both_directions(stack):
    path = Path(stack)
    assert (path.hello.known, path.hello.fields["rank"]) == (True, 3)
    (piece,) = path.pieces(b"to the end that listens\nand more")
    path.from_listens.sendall(piece)
    reader = io.BufferedReader(path.listens)
    assert reader.readline() == b"to the end that listens\n"
    assert reader.read1(100) == b"and more"
    path.listens.write(b"back")
    path.from_connects.sendall(path.from_listens.recv(100))
    assert path.connects.read(3) + path.connects.read(3) == b"back"
    path.from_connects.close()
    assert path.connects.read(3) == b""


def test_neither_the_key_nor_what_can_be_used_again_is_sent(stack):
    path = Path(stack)
    assert KEY not in b"".join(path.lines)
    again = path.lines[1]
    with pytest.raises(WrongKey):
        Path(stack, lambda number, line: again if number == 1 else line)
    with pytest.raises(WrongKey):
        Path(stack, lambda number, line: path.lines[2] if number == 2 else line)


def changed(old, new):
    return lambda number, line: line.replace(old, new)


@pytest.mark.parametrize(
    ("change", "keys", "refused"),
    [
        (changed(b'"rank": 3', b'"rank": 4'), (KEY, KEY), ""),
        (changed(b"hvdkit-sealed-1 ", b"hvdkit-sealed-1 0"), (KEY, KEY), ""),
        (changed(b'"wrong"', b'""'), (KEY, KEY), "wrong"),
        (changed(b'""', b'"refused"'), (KEY, KEY), ""),
        (changed(b"", b""), (KEY, b"f" * 16), ""),
    ],
)
def test_a_changed_handshake_is_refused(stack, change, keys, refused):
    with pytest.raises(WrongKey):
        Path(stack, change, keys, refused)


def test_the_end_that_connects_is_told_why_it_is_refused(stack):
    with pytest.raises(Refused, match="there is a node 1 already"):
        Path(stack, refused="there is a node 1 already")


def test_another_program():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        with pytest.raises(OSError, match="another program, or another version of hvdkit"):
            introduce(ours, KEY, {})


#: What the process on the way sends instead of the pieces `a` and `b`, which the end that connects
#: has sent, and how much of that is accepted.
CHANGES = {
    "changed": (lambda a, b, back, other: a + b[:-1] + b"x", b"one"),
    "changed code": (lambda a, b, back, other: a[:4] + bytes(32) + a[HEAD:], b""),
    "shorter": (lambda a, b, back, other: b"\0\0\0\2" + a[4:-1], b""),
    "too long": (lambda a, b, back, other: b"\xff" + a[1:], b""),
    "repeated": (lambda a, b, back, other: a + a, b"one"),
    "in another order": (lambda a, b, back, other: b + a, b""),
    "without the first": (lambda a, b, back, other: b, b""),
    "of the other direction": (lambda a, b, back, other: back, b""),
    "of another connection": (lambda a, b, back, other: a + other, b"one"),
    "without a code": (lambda a, b, back, other: b'{"kind":"start"}\n' * 10, b""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_data_of_the_process_on_the_way_are_refused(stack, name):
    change, accepted = CHANGES[name]
    path, second = Path(stack), Path(stack)
    a, b = path.pieces(b"one", b"two")
    path.listens.write(b"one")
    other = second.pieces(b"one", b"two")[1]
    path.from_listens.sendall(change(a, b, path.from_listens.recv(100), other))
    path.from_listens.shutdown(socket.SHUT_WR)
    if accepted:
        assert path.listens.read(100) == accepted
    for _ in range(2):  # it does not recover
        with pytest.raises(BrokenSeal, match="were changed, or come from another process"):
            path.listens.read(100)


def test_a_part_of_a_piece_is_not_delivered(stack):
    path = Path(stack)
    a, b = path.pieces(b"one", b"two")
    path.from_listens.sendall(a + b[:-1])
    path.from_listens.shutdown(socket.SHUT_WR)
    assert [path.listens.read(100) for _ in range(3)] == [b"one", b"", b""]


def test_without_blocking_no_bytes_are_lost_or_sent_twice():
    ours, theirs = socket.socketpair()
    with SealedConnection(ours, KEY, True) as sender, SealedConnection(theirs, KEY, False) as end:
        for each in (ours, theirs):
            each.setblocking(False)
        data, sent, received = bytes(range(256)) * 8192, 0, b""
        assert end.read(10) is None
        waited = 0
        while len(received) < len(data):
            while (count := sender.write(data[sent : sent + 100_000])) is not None and count:
                sent += count
            waited += count is None
            while (piece := end.read(7000)) is not None:
                received += piece
        assert received == data
        assert waited > 3
