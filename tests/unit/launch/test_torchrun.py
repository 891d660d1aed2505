"""Ranks of torchrun on this machine. tests/hosts has several hosts."""

import os
import socket
import sys

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.runtime.environment import ranks_started_by_torchrun
from tests.alone import run_alone
from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.launch.commands import execute

SECONDS = 100

# A rank prints with one write, because torchrun's ranks write unbuffered to one pipe.

REDUCE = """
import os
import torch
import torch.distributed as dist
import hvdkit.torch as hvd

for _ in range(2):  # a second start finds the same rendezvous
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()
    hvd.shutdown()
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(" ".join(map(str, ("place", *place, "and", int(total.item())))) + "\\n", end="")
dist.destroy_process_group()
"""

RESTARTED = """
import os
import sys
import torch
import hvdkit.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and hvd.rank() == 1:
    os._exit(1)
print(f"reduced {hvd.allreduce(torch.ones(1), op=hvd.Sum).item()}\\n", end="")
"""

ABSENT = """
from datetime import timedelta
from hvdkit.errors import HvdkitError
from hvdkit.torch import torchrun

try:
    torchrun.horovod_variables(timedelta(seconds=2))
except HvdkitError as error:
    print(error)
"""
CHANGED = """
import json, os
from hvdkit.errors import HvdkitError
from hvdkit.torch import torchrun
from torch.distributed import HashStore

os.environ["RANK"] = "1"
store = HashStore()
store.set("variables", json.dumps([{}, {"HOROVOD_RANK": "1", "HVDKIT_ELASTIC_DIR": "/tmp"}]))
torchrun._store = lambda *_: store
try:
    print(torchrun.horovod_variables())
except HvdkitError as error:
    print(error)
"""
STRANGER = """
import http.client
from hvdkit.torch import torchrun

for engine in (5, 6):
    (found,) = torchrun._variables([torchrun._own_host() | {"engine": engine}])
    place = found["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(found["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    for method in ("PUT", "GET"):
        client = http.client.HTTPConnection(*place)
        client.request(method, "/global/1", b"mine" if method == "PUT" else None)
        print(client.getresponse().status)
"""


SIZE = "import hvdkit.torch as hvd; hvd.init(); print(f'{hvd.size()}\\n', end='')"


def run(program, tmp_path, *arguments):
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments), str(script)]
    # torchrun leaves a folder for logs.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = execute(command, env=env, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def engine():
    skip_where_unsupported(Configuration("torch", "gloo", 2))


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    "rendezvous", ["static", pytest.param("standalone", marks=pytest.mark.long)]
)
def test_ranks_of_torchrun_reduce(engine, tmp_path, port, rendezvous):
    how = ["--standalone"] if rendezvous == "standalone" else ["--master-port", port]
    lines = run(REDUCE, tmp_path, *how, "--nproc-per-node", 2)
    assert sorted(lines) == ["place 0 2 0 2 1 and 2", "place 1 2 1 2 1 and 2"]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "size"), [("[0, 1]", 2), ("", 1)])
def test_init_with_a_list_of_ranks_and_a_single_rank(engine, tmp_path, ranks, size):
    program = SIZE.replace("init()", f"init({ranks})")
    how = ("--standalone", "--nproc-per-node", size)
    assert run(program, tmp_path, *how) == [str(size)] * size


@pytest.mark.long
def test_a_job_that_a_rank_of_torchrun_starts(engine, tmp_path):
    """The ranks of the inner job do not inherit the rank variables of the outer job."""
    (tmp_path / "inner.py").write_text(REDUCE)
    program = f"""
import subprocess, sys
inner = [sys.executable, "-m", "hvdkit", "run", "-np", "2", {str(tmp_path / "inner.py")!r}]
sys.exit(subprocess.run(inner, timeout=60).returncode)
"""
    lines = run(program, tmp_path, "--standalone", "--nproc-per-node", 1)
    assert sorted(lines) == ["[0] place 0 2 0 2 1 and 2", "[1] place 1 2 1 2 1 and 2"]


@pytest.mark.long
def test_ranks_that_torchrun_starts_again_find_each_other(engine, tmp_path):
    how = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 1]
    assert run(RESTARTED, tmp_path, *how) == ["reduced 2.0"] * 2


def run_rank_0(program, size, port):
    """Run rank 0 of a job with the variables that torchrun sets, which takes less time."""
    places = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in places.items()}
    return run_alone(program, **variables, MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")


def test_a_missing_rank_is_named(port):
    assert "rank 1 did not call hvd.init() within 2 s" in run_rank_0(ABSENT, 2, port)


def test_variables_that_rank_0_does_not_write_are_refused(port):
    """The store of torchrun has no authentication."""
    found = run_rank_0(CHANGED, 2, port)
    assert "has the variables HOROVOD_RANK, HVDKIT_ELASTIC_DIR for rank 1" in found


def test_the_rendezvous_stores_nothing_without_the_key_if_the_engines_send_it(port):
    assert run_rank_0(STRANGER, 1, port).split() == ["200", "200", "200", "404"]


@pytest.mark.long
def test_tensorflow_under_torchrun_is_refused(tmp_path):
    skip_where_unsupported(Configuration("tensorflow", "gloo", 2))
    program = """
import hvdkit.tensorflow as hvd
from hvdkit.errors import HvdkitError
try:
    hvd.init()
except HvdkitError as error:
    print(f"{error}\\n", end="")
"""
    lines = run(program, tmp_path, "--standalone", "--nproc-per-node", 2)
    assert len(lines) == 2
    assert all("start this script with `hvdkit run`" in line for line in lines)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ({}, 4),
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "2"}, 4),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"}, 0),
    ],
)
def test_precedence_of_variables(more, ranks):
    assert ranks_started_by_torchrun(TORCHRUN | more) == ranks


def test_torchrun_inside_a_rank_of_another_job():
    with pytest.raises(HvdkitError, match="torchrun started 4 ranks inside a rank of a job of 2"):
        ranks_started_by_torchrun(TORCHRUN | {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})
    # A script may set some of the variables for torch.
    for missing in TORCHRUN:
        environ = {name: value for name, value in TORCHRUN.items() if name != missing}
        assert ranks_started_by_torchrun(environ) == 0
