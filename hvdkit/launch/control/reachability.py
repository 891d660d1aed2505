"""Find the connections between the hosts of a job that fail.

All hosts accept TCP connections for a moment, connect to each other, and send some data. The
launcher calls `broken_connections` after a failure that does not show its host.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from hvdkit.errors import HvdkitError
from hvdkit.faults.names import shortened
from hvdkit.launch.control.listener import BACKLOG, Listener
from hvdkit.launch.control.prepare import Workers
from hvdkit.launch.control.questions import Questions
from hvdkit.launch.control.start_error import BrokenConnection
from hvdkit.launch.hosts.hosts import Host

#: The launcher's name among the hosts.
LAUNCHER = "the launcher"
#: With more hosts than this, each host connects only to `FULL_MESH_HOSTS - 1` other hosts.
FULL_MESH_HOSTS = 32

#: The bytes that hosts send to each other: several packets, also on a network with a large MTU.
_SENT_BYTES = 65536


def broken_connections(workers: Workers, timeout: float) -> list[BrokenConnection]:
    """Return the connections between hosts, and to the launcher, that fail.

    Args:
        workers: the agents of the hosts, which run no ranks now.
        timeout: seconds for the answers to each question.

    Raises:
        HvdkitError: a host does not answer.
    """
    questions = Questions(workers.agents, timeout)
    with listening(questions, workers) as targets:
        return try_connections(questions, targets)[0]


def describe_broken(broken: Sequence[BrokenConnection]) -> str:
    """Return a text with the connections that fail."""
    return shortened(broken, separator="; ")


@contextlib.contextmanager
def listening(questions: Questions, workers: Workers) -> Iterator[dict[str, tuple[str, int]]]:
    """Context in which all hosts, and the launcher at its address, accept connections.

    Yield their addresses and ports, by name.
    """
    address = workers.address
    addresses = {host: workers.interfaces[host].address for host in questions.hosts}
    arguments = {host: {"address": addresses[host]} for host in questions.hosts}
    try:
        server = socket.create_server((address, 0), backlog=BACKLOG)
        own = {LAUNCHER: (address, server.getsockname()[1])}
        # It also accepts the connections of strangers, which would fill a short queue.
        listener: Listener[None] = Listener(server, len(arguments), lambda _: None)
        try:
            ports = questions.each("listen", arguments)
            found = {host.name: (addresses[host], ports[host]) for host in questions.hosts}
            yield found | own
        finally:
            listener.close()
    except HvdkitError:
        # A host does not answer. The agents of the other hosts may stay.
        questions.end("stop_listening")
        raise
    questions.all("stop_listening", {})


def try_connections(
    questions: Questions, targets: Mapping[str, tuple[str, int]]
) -> tuple[list[BrokenConnection], int]:
    """Return the connections that fail, and the number of connections that were tried.

    Args:
        questions: asks the hosts.
        targets: as `listening` yields them.
    """
    # The launcher does not confirm data.
    known = {name: (*target, _SENT_BYTES) for name, target in targets.items()}
    known[LAUNCHER] = (*targets[LAUNCHER], 0)
    answers = questions.each(
        "connect",
        {
            host: {"targets": {name: known[name] for name in names}}
            for host, names in targets_by_host(questions.hosts).items()
        },
    )
    broken = [
        BrokenConnection(host.name, name, known[name][0], why)
        for host, answer in answers.items()
        for name, why in answer.items()
        if why
    ]
    return broken, sum(map(len, answers.values()))


def targets_by_host(hosts: Sequence[Host]) -> dict[Host, list[str]]:
    """Return host -> the names of the hosts that it connects to, and the launcher.

    In a large job a host connects only to some of the other hosts, near and far in the list.
    """
    count = len(hosts)
    if count <= FULL_MESH_HOSTS:
        steps = list(range(1, count))
    else:
        steps = [max(i, round(count ** (i / FULL_MESH_HOSTS))) for i in range(1, FULL_MESH_HOSTS)]
    return {
        host: [*(hosts[(at + step) % count].name for step in steps), LAUNCHER]
        for at, host in enumerate(hosts)
    }


def best_connected(
    hosts: Sequence[Host], broken: Sequence[BrokenConnection], proven: Collection[str] | None = None
) -> tuple[list[Host], list[Host]]:
    """Divide hosts into those that all reach each other, and those to leave out.

    Hosts that do not reach the launcher are left out first. Then follows, again and again, the host
    with the fewest slots and the most broken connections; of several such hosts, the last. This is
    the greedy algorithm GWMAX for independent sets (Sakai, Togasaki and Yamazaki, 2003): it keeps
    many slots.

    Args:
        broken: the connections that fail.
        proven: the names of hosts on which ranks have been started, which may have commits. Another
            host is left out first if no host has more broken connections. None: all hosts are
            equal.
    """
    left: list[Host] = list(hosts)
    without: list[Host] = []
    names = {host.name for host in hosts} | {LAUNCHER}
    pairs = {frozenset((each.host, each.target)) for each in broken}
    pairs = {pair for pair in pairs if pair <= names}
    while pairs:
        counts = Counter(name for pair in pairs for name in pair)
        alone = [host for host in left if frozenset((host.name, LAUNCHER)) in pairs]
        connected = [host for host in left if counts[host.name]]
        most = max((counts[host.name] for host in connected), default=0)
        new = [
            host
            for host in connected
            if proven is not None and host.name not in proven and counts[host.name] == most
        ]
        worst = min(
            reversed(alone or new or connected),
            key=lambda host: host.slots / (counts[host.name] * (counts[host.name] + 1)),
        )
        left.remove(worst)
        without.append(worst)
        pairs = {pair for pair in pairs if worst.name not in pair}
    return left, without
