"""Event files, read by TensorBoard's own reader."""

import json
import math
import subprocess
import sys

import pytest

from hvdkit.monitor import Run, TensorBoardLogger
from tests.unit.monitor.simulated import RUN, record

pytest.importorskip("tensorboard", reason="pip install 'hvdkit[monitor-tensorboard]'")


def write(folder, *records, run=RUN):
    logger = TensorBoardLogger(folder)
    logger.open()
    logger.begin(run)
    for each in records:
        logger.log(each)
    logger.close()


def read(folder):
    """Return tag -> step -> value, read in another process by TensorBoard without TensorFlow."""
    code = """
import json, sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
print(json.dumps({tag: [(e.step, e.value) for e in found] for tag, found in scalars.items()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    tags = json.loads(done.stdout.splitlines()[-1])
    return {tag: dict(map(tuple, values)) for tag, values in tags.items()}


def test_tensorboard_reads_the_run_and_its_restart(tmp_path):
    write(
        tmp_path, record(10, loss=[1.0, 3.0]), record(20, loss=[2.0, 2.0]), record(30, late=[1, 1])
    )
    nan = record(25, 5, loss=[math.nan, 5.0])
    write(tmp_path, nan, run=Run(20, 2000.0, [0, 1], 10, "torch"))
    found = read(tmp_path)
    assert found["loss"].keys() == {10, 20, 25}
    assert found["loss"][10] == 2.0
    assert math.isnan(found["loss"][25])
    assert found["loss_min"] == {10: 1.0, 25: 5.0}
    assert found["loss_max"] == {10: 3.0, 25: 5.0}
    # The restart at step 20 hides the record of step 30.
    assert not found.get("late")
    assert found["time/step"].keys() == {10, 20, 25}
    assert found["slowest_rank"] == {10: 1.0, 20: 1.0, 25: 1.0}


def test_writing_loads_no_framework(tmp_path):
    code = (
        "import sys; from tests.unit.monitor.test_tensorboard import write, record;"
        f"write({str(tmp_path)!r}, record(1)); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "tensorflow"} & {name.split(".")[0] for name in done.stdout.split()}
