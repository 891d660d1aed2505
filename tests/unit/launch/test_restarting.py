"""`hvdkit run --restarts`."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import psutil
import pytest

from hvdkit.errors import RESUMABLE, HvdkitError
from hvdkit.launch.agent.spares.spare import same_for_imports
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.reachability import best_connected
from hvdkit.launch.control.restarting import RestartedJob
from hvdkit.launch.control.start_error import BrokenConnection, StartError
from hvdkit.launch.ending.failure import Failure
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host, read_hostfile
from hvdkit.system.processes import GROUP_VARIABLE
from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.launch.commands import SAID, run, started, wait_until
from tests.without_dynamo import WITHOUT_DYNAMO

DONE, FAILED = Outcome(0), Outcome(1, restartable=True)
SAVED = Outcome(1, restartable=True, saved=True)
NO_ROUTE = HvdkitError("host1: no route to host")


def hosts(text):
    """Return hosts such as `0:2 1:2`, which are named host0 and host1."""
    named = (word.split(":") for word in text.split())
    return [Host(f"host{number}", int(slots)) for number, slots in named]


ALL = "0:2 1:2"
THREE = hosts(f"{ALL} 2:2")


def failed(*suspects):
    """Return the outcome of a job in which one of these ranks has caused a failure."""
    failure = Failure(suspects[0], 1)
    return Outcome(1, failure=failure, restartable=True, saved=True, suspects=suspects)


def lost(outcome=FAILED, host="host1"):
    return replace(outcome, lost=(host,))


def not_started(*names, torch=None, broken=()):
    versions = {} if torch is None else {"torch": torch}
    found = [BrokenConnection(*pair, "10.0.0.9", "?") for pair in broken]
    return StartError("", names, versions, found)


def broken(*pairs):
    """Return the outcome of a job after which connections between these hosts fail."""
    named = (("the launcher" if n == "L" else f"host{n}" for n in pair) for pair in pairs)
    return replace(SAVED, broken=tuple(BrokenConnection(*pair, "10.0.0.9", "?") for pair in named))


def supervise(outcomes, restarts=2, hosts=THREE[:2], min_size=4, lost=(), **options):
    """Run a job with the given outcomes. Return the outcome, the plans' hosts, texts and pauses."""
    left, plans, pauses = list(outcomes), [], []
    SAID.clear()

    def start(plan, variables):
        assert variables is None
        plans.append(" ".join(f"{host.name[4:]}:{len(plan.on(host))}" for host in plan.hosts))
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def plan_for(given, size):
        return make_plan(["true"], "/", given, size)

    job = RestartedJob(
        start=start,
        make_plan=plan_for,
        hosts=hosts if callable(hosts) else lambda: hosts,
        answering=lambda given: [host for host in given if host.name not in lost],
        first=plan_for(THREE[:2], 4),
        min_size=min_size,
        restarts=restarts,
        pause=pauses.append,
        **options,
    )
    outcome = job.run()
    assert not left
    return outcome, plans, [*SAID], pauses


LEFT_OUT = "left out, because the job failed there 2 times: host1"
UNFIT = "left out, because of a failed start: host2"
UNREACHED = "left out, because connections to other hosts fail"
AGENT_FAILED = replace(FAILED, failed_agents=("host1",))
ALL_RANKS = failed(3, 0, 1, 2)
OTHER_ORDER = hosts("1:2 0:2")
TWO_VERSIONS = not_started(torch={"host0": "2.5", "host1": "2.6"})


