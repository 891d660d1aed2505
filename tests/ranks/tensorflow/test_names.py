"""Names of collectives that are called outside of graphs, in jobs of `hvdkit run`."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.ranks.rank_pool import Configuration, skip_where_unsupported


def run(folder, script, *arguments, **env):
    skip_where_unsupported(Configuration("tensorflow", "gloo", 2))
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", "run", "-np", "2", "train.py", *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder,
        env=dict(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"} | env,
    )  # fmt: skip


ADDITIONAL = """
import sys
import tensorflow as tf
import hvdkit.tensorflow as hvd

hvd.init()
def name(text):
    return text if "named" in sys.argv else None

for step in range(3):
    if hvd.rank() == 1 and step == 1:
        hvd.allreduce(tf.constant(100.0), name=name("additional"))
    loss = hvd.allreduce(tf.constant(1.0), name=name("loss"))
    accuracy = hvd.allreduce(tf.constant(2.0), name=name("accuracy"))
    assert loss == 1.0 and accuracy == 2.0, (loss, accuracy)
"""


@pytest.mark.parametrize("named", ["", pytest.param("named", marks=pytest.mark.long)])
def test_an_additional_call_of_one_rank_is_named(tmp_path, named):
    done = run(tmp_path, ADDITIONAL, named, HVDKIT_STALL_TIMEOUT="2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError" not in done.stderr
    lines = {name: n + 1 for n, line in enumerate(ADDITIONAL.splitlines())
             for name in re.findall(r'name\("(\w+)"\)', line)}  # fmt: skip
    called = {name: name if named else f"line {n} of train.py" for name, n in lines.items()}
    waits = r"Rank {} .*for the allreduce '{}'.*train\.py:{} in <module>"
    for rank, name in ((0, "loss"), (1, "additional")):
        assert re.search(waits.format(rank, called[name], lines[name]), done.stderr), done.stderr
    assert "a deadlock" in done.stderr
    assert ("give all of them the same name" in done.stderr) == (not named)


EVERY_KIND = """
import json, os, time
import tensorflow as tf
import hvdkit.keras
import hvdkit.tensorflow as hvd

hvd.init()
x, v = tf.ones((2, 3)), tf.Variable(tf.ones(3), name="v")

def call(n):
    a = hvd.allreduce(x, name=n)
    g = hvd.grouped_allreduce([x, x], name=n)
    b = hvd.allgather(x, name=n)
    h = hvd.grouped_allgather([x, x], name=n)
    c = hvd.broadcast(x, 0, name=n)
    hvd.broadcast_([v], 0, name=n)
    d = hvd.alltoall(x, name=n)
    e = hvd.reducescatter(x, name=n)
    i = hvd.grouped_reducescatter([x, x])
    k = hvdkit.keras.allreduce(x, name=n)
    for result in (a, *g, b, *h, c, v, d, e, *i, k):
        assert (result.numpy() == 1.0).all()

for repetition in range(2):
    call(None)
    call("metrics of/epoch")
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, op=hvd.Sum)
    assert (tape.gradient(y, x).numpy() == 2.0).all()
    hvd.broadcast_variables([v], 0, inplace=True)
    in_graph = tf.function(lambda x: hvd.allreduce(x, name="in_graph"))
    in_graph(x)
    tf.py_function(lambda: hvd.allreduce(x, name="in_py_function"), [], tf.float32)

records = os.environ["HVDKIT_RECORD_DIR"]
if hvd.rank() == 0:
    open(f"{records}/request", "w").close()
mine = f"{records}/rank-{hvd.rank()}.json"
while not os.path.exists(mine):
    time.sleep(0.1)
print("calls of rank", hvd.rank(), json.dumps(json.load(open(mine))["calls"]["0"]), flush=True)
"""


def test_each_kind_has_the_name_of_the_user_or_of_its_line(tmp_path):
    done = run(tmp_path, EVERY_KIND)
    assert done.returncode == 0, done.stdout + done.stderr
    calls, of_rank_1 = (
        json.loads(re.search(rf"calls of rank {rank} (.*)", done.stdout)[1]) for rank in range(2)
    )
    assert calls == of_rank_1
    expected = {"in_graph": 2, "allreduce.in_py_function": 2}
    for number, line in enumerate(EVERY_KIND.splitlines(), 1):
        of_line = f"line {number} of train.py"
        # Horovod's grouped_reducescatter has no argument `name`.
        if found := re.search(r"(?:hvd|keras)\.(\w+)\(.*(name=n|\[x, x\])\)", line):
            kind = found[1].rstrip("_")
            parts = ["_1of2", "_2of2"] if kind.startswith("grouped") else [""]
            for part in ["_v_0"] if "[v]" in line else parts:
                named = f"{kind}.{'metrics of/epoch' if found[2] == 'name=n' else of_line}{part}"
                expected[f"{kind}.{of_line}{part}"] = 2
                expected[named] = expected.get(named, 0) + 2
        elif "op=hvd.Sum" in line or "tape.gradient" in line:
            expected[f"allreduce.{of_line}"] = 2
    own = {name: n for name, n in calls.items() if not re.search("hvdkit|Inplace", name)}
    assert own == expected
