"""One job with some faults, compared with a job that nothing has disturbed."""

from __future__ import annotations

import glob
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.checkpoint.store import Store
from hvdkit.errors import HvdkitError
from hvdkit.faults.command import why
from tests.search.chaos import faults, surroundings
from tests.search.chaos.faults import Fault
from tests.search.chaos.job import Job, lines_of
from tests.search.chaos.settings import ELASTIC, Setting
from tests.search.chaos.world import World, wait_until

#: Within this time after a fault, a job must train again or end, on a machine where a job starts in
#: the second time. On a slower machine it has twice the difference more.
LIMIT_SECONDS, START_SECONDS = 60.0, 5.0
#: Seconds after which a job without progress counts as hanging.
_HANG_SECONDS = 150.0
_REFERENCE_SECONDS = 300.0
#: The passes of one process after a fault that show that the job trains again.
_PASSES = 3
_LEFT_SECONDS = 25.0
#: A fault at the start comes within this time after it. Other faults come after up to so many
#: passes, or at the next save.
_EARLY_SECONDS, _PASSES_BEFORE, _SAVE_SECONDS = 4.0, 12, 5.0
#: The time that a fault may wait for the restart after the one before it.
_RESTART_SECONDS = 8.0
#: How many faults come together, and how often.
_BURSTS = {1: 3, 2: 3, 3: 3, 4: 2, 6: 1}
#: A report of the launcher that a rank was killed.
_KILLED = re.compile(r"rank (\d+) on \S+ failed: killed by signal")
#: The accuracy of a job that has changed its size may differ by this much.
_ACCURACY = 0.15
#: Temporary files of killed processes of TensorFlow, PyTorch and Open MPI.
_OF_OTHERS = re.compile(r"__autograph_generated|^tmp|^ompi|^prte|^pmix|torch|pymp-|^hvd\d")

#: What a fault has led to.
UNAFFECTED = "continued"
RESTARTED = "restarted by the launcher"
STOPPED = "ended with an error, started again"
RELAUNCHED = "launcher killed, started again"
NOTHING = "came too late"
_AT_START = "at the start"

ALL: list[type[Fault]] = [*faults.FAULTS, *surroundings.FAULTS]


@dataclass
class Event:
    """A fault, and what it has led to.

    Attributes:
        fault: its name.
        outcome: one of the constants of this module, for the burst of this fault.
        seconds: the time from the end of the fault to the next pass of the training.
        named: whether the launcher has named the cause of the burst; None if it need not.
        moment: when it was injected, such as "at the start".
        burst: the number of the burst.
        text: what the launcher said.
    """

    fault: str
    outcome: str
    seconds: float
    named: bool | None
    moment: str
    burst: int
    text: str = ""


@dataclass
class _Injected:
    """A fault of the current burst.

    Attributes:
        fault: the fault.
        moment: as of `Event`.
        ends: the time at which it is lifted.
        lifted: whether it was.
    """

    fault: Fault
    moment: str
    ends: float
    lifted: bool = False


@dataclass
class Result:
    """A job with faults.

    Attributes:
        setting: the job.
        events: its faults.
        problems: what was wrong.
        sizes: the numbers of ranks that it has had.
    """

    setting: Setting
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)


