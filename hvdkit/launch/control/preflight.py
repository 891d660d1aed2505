"""The preflight check: examine several hosts before a job starts, and for `hvdkit doctor`.

The agents answer questions (`inspection`). Each diagnostic combines the answers of all hosts to one
question, so the report for 64 hosts is as short as the report for 2 hosts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.console.diagnostics import ERROR, OK, WARNING, Diagnostic
from hvdkit.faults.names import shortened
from hvdkit.launch.agent import open_files
from hvdkit.launch.control import prepare, readers
from hvdkit.launch.control.agent_pool import AgentPool, other_versions
from hvdkit.launch.control.network import LOOPBACK, Interface
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.prepare import Workers
from hvdkit.launch.control.questions import Questions, named
from hvdkit.launch.control.reachability import (
    FULL_MESH_HOSTS,
    describe_broken,
    listening,
    try_connections,
)
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.start_error import BrokenConnection, StartError
from hvdkit.launch.hosts.hosts import Host

#: The free bytes that a host should have. NCCL and MPI keep shared buffers in /dev/shm.
_SHM_BYTES = 1_000_000_000
_MEMORY_BYTES = 2_000_000_000
_DISK_BYTES = 1_000_000_000
# If clocks differ by more, times of logs and files cannot be compared between hosts.
_SKEW_SECONDS = 2.0

_BANDWIDTH_SECONDS = 2.0
#: In bytes per second. On a slower network, int8 saves more time than it costs on the CPU
#: (docs/synchronizer.md).
_INT8_BELOW = 5e9 / 8

_HOSTNAMES = "hostnames"
#: The version of a package that a host does not have.
_NO_VERSION = "none"


@dataclass(frozen=True)
class Checked:
    """The diagnostics of the hosts, and the hosts to which their errors belong.

    Attributes:
        versions: the name of a package that differs -> the name of each host -> its version.
        broken: the connections that fail.
    """

    diagnostics: Sequence[Diagnostic]
    versions: Mapping[str, Mapping[str, str]]
    broken: Sequence[BrokenConnection]


def before_start(workers: Workers, plan: Plan, settings: Settings) -> None:
    """Check several hosts; warn of problems, and raise if the job could not start.

    Raises:
        StartError: a diagnostic is an error, or a host does not answer.
    """
    if not settings.preflight or len(workers.interfaces) < 2:
        return
    checked = check(workers, plan, settings.timeouts.start)
    for diagnostic in checked.diagnostics:
        # Only MPI needs different host names, and `--nodes` does not use MPI.
        if diagnostic.status == WARNING and not (
            diagnostic.name == _HOSTNAMES and settings.use_agent_environment
        ):
            readers.say(f"{diagnostic.name}: {diagnostic.found}; {diagnostic.advice}")
    errors = [diagnostic for diagnostic in checked.diagnostics if diagnostic.status == ERROR]
    if errors:
        lines = [f"\n  {f.name}: {f.found}\n    -> {f.advice}" for f in errors]
        raise StartError(
            "the hosts are not ready; nothing was started (--no-preflight starts anyway)."
            + "".join(lines),
            versions=checked.versions,
            broken=checked.broken,
        )


def examine(plan: Plan, settings: Settings, bandwidth: bool = False) -> list[Diagnostic]:
    """Return the diagnostics of the hosts of `plan`.

    A problem of the hosts with which `hvdkit run` would start nothing is an error among them, such
    as a host that cannot be reached. The other hosts are examined. No Horovod is an error, too.

    Args:
        plan: the hosts and the directory; its command is not run.
        settings: how to reach the hosts, and their network.
        bandwidth: also measure the bandwidth between the first two hosts.

    Raises:
        HvdkitError: a host stops answering, or no network connects the hosts.
    """
    with AgentPool(settings.ssh.silence) as agents:
        prepare.start_agents(agents, plan, settings)
        facts, problems = agents.collect_facts(
            prepare.task(plan, settings), settings.timeouts.start
        )
        diagnostics = [
            Diagnostic(c.host.name, ERROR, "cannot take part", problems[c]) for c in problems
        ]
        if facts:
            text = f"{len(facts)} of {len(agents.connections)} hosts answer without a password"
            diagnostics.insert(0, Diagnostic("ssh", OK, text))
        # An agent of another version may not understand the questions.
        able = [connection for connection in facts if not other_versions(facts[connection])]
        if able:
            by_host = {connection.host: facts[connection] for connection in able}
            workers = prepare.choose_network(agents, plan, by_host, settings)
            with agents.only(able):
                timeout = settings.timeouts.start
                checked = check(workers, plan, timeout, bandwidth, needs_engine=True)
            diagnostics += checked.diagnostics
    return diagnostics


def check(
    workers: Workers,
    plan: Plan,
    timeout: float,
    bandwidth: bool = False,
    needs_engine: bool = False,
) -> Checked:
    """Examine the hosts, all at once.

    Args:
        plan: the number of ranks, and their hosts.
        timeout: seconds for the answers to each question.
        bandwidth: also measure the bandwidth between the first two hosts.
        needs_engine: whether it is an error if no host has Horovod. A job may not use Horovod.

    Raises:
        StartError: a host does not answer.
    """
    questions, interfaces = Questions(workers.agents, timeout), workers.interfaces
    skews = _skews(questions)
    found = questions.all("examine", {"directory": plan.directory})
    versions = _versions(found)
    if needs_engine:
        versions.setdefault("horovod", dict.fromkeys(found, _NO_VERSION))
    connections, broken = _connections(questions, workers, bandwidth)
    diagnostics = [
        *_compared(versions),
        _network(interfaces),
        _mtu(interfaces),
        *connections,
        _own_names(found, interfaces),
        _clocks(skews),
        _shared_memory(found),
        _amount(found, "memory", "free memory", _MEMORY_BYTES, "see what else runs there"),
        _amount(found, "disk", "free disk", _DISK_BYTES, f"make room under {plan.directory}"),
        _open_files(found, plan.size),
        _gpus(found),
    ]
    different = {
        name: {host.name: version for host, version in by_host.items()}
        for name, by_host in versions.items()
        if not _is_same(by_host)
    }
    return Checked(diagnostics, different, broken)


def _by_value(values: Mapping[Host, str]) -> dict[str, list[Host]]:
    groups: dict[str, list[Host]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return groups


def _grouped(values: Mapping[Host, str]) -> str:
    """Return the value if all hosts have the same, else each value with its hosts."""
    groups = _by_value(values)
    if len(groups) == 1:
        (value,) = groups
        few = {1: next(iter(values)).name, 2: "both hosts"}
        return f"{value} ({few.get(len(values), f'all {len(values)} hosts')})"
    by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "; ".join(f"{value} ({named(hosts)})" for value, hosts in by_size)


def _versions(found: Mapping[Host, Mapping[str, Any]]) -> dict[str, dict[Host, str]]:
    """Return the name of each package -> each host -> its version."""
    names = dict.fromkeys(name for facts in found.values() for name in facts["versions"])
    return {
        name: {host: facts["versions"].get(name, _NO_VERSION) for host, facts in found.items()}
        for name in names
    }


def _diagnostic(name: str, found: str, advice: str = "", status: str = WARNING) -> Diagnostic:
    """Return a diagnostic. Without advice, it is OK."""
    return Diagnostic(name, status if advice else OK, found, advice)


def _compared(versions: Mapping[str, Mapping[Host, str]]) -> Iterator[Diagnostic]:
    for name, by_host in versions.items():
        advice = "" if _is_same(by_host) else "install the same version on every host"
        if set(by_host.values()) == {_NO_VERSION}:
            advice = "run `hvdkit build` on every host"
        yield _diagnostic(name, _grouped(by_host), advice, ERROR)


def _is_same(by_host: Mapping[Host, str]) -> bool:
    return len(set(by_host.values())) == 1


def _network(interfaces: Mapping[Host, Interface]) -> Diagnostic:
    subnets = sorted({str(interface.network) for interface in interfaces.values()})
    names = _grouped({host: interface.name for host, interface in interfaces.items()})
    return _diagnostic("network", f"{', '.join(subnets)} over {names}; also for NCCL")


def _mtu(interfaces: Mapping[Host, Interface]) -> Diagnostic:
    if all(interface is LOOPBACK for interface in interfaces.values()):
        return _diagnostic("MTU", "no network is used on one machine")
    values = {host: str(interface.mtu) for host, interface in interfaces.items()}
    advice = "set the same MTU everywhere: large packets get lost where it is smaller"
    return _diagnostic("MTU", _grouped(values), "" if _is_same(values) else advice)


def _connections(
    questions: Questions, workers: Workers, bandwidth: bool
) -> tuple[list[Diagnostic], list[BrokenConnection]]:
    """Check TCP between all hosts, and from them to the launcher, on arbitrary ports.

    Return the diagnostics, and the connections that fail.
    """
    count = len(questions.hosts)
    with listening(questions, workers) as targets:
        broken, tried = try_connections(questions, targets)
        others = f"{FULL_MESH_HOSTS - 1} others" if count > FULL_MESH_HOSTS else "every other"
        text = f"every host reaches {others} and the launcher ({tried} connections)"
        if broken:
            text = f"{len(broken)} of {tried} connections fail: {describe_broken(broken)}"
        advice = (
            "open all TCP ports between the hosts in their firewalls, or choose another --network. "
            "If connections are made but large data does not arrive, or only some attempts fail, "
            "check the MTU and the packet loss of the network (`ping -s 1400 HOST`)"
        )
        found = [_diagnostic("TCP", text, advice if broken else "", ERROR)]
        if bandwidth and count > 1 and not broken:
            found.append(_bandwidth(questions, targets))
    return found, broken


def _bandwidth(questions: Questions, targets: Mapping[str, tuple[str, int]]) -> Diagnostic:
    first, second = questions.hosts[:2]
    address, port = targets[second.name]
    arguments = {"address": address, "port": port, "seconds": _BANDWIDTH_SECONDS}
    speed = questions.each("send", {first: arguments})[first]
    text = f"{8 * speed / 1e9:.2f} Gbit/s from {first.name} to {second.name}, one connection"
    if speed < _INT8_BELOW:
        text += '; so slow that compression="int8" may be faster than "fp16"'
    return _diagnostic("bandwidth", text)


def _own_names(
    found: Mapping[Host, Mapping[str, Any]], interfaces: Mapping[Host, Interface]
) -> Diagnostic:
    names = {host: facts["own_name"]["name"] for host, facts in found.items()}
    machines = _by_value({host: f"{names[host]} {interfaces[host].address}" for host in names})
    shared = {name: hosts for name, hosts in _by_value(names).items() if len(hosts) > 1}
    nameless = [host for host, facts in found.items() if "error" in facts["own_name"]]
    for text, problems, advice in (
        (
            "these are names of one machine",
            [named(hosts) for hosts in machines.values() if len(hosts) > 1],
            "name each machine once, with all its slots (HOST:SLOTS). Otherwise its ranks use the "
            "same GPUs, and MPI fails",
        ),
        (
            "several hosts have the same host name",
            [f"{name} is {named(hosts)}" for name, hosts in shared.items()],
            "give each host its own name (hostnamectl set-hostname). MPI treats hosts with the "
            "same name as one host, and fails",
        ),
        (
            "the host's own name does not resolve there",
            [named(nameless)] if nameless else [],
            "add it to /etc/hosts there: MPI and some libraries look it up",
        ),
    ):
        if problems:
            return _diagnostic(_HOSTNAMES, f"{text}: {'; '.join(problems)}", advice)
    return _diagnostic(_HOSTNAMES, "every host resolves its own name")


def _skews(questions: Questions) -> dict[Host, float]:
    """Return host -> the seconds that its clock is ahead of this machine's clock."""
    before = time.time()
    answers = questions.all("clock", {})
    # Each host read its clock between `before` and now.
    middle = (before + time.time()) / 2
    return {host: answer - middle for host, answer in answers.items()}


