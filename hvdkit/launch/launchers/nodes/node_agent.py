"""The agent of a node of `--nodes`, which a user has started."""

from __future__ import annotations

import io
import itertools
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hvdkit.launch.agent.agent import Agent
from hvdkit.launch.agent.echo import Echo
from hvdkit.launch.agent.host_facts import facts
from hvdkit.launch.agent.keeper import may_get_orphans_of_others
from hvdkit.launch.control import readers
from hvdkit.launch.control.messages import Message
from hvdkit.system.signals import STOP_SIGNALS


class NodeAgent(Agent):
    """An agent that sends its signals to the launcher, and waits for the outcome.

    A user may suspend it, so it does not answer heartbeats.

    Args:
        received: as for `Agent`.
        sent: as for `Agent`.
        overrides: fields that replace those of the launcher's `task` message.
        echo: also shows the ranks' output on this host; None to show nothing.

    Attributes:
        outcome: the launcher's `outcome` message; None if there was none.
    """

    answers = False

    def __init__(
        self,
        received: io.RawIOBase,
        sent: io.RawIOBase,
        overrides: Message,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(received, sent)
        self.outcome: Message | None = None
        self._overrides = overrides
        self._echo = echo
        # Counts each Ctrl-C.
        self._interrupts = itertools.count(1)

    def _adopt_orphans(self) -> None:
        if not may_get_orphans_of_others():
            super()._adopt_orphans()

    def _handled(self) -> Sequence[int]:
        # With `nohup`, SIGHUP stays ignored.
        return [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]

    def _explain(self, reason: str) -> None:
        """Write nothing: the launcher does not read it."""

    @property
    def _stays(self) -> bool:
        return super()._stays and self.outcome is None

    def _waits_for_launcher(self) -> bool:
        return self.outcome is None and not self._link.lost

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._send("signal", number=number)
        readers.give_up_soon()
        if number == signal.SIGINT and next(self._interrupts) > 1:
            readers.give_up_now()

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "task":
                self._task = message | self._overrides
                found = facts(self._task)
                if not _same_command(message["command"], self._task["command"]):
                    found["problems"].append(
                        f"its command is `{shlex.join(self._task['command'])}`, but that of node 0 "
                        f"is `{shlex.join(message['command'])}`; give the same on every node"
                    )
                self._send("hello", **found)
            case "outcome":
                self.outcome = self.outcome or message
                if not self._ranks.all:
                    self._end(0)
            case _:
                super()._handle(message)


def _same_command(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two nodes run the same command. The paths of their Pythons may differ."""
    programs = [Path(command[0]).name for command in (first, second)]
    if all(program.startswith("python") for program in programs):
        return first[1:] == second[1:]
    return first == second
