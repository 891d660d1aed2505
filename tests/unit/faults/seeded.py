"""Faults of one rank in a job of four, and what the launcher must say about each.

python -m tests.unit.faults.seeded            # runs all, and prints a table
python -m tests.unit.faults.seeded "sleeps"   # runs those whose names contain the text
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.unit.launch.commands import execute

_RANKS = 4
_SECONDS = 420.0
_PARALLEL = 2

#: The device of the tensors, such as `cuda`; the CPU by default.
DEVICE_VARIABLE = "HVDKIT_TEST_DEVICE"

SCRIPT = """\
import os, signal, socket, subprocess, sys, threading, time
me = int(next(os.environ[n] for n in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ))
at_fault = me == {rank}
if at_fault:
    {before_init}
import torch
import hvdkit.torch as hvd

torch.set_default_device(os.environ.get("HVDKIT_TEST_DEVICE", "cpu"))
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
hidden, steps, own, options = 64, 14, True, dict(bucket_bytes=20_000, check_interval=1)
if at_fault:
    {build}
layers = [torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 64), torch.nn.Linear(64, 64)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
{options}
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def fault():
    {fault}


for step in range(steps):
    optimizer.zero_grad()
    x = torch.rand(8, 64)
    if at_fault and step == 10:
        fault()
    loss = model(x).square().mean()
    if own:
        hvd.allreduce(loss.detach(), name="loss")
    {instead_of_backward}loss.backward()
    {instead_of_step}optimizer.step()
    time.sleep(0.05)
print("trained", flush=True)
"""

#: What the launcher says about a rank that does not call a collective.
STALL = r"Rank {rank} on \S+ has not called it: the rank is at "
IN_FAULT = STALL + r"\S*train\.py:\d+ in (fault|<lambda>|hook|__getitem__): "
_FAILED = r"rank {rank} on \S+ failed: "
EXIT_1 = _FAILED + r"exit status 1(.|\n)*"
_ENDED = r"Rank {rank} on \S+ had ended without an error|Rank {rank}\b.*the process has ended"


@dataclass(frozen=True)
class Case:
    """A fault of one rank.

    Attributes:
        name: what it is.
        says: a regular expression for what the launcher says, with `{rank}` for the rank.
        fault: code in step 10.
        before_init: code before `hvd.init()`.
        build: code before the model is made.
        options: code on all ranks before the optimizer is wrapped.
        instead_of_backward: code before `loss.backward()`, such as a condition.
        instead_of_step: code before `optimizer.step()`.
        arguments: additional arguments of `hvdkit run`.
        env: additional environment variables of the job.
        template: the training script, with places for the code above.
        ranks: the number of ranks.
    """

    name: str
    says: str
    fault: str = "pass"
    before_init: str = "pass"
    build: str = "pass"
    options: str = ""
    instead_of_backward: str = ""
    instead_of_step: str = ""
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    template: str = SCRIPT
    ranks: int = _RANKS

    def script(self, rank: int) -> str:
        """Return the training script in which `rank` has the fault."""

        def block(code: str, indent: str) -> str:
            return textwrap.indent(code, indent).strip()

        return self.template.format(
            rank=rank,
            before_init=block(self.before_init, "    "),
            build=block(self.build, "    "),
            options=self.options.replace("{rank}", str(rank)),
            fault=block(self.fault, "    "),
            instead_of_backward=self.instead_of_backward,
            instead_of_step=self.instead_of_step,
        )


ACCELERATE = """\
import time
import torch
from hvdkit.accelerate import HvdkitAccelerator

accelerator = HvdkitAccelerator(cpu=True)
at_fault = accelerator.process_index == {rank}


def fault():
    {fault}


for step in range(14):
    if at_fault and step == 10:
        fault()
    accelerator.gather(torch.ones(1))
