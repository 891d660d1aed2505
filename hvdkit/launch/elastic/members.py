"""The hosts of an elastic job: watch the list of hosts, and keep an agent on each of them.

The agents outlive the ranks, and own the folders for commits. A new host joins when its agent has
answered, so a host that cannot take part does not interrupt the training.

Two threads run. One reads the list of hosts, which may take long. The other reads the messages of
the agents, and starts and ends agents.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import readers
from hvdkit.launch.control.agent_pool import AgentPool, unfitness
from hvdkit.launch.control.connection import Connection
from hvdkit.launch.control.messages import PAUSE_SECONDS, Message
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.elastic.choice import Assignment, Choice, assignment_of
from hvdkit.launch.elastic.member import Member
from hvdkit.launch.hosts.hosts import Host, are_local, name_slots, total_slots
from hvdkit.system.signals import begin_to_note

#: Seconds between two looks at the list of hosts, as in Horovod.
_LOOK_SECONDS = 1.0
#: Seconds for the answer of a host whose agent was lost, and of each host before a restart.
_PROBE_SECONDS = 15.0
#: Seconds between two attempts to reach a host.
_RETRY_SECONDS = 10.0
_POLL_SECONDS = 0.1
#: Seconds for each thread to end.
_THREAD_SECONDS = 5.0


@dataclass
class Members:
    """Watch the hosts in a thread. A context manager that ends the agents on exit.

    Attributes:
        discover: returns the current list of hosts. Its argument is a function that returns whether
            to end the search early.
        task: the fields of the `task` message, with which agents examine their hosts.
        min_size: the smallest number of ranks.
        max_size: the largest number of ranks; None for all slots.
        excluded: returns whether a host is left out because of its failures.
    """

    discover: Callable[[Callable[[], bool]], Sequence[Host]]
    task: Message
    settings: Settings
    min_size: int
    max_size: int | None
    excluded: Callable[[str], bool]
    _agents: AgentPool = field(init=False)
    _members: dict[str, Member] = field(default_factory=dict)
    # The names on the list, the oldest first.
    _listed: list[str] = field(default_factory=list)
    _folders: dict[str, str] = field(default_factory=dict)
    # The lists of hosts that were read, or errors, and the error of the last attempt: "" for none,
    # and None before the first list was handled.
    _found: queue.SimpleQueue[list[Host] | HvdkitError] = field(default_factory=queue.SimpleQueue)
    _problem: str | None = None
    # The version of the list that the ranks know: an even number for that of their start. The next
    # odd number tells the ranks that the hosts have changed.
    _version: int = 0
    _error: HvdkitError | None = None
    _current: Assignment = ()
    # The hosts that have the newest commit.
    _holders: frozenset[str] = frozenset()
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._agents = AgentPool(self.settings.ssh.silence)

    def __enter__(self) -> Self:
        self._agents.__enter__()
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (("hvdkit-members", self._watch), ("hvdkit-hosts", self._discover))
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        # A signal must not replace the outcome or the error.
        begin_to_note()
        with self._changed:
            # The next agent of a host deletes the folders of an agent that got a signal.
            self._changed.wait_for(lambda: not self._lacks_agent(), _PROBE_SECONDS)
            self._stop.set()
        for thread in self._threads:
            # The thread that reads the list of hosts may wait for a disk or a name server.
            thread.join(_THREAD_SECONDS)
        self._agents.__exit__(*exc)

    def _lacks_agent(self) -> bool:
        """Return whether the agent of a host has just been lost, and the next one starts."""
        return any(member.lacks_agent for member in self._members.values())

    # For the supervisor

    def wait_for(self, size: int, timeout: float) -> Sequence[Host]:
        """Return the hosts that can take part, as soon as they have `size` slots.

        If none of these hosts has the newest commit, the first host that is returned has it, see
        `Choice.with_holder`.

        Raises:
            HvdkitError: they have fewer slots after `timeout` seconds, or the first look at the
                list of hosts failed.
        """
        deadline = time.monotonic() + timeout
        told = False
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                usable = self._usable()
                awaited = [*self._on_list(), *self._choice.missing_holders(usable, self._holders)]
                starting = any(member.is_starting for member in awaited)
                if self._problem is not None and not starting:
                    if total_slots(usable) >= size:
                        hosts = self._choice.with_holder(usable, self._holders)
                        self._say_holder(hosts[0], usable)
                        return hosts
                    if not told:
                        readers.say(
                            f"waiting for hosts: they have {name_slots(total_slots(usable))}, "
                            f"expected {size} (-np, or --min-np after a restart). The job ends if "
                            f"this takes longer than {timeout:g} s (--elastic-timeout)"
                        )
                        told = True
                if time.monotonic() > deadline:
                    found = ", ".join(f"{host.name}:{host.slots}" for host in usable) or "none"
                    raise HvdkitError(
                        f"after {timeout:g} s (--elastic-timeout) the hosts that can be used have "
                        f"{name_slots(total_slots(usable))} ({found}): expected at least {size} "
                        f"(-np, or --min-np after a restart)"
                    )
                self._changed.wait(_LOOK_SECONDS)

    def confirm(self, committed: bool) -> None:
        """Ask all agents. A host that does not answer in time does not take part.

        Args:
            committed: whether the hosts of the last start have the newest commit.
        """
        with self._changed:
            if committed:
                self._holders = frozenset(dict(self._current))
            for member in self._members.values():
                if member.is_ready:
                    member.deadline = time.monotonic() + _PROBE_SECONDS
                    member.ask(self.task)
                elif member.connection is None and member.host.name in self._holders:
                    # Its agent was lost after the ranks had committed, and before this call.
                    member.expect_again(_PROBE_SECONDS)

    def holders(self) -> frozenset[str]:
        """Return the names of the hosts that have the newest commit."""
        with self._changed:
            return self._holders

    def give_up(self, name: str) -> None:
        """Forget that a host has the newest commit, because ranks there end before they load it."""
        with self._changed:
            self._holders -= {name}

    def begin(self, plan: Plan) -> int:
        """Begin a start with `plan`. From now on, ranks are told if the hosts differ from the plan.

        Return the version of the list. A higher version tells ranks that the hosts have changed.
        """
        with self._changed:
            self._current = assignment_of(plan)
            self._sort_list(self._listed)
            if not self._holders & dict(self._current).keys():
                # The training begins again. Hosts that have left the list are not needed any more.
                self._holders &= set(self._listed)
            self._announce_version(self._version // 2 * 2 + 2)
            return self._version

    def folders(self, host: Host) -> Sequence[Path]:
        """Return the folders for commits on a host.

        Raises:
            HvdkitError: the host has just left the list.
        """
        with self._changed:
            member = self._members.get(host.name)
            if member is None or not member.folders:
                raise HvdkitError(
                    f"{host.name} is not on the list of hosts any more, so no rank can start there"
                )
            return [Path(text) for text in member.folders]

    # The threads

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            with self._changed:
                self._error = HvdkitError(f"the hosts cannot be watched any more: {error!r}")
                self._changed.notify_all()
            raise

    def _discover(self) -> None:
        """Read the list of hosts again and again. A disk or a name server may be slow."""
        local: dict[str, bool] = {}  # the names on the list -> whether the host is this machine
        while not self._stop.is_set():
            try:
                hosts = self.discover(self._stop.is_set)
                new = are_local([host for host in hosts if host.name not in local])
                local = {h.name: new.get(h, local.get(h.name, False)) for h in hosts}
                self._found.put([replace(host, local=local[host.name]) for host in hosts])
            except HvdkitError as error:
                self._found.put(error)
            self._stop.wait(_LOOK_SECONDS)

    def _watch(self) -> None:
        """Handle the messages that arrive, then the list of hosts and the deadlines."""
        watched_at = time.monotonic()
        while not self._stop.is_set():
            event = self._agents.next_event(_POLL_SECONDS)
            # Before the other messages are read: a member is only late if its answer has not
            # arrived.
            now = time.monotonic()
            with self._changed:
                if now > watched_at + PAUSE_SECONDS:
                    # This process was stopped, or the last step was slow.
                    for member in self._members.values():
                        member.deadline += now - watched_at
                watched_at = now
                while event is not None:
                    self._handle(event.connection, event.message)
                    event = self._agents.next_event(0.0)
                self._check_deadlines(now)
                while not self._found.empty():
                    self._handle_found(self._found.get())
                self._retry_all(now)
                self._announce()
                self._changed.notify_all()

    def _handle_found(self, found: list[Host] | HvdkitError) -> None:
        """Handle the list of hosts, which was read again, or could not be read."""
        if isinstance(found, list):
            self._set_list(found)
        elif self._problem is None:
            self._error = found
        elif str(found) != self._problem and not self._stop.is_set():
            # Keep the last list.
            readers.say(f"the hosts stay the same: {found}")
        self._problem = "" if isinstance(found, list) else str(found)

    def _set_list(self, found: Sequence[Host]) -> None:
        self._sort_list([host.name for host in found])
        for host in found:
            if host.name in self._members:
                self._members[host.name].host = host
            else:
                # The next agent of a host gets the same folders.
                folder = self._folders.setdefault(host.name, os.urandom(16).hex())
                self._members[host.name] = Member(host, folder)
        for name, member in list(self._members.items()):
            if not self._is_kept(member) and name not in dict(self._current):
                self._members.pop(name).drop(self._agents)

    def _sort_list(self, names: Iterable[str]) -> None:
        """Set the names on the list.

        The hosts of the current start come first, because they have commits. Then the oldest hosts
        follow.
        """
        listed = set(names)
        # `fromkeys` removes repetitions.
        order = dict.fromkeys([*dict(self._current), *self._listed, *names])
        self._listed = [name for name in order if name in listed]

    def _is_kept(self, member: Member) -> bool:
        """Return whether the host needs an agent.

        Hosts on the list need one, and a host with the newest commit if no host on the list that
        has answered has this commit.
        """
        if member.host.name in self._listed:
            return True
        return member.host.name in self._holders and not self._has_commit(self._on_list())

    def _has_commit(self, members: Iterable[Member]) -> bool:
        """Return whether one of these hosts has answered, and has the newest commit."""
        return any(m.is_ready and m.host.name in self._holders for m in members)

    def _retry_all(self, now: float) -> None:
        """Start agents on hosts without one. Ask agents that could not take part again.

        Many hosts may not answer. They must not delay the others, so do not wait for their ssh.
        """
        places = self._agents.places()
        for member in sorted(self._members.values(), key=lambda member: member.retry_at):
            if now <= member.retry_at or self._stop.is_set():
                return
            if not self._is_kept(member):
                continue
            if member.connection is not None:
                if member.kept and not (member.is_ready or member.is_starting):
                    member.retry_at = time.monotonic() + _RETRY_SECONDS
                    member.ask(self.task)
            elif member.host.local or places:
                places -= not member.host.local
                try:
                    member.start(self._agents, self.settings, self.task)
                except HvdkitError as error:
                    self._fail(member, str(error))

    def _handle(self, connection: Connection, message: Message) -> None:
        member = next((m for m in self._members.values() if m.connection is connection), None)
        if member is None:
            return
        match message["kind"]:
            case "hello":
                if problems := unfitness(message):
                    self._fail(member, "; ".join(problems), stays=self._may_hold(member))
                member.fit = not problems
            case "kept":
                member.kept, member.folders = True, message["folders"]
                connection.send("hosts", version=self._version)
            case "failed":
                self._fail(member, message["reason"])
            case "signalled" if not self._stop.is_set():
                # Its successor gets the commits. At the end of the job, the agent deletes them.
                member.fit = False
                member.expect_again(_PROBE_SECONDS)
                connection.send("end", grace=0.0)
            case "lost":
                had_answered = member.kept
                self._fail(member, connection.explain())
                if had_answered and self._is_kept(member):
                    member.expect_again(_PROBE_SECONDS)
        if member.is_ready:
            member.problem, member.deadline = "", float("inf")

    def _check_deadlines(self, now: float) -> None:
        for member in self._members.values():
            if now > member.deadline:
                if (limit := self._limit_of_holder(member, now)) > now:
                    member.deadline = limit
                    continue
                why = member.connection.explain() if member.connection else "its agent has ended"
                self._fail(member, f"it does not answer: {why}")

    def _limit_of_holder(self, member: Member, now: float) -> float:
        """Return the time until which to wait for a host that alone has the newest commit.

        Its agent deletes the commit when its connection ends, so the host gets as much time as a
        host with ranks (`--host-timeout`).
        """
        others_have = self._has_commit(self._members.values())
        is_alone = member.host.name in self._holders and not others_have
        if not is_alone or not member.kept or member.connection is None:
            return float("-inf")
        return min(member.connection.silent_since, now) + self.settings.ssh.silence

    def _may_hold(self, member: Member) -> bool:
        """Return whether the host may have the newest commit, which ends with its agent."""
        return member.host.name in self._holders or member.host.name in dict(self._current)

    def _fail(self, member: Member, problem: str, stays: bool = False) -> None:
        """Note that a host cannot take part, and end its agent unless the agent stays."""
        if problem != member.problem and not self._stop.is_set():
            readers.say(f"{member.host.name} cannot take part: {problem}")
        member.problem = problem or "it failed"
        member.retry_at = time.monotonic() + _RETRY_SECONDS
        member.fit, member.deadline = False, float("inf")
        if not stays:
            member.drop(self._agents)

    # Announcements

    def _announce(self) -> None:
        """Tell the ranks if a new start would use other hosts than the current start."""
        if not self._current:
            return
        usable = self._usable(also_starting=True)
        # The ranks commit before they end. After that, the hosts of this start have the commit.
        chosen = self._choice.with_holder(usable, dict(self._current).keys(), also_starting=True)
        # With too few slots, the ranks continue as long as their hosts permit.
        differs = self._choice.assign(chosen) != self._current
        changed = differs and total_slots(usable) >= self.min_size
        self._announce_version(self._version // 2 * 2 + int(changed))

    def _announce_version(self, version: int) -> None:
        if version == self._version:
            return
        self._version = version
        for member in self._members.values():
            if member.connection is not None:
                member.connection.send("hosts", version=version)

    @property
    def _choice(self) -> Choice:
        return Choice(self._members, self._listed, self.max_size)

    def _on_list(self) -> list[Member]:
        return [self._members[name] for name in self._listed]

    def _usable(self, also_starting: bool = False) -> list[Host]:
        """Return the hosts that can take part.

        Leave out the excluded hosts, unless the other hosts have fewer than `min_size` slots.

        Args:
            also_starting: whether hosts of the current start whose agents start count, too.
        """
        current = dict(self._current)
        usable = [
            member.host
            for member in self._on_list()
            if member.is_ready
            or (also_starting and member.is_starting and member.host.name in current)
        ]
        good = [host for host in usable if not self.excluded(host.name)]
        return good if total_slots(good) >= self.min_size else usable

    def _say_holder(self, first: Host, usable: Sequence[Host]) -> None:
        """Say why the first host of a start takes part, if it is not one of the usable hosts."""
        if first in usable:
            return
        why = "would be left out" if first.name in self._listed else "has left the list"
        if self.max_size == 1:
            how = "keeps the only rank (--max-np 1)"
        else:
            how = "takes part with 1 rank until the next commit"
        readers.say(f"no other host has the last commit. {first.name}, which {why}, {how}")
