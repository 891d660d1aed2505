"""Connections between processes of a job that know the same key, such as launcher and agent.

Both ends prove that they know the key, without sending it. Afterwards each piece of data has a code
(HMAC-SHA-256, RFC 2104) that only these two ends can compute. The data are not encrypted.

1. The end that listens sends a nonce.
2. The end that connects sends a nonce and a description of itself, with a proof.
3. The end that listens sends whether it accepts the other end, with a proof.

The proofs, and the keys for the two directions, are derived from the key and from all bytes of
steps 1 and 2. A process between the two ends can pass on or drop what they send. It cannot add,
change, repeat or reorder anything, and nothing that it has recorded is valid on another connection.

This module uses the standard library only, because `hvdkit.bench` runs it with other versions of
hvdkit.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

#: Seconds for each step of the handshake.
STEP_SECONDS = 5.0

_GREETING = b"hvdkit-sealed-1"
_LONGEST_LINE = 10_000
_OTHER_KEY = b"another key"
# The most bytes of a piece of data. A piece follows its length and its code.
_PIECE_BYTES = 1 << 16
_LENGTH_BYTES = 4
_CODE_BYTES = 32
_HEAD_BYTES = _LENGTH_BYTES + _CODE_BYTES
# The exceptions of parsing a text that is not of this protocol.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class BrokenSeal(ConnectionError):
    """Data of the connection do not come from the process that has proven to know the key."""

    def __init__(self) -> None:
        super().__init__(
            "data of the connection were changed, or come from another process than that which "
            "has proven to know the job's key. Check which programs and hosts are on the way"
        )


class WrongKey(Exception):
    """The other end does not know the key."""


class Refused(Exception):
    """The other end knows the key, and refuses this process. The text says why."""


class SealedConnection(io.RawIOBase):
    """A connection after the handshake, as an unbuffered stream of bytes.

    If the socket does not block, `read` and `write` return None where they would have to wait.
    After that, `write` needs data that begin with the same bytes.

    Args:
        connection: the socket, which then blocks. The stream owns it.
        listens: whether this process is the end that listens.

    Raises:
        BrokenSeal: by `read`, see the class.
    """

    def __init__(self, connection: socket.socket, session: bytes, listens: bool) -> None:
        self.socket = connection
        connection.settimeout(None)
        keys = [_derive(session, b"to the end that " + end) for end in (b"listens", b"connects")]
        self._receive_key, self._send_key = keys if listens else keys[::-1]
        self._received_pieces = self._sent_pieces = 0
        # The piece that is being received, and the received data that were not read yet.
        self._piece = bytearray()
        self._unread = b""
        # The rest of the piece that is being sent, and the bytes of data in it.
        self._unsent = b""
        self._unsent_bytes = 0

    def readinto(self, buffer: Any) -> int | None:
        """Read at least one byte, as `io.RawIOBase.readinto` does."""
        while not self._unread:
            length = _HEAD_BYTES
            if len(self._piece) >= _HEAD_BYTES:
                length += int.from_bytes(self._piece[:_LENGTH_BYTES])
            if length > _HEAD_BYTES + _PIECE_BYTES:
                raise BrokenSeal
            if _HEAD_BYTES < length == len(self._piece):
                self._open_piece()
                break
            try:
                data = os.read(self.fileno(), length - len(self._piece))
            except BlockingIOError:
                return None
            if not data:
                return 0
            self._piece += data
        with memoryview(buffer).cast("B") as view:
            count = min(len(view), len(self._unread))
            view[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count

    def _open_piece(self) -> None:
        data = bytes(self._piece[_HEAD_BYTES:])
        code = _code(self._receive_key, self._received_pieces, data)
        if not hmac.compare_digest(code, self._piece[_LENGTH_BYTES:_HEAD_BYTES]):
            raise BrokenSeal
        self._unread = data
        self._piece.clear()
        self._received_pieces += 1

    def write(self, data: Any) -> int | None:
        """Write at least one byte, as `io.RawIOBase.write` does."""
        if not len(data):
            return 0
        if not self._unsent:
            piece = bytes(data[:_PIECE_BYTES])
            code = _code(self._send_key, self._sent_pieces, piece)
            self._sent_pieces += 1
            self._unsent = len(piece).to_bytes(_LENGTH_BYTES) + code + piece
            self._unsent_bytes = len(piece)
        while self._unsent:
            try:
                sent = os.write(self.fileno(), self._unsent)
            except BlockingIOError:
                return None
            self._unsent = self._unsent[sent:]
        return self._unsent_bytes

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
        super().close()


class Hello:
    """Step 2 of the handshake, in the process that listens.

    Attributes:
        known: whether the other end has proven that it knows the key.
        fields: how it describes itself. If it does not know the key, this may be any JSON.
    """

    def __init__(self, connection: socket.socket, session: bytes, known: bool, fields: Any) -> None:
        self._connection = connection
        self._session = session
        self.known = known
        self.fields = fields

    def accept(self) -> SealedConnection:
        """Accept the other end, which must know the key.

        Raises:
            OSError: the connection has ended.
        """
        self._answer("")
        return SealedConnection(self._connection, self._session, listens=True)

    def refuse(self, reason: str) -> None:
        """Tell the other end why it is refused. It gets the reason only if it knows the key."""
        if self.known:
            self._answer(reason)
        else:
            self._connection.sendall(_OTHER_KEY + b"\n")

    def _answer(self, refused: str) -> None:
        assert self.known
        sent = json.dumps(refused).encode()
        proof = _derive(self._session, b"answer " + sent).hex().encode()
        self._connection.sendall(proof + b" " + sent + b"\n")


def greet(connection: socket.socket, key: bytes) -> Hello | None:
    """Take steps 1 and 2 of the handshake, as the process that listens.

    Returns:
        Step 2; None if the other end does not follow this protocol.

    Raises:
        OSError: the connection has ended.
    """
    connection.settimeout(STEP_SECONDS)
    greeting = _GREETING + b" " + secrets.token_hex(16).encode()
    connection.sendall(greeting + b"\n")
    proof, _, sent = read_line(connection).partition(b" ")
    try:
        fields = json.loads(sent)
    except MALFORMED:
        return None
    session = _session(key, greeting, sent)
    known = hmac.compare_digest(proof, _derive(session, b"hello").hex().encode())
    return Hello(connection, session, known, fields)


def introduce(
    connection: socket.socket,
    key: bytes,
    fields: Mapping[str, Any],
    seconds: float = STEP_SECONDS,
) -> SealedConnection:
    """Carry out the handshake, as the process that connects.

    Args:
        fields: the description of this process, for `Hello.fields`.
        seconds: for each step of the other end.

    Raises:
        OSError: the other end does not follow this protocol, or the connection has ended.
        WrongKey: the other end does not know the key.
        Refused: the other end knows the key, and refuses this process.
    """
    greeting = _read_greeting(connection, seconds)
    sent = json.dumps({**fields, "nonce": secrets.token_hex(16)}).encode()
    session = _session(key, greeting, sent)
    connection.settimeout(seconds)
    connection.sendall(_derive(session, b"hello").hex().encode() + b" " + sent + b"\n")
    line = read_line(connection, seconds)
    if not line:
        raise OSError("it closed the connection")
    proof, _, answer = line.partition(b" ")
    if not hmac.compare_digest(proof, _derive(session, b"answer " + answer).hex().encode()):
        raise WrongKey
    if refused := str(json.loads(answer)):
        raise Refused(refused)
    return SealedConnection(connection, session, listens=False)


def _read_greeting(connection: socket.socket, seconds: float) -> bytes:
    greeting = read_line(connection, seconds)
    if greeting.partition(b" ")[0] != _GREETING:
        raise OSError("another program, or another version of hvdkit, listens there")
    return greeting


def read_line(connection: socket.socket, seconds: float = STEP_SECONDS) -> bytes:
    """Read a line within some seconds, without its end.

    Returns:
        The line; empty if the connection has ended, or the line is too long.

    Raises:
        OSError: it does not arrive in time.
    """
    deadline = time.monotonic() + seconds
    received = bytearray()
    while not received.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        # One byte, because the next ones may belong to a piece of data.
        byte = connection.recv(1)
        if not byte or len(received) >= _LONGEST_LINE:
            return b""
        received += byte
    return bytes(received[:-1])


def _session(key: bytes, greeting: bytes, hello: bytes) -> bytes:
    """Return the key of a connection. Neither text contains a line end."""
    return _derive(key, greeting + b"\n" + hello)


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, purpose, "sha256")


def _code(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + data, "sha256")
