"""Weights & Biases and MLflow, read back with their own readers."""

import json
import struct
import subprocess
import sys

import pytest

from hvdkit.monitor import MLFlowLogger
from tests.unit.monitor.simulated import RUN, record


@pytest.mark.long
def test_an_offline_run_of_weights_and_biases(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'hvdkit[monitor-wandb]'")
    # In a process of its own, because wandb leaves threads and a service behind.
    code = """
import os, sys
from hvdkit.monitor import WandbLogger
from tests.unit.monitor.simulated import RUN, record
logger = WandbLogger("project", dir=sys.argv[1], mode="offline", name="run", id="abc")
logger.open()
logger.begin(RUN)
logger.log(record(10, loss=[1.0, 3.0]))
logger.log(record(20, loss=[2.0, 2.0]))
logger.close()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=180)
    rows = history_of(next(tmp_path.glob("wandb/offline-run-*/run-abc.wandb")))
    assert [row["trainer/global_step"] for row in rows] == [10, 20]
    assert [row["loss"] for row in rows] == [2.0, 2.0]
    assert rows[0]["loss_max"] == 3.0
    assert rows[0]["time/step"] == 0.75


def history_of(path):
    """Return the rows of a run's history.

    wandb has the definition of the entries, and no reader in Python. The entries are in the format
    of LevelDB's log, after a header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, entry, rows = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        entry += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole entry, or the last part of one
            record, entry = Record.FromString(entry), b""
            if record.HasField("history"):
                items = record.history.item
                rows.append(
                    {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
    return rows


@pytest.mark.long
def test_a_run_of_mlflow_in_a_local_database(tmp_path):
    pytest.importorskip("mlflow", reason="pip install 'hvdkit[monitor-mlflow]'")
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    first = MLFlowLogger("experiment", tracking_uri=uri, run_name="run")
    first.open()
    first.begin(RUN)
    first.log(record(10, **{"loss": [1.0, 3.0], "top-5 (%)": [1.0, 1.0]}))
    first.close()
    again = MLFlowLogger("experiment", tracking_uri=uri, run_id=first.run_id)
    again.open()
    again.log(record(20, loss=[2.0, 2.0]))
    again.close()
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["hvdkit.ranks"] == "2"
    history = client.get_metric_history(first.run_id, "loss")
    assert {m.step: m.value for m in history} == {10: 2.0, 20: 2.0}
    assert run.data.metrics["time/step"] == 0.75
    assert run.data.metrics["top-5 ___"] == 1.0
    names = [e.name for e in client.search_experiments()]
    assert names.count("experiment") == 1