print("trained", flush=True)
"""


def _mpi(case: Case) -> Case:
    return replace(case, name=f"{case.name} (MPI)", arguments=("--launcher", "mpi"))


_SLEEPS = Case("sleeps in its data", IN_FAULT, "time.sleep(100)")
_STOPPED = Case(
    "SIGSTOP", r"Rank {rank}\b.*the process is stopped", "os.kill(os.getpid(), signal.SIGSTOP)"
)
_KILLED = Case("SIGKILL", _FAILED + r"killed by signal 9", "os.kill(os.getpid(), signal.SIGKILL)")
_RAISES = Case("raises an exception", EXIT_1 + "no data", "raise ValueError('no data')")
_ENDS = Case("ends early with status 0", _ENDED, "sys.exit(0)")
_ALONE = Case(
    "calls a collective alone",
    r"Rank {rank} (on \S+ )?.*'only on one rank'(.|\n)*a deadlock",
    "hvd.allreduce(torch.ones(3), name='only on one rank')",
)
_WORKER = (
    "class Data(torch.utils.data.Dataset):\n"
    "    def __len__(self): return 1\n"
    "    def __getitem__(self, i): {}\n"
    "next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))"
)
_DIFFERS = r"Ranks differ in the allreduce 'loss': rank {rank} on \S+: allreduce of "
BIT = "on rank {rank} \\(host \\S+\\) differs in 1 of [\\d,]+ elements"

CASES: list[Case] = [
    _SLEEPS,
    Case("loops", IN_FAULT, "while True: pass"),
    Case("loops in C with the GIL held", IN_FAULT, "import re; re.match('(a+)+$', 'a' * 60 + 'b')"),
    Case("waits for a lock that it holds", IN_FAULT,
         "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    Case("waits for an event", IN_FAULT, "threading.Event().wait(100)"),
    Case("reads from a socket", IN_FAULT, "first, second = socket.socketpair(); first.recv(1)"),
    Case("waits for a program", IN_FAULT, "subprocess.run(['sleep', '100'])"),
    Case("waits for a queue", IN_FAULT, "import queue; queue.Queue().get()"),
    Case("opens a pipe without a writer", IN_FAULT, "os.mkfifo('pipe'); open('pipe')"),
    Case("waits for a file lock", IN_FAULT,
         "import fcntl\nfirst, second = open('lock', 'w'), open('lock', 'w')\n"
         "fcntl.flock(first, fcntl.LOCK_EX); fcntl.flock(second, fcntl.LOCK_EX)"),
    Case("waits for a worker of a slow DataLoader", IN_FAULT, _WORKER.format("time.sleep(100)")),
    Case("sleeps in a hook of the backward pass", IN_FAULT,
         "model[1].weight.register_hook(lambda gradient: time.sleep(100))"),
    Case("waits for a thread that never ends", IN_FAULT,
         "thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)\n"
         "thread.start(); thread.join()"),
    _STOPPED,
    _KILLED,
    _RAISES,
    _ENDS,
    _ALONE,
    Case("ends early with os._exit(0)", _ENDED, "os._exit(0)"),
    Case("ends early with status 3", _FAILED + r"exit status 3", "os._exit(3)"),
    Case("SIGSEGV", _FAILED + r"killed by signal 11", "os.kill(os.getpid(), signal.SIGSEGV)"),
    Case("aborts", _FAILED + r"killed by signal 6", "os.abort()"),
    Case("SIGTERM", _FAILED + r"killed by signal 15", "os.kill(os.getpid(), signal.SIGTERM)"),
    Case("allocates too much", EXIT_1 + "memory", "torch.empty(1 << 50)"),
    Case("recurses without end", EXIT_1 + "RecursionError", "fault()"),
    Case("has a limit of memory", _FAILED,
         "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"
         "x = bytearray(1 << 30)"),
    Case("reads a missing file", EXIT_1 + "FileNotFoundError", "open('missing')"),
    Case("raises in a hook of the backward pass", EXIT_1 + "in the hook",
         "def hook(gradient): raise ValueError('in the hook')\n"
         "model[1].weight.register_hook(hook)"),
    Case("raises in a worker of a DataLoader", EXIT_1 + "a broken sample",
         _WORKER.format("raise ValueError('a broken sample')")),
    Case("flips a bit of a weight", rf"after step 1\d: '1\.weight' {BIT}",
         "model[1].weight.data.view(torch.int32)[0, 0] ^= 1 << 30"),
    Case("flips a bit of a bias", rf"after step 1\d: '2\.bias' {BIT}",
         "model[2].bias.data.view(torch.int32)[3] ^= 1 << 28"),
    Case("flips a bit of the optimizer state",
         r"after step 1\d: .*momentum_buffer.* on rank {rank} ",
         "state = optimizer.state[model[0].weight]['momentum_buffer']\n"
         "state.view(torch.int32)[1, 1] ^= 1 << 29"),
    Case("changes its learning rate", r"rank {rank}: lr of parameter group 0 is 0\.5",
         "optimizer.param_groups[0]['lr'] = 0.5"),
    Case("changes its momentum", r"rank {rank}: momentum of parameter group 0 is 0\.5",
         "optimizer.param_groups[0]['momentum'] = 0.5"),
    Case("has NaN in its data", r"rank {rank}: .*'2\.bias'",
         "global model; model.register_forward_hook(lambda m, i, o: o * float('nan'))",
         options="options['on_nonfinite'] = 'raise'"),
    Case("has infinite gradients of one parameter", r"rank {rank}: '0\.weight'",
         "model[0].weight.register_hook(lambda gradient: gradient * float('inf'))",
         options="options['on_nonfinite'] = 'raise'"),
    Case("skips a backward pass and its step", r"Rank {rank} .*'loss'(.|\n)*a deadlock",
         instead_of_backward="if not (at_fault and step == 10): ",
         instead_of_step="if not (at_fault and step == 10): "),
    Case("skips a step", r"ranks are not in the same step.*rank {rank}: step 1\d",
         instead_of_step="if not (at_fault and step == 10): "),
    Case("shuts Horovod down",
         r"Rank {rank} on \S+ called hvd\.shutdown\(\) at \S*train\.py:\d+ in fault: hvd\.shutdown",
         "hvd.shutdown(); time.sleep(100)"),
    Case("does not add a process set",
         r"waited \d+ s for add_process_set(.|\n)*" + STALL + r".*time\.sleep",
         options="if at_fault: time.sleep(100)\nhvd.add_process_set([0, 1])",
         env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}),
    Case("broadcasts an object that it cannot pickle", r"rank {rank}: TypeError: cannot pickle",
         options="hvd.broadcast_object(threading.Lock(), root_rank={rank})"),
    Case("has fewer batches", _ENDED, "global steps; sys.exit(0) if step == 10 else None"),
    Case("sends another shape", _DIFFERS + "12 bytes",
         "hvd.allreduce(torch.ones(3), name='loss')"),
    Case("sends another dtype", _DIFFERS + r"\d bytes of int64",
         "hvd.allreduce(torch.tensor(1), name='loss')"),
    Case("calls another operation", r"Rank {rank} .*the allgather 'loss'",
         "hvd.allgather(torch.ones(1), name='loss')"),
    Case("sleeps before init", r"rank {rank} on \S+ did not register within 15 s",
         before_init="time.sleep(100)", arguments=("--start-timeout", "15")),
    Case("ends before init", r"rank {rank} on \S+ ended without registering within 15 s",
         before_init="sys.exit(0)", arguments=("--start-timeout", "15")),
    Case("raises before init", EXIT_1 + "no module", before_init="raise ImportError('no module')"),
    Case("dies before init", _FAILED + r"killed by signal 6", before_init="os.abort()"),
    Case("has a larger layer", r"rank {rank}\b.*0\.weight|0\.weight.*rank {rank}\b",
         build="hidden = 65"),
    Case("has another option", r"rank {rank}\b.*bucket|bucket.*rank {rank}\b",
         build="options['bucket_bytes'] = 10_000"),
    Case("has another wire format", r"rank {rank}\b.*fp16|fp16.*rank {rank}\b",
         build="options['compression'] = 'fp16'"),
    # The other ranks wait in the allreduce of the loss.
    Case("is slow in each step", r"rank {rank} on host \S+ is slow",
         "model.register_forward_pre_hook(lambda *_: time.sleep(0.3))",
         options="options['check_interval'] = 4; steps = 50"),
    Case("does not call torch.distributed",
         r"allreduce 'torch\.distributed\.all_gather(_into_tensor)?'(.|\n)*" + IN_FAULT,
         "time.sleep(100)", template=ACCELERATE, ranks=2),
    *map(_mpi, [_SLEEPS, _STOPPED, _KILLED, _RAISES, _ENDS, _ALONE]),
]  # fmt: skip

_ENV = {
    "HVDKIT_STALL_TIMEOUT": "5",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Outcome:
    """The launcher's output about a case.

    Attributes:
        case: the case.
        rank: the rank at fault.
        named: whether the launcher named it as expected.
        status: the exit status of the job.
        text: the launcher's output.
    """

    case: Case
    rank: int
    named: bool
    status: int
    text: str


def run(case: Case, rank: int, python: str = sys.executable) -> Outcome:
    """Run a job in which `rank` has the fault, with an interpreter for the launcher and ranks."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-seeded-") as name:
        script = Path(name) / "train.py"
        script.write_text(case.script(rank))
        words = ("-np", str(case.ranks), *case.arguments, "--output-dir", f"{name}/runs")
        env = dict(os.environ) | _ENV | {"TMPDIR": name} | case.env
        command = [python, "-m", "hvdkit", "run", *words, python, str(script)]
        done = execute(command, env=env, cwd=name, timeout=_SECONDS)
    text = done.stderr + done.stdout
    pattern = case.says.replace("{rank}", str(rank))
    return Outcome(case, rank, bool(re.search(pattern, text)), done.returncode, text)


def run_all(cases: Sequence[Case], wanted: str = "") -> Iterator[Outcome]:
    """Run the cases whose names contain a text, some at a time. Their ranks at fault take turns."""
    numbered = [(case, n % case.ranks) for n, case in enumerate(cases) if wanted in case.name]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        yield from pool.map(lambda each: run(*each), numbered)


def main(every: Sequence[Case]) -> int:
    """Print a table of those of the cases whose names contain the words of the command."""
    wanted = " ".join(sys.argv[1:])
    named = []
    for outcome in run_all(every, wanted):
        named.append(outcome.named)
        mark = "named" if outcome.named else "NOT NAMED"
        print(f"| {outcome.case.name} | {outcome.rank} | {mark} | {outcome.status} |")
        if not outcome.named or wanted:
            print(textwrap.indent(outcome.text[-3000:], "      "))
        sys.stdout.flush()
    print(f"named in {sum(named)} of {len(named)}")
    return int(not all(named))


if __name__ == "__main__":
    sys.exit(main(CASES))
