"""Jobs that are killed at random moments, and resume from the memory of their hosts."""

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hvdkit.launch.agent.host_folders import STEPS_PREFIX
from hvdkit.system.owned_folders import temporary
from tests.elastic import preloaded
from tests.elastic.search import preloaded_framework
from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.launch.commands import run, started, wait_until
from tests.without_dynamo import WITHOUT_DYNAMO

STEPS = 240
#: `start` is the number of starts before this one, and `kept` returns the newest step in memory.
TRAIN = f"""
{WITHOUT_DYNAMO}
import hashlib, os, random, signal, threading, time
from pathlib import Path
import hvdkit.torch as hvd
from hvdkit.checkpoint.posix import disk

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(), torch.nn.Linear(32, 4)
)
optimizer = torch.optim.Adam(model.parameters(), 0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
data = torch.utils.data.TensorDataset(torch.randn(192, 16), torch.randint(0, 4, (192,)))
sampler = hvd.ResumableSampler(data, batch_size=4, seed=0)
start = hvd.broadcast_object(len(list(Path().glob("start-*"))), 0)
hvd.barrier()
Path(f"start-{{start}}").touch()

def kept():
    folders = os.environ.get("HVDKIT_HOST_FOLDERS", "").split(os.pathsep)
    found = [p for folder in folders for p in Path(folder or "no").glob("steps-*/step-*")]
    return max([int(path.name[5:17]) for path in found], default=0)

def die():
    print(f"killed in start {{start}} after step {{step}}: kept {{kept()}}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

draw = random.Random(f"{{os.environ['SEED']}} {{start}}")
step = 0
is_victim = start < int(os.environ["KILLS"]) and draw.randrange(hvd.size()) == hvd.rank()
# A few starts end in the restore. After such a failure, the launcher waits.
in_restore, delay = draw.random() < 0.1, draw.uniform(0, 0.3)

def kill_soon():
    timer = threading.Timer(delay, die)
    timer.daemon = True
    timer.start()

if is_victim and in_restore:
    kill_soon()
if start == 0 and hvd.rank() == 0 and (point := os.environ.get("POINT")):
    def before(*step):
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread and step == tuple(point.split()) and kept() == int(os.environ["KEPT"]):
            die()
    disk.before_step = before

with hvd.Checkpointer(
    "checkpoints", model=model, optimizer=optimizer, data=sampler, every_steps=100,
    every_steps_in_memory=1,
) as checkpointer:
    restored = checkpointer.restore()
    step = restored.step if restored else 0
    print("from", step, "in start", start, flush=True)
    for epoch in range(sampler.epoch, {STEPS} // sampler.batches_per_epoch):
        for indices in sampler.batches():
            x, y = data[indices]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            time.sleep(float(os.environ["PAUSE"]))
            checkpointer.maybe_save(step, epoch)
            if is_victim and not in_restore:
                is_victim = False
                kill_soon()
    checkpointer.save(step)
state = [*model.state_dict().values()]
state += [v for each in optimizer.state_dict()["state"].values() for v in each.values()]
found = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state)).hexdigest()
print("state", step, found, torch.rand(1).item(), flush=True)
"""

FIT = """
import os, signal
import numpy as np
import keras
import hvdkit.keras as hvd

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
generator = np.random.default_rng(0)
inputs, targets = generator.normal(size=(2, 96, 8)).astype("float32")
sampler = hvd.ResumableSampler(96, batch_size=4, seed=0)
trained = []


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        trained.append(batch)
        if os.environ["KILLS"] == "1" and len(trained) == 17 and not os.path.exists("killed"):
            if hvd.rank() == 1:
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)


model.fit(
    sampler.arrays((inputs, targets[:, :1])),
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.Checkpoint(
            "checkpoints", every_epochs=None, every_steps_in_memory=1, data=sampler, verbose=1
        ),
        Kill(),
    ],
)
print("state", [value.tobytes().hex() for value in model.get_weights()], flush=True)
"""


def folders():
    """Return the folders for steps on this machine."""
    return {p for place in (Path("/dev/shm"), temporary()) for p in place.glob(f"{STEPS_PREFIX}*")}


@pytest.fixture(autouse=True)
def nothing_stays():
    before = folders()
    yield
    wait_until(lambda: not folders() - before)


