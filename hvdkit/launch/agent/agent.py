"""The agent of a host: start the ranks of the host, and watch them.

The launcher starts an agent on each host, here or over ssh. The agent reads messages (`messages`)
from its launcher, starts its ranks, and sends their output to the launcher. The agent ends
the ranks when the launcher asks for it, and when the launcher is lost (end of input, or no
heartbeat). On SIGTERM or SIGHUP, the agent asks its ranks to stop, tells the launcher, and ends
after the ranks. If the task says `stay`, the agent waits for the next start after all ranks have
ended by themselves or at the launcher's request.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import selectors
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

from hvdkit.errors import HvdkitError
from hvdkit.exit_statuses import CRASHES, signal_of
from hvdkit.launch.agent import open_files
from hvdkit.launch.agent.echo import Echo
from hvdkit.launch.agent.host_facts import facts
from hvdkit.launch.agent.host_folders import HostFolders
from hvdkit.launch.agent.keeper import ORPHAN_GRACE, adopt_orphans
from hvdkit.launch.agent.launcher_link import LauncherLink
from hvdkit.launch.agent.local_ranks import LocalRanks, RankProcess
from hvdkit.launch.agent.spares.pool import SparePool
from hvdkit.launch.control import messages
from hvdkit.launch.control.messages import Message
from hvdkit.runtime import host_folders
from hvdkit.system import process_limit
from hvdkit.system.processes import without_rank_variables
from hvdkit.system.signals import STOP_SIGNALS

_READ_BYTES = 65536
_ENDING_POLL_SECONDS = 0.05
# Seconds between two looks for new records of the ranks.
_RECORDS_SECONDS = 1.0


class Agent:
    """Start and watch the ranks of this host, on request of the launcher.

    Args:
        received: the stream with the launcher's messages.
        sent: the stream for messages to the launcher; it may be the same.
        terminal: the descriptors of the user's terminal (input, output, errors), for the rank that
            gets it.
        job: as for `RecordFolder`.
    """

    #: Whether the agent answers heartbeats, so that the launcher notices if it is stopped.
    answers: ClassVar[bool] = True

    def __init__(
        self,
        received: io.RawIOBase,
        sent: io.RawIOBase,
        terminal: Sequence[int] = (),
        job: str = "",
    ) -> None:
        self._link = LauncherLink(received, sent)
        self._send = self._link.send
        self._echo: Echo | None = None
        if self.answers:
            self._send("alive")
        self._terminal, self._job = terminal, job
        self._records_at = 0.0
        self._folders: HostFolders | None = None
        self._task: Message = {}
        self._ranks = self._new_ranks(SparePool())
        # When the ranks get SIGKILL, and the steps that end them.
        self._ending: tuple[float, Iterator[None]] | None = None
        # Whether `done` was sent, and no other start follows.
        self._done = False
        self._signals, self._wakeup = os.pipe()
        for end in (self._signals, self._wakeup):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()

    def _inherited(self) -> tuple[Mapping[str, str], Sequence[int]]:
        """Return the environment and the descriptors that ranks inherit."""
        return without_rank_variables(os.environ), ()

    def _new_ranks(self, spares: SparePool, ranks: Sequence[Message] = ()) -> LocalRanks:
        environment, descriptors = self._inherited()
        if self._folders is not None:
            environment = {**environment, **host_folders.variables(self._folders.paths)}
        return LocalRanks(
            ranks, self._task, environment, descriptors, self._terminal, self._job, spares
        )

    def run(self) -> None:
        """Handle messages until every process of the job on this host has ended."""
        self._adopt_orphans()
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, _do_nothing)
        # A batch system may send it to all processes, for scripts that handle it.
        signal.signal(signal.SIGUSR2, _do_nothing)
        for number in self._handled():
            signal.signal(number, self._on_signal)
        self._selector.register(self._link.receive_fd, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        try:
            while not self._finished():
                self._step()
            while self._waits_for_launcher():
                self._step()
        finally:
            # Also after an exception, no process of the job may remain. `_finished` has reported a
            # process that SIGKILL does not end.
            with contextlib.suppress(HvdkitError):
                self._ranks.end()
        if self._folders is not None:
            if self._link.lost or not self._folders.has_commits:
                self._folders.remove()
            else:
                # After an exception, or the launcher's message `end`, the successor of this agent
                # finds the commits.
                self._folders.leave()
        self._link.flush(ORPHAN_GRACE)
        self._link.close()
        if self._echo is not None:
            self._echo.close()

    def _adopt_orphans(self) -> None:
        adopt_orphans()

    def _handled(self) -> Sequence[int]:
        """Return the stop signals that this process handles."""
        return STOP_SIGNALS

    def _step(self) -> None:
        self._select_pipes()
        ending = self._ending is not None and not self._done
        poll = _ENDING_POLL_SECONDS if ending else _RECORDS_SECONDS
        ready = self._selector.select(poll)
        self._link.note_step(time.monotonic())
        if any(key.fd == self._link.receive_fd for key, _ in ready):
            self._receive()
        # Check this before output is forwarded, which may take some time.
        limit = self._task.get("lost_after", messages.LOST_SECONDS)
        if self._link.is_silent(limit):
            self._explain(f"no message from the launcher for {limit:g} s")
            self._on_launcher_lost()
        for key, _ in ready:
            if key.fd == self._link.receive_fd:
                continue
            if key.fd == self._signals:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._signals, _READ_BYTES)
            elif key.data is not None:
                self._forward(key.fd, key.data)
        if self._echo is not None:
            self._echo.step()
        if time.monotonic() > self._records_at + _RECORDS_SECONDS:
            self._records_at = time.monotonic()
            self._send_news(with_records=self._link.may_send)
            for rank in self._ranks.all:
                rank.memory.look()
        self._send_pending()
        self._report_ends()

    def _finished(self) -> bool:
        """Take the next step of ending the processes; return True after the last one."""
        if self._ending is None:
            return False
        try:
            next(self._ending[1])
        except StopIteration:
            self._report_ends()
            # The ranks' helper processes may have written since the ends of the ranks.
            for rank in self._ranks.all:
                self._drain(rank)
            # Before `done`, because this agent may be killed after it.
            self._close_ranks()
            self._send("done", stays=self._stays)
            self._done = not self._stays
            if self._stays:
                self._ending = None
            return self._done
        except HvdkitError as error:
            self._send("failed", reason=str(error))
            # At once: `LocalRanks.end` waits for the same processes again.
            self._send_pending()
            return True
        return False

    def _waits_for_launcher(self) -> bool:
        """Return whether to stay connected, although no process of the job is left here."""
        # The last messages must not be lost if the network is slow.
        return self._done and self._link.unsent and not self._link.lost

    def _close_ranks(self) -> None:
        """Delete the folders of the ranks, which have ended, and forget the ranks."""
        pipes = {pipe for rank in self._ranks.all for pipe in rank.pipes}
        for pipe in pipes & set(self._selector.get_map()):
            self._selector.unregister(pipe)
        self._ranks.close()
        self._ranks = self._new_ranks(self._ranks.spares)

    def _end(self, grace: float) -> None:
        if self._ending is None:
            self._ending = time.monotonic() + grace, self._terminated(grace)

    def _terminated(self, grace: float) -> Iterator[None]:
        # A generator, which reads `_ranks` at its first step: a signal handler may call `_end`
        # while ranks are started.
        yield from self._ranks.terminate(grace)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._task.get("forward_signals") and self._ranks.all and number != signal.SIGHUP:
            # A batch system may send the signal only to the tasks that it started.
            self._ranks.signal(number)
        elif number in (signal.SIGTERM, signal.SIGHUP):
            self._task = {**self._task, "stay": False}
            if not self._ranks.all:
                self._explain(f"got {signal.Signals(number).name}")
            has_commits = self._folders is not None and self._folders.has_commits
            if self._ending is None and (self._ranks.all or has_commits):
                # The launcher decides how long the ranks may save, and whether another agent needs
                # the commits. Ranks may not handle SIGHUP.
                self._ranks.signal(signal.SIGTERM)
                self._send("signalled", number=number)
            else:
                self._end(ORPHAN_GRACE)
        # Otherwise do nothing: the launcher forwards the signal. Ignoring the signal instead would
        # not work, because ranks would inherit that.

    def _explain(self, reason: str) -> None:
        """Write why this agent ends. The launcher shows the last line."""
        with contextlib.suppress(OSError):
            os.write(2, f"{reason}\n".encode())

    def _on_launcher_lost(self) -> None:
        self._link.lose()
        self._end(ORPHAN_GRACE)

    # Messages from the launcher

    def _receive(self) -> None:
        try:
            for message in self._link.receive():
                self._handle(message)
        except EOFError:
            self._selector.unregister(self._link.receive_fd)
            self._on_launcher_lost()

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "task":
                self._task = message
                self._send("hello", **facts(message))
            case "ask":
                self._answer(message["question"], message["arguments"])
            case "start":
                open_files.raise_limit(open_files.needed_by_rank(message["size"]))
                if self._echo is not None:
                    self._echo.start(message["size"])
                try:
                    if self._task.get("steps") and self._folders is None:
                        with contextlib.suppress(OSError):  # the ranks keep no steps
                            self._folders = HostFolders()
                    with process_limit.explained():
                        self._ranks = self._new_ranks(self._ranks.spares, message["ranks"])
                        self._ranks.start(self._report_alive)
                except (HvdkitError, OSError) as error:  # OSError: no folder for records
                    self._send("failed", reason=str(error))
                    self._end(0)
            case "signal":
                self._ranks.signal(message["number"])
            case "end" if self._ranks.all or not self._stays:
                # After a second Ctrl-C, the new grace is shorter. Further ones must not prolong it.
                if self._ending and time.monotonic() + message["grace"] < self._ending[0]:
                    self._ending = None
                self._end(message["grace"])
            case "record" if self._ranks.all:
                self._ranks.records.request()
                self._send("states", states=self._ranks.states())
            case "shutdown" if self._ranks.all:
                self._ranks.records.write_note(message["rank"], message["content"])
            case "heartbeat":
                self._report_alive()
            case "read":
                self._link.note_read(message["bytes"])
            case "keep":
                self._keep(message["name"])
            case "hosts" if self._folders is not None:
                self._folders.announce(message["version"])

    def _report_alive(self) -> None:
        if self.answers:
            self._send("alive")
            self._send_pending()

    def _answer(self, question: str, arguments: Mapping[str, Any]) -> None:
        from hvdkit.launch.agent import inspection  # slow to import, and rarely needed

        # This blocks. The launcher asks only while no ranks run.
        try:
            with process_limit.explained():
                answer = inspection.QUESTIONS[question](**arguments)
            self._send("answer", answer=answer)
        except HvdkitError as error:
            self._send("failed", reason=str(error))
        except OSError as error:
            self._send("failed", reason=f"{question}: {error}")

    def _keep(self, name: str) -> None:
        """Make the folders for the commits of an elastic job."""
        try:
            self._folders = HostFolders(name)
        except OSError as error:
            self._send("failed", reason=f"no folder for commits: {error}")
            return
        self._send("kept", folders=[str(path) for path in self._folders.paths])

    # Output and ends of the ranks

    def _select_pipes(self) -> None:
        """Watch the ranks' pipes only while the launcher and the terminal take their output."""
        wanted = self._link.may_send
        if self._echo is not None and self._echo.full:
            wanted = False
        watched = self._selector.get_map()
        for rank in self._ranks.all:
            for pipe in rank.pipes:
                if wanted and pipe not in watched:
                    self._selector.register(pipe, selectors.EVENT_READ, rank)
                elif not wanted and pipe in watched:
                    self._selector.unregister(pipe)
        writing = {self._link.send_fd} if self._link.unsent else set()
        if self._echo is not None:
            writing.update(self._echo.waiting)
        before = {key.fd for key in watched.values() if key.events == selectors.EVENT_WRITE}
        for descriptor in writing - before:
            self._selector.register(descriptor, selectors.EVENT_WRITE)
        for descriptor in before - writing:
            self._selector.unregister(descriptor)

    def _forward(self, pipe: int, rank: RankProcess) -> bool:
        """Send a piece of a rank's output to the launcher. False if the pipe is empty now."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            del rank.pipes[pipe]
            return False
        if self._echo is not None:
            self._echo.write(rank.rank, rank.pipes[pipe], data)
        text = messages.as_text(data)
        self._send("output", rank=rank.rank, stream=rank.pipes[pipe], text=text)
        return True

    def _send_news(self, with_records: bool = True) -> None:
        if with_records:
            for text in self._ranks.records.changed():
                self._send("record", text=text)
        for rank, content in self._ranks.records.changed_notes():
            self._send("shutdown", rank=rank, content=content)
        for rank, age, report in self._ranks.records.reports():
            self._send("report", rank=rank, age=age, report=report)
        if self._ranks.records.saved():
            self._send("saved")
        if self._ranks.records.committed():
            self._send("committed")
        if self._folders is not None:
            self._folders.announce_pending()
        if self._ranks.all and self._ending is None:
            self._ranks.spares.step(self._ranks.records.path)

    def _report_ends(self) -> None:
        for rank in self._ranks.all:
            if rank.reported or rank.process.poll() is None:
                continue
            rank.reported = True
            status = rank.process.returncode
            end = {"rank": rank.rank, "status": status}
            # At once: if a rank over MPI is killed, Slurm kills its agent milliseconds later.
            self._send("exited", **end)
            self._send_pending()
            # A shell whose child is killed ends with the second status.
            killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
            if killed and self._ending is None and (hint := rank.memory.explain()):
                end["hint"] = hint
            # Not after another end: a process that the rank has forked may have crashed.
            crashed = signal_of(status) in CRASHES
            if crashed and (stack := self._ranks.records.crash(rank.rank)):
                end["stack"] = stack
            self._send_news()
            self._drain(rank)
            self._send("ended", **end)
            self._send_pending()
        if self._ranks.all and all(rank.reported for rank in self._ranks.all):
            # The ranks' helper processes may still run.
            self._end(ORPHAN_GRACE)

    def _drain(self, rank: RankProcess) -> None:
        """Send the output that is in the pipes of a rank that has ended."""
        # Not until the pipe is empty: another process of the rank may write all the time.
        for pipe in list(rank.pipes):
            capacity = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
            for _ in range(capacity // _READ_BYTES + 1):
                if not self._forward(pipe, rank):
                    break
        if self._echo is not None:
            self._echo.finish(rank.rank)

    @property
    def _stays(self) -> bool:
        """Whether the agent waits for another start after the ranks have ended."""
        return bool(self._task.get("stay")) and not self._link.lost

    def _send_pending(self) -> None:
        if not self._link.send_pending():
            self._on_launcher_lost()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal that only wakes the selector."""
