"""A rank that calls `hvd.shutdown()` while others train, in a job of `hvdkit run`."""

import re
import subprocess
import sys

from tests.ranks.rank_pool import Configuration, skip_where_unsupported

SCRIPT = """
import sys
import tensorflow as tf
import hvdkit.tensorflow as hvd

hvd.init()
reduce = tf.function(lambda x: hvd.allreduce(x, name="graph"))
reduce(tf.ones(1))
hvd.allreduce(tf.ones(1), name="eager")
if hvd.rank() == 1:
    hvd.shutdown()
    sys.exit(0)
for call in (reduce, lambda x: hvd.allreduce(x, name="eager")):
    try:
        call(tf.ones(1))
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
sys.exit(1)
"""


def test_the_errors_of_the_other_ranks_name_the_rank(tmp_path):
    skip_where_unsupported(Configuration("tensorflow", "gloo", 2))
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", "run", "-np", "2", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    named = r"Horovod has been shut down.* Rank 1 on \S+ called hvd\.shutdown\(\) at \S*train\.py"
    errors = [line for line in done.stdout.splitlines() if re.search(named, line)]
    assert len(errors) == 2, done.stdout + done.stderr
    assert all(line.count("called hvd.shutdown()") == 1 for line in errors)