@pytest.mark.parametrize(
    ("outcomes", "options", "status", "plans", "text"),
    [
        ([FAILED, DONE], {}, 0, [ALL] * 2, "restart 1 of 2"),
        ([FAILED] * 3, {}, 1, [ALL] * 3, "the job failed 3 times in a row without a new checkpoin"),
        # Each checkpoint permits all restarts again.
        ([FAILED, FAILED, SAVED, FAILED, DONE], {}, 0, [ALL] * 5, "restart 2 of 2"),
        # A host that does not answer, or was lost; an idle host takes its place.
        ([FAILED, DONE], {"min_size": 2, "lost": ["host0"]}, 0, [ALL, "1:2"], "2 ranks instead of"),
        ([lost(), DONE], {"hosts": THREE}, 0, [ALL, "0:2 2:2"], "left out"),
        ([failed(3)] * 2 + [DONE], {"hosts": THREE}, 0, [ALL, ALL, "0:2 2:2"], LEFT_OUT),
        ([failed(3)] * 2 + [DONE], {"hosts": THREE, "lost": ["host2"]}, 0, [ALL] * 3, LEFT_OUT),
        # An idle host is not examined without need.
        ([FAILED, DONE], {"hosts": THREE, "lost": ["host1"]}, 0, [ALL] * 2, "restart 1 of 2"),
        # Two failures on a host, of ranks or of the agent; but not of all ranks.
        ([failed(3)] * 2 + [DONE], {"min_size": 2}, 0, [ALL, ALL, "0:2"], LEFT_OUT),
        ([AGENT_FAILED] * 2 + [DONE], {"min_size": 2}, 0, [ALL, ALL, "0:2"], LEFT_OUT),
        ([ALL_RANKS] * 2 + [DONE], {"min_size": 2}, 0, [ALL] * 3, "restart"),
        # The host that the rank had in that start: the hostfile has changed.
        ([FAILED, failed(0), failed(0), DONE], {"hosts": OTHER_ORDER, "min_size": 2, "restarts": 3},
         0, [ALL, "1:2 0:2", "1:2 0:2", "0:2"], LEFT_OUT),
        # Too few hosts use up the restarts, and a start that fails is tried again.
        ([FAILED], {"min_size": 3, "lost": ["host0"]}, 1, [ALL], "have 2 slots: expected at least"),
        ([FAILED, NO_ROUTE, DONE], {}, 0, [ALL] * 3, "host1: no route to host"),
        ([FAILED, NO_ROUTE], {"hosts_return": False}, 1, [ALL] * 2, "host1: no route to host"),
        # A host with which two starts fail is left out for the rest of the job.
        ([SAVED, not_started("host2"), SAVED, not_started("host2"), SAVED, DONE],
         {"hosts": hosts("0:2 2:2 3:2")}, 0,
         [ALL, "0:2 2:2", "0:2 3:2", "0:2 2:2", "0:2 3:2", "0:2 3:2"],
         "left out, because the job failed there 2 times: host2"),
        # No host is left out at random.
        ([FAILED, TWO_VERSIONS, DONE], {"min_size": 2}, 0, [ALL] * 3,
         "no host is left out because of its version of torch"),
        ([FAILED, not_started("host0", "host1"), DONE], {"min_size": 2}, 0, [ALL] * 3, "restart"),
        # In an allocation. Slurm sends SIGTERM before it takes a node away.
        ([FAILED, lost()], {"requeue": True}, RESUMABLE, [ALL] * 2, "the allocation has lost a"),
        ([lost(Outcome(143))], {"requeue": True}, RESUMABLE, [ALL], "the allocation has lost a"),
        ([lost(DONE)], {"requeue": True}, 0, [ALL], ""),
        # Of two hosts that do not reach each other, rank 0 stays where its checkpoints may be.
        ([broken("01", "10"), DONE], {"hosts": hosts("0:1 1:1 2:1"), "min_size": 2}, 0,
         [ALL, "0:1 2:1"], UNREACHED),
        ([broken("01", "20"), DONE], {"hosts": hosts("0:1 1:1 2:1"), "min_size": 2}, 0,
         [ALL, "1:1 2:1"], UNREACHED),
        ([broken("1L"), DONE], {"hosts": hosts("0:1 1:1 2:1"), "min_size": 2}, 0,
         [ALL, "0:1 2:1"], UNREACHED),
        ([broken("01", "12", "20"), DONE], {"hosts": hosts("0:1 1:1 2:1"), "min_size": 2}, 0,
         [ALL, "0:1 1:1 2:1"], "restart"),
        # Hosts with many slots are kept, maybe one without the others.
        ([broken("01"), DONE], {"hosts": hosts("0:1 1:2"), "min_size": 2}, 0,
         [ALL, "1:2"], UNREACHED),
        ([broken("01", "20"), DONE], {"hosts": hosts("0:4 1:1 2:1"), "min_size": 2}, 0,
         [ALL, "0:4"], UNREACHED),
        ([broken("10", "1L"), DONE], {"hosts": hosts("0:1 1:8 2:1"), "min_size": 2}, 0,
         [ALL, "0:1 2:1"], UNREACHED),
    ],
)  # fmt: skip
def test_restarts(outcomes, options, status, plans, text):
    outcome, made, texts, _ = supervise(outcomes, **options)
    assert (outcome.status, made) == (status, plans)
    assert any(text in each for each in texts) or not text
    left_out = any("left out" in each and "no host" not in each for each in texts)
    assert left_out == text.startswith("left out")


def test_there_is_a_pause_after_a_restart_without_progress():
    assert supervise([FAILED, DONE])[3] == []
    assert supervise([FAILED] * 3)[3] == [1.0]