def _clocks(skews: Mapping[Host, float]) -> Diagnostic:
    far = [
        f"{host.name} {skew:+.1f} s" for host, skew in skews.items() if abs(skew) > _SKEW_SECONDS
    ]
    if far:
        return _diagnostic("clocks", shortened(far), "run an NTP client on every host")
    worst = max(map(abs, skews.values()))
    return _diagnostic("clocks", f"within {max(worst, 0.1):.1f} s of the launcher's")


def _shared_memory(found: Mapping[Host, Mapping[str, Any]]) -> Diagnostic:
    name = "/dev/shm"
    closed = [host for host, facts in found.items() if not facts["shared_memory_writable"]]
    if closed:
        advice = (
            "mount a tmpfs that this user can write to: NCCL, MPI and the workers of a DataLoader "
            "keep shared buffers there"
        )
        return _diagnostic(name, f"not writable on {named(closed)}", advice)
    return _amount(found, "shared_memory", name, _SHM_BYTES, "mount a larger tmpfs there")


def _amount(
    found: Mapping[Host, Mapping[str, Any]], key: str, name: str, least: int, advice: str
) -> Diagnostic:
    known = {host: facts[key] for host, facts in found.items() if facts[key] is not None}
    missing = [host for host in found if host not in known]
    if missing:
        return _diagnostic(name, f"cannot be determined on {named(missing)}", advice)
    lowest = min(known, key=lambda host: known[host])
    text = f"at least {known[lowest] / 1e9:.1f} GB"
    text += f" ({lowest.name})" if len(known) > 1 else ""
    few = [host for host, amount in known.items() if amount < least]
    if not few:
        return _diagnostic(name, text)
    return _diagnostic(name, f"{text}; less than {least / 1e9:g} GB on {named(few)}", advice)


def _open_files(found: Mapping[Host, Mapping[str, Any]], size: int) -> Diagnostic:
    needed = open_files.needed_by_rank(size)
    least = min(facts["open_files"] for facts in found.values())
    few = [host for host, facts in found.items() if facts["open_files"] < needed]
    text = f"each of {size} ranks may need {needed:,}, for connections to the other ranks"
    if not few:
        return _diagnostic("open files", text)
    return _diagnostic(
        "open files",
        f"{text}; the limit is {least:,} on {named(few)}",
        "raise it there (`ulimit -Hn`, /etc/security/limits.conf, LimitNOFILE of the ssh server)",
    )


def _gpus(found: Mapping[Host, Mapping[str, Any]]) -> Diagnostic:
    values = {}
    for host, facts in found.items():
        counts = Counter(facts["gpus"])
        values[host] = ", ".join(f"{counts[kind]} x {kind}" for kind in counts) or "none"
    advice = "" if _is_same(values) else "the slowest GPU limits the job; match slots to GPUs"
    if any("nvidia-smi" in text for text in values.values()):
        advice = "repair the NVIDIA driver there"
    return _diagnostic("GPUs", _grouped(values), advice)
