"""The agent's end of the connection to the launcher."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from hvdkit.launch import messages
from hvdkit.launch.messages import Message

_READ_BYTES = 65536
_FLUSH_POLL_SECONDS = 0.005


class LauncherLink:
    """The connection of an agent to the launcher. No method waits, except `flush`.

    Args:
        receive_fd: the descriptor with the launcher's messages.
        send_fd: the descriptor for messages to the launcher.

    Attributes:
        receive_fd: as above.
        send_fd: as above.
        lost: whether the connection has ended. Messages to the launcher are then discarded.
    """

    def __init__(self, receive_fd: int, send_fd: int) -> None:
        self.receive_fd = receive_fd
        self.send_fd = send_fd
        self.lost = False
        os.set_blocking(receive_fd, False)
        os.set_blocking(send_fd, False)
        self._lines = messages.Lines()
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
                sent = os.write(self.send_fd, self._unsent[:_READ_BYTES])
            except BlockingIOError:
                return True
            except OSError:
                return False
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
            data = os.read(self.receive_fd, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        for line in self._lines.feed(data):
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
