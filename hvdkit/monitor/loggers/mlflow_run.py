"""Write records to MLflow."""

import re
from typing import Any

from hvdkit.monitor.loggers.logger import Logger, require
from hvdkit.monitor.records import Record, Run, scalars

# MLflow accepts this number of metrics in one request.
_BATCH = 1000
_INVALID = re.compile(r"[^\w\-. /]", re.ASCII)


class MLFlowLogger(Logger):
    """Write records to a run of MLflow.

    Characters that MLflow does not accept in a name become `_`.

    Needs `pip install 'hvdkit[monitor-mlflow]'`.

    Args:
        experiment: the name of the experiment. It is created if it does not exist.
        tracking_uri: a server, or a local database such as `sqlite:///mlflow.db`. Default: that of
            MLflow, which MLFLOW_TRACKING_URI sets.
        run_name: the name of a new run.
        run_id: the run to continue, after a restart.

    Raises:
        UsageError: the package mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str,
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
    ) -> None:
        self._mlflow = require("mlflow", "mlflow", "monitor-mlflow")
        self._entities = require("mlflow.entities", "mlflow", "monitor-mlflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._run_id = run_id
        self._client: Any = None

    def open(self) -> None:
        """Begin a run, or continue one.

        Raises:
            mlflow.exceptions.MlflowException: the server does not answer, or there is no such run.
        """
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        if self._run_id is not None:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(number, run_name=self._run_name).info.run_id

    @property
    def run_id(self) -> str | None:
        """The id of the run, on the first rank."""
        return self._run_id

    def begin(self, run: Run) -> None:
        """Store the number of ranks and the framework as tags."""
        self._client.set_tag(self._run_id, "hvdkit.ranks", str(len(run.ranks)))
        self._client.set_tag(self._run_id, "hvdkit.framework", run.framework)

    def log(self, record: Record) -> None:
        """Send a record."""
        milliseconds = int(record.time * 1000)
        metrics = [
            self._entities.Metric(_INVALID.sub("_", name), value, milliseconds, record.step)
            for name, value in scalars(record).items()
        ]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)
