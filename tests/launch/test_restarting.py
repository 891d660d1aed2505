"""`hvdkit run --restarts`."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from hvdkit.errors import RESUMABLE, HvdkitError
from hvdkit.launch.failure import Failure
from hvdkit.launch.hosts import Host, read_hostfile
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import make_plan
from hvdkit.launch.reachability import BrokenConnection, best_connected
from hvdkit.launch.restarting import Supervisor
from hvdkit.launch.spares.spare import same_for_imports
from hvdkit.launch.start_error import StartError
from hvdkit.processes import GROUP_VARIABLE
from tests.parallel.rank_pool import Configuration, skip_where_unsupported
from tests.without_dynamo import WITHOUT_DYNAMO

HOSTS = [Host("host0", 2), Host("host1", 2)]
FAILED = Outcome(1, restartable=True)
SAVED = Outcome(1, restartable=True, saved=True)


def failed(*suspects):
    """Return the outcome of a job in which one of these ranks has caused a failure."""
    failure = Failure(suspects[0], 1)
    return Outcome(1, failure=failure, restartable=True, saved=True, suspects=suspects)


def supervise(outcomes, restarts=2, hosts=HOSTS, min_size=4, lost=(), **options):
    """Run a job with the given outcomes. Return the outcome, the plans' hosts, texts and pauses."""
    left = list(outcomes)
    plans, texts, pauses = [], [], []

    def start(plan):
        plans.append([f"{host.name}:{len(plan.on(host))}" for host in plan.hosts])
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def plan_for(given, size):
        return make_plan(["true"], "/", given, size)

    supervisor = Supervisor(
        start,
        plan_for,
        hosts if callable(hosts) else lambda: hosts,
        lambda given: [host for host in given if host.name not in lost],
        size=4,
        min_size=min_size,
        restarts=restarts,
        say=texts.append,
        pause=pauses.append,
        **options,
    )
    outcome = supervisor.run(plan_for(HOSTS, 4))
    assert not left
    return outcome, plans, texts, pauses


def test_a_job_that_fails_is_restarted():
    outcome, plans, texts, pauses = supervise([FAILED, Outcome(0)])
    assert outcome.status == 0
    assert plans == [["host0:2", "host1:2"]] * 2
    assert texts == ["restart 1 of 2"]
    assert pauses == []


def test_a_job_without_progress_ends():
    outcome, _, texts, pauses = supervise([FAILED, FAILED, FAILED])
    assert outcome.status == 1
    assert texts[-1].startswith("the job failed 3 times in a row without a new checkpoint")
    assert pauses == [1.0]


def test_each_checkpoint_permits_all_restarts_again():
    outcome, *_ = supervise([FAILED, FAILED, SAVED, FAILED, Outcome(0)])
    assert outcome.status == 0


@pytest.mark.parametrize("outcome", [Outcome(75), Outcome(143), Outcome(0)])
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
    assert pauses == []
    # Without the signal, the job would have ended, too.
    assert supervise([FAILED, FAILED, stopped])[0].status == 1


def test_a_host_that_does_not_answer_is_left_out():
    outcome, plans, texts, _ = supervise([FAILED, Outcome(0)], min_size=2, lost=["host0"])
    assert outcome.status == 0
    assert plans[1] == ["host1:2"]
    assert "2 ranks instead of 4" in texts


@pytest.mark.parametrize(
    "failures",
    [[replace(FAILED, lost=(HOSTS[1].name,))], [failed(3), failed(3)]],
    ids=["lost", "fails twice"],
)
def test_a_host_that_was_idle_takes_the_place_of_another_host(failures):
    hosts = [*HOSTS, Host("host2", 2)]
    _, plans, texts, _ = supervise([*failures, Outcome(0)], hosts=hosts)
    assert plans[-2:] == [["host0:2", "host1:2"], ["host0:2", "host2:2"]]
    assert texts[-1].startswith("left out")


def test_a_failing_host_is_used_again_if_no_idle_host_answers():
    hosts = [*HOSTS, Host("host2", 2)]
    outcome, plans, *_ = supervise([failed(3), failed(3), Outcome(0)], hosts=hosts, lost=["host2"])
    assert outcome.status == 0
    assert plans[-1] == ["host0:2", "host1:2"]