class References:
    """Undisturbed jobs, each run once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[Setting, Job] = {}
        self._start_seconds = START_SECONDS

    @property
    def limit(self) -> float:
        """The seconds in which a job must train again after a fault."""
        return LIMIT_SECONDS + 2 * max(0.0, self._start_seconds - START_SECONDS)

    def get(self, setting: Setting) -> Job:
        """Return the undisturbed job of a setting."""
        key = setting.undisturbed
        if key not in self._jobs:
            job = Job(key, self._world, saves=False)
            began = time.monotonic()
            job.start()
            wait_until(lambda: job.passes() or job.status() is not None, _REFERENCE_SECONDS)
            self._start_seconds = time.monotonic() - began
            if not wait_until(lambda: job.status() is not None, _REFERENCE_SECONDS):
                job.kill()
            if job.status() != 0:
                raise RuntimeError(f"the undisturbed job failed: {job.said()}")
            self._jobs[key] = job
        return self._jobs[key]


class Trial:
    """Run one job with faults.

    Args:
        setting: the job.
        most: the largest number of faults.
        world: where it runs.
        references: the undisturbed jobs.
        draw: the random numbers.
        only: the names of faults; empty for all.
        gap: the longest time between the faults of a burst; None for single faults.
        record: called with each event.
    """

    def __init__(
        self,
        setting: Setting,
        most: float,
        world: World,
        references: References,
        draw: random.Random,
        only: Sequence[str] = (),
        gap: float | None = 1.5,
        record: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._record = record
        self._most = most
        self._reference = references.get(setting)
        self._limit = references.limit
        self._before = _temporary(world)
        self.job = Job(setting, world)
        self._world = world
        self._draw = draw
        self._gap = gap
        self._kinds = [
            kind for kind in ALL if kind.possible(self.job) and (not only or kind.name in only)
        ]
        self.result = Result(setting)
        self._bursts = 0
        # The time at which the user starts the command again; None while it should run.
        self._start_at: float | None = None

    def run(self) -> Result:
        """Run the job and its faults, and check it."""
        try:
            self.job.start()
            trains = True
            while trains and not self.job.finished() and len(self.result.events) < self._most:
                trains = self._burst()
            # Also after other problems, such as a name that is missing.
            if trains and self._run_to_the_end():
                self._check()
        finally:
            self.job.kill()
        return self.result

    def _burst(self) -> bool:
        """Inject some faults, and wait until the job trains again. False after a problem."""
        job = self.job
        self._bursts += 1
        moment = self._wait_for_the_moment()
        if moment is None:
            return False
        if job.finished():
            return True
        said = len(job.errors.read_bytes())
        before, commands = job.alive(), job.commands
        newest, resumed = self._newest_step(), len(job.resumed())
        earlier = set(job.ended_starts())
        injected = self._inject(moment)
        relaunched = any(each.fault.relaunch for each in injected)
        passes, lifted = len(job.passes()), time.monotonic()
        # The ranks of a killed launcher still train for a moment.
        old = {start.pid for start in before.values()} if relaunched else set()
        trains = self._wait(lambda: self._trains(passes, old))
        times = [at for pid, at in job.passes()[passes:] if pid not in old]
        trained_at = times[0] if times else time.monotonic()
        # Without the output of ranks.
        text = re.sub(r"^\[\d+\].*\n", "", job.said(said), flags=re.MULTILINE)
        after = {start.pid for start in job.starts()[-1:]}
        if not injected or (job.finished() and not text):
            outcome = NOTHING
        elif relaunched:
            outcome = RELAUNCHED
        elif job.commands > commands:
            outcome = STOPPED
        elif after & {start.pid for start in before.values()} or (not before and not text):
            outcome = UNAFFECTED
        else:
            outcome = RESTARTED
        names = [name for each in injected for name in each.fault.names]
        named = self._named(names, outcome, text)
        kinds = " + ".join(each.fault.name for each in injected)
        if outcome != NOTHING:
            for each in injected:
                seconds = max(0.0, trained_at - each.ends)
                moment = each.moment
                event = Event(each.fault.name, outcome, seconds, named, moment, self._bursts, text)
                self.result.events.append(event)
                self._record(event)
        seconds = max(0.0, trained_at - lifted)
        if not trains:
            self._problem(f"{kinds}: no progress {seconds:.0f} s after it", text)
        elif seconds > self._limit:
            self._problem(f"{kinds}: {seconds:.0f} s until the job trained again", text)
        from_steps = job.resumed()[resumed:]
        damaged = any(each.fault.damages for each in injected)
        if not damaged and any(step < newest for step in from_steps):
            self._problem(f"{kinds}: resumed from {from_steps}, and step {newest} was saved")
        if named is False:
            self._problem(f"{kinds}: expected one of {names}", text)
        explained = [self._why(start) for start in job.ended_starts() if start not in earlier]
        if named and explained and not any(re.search(n, t) for n in names for t in explained):
            self._problem(f"{kinds}: hvdkit why has none of {names}", "\n---\n".join(explained))
        blamed = {int(rank) for rank in _KILLED.findall(text)}
        killed = {rank for each in injected for rank in each.fault.killed}
        if injected and job.setting.min_ranks is None and not blamed <= killed:
            self._problem(f"{kinds}: ranks {blamed - killed} are said to be killed", text)
        return trains

    def _inject(self, moment: str) -> list[_Injected]:
        """Inject the faults of a burst, and return those that have happened, all lifted."""
        count = 1
        if self._gap is not None:
            count = self._draw.choices(list(_BURSTS), list(_BURSTS.values()))[0]
        count = int(min(count, self._most - len(self.result.events)))
        kinds, done = list(self._kinds), []
        for number in range(count):
            if number:
                moment = self._wait_between(done)
            if self.job.finished() or not kinds:
                break
            kind = self._draw.choices(kinds, [kind.weight for kind in kinds])[0]
            if moment == _AT_START and not kind.early:
                continue
            # Two faults of a kind with a duration would end each other.
            if kind.lift is not Fault.lift:
                kinds.remove(kind)
            fault = kind(self._draw, self.job)
            if not fault.inject():
                continue
            done.append(_Injected(fault, moment, time.monotonic() + fault.seconds))
            if fault.relaunch:
                self._start_at = time.monotonic() + self._draw.choice([0.0, 0.0, 0.5, 2.0])
        while not all(each.lifted for each in done) or self._start_at is not None:
            self._tend(done)
        return done

    def _tend(self, injected: Sequence[_Injected]) -> None:
        """Lift the faults whose time is over, and start the command again if it has ended."""
        time.sleep(0.02)
        now = time.monotonic()
        for each in injected:
            if not each.lifted and now > each.ends:
                each.fault.lift()
                each.lifted = True
        if self._start_at is None and not self.job.finished() and self.job.status() is not None:
            self._start_at = now
        # The commands of other nodes may run for some time after that of node 0.
        if self._start_at is not None and now > self._start_at and self.job.status() is not None:
            self._start_at = None
            self.job.start()

    def _wait_between(self, injected: Sequence[_Injected]) -> str:
        """Wait for the moment of the next fault of a burst: some time, or the next restart."""
        assert self._gap is not None
        starts, began = len(self.job.starts()), time.monotonic()
        until = began + self._draw.uniform(0, self._gap)
        moment = f"{until - began:.1f} s after the fault before it"
        in_restart = self._draw.random() < 0.3
        while in_restart and time.monotonic() < began + _RESTART_SECONDS:
            self._tend(injected)
            if len(self.job.starts()) > starts:
                moment = "during the restart"
                until = time.monotonic() + self._draw.uniform(0, 2 * self._gap)
                break
        while time.monotonic() < until:
            self._tend(injected)
        return moment

    def _why(self, start: Path) -> str:
        """Return what `hvdkit why` says about a start."""
        try:
            return why(start)
        except HvdkitError as error:
            return str(error)

    def _named(self, names: Sequence[str], outcome: str, text: str) -> bool | None:
        """Return whether the launcher has named the cause; None if there was nothing to name."""
        own = re.sub(r"^hvdkit run: mpirun: .*\n?", "", text, flags=re.MULTILINE)
        if outcome == NOTHING or (outcome == UNAFFECTED and not own.strip()):
            return None
        if not names and outcome == UNAFFECTED:
            # Other programs may delay a rank so much that the launcher reports it.
            return None
        found = any(re.search(pattern, text) for pattern in names)
        # The launcher was killed, maybe before it could say anything.
        return True if found else None if outcome == RELAUNCHED else False

    def _problem(self, problem: str, text: str = "") -> None:
        shown = "".join(f"\n      {line}" for line in text.splitlines()[-40:])
        self.result.problems.append(f"{problem}{shown}")

    def _wait_for_the_moment(self) -> str | None:
        """Wait until the job starts, saves or has trained for a while. None after a problem."""
        if self._bursts == 1 and self._draw.random() < 0.5:
            time.sleep(self._draw.uniform(0, _EARLY_SECONDS))
            return _AT_START
        passes = len(self.job.passes())
        wanted = self._draw.randrange(0, _PASSES_BEFORE)
        if not self._wait(lambda: len(self.job.passes()) > passes + wanted):
            self._problem("no progress before the next fault", self.job.said()[-3000:])
            return None
        if self.job.setting.store == "folder" and self._draw.random() < 0.3:
            pattern = f"{self.job.checkpoints}/.writing*"
            if wait_until(lambda: bool(glob.glob(pattern)), _SAVE_SECONDS, 0.001):
                return "during a save"
        time.sleep(self._draw.uniform(0, 0.2))
        return "while it trained"

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition or the end of the job. Start the command again if it fails."""

        def look() -> bool:
            if condition() or self.job.finished():
                return True
            if self.job.status() is not None:
                self.job.start()
            return False

        return wait_until(look, _HANG_SECONDS)

    def _trains(self, passes: int, old: set[int]) -> bool:
        """Return whether a process not in `old` has trained since the given number of passes."""
        new = [done for done in self.job.passes()[passes:] if done[0] not in old]
        return len(new) >= _PASSES and len({pid for pid, _ in new[-_PASSES:]}) == 1

    def _run_to_the_end(self) -> bool:
        if not self._wait(lambda: False):
            self._problem("the job did not end", self.job.said()[-3000:])
            return False
        return True

    # What must be true at the end

    def _check(self) -> None:
        self.result.sizes = {start.size for start in self.job.starts()}
        if self.result.sizes == {self.job.setting.ranks}:
            self._check_bits()
        else:
            self._check_accuracy()
        self._check_steps()
        self._check_left()

    def _check_bits(self) -> None:
        out, expected = self.job.out, self._reference.out
        for rank in range(self.job.setting.ranks):
            if _content(out / f"final.{rank}") != _content(expected / f"final.{rank}"):
                self._problem(f"rank {rank}: weights or optimizer state differ")
            of_reference = {line[1]: line[3] for line in lines_of(expected / f"losses.{rank}")}
            losses = [(line[1], line[3]) for line in lines_of(out / f"losses.{rank}")]
            differ = [line for line in losses if of_reference.get(line[0]) != line[1]]
            if differ:
                self._problem(f"rank {rank}: {len(differ)} losses differ, the first in {differ[0]}")
            if of_reference.keys() != dict(losses).keys():
                self._problem(f"rank {rank}: other passes")

    def _check_accuracy(self) -> None:
        found, expected = (
            float((job.out / "accuracy.0").read_text()) for job in (self.job, self._reference)
        )
        if found < expected - _ACCURACY:
            self._problem(f"accuracy {found}: expected about {expected}")

    def _newest_step(self) -> int:
        """Return the newest saved step; 0 without one, or if that is not known.

        For an elastic job, return the last committed step if it is older: the commit counts.
        """
        if self.job.setting.store != "folder" or not os.path.isdir(self.job.checkpoints):
            return 0
        steps = Store(self.job.checkpoints).steps()
        newest = steps[-1].step if steps else 0
        return min(newest, self.job.committed) if self.job.setting.started == ELASTIC else newest

    def _check_steps(self) -> None:
        """Check that all steps are whole, and that nothing else is left of a save."""
        if self.job.setting.store != "folder":
            return
        store = Store(self.job.checkpoints)
        for info in store.steps():
            for problem in store.verify(info.step):
                self._problem(f"{info.location}: {problem.file}: {problem.reason}")
        left = [name for name in os.listdir(self.job.checkpoints) if name.startswith(".writing")]
        if left:
            self._problem(f"left in the folder of checkpoints: {left}")

    def _check_left(self) -> None:
        if not wait_until(lambda: not self.job.left(), _LEFT_SECONDS, 0.5):
            self._problem(f"processes are left: {self.job.left()}")
        new = _temporary(self._world) - self._before
        if new:
            self._problem(f"temporary files are left: {sorted(new)}")


def _temporary(world: World) -> set[str]:
    """Return the names of files in TMPDIR and in /dev/shm that are not other programs'."""
    names = {path.name for path in world.temporary.iterdir()}
    if os.geteuid() == 0:  # otherwise other programs use the same /dev/shm
        names |= {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not _OF_OTHERS.search(name)}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
