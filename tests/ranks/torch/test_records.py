"""The flight recorder and its verdicts, on jobs of `hvdkit run` with one fault each."""

import json
import os
import re
import struct
import subprocess
import sys
import time

import pytest

from hvdkit.faults.command import why
from tests.alone import run_alone
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.without_dynamo import WITHOUT_DYNAMO

SCRIPT = """
import os, signal, sys, time
import torch
import hvdkit.torch as hvd

def fault():
    {fault}

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer = hvd.DistributedOptimizer(
    optimizer, model.named_parameters(), bucket_bytes=20_000, check_interval=1
)
for step in range(12):
    optimizer.zero_grad()
    if hvd.rank() == {rank} and step == 10:
        fault()
    model(torch.rand(8, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
print("trained", flush=True)
"""
METRIC = "    metric = hvd.allreduce(torch.ones(1))\n"
STALL = {"HVDKIT_STALL_TIMEOUT": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12"}


def run(folder, fault, rank=1, ranks=4, *options, script=SCRIPT, **env):
    skip_where_unsupported(Configuration("torch", "gloo", ranks))
    path = folder / "train.py"
    path.write_text(WITHOUT_DYNAMO + script.format(fault=fault, rank=rank))
    command = [sys.executable, "-m", "hvdkit", "run", "-np", str(ranks), "--output-dir"]
    return subprocess.run(
        [*command, str(folder / "runs"), *options, str(path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=folder,
        env=dict(os.environ) | STALL | env,
    )


def test_a_rank_that_does_not_call_a_collective_is_named(tmp_path):
    done = run(tmp_path, "time.sleep(5)", 1, 3)
    assert done.returncode == 0, done.stderr
    waits = r"Ranks 0, 2 have waited \d+ s for bucket \d of 4 \(.*\), call 11\."
    assert re.search(waits, done.stderr)
    assert "Rank 1 on" in done.stderr
    assert "in fault: time.sleep(5)" in done.stderr
    assert "The job waits." in done.stderr
    # The job goes on without another verdict, and its records stay.
    assert done.stderr.count("has not called it") == 1
    assert done.stdout.count("trained") == 3
    assert "Ranks 0, 2 have waited" in why(tmp_path / "runs")


@pytest.mark.parametrize(
    ("threads", "doing"),
    [
        (64, r"in fault: time\.sleep\(5\)"),
        pytest.param(120, "the rank has many threads", marks=pytest.mark.long),
    ],
)
def test_a_rank_with_many_threads_after_many_calls_without_a_name(tmp_path, threads, doing):
    """Its stacks have more than 100 kB. The other calls still have numbers."""
    fault = f"""import threading
    def deep(frames):
        deep(frames - 1) if frames else time.sleep(8)
    for _ in range({threads}):
        threading.Thread(target=deep, args=(30,), daemon=True).start()
    time.sleep(5)"""
    calls = "for _ in range(4200):\n    hvd.allreduce(torch.ones(1))\nfor step in range(12)"
    script = SCRIPT.replace("for step in range(12)", calls)
    done = run(tmp_path, fault, 0, 2, script=script)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Rank 1 has waited \d+ s for bucket \d of 4 \(.*\), call 11\.", done.stderr)
    assert re.search(f"Rank 0 on .* has not called it: .*{doing}", done.stderr), done.stderr


@pytest.mark.parametrize("seconds", [7200.0, pytest.param(-7200.0, marks=pytest.mark.long)])
def test_the_time_of_day_is_set_during_a_stall(tmp_path, seconds):
    library, offset = tmp_path / "clock.so", tmp_path / "offset"
    source = REPOSITORY / "tests" / "search" / "chaos" / "clock.c"
    command = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    offset.write_bytes(struct.pack("d", 0.0))
    set_clock = f"open({str(offset)!r}, 'r+b').write(__import__('struct').pack('d', {seconds}))"
    preloaded = {"LD_PRELOAD": str(library), "HVDKIT_CHAOS_CLOCK": str(offset)}
    done = run(tmp_path, f"{set_clock}; time.sleep(5)", 1, 3, **preloaded)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Ranks 0, 2 have waited [2-9] s for bucket", done.stderr), done.stderr
    text = why(tmp_path / "runs")
    assert re.search(r"Its last collective, .*, ended [2-9] s ago", text), text
    delays = [int(delay) for delay in re.findall(r"\+(\d+) ms", text)]
    assert max(delays) < 60_000


def test_ranks_that_wait_for_each_other_end_at_once(tmp_path):
    began = time.monotonic()
    fault = "hvd.allreduce(torch.ones(3), name='only on one rank')"
    done = run(tmp_path, fault, 1, 2, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="600")
    assert time.monotonic() - began < 40
    assert done.returncode == 1
    assert "the allreduce 'only on one rank', 12 bytes of float32" in done.stderr
    assert "a deadlock" in done.stderr
    folder = tmp_path / "runs" / "latest"
    assert json.loads((folder / "start.json").read_text())["verdict"] is True
    error = json.loads((folder / "error.json").read_text())
    assert error["rank"] is None
    assert "a deadlock" in error["reason"]
    assert "The job failed" not in why(tmp_path / "runs")


def test_an_additional_call_without_a_name(tmp_path):
    # Rank 1's additional call is combined with the metric of rank 0.
    fault = "print('wrong', hvd.allreduce(torch.full((1,), 10.0)).item())"
    script = SCRIPT.replace("    model(", METRIC + "    model(")
    done = run(tmp_path, fault, 1, 2, script=script, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="600")
    assert done.returncode == 1
    assert "a deadlock" in done.stderr
    place = re.escape(str(tmp_path / "train.py"))
    expected = (
        rf"In the allreduce 'noname\.11', rank 0 called it at {place}:(\d+), and rank 1 called it "
        rf"at {place}:(\d+)\. If these calls do not belong together"
    )
    found = re.search(expected, done.stderr)
    assert found, done.stderr
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert "metric" in lines[int(found[1]) - 1]
    assert "wrong" in lines[int(found[2]) - 1]


UNEVEN = """
import time
import torch
import hvdkit.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

def step():
    optimizer.zero_grad()
    model(torch.rand(8, 8)).sum().backward()
    optimizer.step()
    hvd.allreduce(torch.ones(1), name="größe")

for batch in range(2 + 3 * hvd.rank()):
    step()
hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
try:
    hvd.allreduce(torch.ones(1 + hvd.rank()), name="wrong")
except RuntimeError:
    print("caught", flush=True)
step()
if hvd.rank() == {rank}:
    {fault}
step()
print("trained", flush=True)
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_stops_after_uneven_epochs_and_a_caught_error(tmp_path, rank):
    done = run(tmp_path, "time.sleep(5)", rank, 2, script=UNEVEN)
    assert done.stdout.count("caught") == done.stdout.count("trained") == 2, done.stderr
    assert re.search(rf"Rank {1 - rank} has waited \d+ s for bucket 1 of 1", done.stderr)
    text = why(tmp_path / "runs", 200)
    for verdict in (done.stderr, text):
        assert re.search(rf"Rank {rank} on \S+ has not called it: the rank is at", verdict), text
        assert re.search(
            r"Its last collective, the allreduce 'größe', .*, ended \d+ s ago", verdict
        )
        assert "wrong" not in verdict.partition("The last collectives")[0]
    # Two calls with both ranks, three while rank 0 was in `join`, and one after it.
    rows = text.partition("The last collectives")[2].splitlines()
    assert ["not complete" in row for row in rows if "'größe'" in row] == [False] * 6


SETS = """
import os, signal, time
import torch
import hvdkit.torch as hvd

hvd.init()
sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
own = sets[hvd.rank() // 2]
for step in range(1000):
    if hvd.rank() == {rank} and step == 10:
        {fault}
    elif step == 10:
        time.sleep(1)  # until the engine waits for the rank, too
    hvd.allreduce(torch.ones(8), name="loss", process_set=own)
    time.sleep(0.02)
"""
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


# While a rank is stopped, the engine's threads of the other ranks wait for it in a negotiation.
@pytest.mark.parametrize("fault", [STOPS, pytest.param("time.sleep(20)", marks=pytest.mark.long)])
def test_a_verdict_names_only_ranks_of_the_process_set(tmp_path, fault):
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6"}
    done = run(tmp_path, fault, 1, 4, script=SETS, **env)
    assert done.returncode == 1
    named = r"Rank 0 has waited \d+ s for the allreduce 'loss' of process set 1 \(ranks 0, 1\)"
    assert re.search(named, done.stderr), done.stderr
    assert re.search(r"Rank 1 (on \S+ )?has not called it", done.stderr)
    assert "Rank 3 has not" not in done.stderr


def test_a_rank_that_shuts_horovod_down_is_named(tmp_path):
    done = run(tmp_path, "hvd.shutdown(); sys.exit(0)", 1, 2)
    assert done.returncode == 1
    named = r"Rank 1 on \S+ called hvd\.shutdown\(\) at \S+/train\.py:\d+ in fault: hvd\.shutdown"
    # The report, and the error of the other rank.
    assert re.search(r"^hvdkit run: " + named, done.stderr, re.MULTILINE), done.stderr
    assert re.search("HorovodInternalError: Horovod has been shut down.*" + named, done.stderr)
    assert re.search(named, why(tmp_path / "runs").splitlines()[0])


# A thread of each rank continues after the exception.
THREAD = "import threading; threading.Thread(target=time.sleep, args=(600,)).start()\n"


@pytest.mark.long
def test_ranks_that_do_not_end_after_an_exception(tmp_path):
    limits = {"HVDKIT_STALL_TIMEOUT": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    script = SCRIPT.replace("hvd.init()", THREAD + "hvd.init()")
    done = run(tmp_path, "raise ValueError('bad sample')", 1, 2, script=script, **limits)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).")
    for text in (done.stderr, why(tmp_path / "runs")):
        assert re.search(r"Rank 1 on \S+ has not called it: .* Python waits for other thr", text)
        assert "The rank has written a traceback: ValueError: bad sample" in text


@pytest.mark.long
def test_a_profile_on_one_rank_only_is_named(tmp_path):
    done = run(tmp_path, "hvd.profile().__enter__()", 1, 2)
    assert done.returncode == 1
    assert "for hvd.profile, which every rank must call" in done.stderr
    assert "a deadlock" in done.stderr


def test_a_lost_rank_leads_to_records(tmp_path):
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", 1, 2)
    assert done.returncode == 137
    text = why(tmp_path / "runs")
    assert text.startswith("The job failed: rank 1 on localhost failed: killed by signal 9")
    assert "Rank 0 on" in text
    assert " failed: " in text


@pytest.mark.long
def test_a_clean_job_leaves_no_records(tmp_path):
    done = run(tmp_path, "pass", 1, 2)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs" / "latest" / "records").exists()


@pytest.mark.long
def test_a_timeout_that_is_no_number(tmp_path):
    done = run(tmp_path, "pass", 1, 2, HVDKIT_STALL_TIMEOUT="soon")
    assert done.returncode == 2
    assert "HVDKIT_STALL_TIMEOUT is 'soon': expected a number of seconds" in done.stderr


def test_records_without_the_launcher(tmp_path):
    """A folder of the user's own, for ranks that mpirun starts."""
    code = """
import os, signal, time
import torch, hvdkit.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3), name="x")
os.kill(os.getpid(), signal.SIGUSR2)
for _ in range(100):
    if os.path.exists(os.environ["HVDKIT_RECORD_DIR"] + "/rank-0.json"):
        break
    time.sleep(0.1)
hvd.shutdown()
"""
    run_alone(code, HVDKIT_RECORD_DIR=str(tmp_path / "records"))
    record = json.loads((tmp_path / "records" / "rank-0.json").read_text())
    assert record["reason"] == "signal"
    assert [call["name"] for call in record["done"]][-1:] == ["allreduce.x"]
    assert "Current thread" in record["stacks"]


@pytest.mark.long
def test_a_record_for_a_profile(tmp_path):
    """`Recorder.read` returns it; afterwards records go to the folder as before."""
    code = """
import json, os, time
import torch, hvdkit.torch as hvd
from hvdkit.torch import runtime
hvd.init()
hvd.allreduce(torch.ones(3), name="x")
record = json.loads(runtime.recorder.read(0))
assert [call["name"] for call in record["done"]][-1:] == ["allreduce.x"]
folder = os.environ["HVDKIT_RECORD_DIR"]
assert not os.path.exists(folder + "/rank-0.json")
open(folder + "/request", "w").close()
for _ in range(100):
    if os.path.exists(folder + "/rank-0.json"):
        break
    time.sleep(0.1)
hvd.shutdown()
assert runtime.recorder.read(0)
"""
    run_alone(code, HVDKIT_RECORD_DIR=str(tmp_path / "records"))
    record = json.loads((tmp_path / "records" / "rank-0.json").read_text())
    assert record["reason"] == "request"
    assert "Current thread" in record["stacks"]


def test_a_running_job_is_inspected(tmp_path):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    code = """
import time
import torch
import hvdkit.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(3), name="all")
print("waits", flush=True)
if hvd.rank() == 1:
    time.sleep(40)
hvd.allreduce(torch.ones(3), name="late")
"""
    env = dict(os.environ) | {"TMPDIR": str(tmp_path)}
    hvdkit = [sys.executable, "-m", "hvdkit"]
    command = [*hvdkit, "run", "-np", "2", sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        try:
            for _ in range(2):
                assert "waits" in job.stdout.readline()
            time.sleep(5)  # a verdict is only given on long waits
            done = subprocess.run(
                [*hvdkit, "inspect", "--live"],
                env=env, capture_output=True, text=True, timeout=60, check=True,
            )  # fmt: skip
        finally:
            job.terminate()
            job.communicate(timeout=60)
    assert "2 of 2 ranks answered on this host." in done.stdout
    assert re.search(r"Rank 0 has waited \d+ s for the allreduce 'late', 12 bytes", done.stdout)
    assert "Rank 1 on" in done.stdout
    none = subprocess.run(
        [*hvdkit, "inspect", "--live"], env=env, capture_output=True, text=True, check=False
    )
    assert none.returncode == 2
    assert "there are no ranks of `hvdkit run` on this host" in none.stderr
