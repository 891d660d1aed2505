"""One host's part of a job: `python -m hvdkit.launch.agent`, started there by the launcher.

An agent reads messages (`messages`) from its standard input, starts its ranks, and sends their
output to the launcher. It ends the ranks when the launcher says so, when the launcher is gone (end
of input, or silence), or on SIGTERM or SIGHUP.

Where mpirun or srun starts the ranks, it starts an agent in place of each. Two variables tell such
an agent how to connect to our launcher. Its rank inherits the place that it was given.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import hvdkit
from hvdkit.errors import HvdkitError
from hvdkit.launch import binding, messages, open_files
from hvdkit.launch.messages import Message
from hvdkit.launch.network import own_interfaces, reached_address
from hvdkit.launch.output import Output
from hvdkit.processes import ProcessGroup, without_place

#: Seconds between SIGTERM and SIGKILL when nobody is there to say.
ORPHAN_GRACE = 10.0

_READ_BYTES = 65536
#: So much may wait to be sent before the ranks' output is left in their pipes.
_WAITING_BYTES = 1_000_000
_ENDING_POLL_SECONDS = 0.05
_STREAMS = ("stdout", "stderr")
#: Where Open MPI, Hydra and Slurm tell a process its rank. Slurm may have started mpirun.
_GIVEN_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class _Rank:
    """One rank's process and the pipes that it writes into."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.reported = False
        self.pipes: dict[int, str] = {}
        for stream, pipe in zip(_STREAMS, (process.stdout, process.stderr), strict=True):
            if pipe is not None:  # else it writes to the user's terminal
                os.set_blocking(pipe.fileno(), False)
                self.pipes[pipe.fileno()] = stream


