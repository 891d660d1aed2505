"""The agent's end of the connection to the launcher."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from hvdkit.launch.control import messages
from hvdkit.launch.control.messages import Message
from hvdkit.system.sealed import BrokenSeal

_READ_BYTES = 65536
_FLUSH_POLL_SECONDS = 0.005


class LauncherLink:
    """The connection of an agent to the launcher. No method waits, except `flush`.

    Args:
        received: the stream with the launcher's messages.
        sent: the stream for messages to the launcher; it may be the same.

    Attributes:
        receive_fd: the descriptor of `received`.
        send_fd: a descriptor of `sent`, another one, because a selector registers each only once.
        lost: whether the connection has ended. Messages to the launcher are then discarded.
    """

    def __init__(self, received: io.RawIOBase, sent: io.RawIOBase) -> None:
        self._received = received
        self._sent = sent
        self.receive_fd = received.fileno()
        self.send_fd = os.dup(sent.fileno())
        self.lost = False
        os.set_blocking(self.receive_fd, False)
        os.set_blocking(self.send_fd, False)
        # The part of a line that has arrived.
        self._line = b""
        self._unsent = bytearray(messages.GREETING)
        # The bytes of output and records that the launcher has not handled yet.
        self._unread = 0
        self._last_received = self._stepped_at = time.monotonic()

    @property
    def may_send(self) -> bool:
        """Whether the launcher takes more output and records."""
        # If the launcher is lost, output is discarded: the ranks must not wait while they end.
        return self.lost or self._unread < messages.WINDOW

    @property
    def unsent(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._unsent)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, when the connection takes it."""
        if not self.lost:
            data = messages.encode(kind, **fields)
            self._unsent.extend(data)
            if kind in messages.COUNTED:
                self._unread += len(data)

    def note_read(self, count: int) -> None:
        """Note that the launcher has handled so many bytes of output and records."""
        self._unread -= count

    def send_pending(self) -> bool:
        """Send what the connection takes now. Return False if it has ended."""
        while self._unsent:
            try:
                sent = self._sent.write(self._unsent[:_READ_BYTES])
            except OSError:
                return False
            if sent is None:  # the launcher does not read
                return True
            del self._unsent[:sent]
        return True

    def flush(self, seconds: float) -> None:
        """Send the messages that are left, for a few seconds at most."""
        deadline = time.monotonic() + seconds
        while self._unsent and time.monotonic() < deadline and self.send_pending():
            time.sleep(_FLUSH_POLL_SECONDS)

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived.

        Raises:
            EOFError: the connection has ended.
        """
        try:
            data = self._received.read(_READ_BYTES)
        except OSError as error:
            if isinstance(error, BrokenSeal):
                print(f"lost the launcher: {error}", file=sys.stderr)
            data = b""
        if data is None:  # a part of a piece of data
            return
        if not data:
            raise EOFError
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            yield messages.decode(line)
        # Not earlier: handling a message may take long, and no other is read meanwhile.
        self._last_received = time.monotonic()

    def note_step(self, now: float) -> None:
        """Note that this process runs. If it was stopped, maybe the launcher was stopped, too."""
        if now > self._stepped_at + messages.PAUSE_SECONDS:
            self._last_received += now - self._stepped_at
        self._stepped_at = now

    def is_silent(self, seconds: float) -> bool:
        """Return whether no message has arrived for so many seconds."""
        return not self.lost and time.monotonic() > self._last_received + seconds

    def lose(self) -> None:
        """Discard all messages to the launcher, from now on."""
        self.lost = True
        self._unsent.clear()

    def close(self) -> None:
        """Close the descriptor for sending; the streams belong to the caller."""
        os.close(self.send_fd)
