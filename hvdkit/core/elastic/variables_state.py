"""The part of an elastic state of variables that the adapters for TensorFlow and Keras share."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.core.elastic.state import CommittedState
from hvdkit.errors import UsageError


class VariablesState(CommittedState):
    """The elastic state of variables, such as those of a model and its optimizer.

    Attributes:
        _saved_variables: the variables, and their values as of the last `save`.
    """

    _saved_variables: Sequence[tuple[Any, Any]]

    def _stored_variables(self) -> Sequence[Any]:
        """Return the variables to store: those that `save` saves, without states of random seeds.

        If all ranks restored the same seed, their Dropout layers would drop the same units.
        """
        raise NotImplementedError

    def _save_variables(self) -> None:
        """Copy the variables to host memory."""
        raise NotImplementedError

    def _layout(self) -> Any:
        """Return what `_build` needs: a picklable object."""

    def _build(self, layout: Any) -> None:
        """Create the variables that another process had. Not a collective.

        Args:
            layout: the result of `_layout` in the other process.
        """

    def save(self) -> None:
        """Copy everything to host memory, except accumulated gradients."""
        self._save_variables()
        super().save()

    def _originals(self) -> Iterable[Any]:
        return [*super()._originals(), *(variable for variable, _ in self._saved_variables)]

    def restore(self) -> None:
        """Restore everything as of the last `save`, and discard accumulated gradients."""
        for variable, value in self._saved_variables:
            variable.assign(value)
        super().restore()

    def _content(self) -> Any:
        """Return what `save` has saved, and the positions of checkpointers."""
        values = {id(variable): value for variable, value in self._saved_variables}
        stored = [values[id(variable)] for variable in self._stored_variables()]
        small = self._values_to_write()
        return stored, small["objects"], small["positions"], self._saved_items, self._layout()

    def read_saved(self, path: Path) -> None:
        """Read what `write_saved` has written, for the next `restore`.

        Raises:
            UsageError: this state has other variables.
        """
        with path.open("rb") as file:
            # Commits of earlier versions lack the last parts.
            values, objects, restored, *others = pickle.load(file)
        if len(others) > 1 and others[1] is not None:
            self._build(others[1])
        variables = self._stored_variables()
        if len(values) != len(variables):
            raise UsageError(
                f"the commit has {len(values)} variables, but this state has {len(variables)}: "
                f"build the model and its optimizer in the same way at each start"
            )
        self._saved_variables = list(zip(variables, values, strict=True))
        self._set_saved(objects, others[0] if others else {}, restored)