@pytest.mark.parametrize("outcome", [Outcome(75), Outcome(143), DONE])
def test_a_job_that_was_stopped_is_not_restarted(outcome):
    assert supervise([outcome])[0] == outcome


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_stop_signal_that_prevents_a_restart(number, status):
    """The status is that of the same signal in the pause before a restart."""
    stopped = replace(FAILED, interrupted=number)
    outcome, _, texts, pauses = supervise([FAILED, stopped])
    assert (outcome.status, outcome.restartable) == (status, False)
    assert texts[-1].startswith(f"no restart after {number.name}. The job ends with status")
    # Nothing may have been saved, and the commits of an elastic job end with it.
    assert texts[-1].endswith("from its last checkpoint on disk") == (status == 75)
    assert pauses == []
    # Without the signal, the job would have ended, too.
    assert supervise([FAILED, FAILED, stopped])[0].status == 1


@pytest.mark.parametrize(
    "error",
    [
        not_started("host2"),
        # The version of the host where ranks ran before is right.
        not_started(torch={"host0": "2.5", "host2": "2.6"}),
        not_started(broken=[("host0", "host2")]),
    ],
    ids=["silent", "version", "connection"],
)
@pytest.mark.parametrize("hosts_return", [True, False])
def test_a_new_host_with_which_a_start_fails_is_left_out(error, hosts_return):
    outcome, plans, texts, _ = supervise(
        [lost(), error, FAILED, DONE], 3, hosts("2:3 0:2 3:2"), hosts_return=hosts_return
    )
    assert outcome.status == 0
    assert plans[1:] == ["2:3 0:1", *["0:2 3:2"] * 2]
    assert texts.count(UNFIT) == 2


def test_the_reason_of_a_failure():
    report = "rank 1 had ended.\nThen rank 0 failed.\nRank 0's last lines:\n  Error"
    outcome = Outcome(1, report, Failure(0, 1), possible_causes="rank 1 had ended.")
    assert outcome.reason == "rank 1 had ended. Then rank 0 failed."
    begin, host = "1 of 2 hosts cannot take part; nothing was started.", "host1: it has no server"
    assert Outcome(1, f"{begin}\n  {host}").reason == f"{begin} {host}"


def test_a_hostfile_that_is_being_written_does_not_end_the_job(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("host0 slots=")
    outcome, plans, texts, _ = supervise([FAILED, DONE], hosts=lambda: read_hostfile(file))
    assert (outcome.status, plans) == (0, [ALL] * 2)
    assert texts[1].startswith(f"the hosts stay the same: {file}, line 1: 'slots=': expected a num")


def test_the_first_start_raises():
    with pytest.raises(HvdkitError, match="no route"):
        supervise([NO_ROUTE])
    assert not supervise([FAILED, NO_ROUTE], hosts_return=False)[0].restartable


def test_a_partition_of_many_hosts_is_found_at_once():
    many = [Host(f"host{n}", 1) for n in range(400)]
    pairs = [(f"host{a}", f"host{b}") for a in range(200) for b in range(200, 220)]
    started_at = time.process_time()
    left, _ = best_connected(many, [BrokenConnection(*pair, "10.0.0.9", "?") for pair in pairs])
    assert [host.name for host in left] == [f"host{n}" for n in (*range(200), *range(220, 400))]
    assert time.process_time() < started_at + 5


# Real jobs

TRAIN = """
import os, signal
import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
with hvd.Checkpointer("checkpoints", model=model, optimizer=optimizer) as checkpointer:
    restored = checkpointer.restore()
    step = restored.step if restored else 0
    print("from", step, flush=True)
    while step < 12:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        model(torch.rand(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        step += 1
        if step % 2 == 0:
            checkpointer.save(step)
            checkpointer.wait()
        if hvd.rank() == 1 and step in {kills} and not os.path.exists(f"killed{{step}}"):
            open(f"killed{{step}}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
if hvd.rank() == 0:
    print("weights", model.weight.detach().numpy().tobytes().hex(), flush=True)
"""

WAIT_FOR = """
import time

def wait_for(name):
    if not os.path.exists(name):
        print("waiting", os.getpid(), flush=True)
    while not os.path.exists(name):
        time.sleep(0.05)

hvd.init()
"""


def script(folder, kills=(), before="", points=()):
    """Write train.py into a folder. At each of `points`, a step, it waits for the file `go`."""
    folder.mkdir(exist_ok=True)
    text = TRAIN.format(kills=list(kills))
    if points:
        waits = f"step += 1; step in {points} and wait_for('go')"
        text = text.replace("hvd.init()", WAIT_FOR).replace("step += 1", waits)
    (folder / "train.py").write_text(before + text)


def weights_of(done):
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "weights" in line]


