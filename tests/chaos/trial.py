"""One job with some faults, compared with a job that nothing has disturbed."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.checkpoint.store import Store
from tests.chaos import faults, surroundings
from tests.chaos.faults import Fault
from tests.chaos.job import Job, lines_of
from tests.chaos.settings import Setting
from tests.chaos.world import World, wait_until

#: Within this time after a fault, a job must train again or end, on a machine where a job starts in
#: the second time. On a slower machine it has twice the difference more.
LIMIT_SECONDS, START_SECONDS = 60.0, 5.0
#: Seconds after which a job without progress counts as hanging.
_HANG_SECONDS = 150.0
_REFERENCE_SECONDS = 300.0
#: The passes of one process after a fault that show that the job trains again.
_PASSES = 3
_LEFT_SECONDS = 25.0
#: Half of the faults are injected within this time after a start, the others after some steps.
_EARLY_SECONDS = 4.0
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

ALL: list[type[Fault]] = [*faults.FAULTS, *surroundings.FAULTS]


@dataclass
class Event:
    """A fault, and what it has led to.

    Attributes:
        fault: its name.
        outcome: one of the constants of this module.
        seconds: the time from the end of the fault until the job trained again.
        named: whether the launcher has named the cause; None if it need not.
        early: whether the fault was injected while the ranks started.
        text: what the launcher said.
    """

    fault: str
    outcome: str
    seconds: float
    named: bool | None
    early: bool
    text: str = ""


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
        count: the number of faults.
        world: where it runs.
        references: the undisturbed jobs.
        draw: the random numbers.
        only: the names of faults; empty for all.
    """

    def __init__(
        self,
        setting: Setting,
        count: int,
        world: World,
        references: References,
        draw: random.Random,
        only: Sequence[str] = (),
    ) -> None:
        self._count = count
        self._reference = references.get(setting)
        self._limit = references.limit
        self._before = _temporary(world)
        self.job = Job(setting, world)
        self._world = world
        self._draw = draw
        self._kinds = [
            kind for kind in ALL if kind.possible(self.job) and (not only or kind.name in only)
        ]
        self.result = Result(setting)

    def run(self) -> Result:
        """Run the job and its faults, and check it."""
        try:
            self.job.start()
            for _ in range(self._count):
                if self.job.finished() or not self._one_fault():
                    break
            if not self.result.problems and self._run_to_the_end():
                self._check()
        finally:
            self.job.kill()
        return self.result

    def _one_fault(self) -> bool:
        """Inject a fault, and wait until the job trains again. False after a problem."""
        kind = self._draw.choices(self._kinds, [kind.weight for kind in self._kinds])[0]
        fault = kind(self._draw, self.job)
        early = fault.early and self._draw.random() < 0.4
        if not self._wait_for_the_moment(early):
            return False
        if self.job.finished():
            return True
        said = len(self.job.errors.read_bytes())
        before = self.job.alive()
        commands = self.job.commands
        newest, resumed = self._newest_step(), len(self.job.resumed())
        began = time.monotonic()
        happened = fault.inject()
        self._keep_running(began + fault.seconds)
        if happened:
            fault.lift()
        if fault.relaunch and happened:
            self.job.start()
        passes, lifted = len(self.job.passes()), time.monotonic()
        # The ranks of a killed launcher still train for a moment.
        old = {start.pid for start in before.values()} if fault.relaunch else set()
        trains = self._wait(lambda: self._trains(passes, old))
        seconds = time.monotonic() - lifted
        text = self.job.said(said)
        after = {start.pid for start in self.job.starts()[-1:]}
        if not happened or (self.job.finished() and not text):
            outcome = NOTHING
        elif fault.relaunch:
            outcome = RELAUNCHED
        elif self.job.commands > commands:
            outcome = STOPPED
        elif after & {start.pid for start in before.values()}:
            outcome = UNAFFECTED
        else:
            outcome = RESTARTED
        event = Event(fault.name, outcome, seconds, self._named(fault, outcome, text), early, text)
        if outcome != NOTHING:
            self.result.events.append(event)
        if not trains:
            self._problem(f"{fault.name}: no progress {seconds:.0f} s after it", text)
        elif seconds > self._limit:
            self._problem(f"{fault.name}: {seconds:.0f} s until the job trained again", text)
        from_steps = self.job.resumed()[resumed:]
        if not fault.damages and any(step < newest for step in from_steps):
            self._problem(f"{fault.name}: resumed from {from_steps}, and step {newest} was saved")
        if event.named is False:
            self._problem(f"{fault.name}: expected one of {fault.names}", text)
        return trains

    def _named(self, fault: Fault, outcome: str, text: str) -> bool | None:
        """Return whether the launcher has named the cause; None if there was nothing to name."""
        if outcome in (NOTHING, RELAUNCHED) or (outcome == UNAFFECTED and not text.strip()):
            return None
        if not fault.names:
            return outcome == UNAFFECTED or None
        return any(re.search(pattern, text) for pattern in fault.names)

    def _problem(self, problem: str, text: str = "") -> None:
        shown = "".join(f"\n      {line}" for line in text.splitlines()[-40:])
        self.result.problems.append(f"{problem}{shown}")

    def _wait_for_the_moment(self, early: bool) -> bool:
        """Wait until the job has started, or has trained for a while."""
        if early:
            time.sleep(self._draw.uniform(0, _EARLY_SECONDS))
            return True
        passes = len(self.job.passes())
        wanted = self._draw.randrange(0, 20)
        if not self._wait(lambda: len(self.job.passes()) > passes + wanted):
            self._problem("no progress before the next fault", self.job.said()[-3000:])
            return False
        time.sleep(self._draw.uniform(0, 0.2))
        return True

    def _keep_running(self, until: float) -> None:
        while time.monotonic() < until:
            time.sleep(0.02)

    def _wait(self, condition) -> bool:
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
        """Return the newest saved step; 0 without one, or if that is not known."""
        if self.job.setting.store != "folder" or not os.path.isdir(self.job.checkpoints):
            return 0
        steps = Store(self.job.checkpoints).steps()
        return steps[-1].step if steps else 0

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
