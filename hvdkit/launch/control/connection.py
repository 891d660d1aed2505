"""The launcher's connection to an agent, and the times in which the agent was silent."""

from __future__ import annotations

import io
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import IO, Any

from hvdkit.launch.control import messages
from hvdkit.launch.control.messages import Message
from hvdkit.launch.hosts.hosts import Host

# Seconds after which the missing answer to a heartbeat counts as a silence.
_SILENCE_SECONDS = 1.0
# The most bytes of a line that an error shows.
_SHOWN_BYTES = 80


@dataclass(frozen=True)
class Event:
    """A message of an agent. A message of kind `lost` means that the connection has ended.

    Attributes:
        connection: the connection to the agent.
        received_at: the time of its arrival (`time.monotonic`).
        counted: its bytes if it counts for `messages.WINDOW`; otherwise 0.
    """

    connection: Connection
    message: Message
    received_at: float = field(default_factory=time.monotonic)
    counted: int = 0


Events = queue.Queue[Event]


@dataclass(frozen=True)
class Silence:
    """A time in which an agent did not answer a heartbeat.

    Attributes:
        seconds: its length.
        ended_at: its end (`time.monotonic`); infinite if it has not ended.
    """

    seconds: float
    ended_at: float


class Heartbeats:
    """The heartbeats to an agent, and the times in which it has not answered.

    Attributes:
        silent_since: the time since which the launcher has waited for a message (`time.monotonic`);
            infinite while no answer is expected: before the first answer, after the end, and
            for agents that send none (`--nodes`).
    """

    def __init__(self) -> None:
        self.silent_since = float("inf")
        # The time of the heartbeat that the agent has not answered yet, and the last silence.
        self._asked_at: float | None = None
        self._silence: Silence | None = None

    def ask(self) -> None:
        """Note that a heartbeat is sent."""
        if self._asked_at is None and self.silent_since < float("inf"):
            self._asked_at = time.monotonic()

    def answer(self, answers: bool) -> None:
        """Note a message of the agent.

        Args:
            answers: whether the message shows that the agent answers heartbeats.
        """
        now = time.monotonic()
        if self._asked_at is not None and now > self._asked_at + _SILENCE_SECONDS:
            self._silence = Silence(now - self._asked_at, now)
        self._asked_at = None
        if answers or self.silent_since < float("inf"):
            self.silent_since = now

    def end(self) -> None:
        """Expect no more answers."""
        self.silent_since, self._asked_at = float("inf"), None

    def silence(self, now: float) -> Silence | None:
        """Return the silence at a time, as `Connection.silence` does."""
        asked_at = self._asked_at
        if asked_at is not None and now > asked_at + _SILENCE_SECONDS:
            return Silence(now - asked_at, float("inf"))
        return self._silence


