"""The messages between the launcher and the agent of a host: one JSON object per line.

To the agent:

    task       {command, directory, path,    the first message: what the ranks will run; whether the
                files, forward_signals,      agent forwards its own signals to its ranks; whether
                bind, stay, spares, steps,   ranks are bound to CPUs; whether the agent stays after
                lost_after}                  its ranks have ended, for the next `task`; whether it
                                             keeps spare interpreters; whether it gives the ranks
                                             folders for steps; and the seconds without a message
                                             after which the launcher is lost
    ask        {question, arguments}         answer one of `inspection.QUESTIONS`
    start      {ranks: [{rank, env,          start these ranks, each bound to its CPUs; a rank with
                defaults, terminal, cpus}],  `terminal` gets the user's terminal; `size` is the
                size}                        number of the job's ranks
    signal     {number}                      send this signal to the ranks
    end        {grace}                       end every process: SIGTERM, `grace` seconds, SIGKILL
    record     {}                            ask the ranks for records, and send the states of their
                                             processes
    shutdown   {rank, content}               a note of a rank on another host, see below
    keep       {name}                        make the folders for an elastic job's commits, and
                                             delete them when the connection ends, but not after
                                             `end`: the next agent of the host takes them
    hosts      {version}                     the version of the elastic job's list of hosts
    heartbeat  {}                            the launcher still runs
    read       {bytes}                       the launcher has handled so many bytes of output and
                                             records, see `WINDOW`
    outcome    {status, report}              how the job ended, for agents of `--nodes`

From the agent:

    hello      {…facts}                      facts about this host; `problems` is not empty if it
                                             cannot run the task
    answer     {answer}                      the answer to a question
    output     {rank, stream, text}          bytes that a rank has written
    exited     {rank, status}                the rank has ended; the status is negative for a signal
    ended      {rank, status, hint, stack}   the same, after all output of the rank; the hint is the
                                             probable cause of a SIGKILL, if known; the stack that
                                             of a crash
    report     {rank, age, report}           the rank has reported its own end so many seconds ago
                                             (`hvdkit.faults.rank_report`)
    record     {text}                        a record that a rank has written (`hvdkit.faults`)
    shutdown   {rank, content}               the note of a rank that has called `hvd.shutdown()`; ""
                                             if it has started Horovod again
    init       {rank, start, connected, leaving}
                                             how far Horovod is in a rank that mpirun or srun has
                                             started: the number of its last start of Horovod, and
                                             whether it is connected, and shuts down
    saved      {}                            a new checkpoint or a new commit was saved
    committed  {}                            the host has the newest commit of an elastic job
    kept       {folders}                     the folders for commits
    states     {states: {rank: state}}       the states of the ranks' processes: "stopped", or ""
    signal     {number}                      a user on the agent's host asks the job to stop
    signalled  {number}                      the agent got this stop signal, and has asked its ranks
                                             to stop; an agent with folders for commits now waits
                                             for `end`
    alive      {}                            the first message, and the answer to `heartbeat`. Not
                                             from agents of `--nodes`, which users may suspend
    failed     {reason}                      the agent cannot continue
    done       {stays}                       no process of the job is left on this host; and
                                             whether the agent waits for the next `task`

Bytes that are not UTF-8 are sent as lone surrogates, so that no bytes are lost.
"""

from __future__ import annotations

import json
from typing import Any

from hvdkit.system.plain_files import parse_json

Message = dict[str, Any]

#: The agent's first line. The output of a login shell's start-up files precedes it.
GREETING = b"hvdkit-agent 1\n"

#: The launcher's address and the job's token, for an agent that mpirun or srun has started.
ADDRESS_VARIABLE = "HVDKIT_LAUNCHER_ADDRESS"
TOKEN_VARIABLE = "HVDKIT_LAUNCHER_TOKEN"
LISTENER_VARIABLES = (ADDRESS_VARIABLE, TOKEN_VARIABLE)
#: The descriptors of the user's terminal (input, output, errors), for an agent on this machine.
TERMINAL_VARIABLE = "HVDKIT_TERMINAL"

#: With so many bytes of output and records that the launcher has not handled yet, an agent sends
#: no more of them. The launcher handles messages in their order and may show output slowly, so
#: without a limit the message about the end of a rank would wait for minutes.
WINDOW = 1 << 18
#: The kinds of messages that count for `WINDOW`.
COUNTED = ("output", "record")

#: The most seconds between two heartbeats.
HEARTBEAT_SECONDS = 5.0
# The system and ssh report a lost host at most so many seconds after the time that was set.
_REPORT_SECONDS = 2.0
#: Seconds without a message after which an agent decides that the launcher is lost, and the other
#: way around.
LOST_SECONDS = 60.0
#: A process that has not looked for messages for so many seconds was stopped itself.
PAUSE_SECONDS = 5.0


def heartbeat_interval(silence: float) -> float:
    """Return the seconds between two heartbeats.

    Args:
        silence: the seconds without an answer after which a host is lost (`--host-timeout`).
    """
    return min(HEARTBEAT_SECONDS, silence / 5)


def longest_silence(silence: float) -> float:
    """Return the seconds without a message after which an agent is lost.

    They are more than `silence`, so that the system or ssh reports a lost host first. Otherwise it
    would not be known whether the host is lost, or only the agent is stopped.

    Args:
        silence: the seconds without an answer after which a host is lost (`--host-timeout`).
    """
    return silence + heartbeat_interval(silence) + _REPORT_SECONDS


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message as bytes, with the end of its line."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in `line`.

    Raises:
        ValueError: the line is not a message.
    """
    message = parse_json(line)
    if not isinstance(message, dict) or "kind" not in message:
        raise ValueError(f"{line!r} is not a message")
    return message


def as_text(data: bytes) -> str:
    """Return bytes as the text of a message. `as_bytes` returns the same bytes again."""
    return data.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