class Agent:
    """Speaks with the launcher over two file descriptors, and looks after the ranks.

    Args:
        orders: what the launcher says is read from here.
        reports: what it is told is written here.
        placed: the ranks' place in the job stands in this process's environment already.
        terminal: the descriptors of the user's terminal (input, output, errors), for a rank that is
            to have it.
        own: what takes precedence over the launcher's `task` here, where a user started this agent
            by himself. It then also tells the launcher of signals, and waits for the outcome.
        echo: given the job's size, returns where the ranks' output is shown here too.

    Attributes:
        outcome: how the job ended, as the launcher says; None where it does not.
    """

    def __init__(
        self,
        orders: int,
        reports: int,
        placed: bool = False,
        terminal: Sequence[int] = (),
        own: Message | None = None,
        echo: Callable[[int], Output] | None = None,
    ) -> None:
        self.outcome: Message | None = None
        self._placed = placed
        self._terminal = terminal
        self._own = own
        self._make_echo = echo
        self._echo: Output | None = None
        self._orders = orders
        self._reports = reports
        os.set_blocking(orders, False)
        os.set_blocking(reports, False)
        self._lines = messages.Lines()
        self._waiting = bytearray(messages.GREETING)
        self._group = ProcessGroup()
        self._ranks: list[_Rank] = []
        self._task: Message = {}
        self._ending: Iterator[None] | None = None
        self._heard = time.monotonic()
        self._launcher_gone = False
        self._signals, self._wakeup = os.pipe()
        for end in (self._signals, self._wakeup):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until every process of the job has ended."""
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, _do_nothing)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            # A user's own `nohup` counts.
            if self._own is None or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._selector.register(self._orders, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        try:
            while not self._finished():
                self._step()
            while self._own is not None and self.outcome is None and not self._launcher_gone:
                self._step()
        finally:
            # Whatever went wrong up there: nothing of the job stays.
            for _ in self._group.ending(ORPHAN_GRACE):
                time.sleep(_ENDING_POLL_SECONDS)
        self._flush()

    def _step(self) -> None:
        self._watch_output()
        ready = self._selector.select(self._patience())
        if any(key.fd == self._orders for key, _ in ready):
            self._receive()
        # Now, because to show output may take as long as its reader likes.
        if time.monotonic() > self._heard + messages.LOST_SECONDS:
            self._lose_launcher()
        for key, _ in ready:
            if key.fd == self._orders:
                continue
            if key.fd == self._signals:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._signals, _READ_BYTES)
            elif key.fd != self._reports:
                self._forward(key.fd, key.data)
        self._send_waiting()
        self._note_ends()

    def _patience(self) -> float:
        if self._ending is not None:
            return _ENDING_POLL_SECONDS
        return messages.ALIVE_SECONDS

    def _finished(self) -> bool:
        """Take the next step of ending the processes; return True after the last one."""
        if self._ending is None:
            return False
        try:
            next(self._ending)
        except StopIteration:
            self._note_ends()
            self._send("done")
            return True
        except HvdkitError as error:
            self._send("failed", reason=str(error))
            return True
        return False

    def _end(self, grace: float) -> None:
        if self._ending is None:
            self._ending = self._group.ending(grace)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._own is not None:
            self._send("signal", number=number)
        elif self._task.get("passes_signals_on") and self._ranks and number != signal.SIGHUP:
            # A batch system may send it to the ranks' places and not to the launcher.
            self._pass_on(number)
        elif number in (signal.SIGTERM, signal.SIGHUP):
            self._end(ORPHAN_GRACE)
        # The others are the ranks' business, which the launcher passes on. They are not ignored,
        # because the ranks would inherit that.

    def _lose_launcher(self) -> None:
        """Nobody is there to speak to any more."""
        self._heard = float("inf")
        self._launcher_gone = True
        self._waiting.clear()
        self._end(ORPHAN_GRACE)

    # What the launcher says

    def _receive(self) -> None:
        try:
            data = os.read(self._orders, _READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._orders)
            self._lose_launcher()
            return
        self._heard = time.monotonic()
        for line in self._lines.feed(data):
            self._obey(messages.decode(line))

    def _obey(self, message: Message) -> None:
        match message["kind"]:
            case "task":
                self._task = message | (self._own or {})
                found = facts(self._task)
                if not _same_command(message["command"], self._task["command"]):
                    found["problems"].append(
                        f"its command is `{shlex.join(self._task['command'])}`, that of node 0 is "
                        f"`{shlex.join(message['command'])}`; give every node the same"
                    )
                self._send("hello", **found)
            case "ask":
                self._answer(message["question"], message["arguments"])
            case "start":
                open_files.allow(open_files.of_rank(message["size"]))
                if self._make_echo is not None:
                    self._echo = self._make_echo(message["size"])
                try:
                    for rank in message["ranks"]:
                        self._start(rank)
                except HvdkitError as error:
                    self._send("failed", reason=str(error))
                    self._end(0)
            case "signal":
                self._pass_on(message["number"])
            case "end":
                # Even while it ends already: the new grace may be shorter.
                self._ending = self._group.ending(message["grace"])
            case "outcome":
                self.outcome = self.outcome or message

    def _answer(self, question: str, arguments: Mapping[str, Any]) -> None:
        from hvdkit.launch import inspection  # what a start without questions need not load

        # Only asked before ranks are started, so nothing waits meanwhile.
        try:
            self._send("answer", answer=inspection.QUESTIONS[question](**arguments))
        except OSError as error:
            self._send("failed", reason=f"{question}: {error}")

    def _start(self, rank: Message) -> None:
        inherited = dict(os.environ) if self._placed else without_place(os.environ)
        pipes = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        stdin, stdout, stderr = self._terminal if rank["terminal"] else pipes
        process = self._group.start(
            self._task["command"],
            rank["defaults"] | inherited | rank["env"],
            self._task["directory"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            dies_with_us=True,
            cpus=rank["cpus"],
            # Hydra's ranks speak with it through a descriptor that they inherit.
            pass_fds=[int(os.environ["PMI_FD"])] if self._placed and "PMI_FD" in os.environ else [],
        )
        self._ranks.append(_Rank(rank["rank"], process))

    def _pass_on(self, number: int) -> None:
        """To the ranks' main processes only: their helpers must live on while they finish."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)

    # What the ranks write, and how they end

    def _watch_output(self) -> None:
        """Read the ranks' output only while the launcher takes it off our hands."""
        wanted = len(self._waiting) < _WAITING_BYTES
        watched = self._selector.get_map()
        for rank in self._ranks:
            for pipe in rank.pipes:
                if wanted and pipe not in watched:
                    self._selector.register(pipe, selectors.EVENT_READ, rank)
                elif not wanted and pipe in watched:
                    self._selector.unregister(pipe)
        if self._waiting and self._reports not in watched:
            self._selector.register(self._reports, selectors.EVENT_WRITE)
        elif not self._waiting and self._reports in watched:
            self._selector.unregister(self._reports)

    def _forward(self, pipe: int, rank: _Rank) -> bool:
        """Pass on what `rank` has written into `pipe`. False where there is nothing more now."""
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

    def _note_ends(self) -> None:
        for rank in self._ranks:
            if rank.reported or rank.process.poll() is None:
                continue
            rank.reported = True
            for pipe in list(rank.pipes):
                while self._forward(pipe, rank):
                    pass
            if self._echo is not None:
                self._echo.finish(rank.rank)
            self._send("ended", rank=rank.rank, status=rank.process.returncode)
        if self._ranks and all(rank.reported for rank in self._ranks):
            # Their own helpers may still be there.
            self._end(ORPHAN_GRACE)

    # What the launcher is told

    def _send(self, kind: str, **fields: Any) -> None:
        if not self._launcher_gone:
            self._waiting += messages.encode(kind, **fields)

    def _send_waiting(self) -> None:
        while self._waiting:
            try:
                sent = os.write(self._reports, self._waiting[:_READ_BYTES])
            except BlockingIOError:
                return
            except OSError:
                self._lose_launcher()
                return
            del self._waiting[:sent]

    def _flush(self) -> None:
        """Wait until the launcher has taken what is left, as long as it is there."""
        deadline = time.monotonic() + ORPHAN_GRACE
        while self._waiting and time.monotonic() < deadline:
            self._send_waiting()
            time.sleep(0.005)