class Connection:
    """A connection to an agent. A thread puts the agent's messages into the queue `events`.

    The queue has no limit, so no message waits in the network. `messages.WINDOW` limits the bytes
    in the queue. `AgentPool.next_event` acknowledges each message that it takes from the queue.

    Attributes:
        greeted: whether the agent's greeting has arrived.
        ended: whether the connection has ended.
        idle: whether the agent has no ranks, and waits for the next start.
        opened_at: when the launcher opened it (`time.monotonic`).
        peer: the IPv4 address of an agent that opened the connection; None for other agents, and
            over IPv6.
    """

    peer: str | None = None

    def __init__(self, host: Host, sent: io.RawIOBase, received: IO[bytes], events: Events) -> None:
        self.host = host
        self.greeted = False
        self.ended = False
        self.idle = True
        self.opened_at = time.monotonic()
        self._heartbeats = Heartbeats()
        self._sent = sent
        self._received = received
        self._events = events
        self._error: OSError | None = None
        # The last line before the greeting, of a login shell.
        self._said = ""
        self._disconnected = threading.Event()
        # A thread writes the messages: an agent that is stopped must not delay the launcher, and a
        # signal handler may send while the main thread does. The value None in the queue closes
        # the agent's input.
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, without waiting for the agent.

        If the agent is lost, nothing happens: the reader thread reports it.
        """
        if not self._disconnected.is_set():
            self._unsent.put(messages.encode(kind, **fields))

    def acknowledge(self, event: Event) -> None:
        """Tell the agent that one of its messages was taken from the queue."""
        if event.counted:
            self.send("read", bytes=event.counted)

    def _write(self) -> None:
        while (data := self._unsent.get()) is not None:
            try:
                while data:
                    data = data[self._sent.write(data) or 0 :]
            except OSError as error:
                # The system reports a lost host only once: either here or to the reader.
                self._error = self._error or error
        self._close_input()

    def send_heartbeat(self) -> None:
        """Send a heartbeat, but only after all earlier messages have been written."""
        if self._unsent.empty():
            self._heartbeats.ask()
            self.send("heartbeat")

    @property
    def silent_since(self) -> float:
        """The time since which the launcher has waited for a message; see `Heartbeats`."""
        return self._heartbeats.silent_since

    def silence(self, now: float) -> Silence | None:
        """Return the current silence of the agent, or else its last one; None if there was none.

        A silence is longer than a second.
        """
        return self._heartbeats.silence(now)

    def disconnect(self) -> None:
        """Close the agent's input after the last message. The agent then ends its ranks and itself.

        This method does not wait for the agent; `close` does.
        """
        if not self._disconnected.is_set():
            self._disconnected.set()
            self._unsent.put(None)

    @property
    def disconnected(self) -> bool:
        """Whether `disconnect` was called."""
        return self._disconnected.is_set()

    def close(self, timeout: float) -> None:
        """Wait until the agent has ended, and cut the connection after `timeout` seconds."""
        raise NotImplementedError

    def cut(self) -> None:
        """Cut the connection to an agent that does not answer. Kill a local agent, or its ssh."""
        raise NotImplementedError

    def explain(self) -> str:
        """Return why the agent has ended or does not answer, and what to do."""
        raise NotImplementedError

    def lost_host(self) -> bool:
        """Return whether the connection has ended because the host does not answer."""
        raise NotImplementedError

    def failed_transiently(self) -> bool:
        """Return whether the agent did not start, but may start at the next attempt."""
        return False

    def restart(self) -> Connection:
        """Close this connection, start the agent again, and return the new connection."""
        raise NotImplementedError

    def _close_input(self) -> None:
        raise NotImplementedError

    def _read(self) -> None:
        try:
            for line in self._received:
                if not self.greeted:
                    # The start-up files of a login shell may print text without a line end.
                    self.greeted = line.endswith(messages.GREETING)
                    self._said = line.decode(errors="replace").strip() or self._said
                elif line.endswith(b"\n"):  # an agent that is killed may leave half a line
                    self._receive(line)
        except OSError as error:  # of a socket whose other host is gone
            self._error = error
        self.ended = True
        self._heartbeats.end()
        self._put({"kind": "lost"})

    def _receive(self, line: bytes) -> None:
        message = _decoded(line)
        self._heartbeats.answer(message["kind"] == "alive")
        if message["kind"] != "alive":
            self._put(message, len(line) if message["kind"] in messages.COUNTED else 0)

    def _put(self, message: Message, counted: int = 0) -> None:
        # After `disconnect` nothing reads the queue, but the agent's output must be read fully.
        if not self._disconnected.is_set():
            self._events.put(Event(self, message, counted=counted))


def _decoded(line: bytes) -> Message:
    try:
        return messages.decode(line)
    except ValueError:
        reason = (
            f"its agent's output contains {line[:_SHOWN_BYTES]!r}: expected a message of the "
            "agent. Check that no other program writes there, such as a background process of a "
            "shell's start-up files"
        )
        return {"kind": "failed", "reason": reason}