def test_an_idle_host_is_not_examined_without_need():
    hosts = [*HOSTS, Host("host2", 2)]
    _, plans, texts, _ = supervise([FAILED, Outcome(0)], hosts=hosts, lost=["host1"])
    assert plans == [["host0:2", "host1:2"]] * 2
    assert texts == ["restart 1 of 2"]


@pytest.mark.parametrize("failure", [failed(3), replace(FAILED, failed_agents=("host1",))])
def test_a_host_where_ranks_or_the_agent_fail_twice_is_left_out(failure):
    _, plans, texts, _ = supervise([failure, failure, Outcome(0)], min_size=2)
    assert plans == [["host0:2", "host1:2"]] * 2 + [["host0:2"]]
    assert "left out, because the job failed there 2 times: host1" in texts


def test_the_reason_of_a_failure_names_a_rank_that_ended_too_early():
    report = "rank 1 had ended.\nThen rank 0 failed.\nRank 0's last lines:\n  Error"
    outcome = Outcome(1, report, Failure(0, 1), possible_causes="rank 1 had ended.")
    assert outcome.reason == "rank 1 had ended. Then rank 0 failed."


def test_the_reason_names_hosts_that_could_not_be_started():
    report = "1 of 2 hosts cannot take part; nothing was started.\n  host1: it has no ssh server"
    assert Outcome(1, report).reason == (
        "1 of 2 hosts cannot take part; nothing was started. host1: it has no ssh server"
    )


def test_no_host_is_left_out_for_an_error_of_all_ranks():
    failure = failed(3, 0, 1, 2)
    _, plans, *_ = supervise([failure, failure, Outcome(0)], min_size=2)
    assert plans == [["host0:2", "host1:2"]] * 3


def test_failures_count_for_the_host_that_the_rank_had_in_that_start():
    hosts = [Host("host1", 2), Host("host0", 2)]  # a hostfile that has changed
    failure = failed(0)
    _, plans, *_ = supervise([FAILED, failure, failure, Outcome(0)], 3, hosts, min_size=2)
    assert plans == [["host0:2", "host1:2"], *[["host1:2", "host0:2"]] * 2, ["host0:2"]]


