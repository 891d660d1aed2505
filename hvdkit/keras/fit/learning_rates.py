"""Resume an epoch with the learning rate that it had.

A callback such as `LearningRateScheduler` may multiply the learning rate at the beginning of each
epoch. `fit` calls `on_epoch_begin` again for an epoch that it resumes. Without this module, the
rate would be multiplied twice.
"""

from collections.abc import Sequence
from typing import Any

import keras

from hvdkit.keras.further_optimizers import all_optimizers
from hvdkit.keras.multi_optimizer import updating_optimizers


def learning_rates(model: Any) -> list[float]:
    """Return the learning rates of a model's optimizers, without those that follow a schedule."""
    return [float(keras.ops.convert_to_numpy(variable)) for variable in rate_variables(model)]


def set_learning_rates(model: Any, rates: Sequence[float]) -> None:
    """Restore a result of `learning_rates`. Do nothing if the model has other optimizers now."""
    variables = rate_variables(model)
    if len(variables) == len(rates):
        for variable, rate in zip(variables, rates, strict=True):
            variable.assign(rate)


def rate_variables(model: Any) -> list[Any]:
    """Return the variables of the learning rates that follow no schedule."""
    found = [
        getattr(each, "_learning_rate", None)
        for optimizer in all_optimizers(model)
        for each in updating_optimizers(optimizer)
    ]
    return [each for each in found if isinstance(each, keras.Variable)]


class EpochRates:
    """The learning rates before and after the callbacks at the beginning of an epoch.

    `hvd.callbacks.Checkpoint` saves them. At a resume within the epoch, the callbacks get the rates
    as before the epoch. If they set the same rates as in the interrupted job, the rates of the
    checkpoint are then restored. Otherwise the script has another schedule now, whose rates stay.
    """

    def __init__(self) -> None:
        self._before: list[float] = []
        self._after: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the rates of the current epoch."""
        return {"before": self._before, "after": self._after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rates of the epoch that will be resumed."""
        self._before, self._after = list(state["before"]), list(state["after"])

    def epoch_ends(self, model: Any) -> None:
        """Keep the rates before the next epoch. Called at the beginning of `fit`, too."""
        self._before = learning_rates(model)

    def resume(self, model: Any) -> list[float]:
        """Give the callbacks at the beginning of a resumed epoch the rates as before the epoch.

        Returns:
            The rates of the checkpoint, for `epoch_begins`.
        """
        restored = learning_rates(model)
        # Checkpoints of earlier versions lack the rates.
        set_learning_rates(model, self._before)
        return restored

    def epoch_begins(self, model: Any, restored: Sequence[float] | None) -> None:
        """Called after the callbacks at the beginning of an epoch.

        Args:
            restored: the result of `resume` if the epoch is resumed; otherwise None.
        """
        rates = learning_rates(model)
        if restored is None or not self._before:
            self._after = rates
        elif rates == self._after:
            set_learning_rates(model, restored)
        else:
            self._after = rates
