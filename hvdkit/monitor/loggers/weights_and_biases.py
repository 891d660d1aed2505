"""Write records to Weights & Biases."""

from typing import Any

from hvdkit.monitor.loggers.logger import Logger, require
from hvdkit.monitor.records import Record, scalars

# The name that Lightning uses, too.
_STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Write records to Weights & Biases.

    The x-axis is `trainer/global_step`. With `mode="offline"` nothing is sent, and `wandb sync`
    sends the run later. To continue a run after a restart, give the same `id` and
    `resume="allow"`.

    Needs `pip install 'hvdkit[monitor-wandb]'`.

    Args:
        project: the name of the project.
        settings: further arguments of `wandb.init`, such as `name`, `id`, `dir` and `mode`.

    Raises:
        UsageError: the package wandb is not installed.
    """

    def __init__(self, project: str, **settings: Any) -> None:
        self._wandb = require("wandb", "wandb", "monitor-wandb")
        self._settings = {"project": project, **settings}
        self._run: Any = None

    def open(self) -> None:
        """Begin a run.

        Raises:
            wandb.Error: wandb cannot begin one, for example without a login.
        """
        self._run = self._wandb.init(**self._settings)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    def log(self, record: Record) -> None:
        """Send a record."""
        self._run.log({**scalars(record), _STEP: record.step})

    def close(self) -> None:
        """Finish the run. It continues if the logger is opened again."""
        self._settings |= {"id": self._run.id, "resume": "allow"}
        self._run.finish()