def test_a_hostfile_that_is_being_written_does_not_end_the_job(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("host0 slots=")
    outcome, plans, texts, _ = supervise([FAILED, Outcome(0)], hosts=lambda: read_hostfile(file))
    assert outcome.status == 0
    assert plans == [["host0:2", "host1:2"]] * 2
    assert (
        texts[1]
        == f"the hosts stay the same: {file}, line 1: 'slots=': expected a number, as in slots=2"
    )


def test_too_few_hosts_use_up_the_restarts():
    outcome, plans, texts, _ = supervise([FAILED], min_size=3, lost=["host0"])
    assert outcome.status == 1
    assert len(plans) == 1
    assert texts.count("restart 2 of 2") == 1
    assert any("have 2 slots: expected at least 3 (--min-np" in text for text in texts)


def test_a_restart_that_cannot_start_is_tried_again():
    outcome, *_ = supervise([FAILED, HvdkitError("host1: no route to host"), Outcome(0)])
    assert outcome.status == 0


def test_a_restart_that_cannot_start_is_final_if_no_host_returns():
    outcome, _, texts, _ = supervise([FAILED, HvdkitError("lost node 1")], hosts_return=False)
    assert (outcome.status, outcome.restartable) == (1, False)
    assert texts == ["restart 1 of 2", "lost node 1"]


def start_error(*hosts, torch=None, broken=()):
    versions = {} if torch is None else {"torch": torch}
    return StartError(
        "", hosts, versions, [BrokenConnection(*pair, "10.0.0.9", "?") for pair in broken]
    )


@pytest.mark.parametrize(
    "error",
    [
        start_error("host2"),
        # The version of the host where ranks ran before is right.
        start_error(torch={"host0": "2.5", "host2": "2.6"}),
        start_error(broken=[("host0", "host2")]),
    ],
    ids=["silent", "version", "connection"],
)
@pytest.mark.parametrize("hosts_return", [True, False])
def test_a_new_host_with_which_a_start_fails_is_left_out(error, hosts_return):
    hosts = [Host("host2", 3), HOSTS[0], Host("host3", 2)]
    lost = replace(FAILED, lost=(HOSTS[1].name,))
    outcome, plans, texts, _ = supervise(
        [lost, error, FAILED, Outcome(0)], 3, hosts, hosts_return=hosts_return
    )
    assert outcome.status == 0
    assert plans[1:] == [["host2:3", "host0:1"], *[["host0:2", "host3:2"]] * 2]
    assert texts.count("left out, because of a failed start: host2") == 2


def test_a_host_with_which_two_starts_fail_is_left_out_for_the_rest_of_the_job():
    hosts = [HOSTS[0], Host("host2", 2), Host("host3", 2)]
    error = start_error("host2")
    _, plans, texts, _ = supervise([SAVED, error, SAVED, error, SAVED, Outcome(0)], hosts=hosts)
    assert [plan[1] for plan in plans] == ["host1:2", *["host2:2", "host3:2"] * 2, "host3:2"]
    assert texts[-1] == "left out, because the job failed there 2 times: host2"


@pytest.mark.parametrize(
    "error",
    [
        start_error(torch={"host0": "2.5", "host1": "2.6"}),
        start_error("host0", "host1"),
    ],
    ids=["two versions of hosts with ranks", "all hosts"],
)
def test_no_host_is_left_out_at_random(error):
    _, plans, texts, _ = supervise([FAILED, error, Outcome(0)], min_size=2)
    assert plans == [["host0:2", "host1:2"]] * 3
    assert any("no host is left out because of its version of torch" in t for t in texts) == bool(
        error.versions
    )


def test_a_job_that_has_lost_a_host_is_requeued():
    lost = replace(FAILED, lost=(HOSTS[1].name,))
    outcome, _, texts, _ = supervise([FAILED, lost], requeue=True)
    assert outcome.status == RESUMABLE
    assert texts[0] == "restart 1 of 2"
    assert texts[1].startswith("the allocation has lost a node")


@pytest.mark.parametrize(("status", "expected"), [(143, RESUMABLE), (0, 0)])
def test_a_job_that_has_lost_a_host_after_a_stop_signal_is_requeued(status, expected):
    """Slurm sends SIGTERM before it takes a node away."""
    outcome, *_ = supervise([Outcome(status, lost=(HOSTS[1].name,))], requeue=True)
    assert outcome.status == expected


def test_the_first_start_raises():
    with pytest.raises(HvdkitError, match="no route"):
        supervise([HvdkitError("host1: no route to host")])


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
        if step == 6 and hvd.rank() == {flips} and not os.path.exists("flipped"):
            open("flipped", "w").close()
            model.weight.data.view(torch.int32)[3, 3] ^= 1 << 30
        if step % 2 == 0:
            checkpointer.save(step)
            checkpointer.wait()
        if hvd.rank() == 1 and step in {kills} and not os.path.exists(f"killed{{step}}"):
            open(f"killed{{step}}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
if hvd.rank() == 0:
    print("weights", model.weight.detach().numpy().tobytes().hex(), flush=True)
"""

# Spares import PyTorch, which takes long.
NO_SPARES = ("--no-spares",)

WAIT_FOR = """
import time

def wait_for(name):
    if not os.path.exists(name):
        print("waiting", os.getpid(), flush=True)
    while not os.path.exists(name):
        time.sleep(0.05)

hvd.init()
"""


def train(folder, kills, *options, controller="gloo", flips=-1):
    skip_where_unsupported(Configuration("torch", controller, 2))
    folder.mkdir()
    (folder / "train.py").write_text(WITHOUT_DYNAMO + TRAIN.format(kills=kills, flips=flips))
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", *options, "train.py"]
    env = {name: value for name, value in os.environ.items() if name != "PWD"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=env
    )
    weights = [line for line in done.stdout.splitlines() if "weights" in line]
    return done, weights


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
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--restarts", "1"]
    command += [sys.executable, "fail.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    for rank in range(2):
        # The agent sets GROUP_VARIABLE in each process that it starts.
        first, second = (
            json.loads((tmp_path / f"rank{rank}-{start}").read_text()) | {GROUP_VARIABLE: ""}
            for start in range(2)
        )
        assert first != second, done.stderr
        assert same_for_imports(second, first)


@pytest.mark.long
def test_spares_become_ranks(tmp_path):
    """Rank 1 kills itself once both spares are ready."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(
        # Without WITHOUT_DYNAMO: a spare gives up if the script has replaced a module of PyTorch.
        "import os, sys, time\nprint('loaded', 'torch' in sys.modules, flush=True)\n"
        "import torch\n"
        + TRAIN.format(kills=[3], flips=-1)
        .replace("hvd.init()", WAIT_FOR)
        .replace("step += 1", "step += 1; step == 3 and wait_for('go')")
    )
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--restarts", "1", "train.py"]
    env = {name: value for name, value in os.environ.items() if name != "PWD"}
    job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env)
    lines = iter(job.stdout.readline, "")
    waiting = next(line for line in lines if "waiting" in line)
    (agent,) = psutil.Process(job.pid).children()
    deadline = time.monotonic() + 120
    while len(spares := [c for c in agent.children() if _is_spare(c)]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # An interpreter that waits uses no processor.
    while any(spare.status() != psutil.STATUS_SLEEPING for spare in spares) or not _idle(spares):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (tmp_path / "go").touch()
    rest = [line for line in lines if "loaded" in line]
    assert job.wait(timeout=60) == 0
    assert "waiting" in waiting
    assert sorted(rest) == ["[0] loaded True\n", "[1] loaded True\n"]
    assert not any(spare.is_running() for spare in spares)


def _is_spare(process):
    try:
        return "HVDKIT_SPARE" in process.environ()
    except psutil.Error:  # it has ended
        return False


def _idle(processes):
    before = [process.cpu_times()[:2] for process in processes]
    time.sleep(2)
    return before == [process.cpu_times()[:2] for process in processes]


@pytest.mark.long
def test_a_killed_job_over_mpi_resumes(tmp_path):
    options = ("--restarts", "1", "--launcher", "mpi")
    done, weights = train(tmp_path / "killed", [3], *options, controller="mpi")
    assert done.returncode == 0, done.stderr
    starts = [line for line in done.stdout.splitlines() if line.startswith("[0] from")]
    assert starts == ["[0] from 0", "[0] from 2"]
    assert len(weights) == 1


@pytest.mark.parametrize(
    ("options", "saved"),
    [((), "checkpoint"), (("--elastic",), "commit or checkpoint")],
    ids=["", "elastic"],
)
def test_a_job_that_always_fails_ends_with_the_first_reason(tmp_path, options, saved):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "if os.path.exists('failed'):\n    sys.exit('the same again')\n"
        "open('failed', 'w').close()\nraise ValueError('bad sample 17')\n"
    )
    run = [sys.executable, "-m", "hvdkit", "run", *options, "-np", "1", "--restarts", "1"]
    env = {name: value for name, value in os.environ.items() if name != "PWD"}
    done = subprocess.run(
        [*run, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env=env,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"hvdkit run: the job failed 2 times in a row without a new {saved}, and ends "
        "(--restarts). The first failure: rank 0 on localhost failed: exit status 1. ValueError: "
        "bad sample 17"
    )


def test_a_killed_job_and_a_killed_launcher_end_with_the_same_weights(tmp_path):
    done, weights = train(tmp_path / "killed", [3, 7], "--restarts", "1", *NO_SPARES)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed by signal 9") == 2
    assert done.stderr.count("restart 1 of 1") == 2
    starts = [line for line in done.stdout.splitlines() if line.startswith("[0] from")]
    assert starts == ["[0] from 0", "[0] from 2", "[0] from 6"]
    assert len(weights) == 1
    assert weights_after_a_killed_launcher(tmp_path / "launcher") == weights


def weights_after_a_killed_launcher(folder):
    """Kill a launcher, and start the job again.

    The ranks end within ten seconds, also those that ignore SIGTERM, and so do the spares.
    """
    folder.mkdir()
    (folder / "train.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + WITHOUT_DYNAMO
        + TRAIN.format(kills=[], flips=-1)
        .replace("step += 1", "step += 1; step == 5 and wait_for('go')")
        .replace("hvd.init()", WAIT_FOR)
    )
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", "--restarts", "1"]
    env = {name: value for name, value in os.environ.items() if name != "PWD"}
    first = [*command, "train.py"]
    job = subprocess.Popen(first, cwd=folder, stdout=subprocess.PIPE, text=True, env=env)
    lines = iter(job.stdout.readline, "")
    waiting = (line for line in lines if "waiting" in line)
    pids = [int(next(waiting).split()[-1]) for _ in range(2)]
    job.kill()
    killed_at = time.monotonic()
    job.communicate(timeout=10)
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < killed_at + 20
        time.sleep(0.05)
    (folder / "go").touch()
    again = [*command, *NO_SPARES, "train.py"]
    done = subprocess.run(
        again, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "[0] from 4" in done.stdout
    return [line for line in done.stdout.splitlines() if "weights" in line]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.long
def test_a_restart_resumes_before_a_bit_flipped(tmp_path, rank):
    done, _ = train(tmp_path / "flipped", [], "--restarts", "1", flips=rank)
    assert done.returncode == 0, done.stderr
    assert "RankMismatchError: Ranks have different values after step 6: 'weight'" in done.stderr
    assert "Step 6 was not saved." in done.stderr
    starts = [line for line in done.stdout.splitlines() if line.startswith("[0] from")]
    assert starts == ["[0] from 0", "[0] from 4"]


@pytest.mark.parametrize("options", [["--launcher", "mpi"], ["--elastic"]])
def test_agents_that_answer_stay_with_a_short_timeout(options):
    controller = "mpi" if "mpi" in options else "gloo"
    skip_where_unsupported(Configuration("torch", controller, 1))
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "1", "--host-timeout", "2"]
    command += ["--restarts", "1", *options, sys.executable, "-c", "import time; time.sleep(4)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "restart" not in done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--restarts", "-1"], "--restarts is -1: expected at least 0"),
        (["--min-np", "1"], "--min-np needs --restarts N"),
        (["--restarts", "1", "--min-np", "3"], "--min-np is 3: expected at least 1, and at most 2"),
        (["--restarts", "1", "--debug-rank", "0"], "cannot be combined with --debug-rank"),
        (["--host-timeout", "1"], "--host-timeout is 1: expected at least 2 seconds"),
        (["--host-discovery-script", "x", "-H", "localhost:2"], "was given with hosts"),
    ],
)
def test_wrong_options(options, expected):
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "2", *options, "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert expected in done.stderr


