"""Resume an epoch whose `on_epoch_begin` hooks have run before.

`fit` calls `on_epoch_begin` again for an epoch that it resumes. A callback may multiply the
learning rate there, change weights, or count epochs. Without this module, the callback would do so
twice.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.checkpoint.state import Tree
from hvdkit.keras import backend
from hvdkit.keras.callback_states import CallbackStates
from hvdkit.keras.fit.learning_rates import EpochRates, rate_variables
from hvdkit.keras.further_optimizers import all_optimizers
from hvdkit.keras.model_state import variables_of
from hvdkit.keras_variables.optimizer_slots import optimizer_variables


class Copies:
    """Copies of a model's variables and optimizer variables in host memory.

    The learning rates are left out; see `EpochRates`.
    """

    def __init__(self, model: Any) -> None:
        built = (each for each in all_optimizers(model) if each.built)
        rates = {id(variable) for variable in rate_variables(model)}
        variables = [
            *variables_of(model),
            *(v for each in built for v in optimizer_variables(each)),
        ]
        self._copies = [(v, backend.read(v).copy()) for v in variables if id(v) not in rates]

    def restore(self) -> None:
        """Restore the variables that have changed."""
        for variable, content in self._copies:
            if not np.array_equal(backend.read(variable), content):
                backend.write(variable, content)


class EpochBegin:
    """The state before and after the `on_epoch_begin` hooks of an epoch.

    `hvd.callbacks.Checkpoint` saves the learning rates (see `EpochRates`), and the states that
    callbacks with `state_dict()` had before the epoch. At a resume within the epoch, the hooks run
    with these states. Then the states and variables of the checkpoint are restored again.
    """

    def __init__(self) -> None:
        self._rates = EpochRates()
        self._before: Tree = {}
        # What is restored after the hooks: the learning rates; and the states and the variables, if
        # a hook of the script may change them.
        self._resumed: tuple[list[float], tuple[Tree, Copies] | None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current epoch."""
        return {**self._rates.state_dict(), "callbacks": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the epoch that will be resumed."""
        self._rates.load_state_dict(state)
        self._before = state.get("callbacks", {})  # absent in earlier checkpoints

    def epoch_ends(self, model: Any, callbacks: Sequence[Any]) -> None:
        """Keep the state before the next epoch. Called at the beginning of `fit`, too."""
        self._rates.epoch_ends(model)
        self._before = copy.deepcopy(_states(callbacks).save())

    def resume(self, model: Any, callbacks: Sequence[Any]) -> None:
        """Give the hooks of a resumed epoch the state as before the epoch."""
        changed = None
        if any(map(_has_own_hook, callbacks)):
            states = _states(callbacks)
            changed = copy.deepcopy(states.save()), Copies(model)
            states.restore(copy.deepcopy(self._before))
        self._resumed = self._rates.resume(model), changed

    def epoch_begins(self, model: Any, callbacks: Sequence[Any]) -> None:
        """Called after the hooks at the beginning of an epoch."""
        (rates, changed), self._resumed = self._resumed or (None, None), None
        self._rates.epoch_begins(model, rates)
        if changed is not None:
            states, copies = changed
            _states(callbacks).restore(states)
            copies.restore()


def _states(callbacks: Sequence[Any]) -> CallbackStates:
    # The hooks of Keras and hvdkit change only learning rates. Their states may be large.
    own = [each for each in callbacks if _has_own_hook(each)]
    # The states of all callbacks are restored before, with a warning.
    return CallbackStates(lambda: own, warns=False)


def _has_own_hook(callback: Any) -> bool:
    """Return whether `on_epoch_begin` is neither Keras's nor hvdkit's."""
    module = getattr(callback.on_epoch_begin, "__module__", None) or ""
    return module.partition(".")[0] not in ("keras", "hvdkit")
