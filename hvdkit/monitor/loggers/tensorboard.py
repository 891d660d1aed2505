"""Write records as TensorBoard's event files, without TensorFlow."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from hvdkit.monitor.loggers.logger import Logger, require
from hvdkit.monitor.records import Record, Run, scalars


class TensorBoardLogger(Logger):
    """Write event files for TensorBoard: `tensorboard --logdir FOLDER`.

    A metric `loss` has the tag `loss` for the mean over the ranks, and `loss_min` and `loss_max` if
    the ranks differ. After a resume, TensorBoard hides the records that the resume has replaced.

    Needs `pip install 'hvdkit[monitor-tensorboard]'`.

    Args:
        folder: the folder of the run. It is created if it does not exist.

    Raises:
        UsageError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        # These modules of tensorboard do not import TensorFlow.
        parts = [
            require(f"tensorboard.{module}", "tensorboard", "monitor-tensorboard")
            for module in (
                "summary.writer.record_writer",
                "compat.proto.event_pb2",
                "compat.proto.summary_pb2",
            )
        ]
        self._writers, self._events, self._summaries = parts
        self._folder = Path(folder)
        self._writer: Any = None

    def open(self) -> None:
        """Create an event file.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = self._writers.RecordWriter((self._folder / name).open("xb"))
        self._write(time.time(), file_version="brain.Event:2")

    def begin(self, run: Run) -> None:
        """Write from which step the job has resumed.

        TensorBoard then hides the earlier records of the steps after `run.step`.
        """
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(run.time, step=run.step + 1, session_log=session)

    def log(self, record: Record) -> None:
        """Write one event with all metrics."""
        value_of = self._summaries.Summary.Value
        values = [value_of(tag=tag, simple_value=v) for tag, v in scalars(record).items()]
        summary = self._summaries.Summary(value=values)
        self._write(record.time, step=record.step, summary=summary)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, seconds: float, **fields: Any) -> None:
        event = self._events.Event(wall_time=seconds, **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()
