"""A job whose ranks are late at random: each verdict must name a rank that is late.

The ranks draw who sleeps, where and for how long. All of them continue, so that the time limit of
earlier stalls passes while the job trains.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch.commands import run as run_job

#: HVDKIT_STALL_TIMEOUT, and the time limit of a stall. Both in seconds.
TIMEOUT, LIMIT = 4, 15
RANKS, STEPS = 3, 40

SCRIPT = """\
import random, sys, time
import torch
import hvdkit.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
draw = random.Random(int(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), check_interval=5
)


def nap(place):
    if place == where and rank == hvd.rank() and seconds:
        print("rank", rank, "sleeps for", seconds, flush=True)
        time.sleep(seconds)


for step in range(int(sys.argv[2])):
    rank = draw.randrange(hvd.size())
    seconds = draw.choice([0, 0, 0, 0, 0, 1, 3, 5, 9])
    where = draw.choice(["before", "between", "after"])
    nap("before")
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    nap("between")
    optimizer.step()
    nap("after")
    if step % 5 == 0:
        hvd.allreduce(loss.detach(), name="loss")
    time.sleep(draw.choice([0, 0.01, 0.3]))
"""

_SLEEPS = re.compile(r"rank (\d+) sleeps for (\d+)$")
_MISSING = re.compile(r"Rank (\d+) on \S+ has not called it: the rank is at (.*)")


@dataclass
class Outcome:
    """A job with late ranks.

    Attributes:
        status: the exit status of the launcher.
        text: the output.
        sleeps: the number of sleeps that are longer than `TIMEOUT`.
        named: the number of verdicts that name ranks in such a sleep, or just after it.
        wrong: the launcher's other messages.
    """

    status: int
    text: str
    sleeps: int = 0
    named: int = 0
    wrong: list[str] = field(default_factory=list)


def run(folder: Path, seed: int) -> Outcome:
    """Run a job in a folder."""
    (folder / "train.py").write_text(SCRIPT)
    limits = {"HVDKIT_STALL_TIMEOUT": TIMEOUT, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": LIMIT}
    given = [f"-x{name}={value}" for name, value in limits.items()]
    words = ("-np", RANKS, *given, sys.executable, folder / "train.py", seed, STEPS)
    streams = {"capture_output": False, "stdout": -1, "stderr": subprocess.STDOUT}
    done = run_job(*words, timeout=600, **streams)
    outcome = Outcome(done.returncode, done.stdout)
    asleep: dict[str, int] = {}
    last = ""
    # A message of the launcher, or a line of a rank.
    for message in re.split(r"\n(?=hvdkit run: |\[\d+\] )", done.stdout):
        if match := _SLEEPS.search(message):
            last, asleep[match[1]] = match[1], int(match[2])
            outcome.sleeps += asleep[last] > TIMEOUT
        elif message.startswith("hvdkit run: "):
            # The rank that has slept last may have just continued.
            is_right = [
                asleep.get(rank, 0) > TIMEOUT and (rank == last or " in nap:" in place)
                for rank, place in _MISSING.findall(message)
            ]
            if is_right and all(is_right):
                outcome.named += 1
            else:
                outcome.wrong.append(message)
    return outcome