def broken(*pairs):
    """Return the outcome of a job after which connections between these hosts fail."""
    return replace(SAVED, broken=tuple(BrokenConnection(*pair, "10.0.0.9", "?") for pair in pairs))


@pytest.mark.parametrize(
    ("pairs", "left"),
    [
        # Of two hosts, the last one: rank 0 stays where its checkpoints may be.
        ([("host0", "host1"), ("host1", "host0")], ["host0:1", "host2:1"]),
        ([("host0", "host1"), ("host2", "host0")], ["host1:1", "host2:1"]),
        ([("host1", "the launcher")], ["host0:1", "host2:1"]),
        ([("host0", "host1"), ("host1", "host2"), ("host2", "host0")], None),
    ],
)
def test_hosts_that_do_not_reach_each_other_are_not_used_together(pairs, left):
    hosts = [Host(f"host{n}", 1) for n in range(3)]
    _, plans, texts, _ = supervise([broken(*pairs), Outcome(0)], hosts=hosts, min_size=2)
    assert plans[-1] == (left or ["host0:1", "host1:1", "host2:1"])
    assert any("left out, because connections to other hosts fail" in t for t in texts) == bool(
        left
    )


def test_a_partition_of_many_hosts_is_found_at_once():
    hosts = [Host(f"host{n}", 1) for n in range(400)]
    pairs = [(f"host{a}", f"host{b}") for a in range(200) for b in range(200, 220)]
    started = time.monotonic()
    left, _ = best_connected(hosts, broken(*pairs).broken)
    assert [host.name for host in left] == [f"host{n}" for n in (*range(200), *range(220, 400))]
    assert time.monotonic() < started + 5


@pytest.mark.parametrize(
    ("slots", "pairs", "left"),
    [
        ([1, 2], [("host0", "host1")], ["host1:2"]),
        # One large host, without the others.
        ([4, 1, 1], [("host0", "host1"), ("host2", "host0")], ["host0:4"]),
        ([1, 8, 1], [("host1", "host0"), ("host1", "the launcher")], ["host0:1", "host2:1"]),
    ],
)
def test_hosts_with_many_slots_are_kept(slots, pairs, left):
    hosts = [Host(f"host{n}", count) for n, count in enumerate(slots)]
    _, plans, _, _ = supervise([broken(*pairs), Outcome(0)], hosts=hosts, min_size=2)
    assert plans[-1] == left