@pytest.fixture
def environment():
    """The environment without PWD, which names the folder of the tests."""
    return {name: value for name, value in os.environ.items() if name != "PWD"}


def train(folder, environment, kills=()):
    """Train in a folder. Return the end of the launcher, and the steps at which rank 0 began."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    script(folder, kills, before=WITHOUT_DYNAMO)
    # Spares import PyTorch, which takes long.
    options = ("-np", "2", "--restarts", "1", "--no-spares", "train.py")
    done = run(*options, cwd=folder, env=environment)
    begun = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[0] from")]
    return done, begun


def test_a_restart_has_the_variables_that_its_spares_have_read(tmp_path):
    """A spare is started before the restart, so its variables are those of the first start."""
    (tmp_path / "fail.py").write_text(
        "import json, os, sys, time\n"
        "from pathlib import Path\n"
        "def draft(n): return Path(f'rank{n}-{len(list(Path().glob(f\"rank{n}-*\")))}')\n"
        "draft(os.environ['HOROVOD_RANK']).write_text(json.dumps(dict(os.environ)))\n"
        "while len(list(Path().glob('rank*'))) % 2: time.sleep(0.01)\n"
        "sys.exit(1)\n"
    )
    done = run("-np", "2", "--restarts", "1", sys.executable, "fail.py", cwd=tmp_path)
    for rank in range(2):
        # The agent sets GROUP_VARIABLE in each process that it starts.
        first, second = (
            json.loads((tmp_path / f"rank{rank}-{start}").read_text()) | {GROUP_VARIABLE: ""}
            for start in range(2)
        )
        assert first != second, done.stderr
        assert same_for_imports(second, first)


def _is_spare(process):
    try:
        return "HVDKIT_SPARE" in process.environ()
    except psutil.Error:  # it has ended
        return False


def _idle(processes):
    """Return whether processes wait: an interpreter that waits uses no processor."""
    before = [process.cpu_times()[:2] for process in processes]
    if any(process.status() != psutil.STATUS_SLEEPING for process in processes):
        return False
    time.sleep(2)
    return before == [process.cpu_times()[:2] for process in processes]


@pytest.mark.long
def test_spares_become_ranks(tmp_path, environment):
    """Rank 1 kills itself once both spares are ready."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    # Without WITHOUT_DYNAMO: a spare gives up if the script has replaced a module of PyTorch.
    loaded = "import os, sys\nprint('loaded', 'torch' in sys.modules, flush=True)\nimport torch\n"
    script(tmp_path, kills=[3], before=loaded, points=[3])
    options = ("-np", "2", "--restarts", "1", "train.py")
    with started(*options, cwd=tmp_path, stderr=None, env=environment) as job:
        lines = iter(job.stdout.readline, "")
        next(line for line in lines if "waiting" in line)
        (agent,) = psutil.Process(job.pid).children()

        def both_spares():
            found = [each for each in agent.children(recursive=True) if _is_spare(each)]
            return found if len(found) == 2 else []

        spares = wait_until(both_spares, seconds=120)
        wait_until(lambda: _idle(spares), seconds=120)
        (tmp_path / "go").touch()
        rest = [line for line in lines if "loaded" in line]
        assert job.wait(timeout=600) == 0
    assert sorted(rest) == ["[0] loaded True\n", "[1] loaded True\n"]
    assert not any(spare.is_running() for spare in spares)


@pytest.mark.parametrize(
    ("options", "saved"), [((), "checkpoint"), (("--elastic",), "commit or checkpoint")]
)
def test_a_job_that_always_fails_ends_with_the_first_reason(tmp_path, options, saved, environment):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "if os.path.exists('failed'):\n    sys.exit('the same again')\n"
        "open('failed', 'w').close()\nraise ValueError('bad sample 17')\n"
    )
    words = (*options, "-np", "1", "--restarts", "1", "script.py")
    done = run(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"hvdkit run: the job failed 2 times in a row without a new {saved}, and ends "
        "(--restarts). The first failure: rank 0 on localhost failed: exit status 1. ValueError: "
        "bad sample 17"
    )


def test_a_killed_job_ends_with_the_weights_of_an_undisturbed_one(tmp_path, environment):
    done, begun = train(tmp_path / "killed", environment, kills=[3])
    assert done.stderr.count("killed by signal 9") == 1
    assert begun == ["0", "2"]
    undisturbed, _ = train(tmp_path / "whole", environment)
    assert len(weights_of(done)) == 1
    assert weights_of(done) == weights_of(undisturbed)