def forked(framework):
    @pytest.fixture(scope="module")
    def variables(tmp_path_factory):
        skip_where_unsupported(Configuration(framework, "gloo", 2))
        with preloaded_framework(framework, tmp_path_factory.mktemp("preloaded")) as found:
            yield found

    return variables


torch_variables = forked("torch")
keras_variables = forked("keras-tensorflow")


def train(folder, variables, script=TRAIN, kills=0, seed=0, **others):
    """Run a job. Return the states of the ranks, the first step of each start, and the output."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    env = os.environ | variables | {"KILLS": str(kills), "SEED": str(seed), "PAUSE": "0"} | others
    command = [sys.executable, "-IS", preloaded.__file__, "train.py"]
    options = ("-np", "2", "--restarts", "30", "--no-spares")
    done = run(*options, *command, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    states = sorted(line for line in done.stdout.splitlines() if "] state" in line)
    begun = re.findall(r"\[0\] from (\d+) in start (\d+)", done.stdout)
    starts = {int(start): int(step) for step, start in begun}
    return states, starts, done.stdout + done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, torch_variables):
    """The states of the ranks of a job without failures."""
    return train(tmp_path_factory.mktemp("undisturbed") / "job", torch_variables)[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_a_job_that_is_killed_at_random_moments(tmp_path, torch_variables, undisturbed, seed):
    states, starts, shown = train(
        tmp_path / "job", torch_variables, kills=20, seed=seed, PAUSE="0.015"
    )
    assert states == undisturbed
    kills = re.findall(r"killed in start (\d+) after step (\d+): kept (\d+)", shown)
    assert len(kills) >= 10, shown
    for killed, _, kept in (map(int, kill) for kill in kills):
        # A start that is killed early tells no step. A step on disk may be newer.
        assert starts[min(start for start in starts if start > killed)] >= kept


@pytest.mark.parametrize(
    ("point", "step"),
    [
        ("create model.safetensors", 7),
        ("fsync optimizer.safetensors", 7),
        ("read manifest.json", 7),
        ("unlink model.safetensors", 8),
    ],
)
def test_a_rank_is_killed_while_it_writes_into_memory(
    tmp_path, torch_variables, undisturbed, point, step
):
    """Rank 0 writes step 8. Step 7 is deleted when step 8 is complete."""
    how = {"POINT": point, "KEPT": str(step), "PAUSE": "0.03"}
    states, starts, _ = train(tmp_path / "job", torch_variables, **how)
    assert states == undisturbed
    assert starts == {0: 0, 1: step}


def test_fit_resumes_from_memory(tmp_path, keras_variables):
    wanted, *_ = train(tmp_path / "undisturbed", keras_variables, FIT)
    states, _, shown = train(tmp_path / "job", keras_variables, FIT, kills=1)
    (resumed,) = re.findall(r"resumed after step (\d+), in epoch 2", shown)
    assert 12 < int(resumed) <= 17
    assert states == wanted


@pytest.mark.parametrize("killed", ["the agent", "the launcher"])
def test_nothing_stays_after_a_kill(killed):
    def own_folders(job):
        return [Path(text) for text in job.stdout.readline().split()[1].split(os.pathsep)]

    code = "import os, time; print(os.environ['HVDKIT_HOST_FOLDERS'], flush=True); time.sleep(60)"
    with started("-np", "1", "--restarts", "1", sys.executable, "-c", code) as job:
        paths = own_folders(job)
        # Other tests may have jobs at the same time.
        assert {*paths} <= folders()
        assert [path.parent for path in paths] == [Path("/dev/shm"), temporary()]
        (paths[0] / "steps-of-a-job").mkdir()
        (agent,) = psutil.Process(job.pid).children()
        if killed == "the agent":
            agent.send_signal(signal.SIGKILL)
            wait_until(lambda: not any(path.exists() for path in paths))
            # The next agent has folders of its own.
            paths = own_folders(job)
            agent.wait(60)
        else:
            job.kill()
        job.kill()
        wait_until(lambda: not folders().intersection(paths))


def test_there_are_folders_only_with_restarts():
    code = "import os; print(os.environ.get('HVDKIT_HOST_FOLDERS'))"
    env = os.environ | {"HVDKIT_HOST_FOLDERS": "/of/another/job"}
    done = run("-np", "1", sys.executable, "-c", code, env=env)
    assert done.stdout == "[0] None\n", done.stderr
