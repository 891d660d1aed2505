"""Examination of the hosts before a job starts on several, and for `hvdkit doctor`.

The agents answer questions (`inspection`). A finding combines the answers of all hosts to one
question, so that a report on 64 hosts is as long as one on 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.findings import ERROR, OK, WARNING, Finding
from hvdkit.launch import open_files, prepare
from hvdkit.launch.agents import Agents
from hvdkit.launch.hosts import Host
from hvdkit.launch.network import LOOPBACK, Interface
from hvdkit.launch.plan import Plan
from hvdkit.launch.prepare import Settings
from hvdkit.rendezvous import RendezvousServer

#: What a rank needs at least; NCCL and MPI keep shared buffers in /dev/shm.
_SHM_BYTES = 1_000_000_000
_MEMORY_BYTES = 2_000_000_000
_DISK_BYTES = 1_000_000_000
# Further apart than that, times in logs and of files mislead.
_SKEW_SECONDS = 2.0

_BANDWIDTH_SECONDS = 2.0
_NAMED_HOSTS = 4
#: Of more hosts than these, each tries to reach one less.
_TRIED_HOSTS = 32

_HOSTNAMES = "hostnames"

#: What the launcher is called among the hosts.
_LAUNCHER = "the launcher"


def before_start(
    agents: Agents,
    interfaces: Mapping[Host, Interface],
    plan: Plan,
    settings: Settings,
    door: tuple[str, int],
    say: Callable[[str], None],
) -> None:
    """Tell the user what is doubtful about several hosts, and stop a start that cannot succeed.

    Args:
        agents: they have been contacted.
        interfaces: by host, what its ranks will talk over.
        plan: the job.
        settings: whether this is wanted at all.
        door: an address and port of this machine that the ranks have to reach.
        say: tells the user something at once.

    Raises:
        HvdkitError: a finding is an error.
    """
    if not settings.preflight or len(interfaces) < 2:
        return
    findings = check(agents, interfaces, plan, door, settings.limits.start)
    for finding in findings:
        # Without ssh there is no MPI, and names may be alike.
        if finding.status == WARNING and not (
            finding.name == _HOSTNAMES and settings.own_environments
        ):
            say(f"{finding.name}: {finding.found}; {finding.advice}")
    errors = [finding for finding in findings if finding.status == ERROR]
    if errors:
        lines = [f"\n  {f.name}: {f.found}\n    -> {f.advice}" for f in errors]
        raise HvdkitError(
            "the hosts are not ready; nothing was started (--no-preflight starts anyway)."
            + "".join(lines)
        )


def examine(plan: Plan, settings: Settings, bandwidth: bool = False) -> list[Finding]:
    """Examine the hosts of `plan`, those that can be reached at least.

    Args:
        plan: its hosts and directory; its command is not run.
        settings: how hosts are reached, and their network.
        bandwidth: also measure how fast the first two talk to each other.

    Raises:
        HvdkitError: a host stops answering, or nothing connects them.
    """
    with Agents() as agents:
        agents.dial(prepare.local_hosts(plan), settings.ssh, settings.python)
        facts, problems = agents.ask(prepare.task(plan), settings.limits.start)
        for connection, found in facts.items():
            if found["problems"]:
                problems[connection] = "; ".join(found["problems"])
        findings = [Finding(c.host.name, ERROR, "cannot take part", problems[c]) for c in problems]
        if facts:
            text = f"{len(facts)} of {len(agents.connections)} hosts answer unattended"
            findings.insert(0, Finding("ssh", OK, text))
            agents.connections = list(facts)
            by_host = {connection.host: found for connection, found in facts.items()}
            interfaces, address = prepare.choose_network(plan, by_host, settings)
            with RendezvousServer(address) as server:
                door = (address, server.port)
                findings += check(agents, interfaces, plan, door, settings.limits.start, bandwidth)
    return findings


def check(
    agents: Agents,
    interfaces: Mapping[Host, Interface],
    plan: Plan,
    door: tuple[str, int],
    timeout: float,
    bandwidth: bool = False,
) -> list[Finding]:
    """Examine the hosts of `agents`, all at once.

    Args:
        agents: they have been contacted.
        interfaces: by host, what its ranks would talk over.
        plan: how many ranks would run, and where.
        door: an address and port of this machine that they have to reach.
        timeout: seconds that the hosts may take for each question.
        bandwidth: also measure how fast the first two talk to each other.

    Raises:
        HvdkitError: a host does not answer.
    """
    asked = _Asked(agents, timeout)
    skews = _skews(asked)
    found = asked.all("examine", {"directory": plan.directory})
    return [
        *_versions(found),
        _network(interfaces),
        _mtu(interfaces),
        *_connections(asked, interfaces, door, bandwidth),
        _own_names(found),
        _clocks(skews),
        _amount(found, "shared_memory", "/dev/shm", _SHM_BYTES, "mount a larger tmpfs there"),
        _amount(found, "memory", "free memory", _MEMORY_BYTES, "see what else runs there"),
        _amount(found, "disk", "free disk", _DISK_BYTES, f"make room under {plan.directory}"),
        _open_files(found, plan.size),
        _gpus(found),
    ]


class _Asked:
    """Asks agents, and sorts their answers by host."""

    def __init__(self, agents: Agents, timeout: float) -> None:
        self._agents = agents
        self._timeout = timeout
        self.hosts = [connection.host for connection in agents.connections]

    def all(self, question: str, arguments: Mapping[str, Any]) -> dict[Host, Any]:
        return self.each(question, dict.fromkeys(self.hosts, arguments))

    def each(self, question: str, arguments: Mapping[Host, Mapping[str, Any]]) -> dict[Host, Any]:
        """The answers of the hosts in `arguments`."""
        for connection in self._agents.connections:
            if connection.host in arguments:
                connection.send("ask", question=question, arguments=arguments[connection.host])
        answers: dict[Host, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(answers) < len(arguments):
            event = self._agents.next(max(0.0, deadline - time.monotonic()))
            if event is None:
                silent = _named([host for host in arguments if host not in answers])
                raise HvdkitError(
                    f"{silent} did not answer within {self._timeout:g} s (asked: {question})"
                )
            if event.message["kind"] != "answer":
                why = event.message.get("reason") or event.connection.explain()
                raise HvdkitError(f"{event.connection.host.name}: {why}")
            answers[event.connection.host] = event.message["answer"]
        return {host: answers[host] for host in self.hosts if host in answers}


def _named(hosts: Sequence[Host]) -> str:
    """`host1, host2 and 3 more`."""
    names = [host.name for host in hosts]
    more = len(names) - _NAMED_HOSTS
    return f"{', '.join(names[:_NAMED_HOSTS])} and {more} more" if more > 0 else ", ".join(names)


def _by_value(values: Mapping[Host, str]) -> dict[str, list[Host]]:
    groups: dict[str, list[Host]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return groups


def _grouped(values: Mapping[Host, str]) -> str:
    """One value where all hosts have the same, else each with its hosts."""
    groups = _by_value(values)
    if len(groups) == 1:
        (value,) = groups
        few = {1: next(iter(values)).name, 2: "both hosts"}
        return f"{value} ({few.get(len(values), f'all {len(values)} hosts')})"
    by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "; ".join(f"{value} ({_named(hosts)})" for value, hosts in by_size)


def _versions(found: Mapping[Host, Mapping[str, Any]]) -> Iterator[Finding]:
    names = dict.fromkeys(name for facts in found.values() for name in facts["versions"])
    for name in names:
        values = {host: facts["versions"].get(name, "none") for host, facts in found.items()}
        same = len(set(values.values())) == 1
        advice = "" if same else "install the same version on every host"
        yield Finding(name, OK if same else ERROR, _grouped(values), advice)


def _network(interfaces: Mapping[Host, Interface]) -> Finding:
    subnets = sorted({str(interface.network) for interface in interfaces.values()})
    names = _grouped({host: interface.name for host, interface in interfaces.items()})
    return Finding("network", OK, f"{', '.join(subnets)} over {names}; NCCL is told the same")


def _mtu(interfaces: Mapping[Host, Interface]) -> Finding:
    if all(interface is LOOPBACK for interface in interfaces.values()):
        return Finding("MTU", OK, "no network is used on one machine")
    values = {host: str(interface.mtu) for host, interface in interfaces.items()}
    if len(set(values.values())) == 1:
        return Finding("MTU", OK, _grouped(values))
    advice = "set the same MTU everywhere: large packets get lost where it is smaller"
    return Finding("MTU", WARNING, _grouped(values), advice)


def _connections(
    asked: _Asked,
    interfaces: Mapping[Host, Interface],
    door: tuple[str, int],
    bandwidth: bool,
) -> Iterator[Finding]:
    """TCP from every host to every other and to the launcher, on ports that the system chose."""
    addresses = {host: interface.address for host, interface in interfaces.items()}
    ports = asked.each("listen", {host: {"address": addresses[host]} for host in asked.hosts})
    targets = {host.name: (addresses[host], ports[host]) for host in asked.hosts}
    ways = _ways(asked, targets | {_LAUNCHER: door})
    yield ways
    if bandwidth and len(asked.hosts) > 1 and ways.status == OK:
        yield _bandwidth(asked, targets)
    asked.all("stop_listening", {})


def _ways(asked: _Asked, targets: Mapping[str, tuple[str, int]]) -> Finding:
    answers = asked.each(
        "connect",
        {
            host: {"targets": {name: targets[name] for name in names}}
            for host, names in _tried(asked.hosts).items()
        },
    )
    failures = [
        f"{host.name} to {name} ({targets[name][0]}): {why}"
        for host, answer in answers.items()
        for name, why in answer.items()
        if why
    ]
    tried = sum(map(len, answers.values()))
    if failures:
        more = f" and {len(failures) - _NAMED_HOSTS} more" if len(failures) > _NAMED_HOSTS else ""
        return Finding(
            "TCP",
            ERROR,
            f"{len(failures)} of {tried} ways fail: {'; '.join(failures[:_NAMED_HOSTS])}{more}",
            "open all TCP ports between the hosts in their firewalls, or choose another --network",
        )
    others = f"{_TRIED_HOSTS - 1} others" if len(asked.hosts) > _TRIED_HOSTS else "every other"
    return Finding("TCP", OK, f"every host reaches {others} and the launcher ({tried} ways)")


def _tried(hosts: Sequence[Host]) -> dict[Host, list[str]]:
    """Return, by host, the names of those that it tries to reach.

    In a large job that is not every other host but a part of them, near and far in the list.
    """
    count = len(hosts)
    if count <= _TRIED_HOSTS:
        steps = list(range(1, count))
    else:
        steps = [max(i, round(count ** (i / _TRIED_HOSTS))) for i in range(1, _TRIED_HOSTS)]
    return {
        host: [*(hosts[(at + step) % count].name for step in steps), _LAUNCHER]
        for at, host in enumerate(hosts)
    }


def _bandwidth(asked: _Asked, targets: Mapping[str, tuple[str, int]]) -> Finding:
    first, second = asked.hosts[:2]
    address, port = targets[second.name]
    way = {"address": address, "port": port, "seconds": _BANDWIDTH_SECONDS}
    speed = asked.each("send", {first: way})[first]
    text = f"{8 * speed / 1e9:.2f} Gbit/s from {first.name} to {second.name}, one connection"
    return Finding("bandwidth", OK, text)


def _own_names(found: Mapping[Host, Mapping[str, Any]]) -> Finding:
    names = {host: facts["own_name"]["name"] for host, facts in found.items()}
    shared = [
        f"{name} is {_named(hosts)}" for name, hosts in _by_value(names).items() if len(hosts) > 1
    ]
    if shared:
        return Finding(
            _HOSTNAMES,
            WARNING,
            f"several hosts call themselves the same: {'; '.join(shared)}",
            "give each its own (hostnamectl set-hostname): MPI takes them for one host, and stops",
        )
    nameless = [host for host, facts in found.items() if "error" in facts["own_name"]]
    if nameless:
        return Finding(
            _HOSTNAMES,
            WARNING,
            f"the own name does not resolve on {_named(nameless)}",
            "add it to /etc/hosts there: MPI and some libraries look it up",
        )
    local = [
        host for host, facts in found.items() if facts["own_name"]["address"].startswith("127.")
    ]
    text = "every host resolves its own name"
    if local:
        text += f"; to 127.x on {_named(local)}, which is fine: ranks use the network's addresses"
    return Finding(_HOSTNAMES, OK, text)


def _skews(asked: _Asked) -> dict[Host, float]:
    """By host, how far its clock is ahead of ours, in seconds."""
    before = time.time()
    answers = asked.all("clock", {})
    # When each answered is known no better than the span of the question.
    middle = (before + time.time()) / 2
    return {host: answer - middle for host, answer in answers.items()}


def _clocks(skews: Mapping[Host, float]) -> Finding:
    far = [host for host, skew in skews.items() if abs(skew) > _SKEW_SECONDS]
    if far:
        text = ", ".join(f"{host.name} {skews[host]:+.1f} s" for host in far[:_NAMED_HOSTS])
        more = f" and {len(far) - _NAMED_HOSTS} more" if len(far) > _NAMED_HOSTS else ""
        return Finding("clocks", WARNING, f"{text}{more}", "run an NTP client on every host")
    worst = max(map(abs, skews.values()))
    return Finding("clocks", OK, f"within {max(worst, 0.1):.1f} s of the launcher's")


def _amount(
    found: Mapping[Host, Mapping[str, Any]], key: str, name: str, least: int, advice: str
) -> Finding:
    known = {host: facts[key] for host, facts in found.items() if facts[key] is not None}
    missing = [host for host in found if host not in known]
    if missing:
        return Finding(name, WARNING, f"there is none on {_named(missing)}", advice)
    lowest = min(known, key=lambda host: known[host])
    text = f"at least {known[lowest] / 1e9:.1f} GB"
    text += f" ({lowest.name})" if len(known) > 1 else ""
    if known[lowest] >= least:
        return Finding(name, OK, text)
    few = [host for host, amount in known.items() if amount < least]
    return Finding(name, WARNING, f"{text}; less than {least / 1e9:g} GB on {_named(few)}", advice)


def _open_files(found: Mapping[Host, Mapping[str, Any]], size: int) -> Finding:
    needed = open_files.of_rank(size)
    least = min(facts["open_files"] for facts in found.values())
    few = [host for host, facts in found.items() if facts["open_files"] < needed]
    text = f"each of {size} ranks may need {needed:,}, for connections with the others"
    if not few:
        return Finding("open files", OK, text)
    return Finding(
        "open files",
        WARNING,
        f"{text}; the limit is {least:,} on {_named(few)}",
        "raise it there (`ulimit -Hn`, /etc/security/limits.conf, LimitNOFILE of the ssh server)",
    )


def _gpus(found: Mapping[Host, Mapping[str, Any]]) -> Finding:
    values = {}
    for host, facts in found.items():
        kinds = dict.fromkeys(facts["gpus"])
        counts = [f"{facts['gpus'].count(kind)} x {kind}" for kind in kinds]
        values[host] = ", ".join(counts) or "none"
    broken = [
        host for host, facts in found.items() if any("nvidia-smi" in g for g in facts["gpus"])
    ]
    if broken:
        return Finding("GPUs", WARNING, _grouped(values), "repair the NVIDIA driver there")
    if len(set(values.values())) > 1:
        return Finding(
            "GPUs", WARNING, _grouped(values), "the slowest decides; match slots to GPUs"
        )
    return Finding("GPUs", OK, _grouped(values))
