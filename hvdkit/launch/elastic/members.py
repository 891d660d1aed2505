"""The hosts of an elastic job: watch the list of hosts, and keep an agent on each of them.

The agents outlive the ranks, and own the folders for commits. A new host joins when its agent has
answered, so a host that cannot take part does not interrupt the training.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Self

from hvdkit.errors import HvdkitError
from hvdkit.launch.agent_pool import AgentPool, unfitness
from hvdkit.launch.connection import Connection
from hvdkit.launch.hosts import Host, are_local, name_slots, total_slots
from hvdkit.launch.launcher import Settings
from hvdkit.launch.messages import Message
from hvdkit.launch.plan import Plan

#: Seconds between two looks at the list of hosts, as in Horovod.
_LOOK_SECONDS = 1.0
#: Seconds for the answer of a host whose agent was lost, and of each host before a restart.
_PROBE_SECONDS = 15.0
#: Seconds between two attempts to reach a host.
_RETRY_SECONDS = 10.0
_CLOSE_SECONDS = 2.0

#: (name of a host, its number of ranks) for each host of a start, in the order of ranks.
Assignment = Sequence[tuple[str, int]]


class _State(Enum):
    STARTING = "its agent is starting"
    READY = "its agent has answered"
    FAILED = "its agent could not be started, or has ended"


@dataclass
class _Member:
    """A host of the list of hosts, and its agent.

    Attributes:
        host: the host, with its current slots.
        folder: the name of its folders for commits.
        state: the state of its agent.
        connection: the connection to its agent; None without one.
        fit: whether the agent has answered that the host can take part.
        kept: whether the agent has made the folders for commits.
        folders: the paths of these folders. The next agent of the host keeps the same folders.
        deadline: the time until which its agent must answer.
        retry_at: the time of the next attempt to start an agent.
        problem: the last problem that was printed.
    """

    host: Host
    folder: str
    state: _State = _State.FAILED
    connection: Connection | None = None
    fit: bool = False
    kept: bool = False
    folders: Sequence[str] = ()
    deadline: float = float("inf")
    retry_at: float = 0.0
    problem: str = ""


@dataclass
class Members:
    """Watch the hosts in a thread. A context manager that ends the agents on exit.

    Attributes:
        discover: returns the current list of hosts. Its argument is a function that returns whether
            to end the search early.
        task: the fields of the `task` message, with which agents examine their hosts.
        settings: how to reach hosts.
        min_size: the smallest number of ranks.
        max_size: the largest number of ranks; None for all slots.
        excluded: returns whether a host is left out because of its failures.
        say: prints a message for the user.
    """

    discover: Callable[[Callable[[], bool]], Sequence[Host]]
    task: Message
    settings: Settings
    min_size: int
    max_size: int | None
    excluded: Callable[[str], bool]
    say: Callable[[str], None]
    _agents: AgentPool = field(init=False)
    _members: dict[str, _Member] = field(default_factory=dict)
    # The names on the list, the oldest first.
    _listed: list[str] = field(default_factory=list)
    _folders: dict[str, str] = field(default_factory=dict)
    _looked: bool = False
    _problem: str = ""
    _error: HvdkitError | None = None
    _current: Assignment = ()
    # The hosts that have the newest commit.
    _holders: frozenset[str] = frozenset()
    _version: int = 0
    _announced: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._agents = AgentPool(self.settings.ssh.silence)

    def __enter__(self) -> Self:
        self._agents.__enter__()
        self._thread = threading.Thread(target=self._watch, name="hvdkit-members", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            # The next agent of a host deletes the folders of an agent that was killed.
            self._changed.wait_for(lambda: not self._lacks_agent(), _PROBE_SECONDS)
        self._stop.set()
        self._thread.join()
        self._agents.__exit__(*exc)

    def _lacks_agent(self) -> bool:
        """Return whether the agent of a host has just been lost, and the next one starts."""
        return any(
            member.folders
            and (
                member.state is _State.STARTING
                or (member.connection is not None and member.connection.ended)
            )
            for member in self._members.values()
        )

    # For the supervisor

    def wait_for(self, size: int, timeout: float) -> Sequence[Host]:
        """Return the hosts that can take part, as soon as they have `size` slots.

        If none of these hosts has the newest commit, the first host that is returned has it. This
        host is not on the list any more. It is used with one rank, until the next commit.

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
                starting = any(m.state is _State.STARTING for m in self._on_list())
                starting = starting or self._removed_holder(usable, _State.STARTING) is not None
                if self._looked and not starting:
                    if total_slots(usable) >= size:
                        return self._with_commit(usable)
                    if not told:
                        self.say(
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
        """Ask all agents. The thread then drops the agents that do not answer in time.

        Args:
            committed: whether the hosts of the last start have the newest commit.
        """
        with self._changed:
            if committed:
                self._holders = frozenset(dict(self._current))
            for member in self._members.values():
                if member.state is _State.READY and member.connection is not None:
                    member.state = _State.STARTING
                    member.deadline = time.monotonic() + _PROBE_SECONDS
                    member.fit = False
                    member.connection.send("task", **self.task)

    def holders(self) -> frozenset[str]:
        """Return the names of the hosts that have the newest commit."""
        with self._changed:
            return self._holders

    def begin(self, plan: Plan) -> int:
        """Begin a start with `plan`. From now on, ranks are told if the hosts differ from the plan.

        Return the version of the list. A higher version tells ranks that the hosts have changed.
        """
        with self._changed:
            self._current = assignment_of(plan)
            # Two, because an announced change has the current version plus one.
            self._version += 2
            self._announced = self._version
            self._send_version()
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

    # The thread

    def _watch(self) -> None:
        try:
            self._watch_until_stopped()
        except Exception as error:
            with self._changed:
                self._error = HvdkitError(f"the hosts cannot be watched any more: {error!r}")
                self._changed.notify_all()
            raise

    def _watch_until_stopped(self) -> None:
        while not self._stop.is_set():
            self._look()
            next_look = time.monotonic() + _LOOK_SECONDS
            while (left := next_look - time.monotonic()) > 0 and not self._stop.is_set():
                event = self._agents.next_event(min(left, 0.1))
                with self._changed:
                    if event is not None:
                        self._handle(event.connection, event.message)
                    self._check_deadlines()
                    self._announce()
                    self._changed.notify_all()

    def _look(self) -> None:
        """Read the list of hosts, and start agents on new ones."""
        try:
            found = list(self.discover(self._stop.is_set))
        except HvdkitError as error:
            with self._changed:
                if not self._looked:
                    self._error = error
                elif str(error) != self._problem and not self._stop.is_set():
                    # This look at the list failed: keep the last list.
                    self.say(f"the hosts stay the same: {error}")
                self._problem = str(error)
                self._looked = True
            found = None
        local = {} if found is None else are_local([h for h in found if self._is_new(h)])
        with self._changed:
            if found is not None:
                self._problem = ""
                self._looked = True
                self._set_list(found, local)
            for member in self._on_list():
                due = time.monotonic() > member.retry_at
                if member.connection is None and due and not self._stop.is_set():
                    self._start_agent(member)

    def _is_new(self, host: Host) -> bool:
        member = self._members.get(host.name)
        return member is None or member.host.local is None

    def _set_list(self, found: Sequence[Host], local: Mapping[Host, bool]) -> None:
        hosts = {host.name: host for host in found}
        # The hosts of the current start come first, because they have commits. `fromkeys` removes
        # repetitions.
        names = dict.fromkeys([*dict(self._current), *self._listed, *hosts])
        self._listed = [name for name in names if name in hosts]
        for host in found:
            known = self._members.get(host.name)
            is_local = local[host] if known is None else known.host.local
            own = Host(host.name, host.slots, is_local)
            if known is not None:
                known.host = own
            else:
                # The next agent of a host gets the same folders.
                folder = self._folders.setdefault(host.name, uuid.uuid4().hex)
                self._members[host.name] = _Member(own, folder)
        ready = {m.host.name for m in self._on_list() if m.state is _State.READY}
        needed = frozenset() if ready & self._holders else self._holders
        for name in self._members.keys() - hosts.keys() - needed:
            if name not in dict(self._current):
                self._drop(self._members.pop(name))

    def _start_agent(self, member: _Member) -> None:
        host = member.host
        first = not member.problem
        try:
            self._agents.start({host: bool(host.local)}, self.settings.ssh, self.settings.python)
        except HvdkitError as error:
            self._fail(member, str(error))
            return
        member.connection = self._agents.connections[-1]
        # `wait_for` does not wait for a host that has failed. The host joins when it answers.
        member.state = _State.STARTING if first else _State.FAILED
        member.fit = member.kept = False
        limit = time.monotonic() + self.settings.timeouts.start
        member.deadline = min(member.deadline, limit)
        member.connection.send("task", **self.task)
        member.connection.send("keep", name=member.folder)

    def _handle(self, connection: Connection, message: Message) -> None:
        member = next((m for m in self._members.values() if m.connection is connection), None)
        if member is None:
            return
        match message["kind"]:
            case "hello":
                if problems := unfitness(message):
                    self._fail(member, "; ".join(problems))
                member.fit = not problems
            case "kept":
                member.kept, member.folders = True, message["folders"]
                connection.send("hosts", version=self._announced)
            case "failed":
                self._fail(member, message["reason"])
            case "lost":
                ready = member.state is _State.READY
                reason = connection.explain()
                self._fail(member, reason)
                if ready and member.host.name in self._listed:
                    # Perhaps only the agent was killed. Start another one, and wait for its answer.
                    member.problem, member.retry_at = "", 0.0
                    member.state = _State.STARTING
                    member.deadline = time.monotonic() + _PROBE_SECONDS
        if member.fit and member.kept and member.connection is not None:
            member.state, member.problem = _State.READY, ""
            member.deadline = float("inf")

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for member in self._members.values():
            if now > member.deadline:
                why = member.connection.explain() if member.connection else "its agent has ended"
                self._fail(member, f"it does not answer: {why}")

    def _fail(self, member: _Member, problem: str) -> None:
        if problem != member.problem and not self._stop.is_set():
            self.say(f"{member.host.name} cannot take part: {problem}")
        member.problem = problem or "it failed"
        member.retry_at = time.monotonic() + _RETRY_SECONDS
        self._drop(member)

    def _drop(self, member: _Member) -> None:
        """End the agent of a host."""
        member.state, member.fit, member.deadline = _State.FAILED, False, float("inf")
        connection, member.connection = member.connection, None
        if connection is not None:
            self._agents.connections.remove(connection)
            connection.close(_CLOSE_SECONDS)

    # Announcements

    def _announce(self) -> None:
        """Tell the ranks if a new start would use other hosts than the current start."""
        if not self._current:
            return
        usable = self._usable(also=_State.STARTING)
        # With too few slots, the ranks continue as long as their hosts permit.
        changed = total_slots(usable) >= self.min_size and self._assign(usable) != self._current
        version = self._version + int(changed)
        if version != self._announced:
            self._announced = version
            self._send_version()

    def _send_version(self) -> None:
        for member in self._members.values():
            if member.connection is not None:
                member.connection.send("hosts", version=self._announced)

    def _assign(self, hosts: Sequence[Host]) -> Assignment:
        left = total_slots(hosts) if self.max_size is None else self.max_size
        found = []
        for host in hosts:
            if count := min(host.slots, left):
                found.append((host.name, count))
                left -= count
        return found

    def _on_list(self) -> list[_Member]:
        return [self._members[name] for name in self._listed]

    def _usable(self, also: _State = _State.READY) -> list[Host]:
        """Return the hosts that can take part.

        Leave out the excluded hosts, unless the other hosts have fewer than `min_size` slots.

        Args:
            also: a state of agents in which hosts of the current start count as usable, too.
        """
        current = dict(self._current)
        usable = [
            member.host
            for member in self._on_list()
            if member.state is _State.READY
            or (member.state is also and member.host.name in current)
        ]
        good = [host for host in usable if not self.excluded(host.name)]
        return good if total_slots(good) >= self.min_size else usable

    def _removed_holder(self, usable: Sequence[Host], state: _State) -> Host | None:
        """Return a host that has the newest commit, but has left the list. Not an excluded one.

        Args:
            usable: the hosts that can take part. If one of them has the commit, return None.
            state: the state of the agent of the host.
        """
        # A copy of the commit needs a rank on a host of the list, too.
        if self.max_size == 1 or self._holders & {host.name for host in usable}:
            return None
        removed = sorted(self._holders - set(self._listed))
        found = (self._members.get(name) for name in removed if not self.excluded(name))
        return next((m.host for m in found if m is not None and m.state is state), None)

    def _with_commit(self, usable: Sequence[Host]) -> Sequence[Host]:
        holder = self._removed_holder(usable, _State.READY)
        if holder is None:
            return usable
        self.say(
            f"no host on the list has the last commit. {holder.name}, which has left the list, "
            f"takes part with 1 rank until the next commit"
        )
        return [replace(holder, slots=1), *usable]


def assignment_of(plan: Plan) -> Assignment:
    """Return the hosts of a plan, and their numbers of ranks."""
    return [(host.name, len(plan.on(host))) for host in plan.hosts]