def _same_command(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two nodes run the same, perhaps with Pythons at different places."""
    programs = [Path(command[0]).name for command in (first, second)]
    if all(program.startswith("python") for program in programs):
        return first[1:] == second[1:]
    return first == second


def facts(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about this host that the launcher needs before it starts anything."""
    # "client-address client-port own-address own-port"
    connection = os.environ.get("SSH_CONNECTION", "").split()
    interfaces = own_interfaces()
    return {
        "hvdkit": hvdkit.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "hostname": socket.gethostname(),
        "engine": engine_revision(),
        "cores": usable_cores(),
        "topology": binding.topology() if task.get("bind") else [],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interfaces": [asdict(interface) for interface in interfaces],
        "reached_at": (
            reached_address(connection[2], interfaces) if len(connection) == 4 else None
        ),
        "problems": problems(task["command"], task["directory"], task["path"], task["files"]),
    }


def engine_revision() -> int:
    """Return the revision of hvdkit's engine in this Python; 0 for another Horovod, or none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        revision = metadata.version("horovod").partition("+hvdkit.")[2].partition(".")[0]
        return int(revision) if revision.isdigit() else 0
    return 0


def problems(
    command: Sequence[str], directory: str, path: str | None, files: Sequence[str]
) -> list[str]:
    """Why this host cannot run `command`; empty where it can.

    Args:
        command: what the ranks are going to run.
        directory: where.
        path: the PATH that they get; None for this process's own.
        files: those of its arguments that are files where the launcher runs.
    """
    if not Path(directory).is_dir():
        return [f"no directory {directory}; every host must see the job's files there"]
    found = []
    program = command[0] if "/" not in command[0] else str(Path(directory, command[0]))
    if shutil.which(program, path=path) is None:
        found.append(f"no program {command[0]!r} on PATH; install it, or give its full path")
    found += [
        f"no file {name} in {directory}; copy it there, or share the directory"
        for name in files
        if not Path(directory, name).exists()
    ]
    return found


def usable_cores() -> int:
    """The cores that this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """That a signal has come is enough: it wakes the selector up."""


def main() -> None:
    address = os.environ.pop(messages.ADDRESS_VARIABLE, None)
    if address is not None:
        _come_to(address, os.environ.pop(messages.TOKEN_VARIABLE))
        return
    # Its own standard output is the launcher's line: what else is printed must not get in there.
    orders, reports = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    terminal = os.environ.pop(messages.TERMINAL_VARIABLE, "")
    descriptors = [int(text) for text in terminal.split(",") if text]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # only the rank that is to have it gets it
    Agent(orders, reports, terminal=descriptors).run()


def _come_to(address: str, token: str) -> None:
    """Serve the launcher that listens at `address`."""
    host, _, port = address.rpartition(":")
    rank = next(os.environ[name] for name in _GIVEN_RANK if name in os.environ)
    with socket.create_connection((host, int(port)), timeout=messages.LOST_SECONDS) as line:
        line.sendall(f"{token} {rank}\n".encode())
        # The selector takes a descriptor once, and this one is for both ways.
        reports = os.dup(line.fileno())
        Agent(line.fileno(), reports, placed=True).run()


if __name__ == "__main__":
    main()
