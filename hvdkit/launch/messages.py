"""The messages between the launcher and the agent of a host: one JSON object per line.

To the agent:

    task    {command, directory, path,       the first message: what is going to be run; and
             files, passes_signals_on,       whether the agent's own signals are for its ranks, and
             bind}                           whether these are bound to CPUs
    ask     {question, arguments}            answer one of `inspection.QUESTIONS`
    start   {ranks: [{rank, env, defaults,   start them, one perhaps in the user's terminal, each on
             terminal, cpus}], size}         these CPUs; and the number of the job's ranks
    signal  {number}                         pass a signal on to the ranks
    end     {grace}                          end every process: SIGTERM, seconds, SIGKILL
    alive   {}                               the launcher is still there
    outcome {status, report}                 how the job ended, for agents of `nodes`

From the agent:

    hello   {…facts}                         what this host is, and why it cannot run the task
    answer  {answer}                         to a question
    output  {rank, stream, text}             a piece of what a rank wrote
    ended   {rank, status}                   negative for a signal
    signal  {number}                         somebody on its host wants the job to stop
    failed  {reason}                         the agent cannot go on
    done    {}                               no process of the job is left on this host

Bytes that are not UTF-8 are sent as lone surrogates, so that nothing of a rank's output is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

#: The agent's first line. What a login shell's start-up files print comes before it.
GREETING = b"hvdkit-agent 1\n"

#: Where an agent that another launcher has started finds ours, and shows that it is of this job.
ADDRESS_VARIABLE = "HVDKIT_LAUNCHER_ADDRESS"
TOKEN_VARIABLE = "HVDKIT_LAUNCHER_TOKEN"
#: Has the descriptors of the user's terminal (input, output, errors), for an agent on this machine.
TERMINAL_VARIABLE = "HVDKIT_TERMINAL"

#: Seconds between two `alive` messages, and after how many without any the launcher counts as gone.
ALIVE_SECONDS = 5.0
LOST_SECONDS = 60.0


def encode(kind: str, **fields: Any) -> bytes:
    """One message, as it is sent."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """One message, as it was meant."""
    message: Message = json.loads(line)
    return message


def as_text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


class Lines:
    """Puts lines together from the pieces that a pipe gives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from lines
