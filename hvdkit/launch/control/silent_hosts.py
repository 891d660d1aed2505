"""Name the hosts that did not answer the launcher for some time."""

from __future__ import annotations

from collections.abc import Iterable

from hvdkit.launch.control.connection import Connection
from hvdkit.launch.control.pauses import Pauses

#: Seconds for which the launcher remembers that a host did not answer.
_REMEMBERED_SECONDS = 60.0
#: The most hosts that are named.
_SHOWN = 3


def describe_silent_hosts(
    connections: Iterable[Connection], lost: Iterable[str], pauses: Pauses, now: float
) -> list[str]:
    """Return a sentence for each host that did not answer in the last minute, longest first.

    The first sentence says whether this process was stopped, and maybe the whole job.

    Args:
        connections: the connections to all agents.
        lost: the names of the hosts that the launcher has lost.
        pauses: the pauses of this process.
    """
    found: dict[str, tuple[float, float]] = {}
    # During a pause, this process did not read answers.
    earliest = max(now - _REMEMBERED_SECONDS, pauses.last.at + 1)
    for connection in connections:
        silence = connection.silence(now)
        if silence is not None and silence.ended_at >= earliest:
            # A host may have an agent for each rank.
            host, times = connection.host.name, (silence.seconds, silence.ended_at)
            found[host] = max(times, found.get(host, times))
    sentences = list(filter(None, [pauses.sentence(now)]))
    for host in list(dict.fromkeys(lost))[:_SHOWN]:
        found.pop(host, None)
        sentences.append(f"The launcher has lost {host}: the host does not answer.")
    longest = sorted(found.items(), key=lambda each: each[1], reverse=True)
    for host, (seconds, ended_at) in longest[:_SHOWN]:
        if ended_at > now:
            sentences.append(f"{host} has not answered the launcher for {seconds:.0f} s.")
        else:
            ago = f"until {now - ended_at:.0f} s ago"
            sentences.append(f"{host} did not answer the launcher for {seconds:.0f} s, {ago}.")
    return sentences
