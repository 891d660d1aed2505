"""Elastic training on the side of a rank.

`hvdkit run --elastic` starts all ranks again, as new processes, after a failure and when the hosts
have changed. So no state of a broken engine is left. The last commit of the script's state is kept
in the memory of each host (`hvdkit.core.committer`).

`CommittedState` is the part of a state class that all adapters share, and `run` is the decorator.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from hvdkit.core.collectives import Collectives
from hvdkit.core.committer import Committer
from hvdkit.core.elastic_start import ElasticStart
from hvdkit.core.replaced_state import positions, restore_positions, state_replaced
from hvdkit.errors import HOSTS_CHANGED, UsageError


class CommittedState:
    """The part of an elastic state that stores its commits. A mixin before Horovod's state class.

    A subclass that keeps more than its attributes extends `save`, `restore`, and the pair
    `write_saved` and `read_saved`.
    """

    #: Raised when the hosts have changed: Horovod's `HostsUpdatedInterrupt`.
    _interrupt: type[Exception]
    _committer: Committer | None = None

    save: Callable[[], None]
    restore: Callable[[], None]
    sync: Callable[[], None]
    on_reset: Callable[[], None]

    def write_saved(self, file: IO[bytes]) -> None:
        """Write what `save` has saved to a file. Not a collective."""
        raise NotImplementedError

    def read_saved(self, path: Path) -> None:
        """Read what `write_saved` has written, for the next `restore`. Not a collective."""
        raise NotImplementedError

    def commit(self) -> None:
        """Save the state, and end the ranks if the hosts have changed. A collective.

        In a job of `hvdkit run --elastic` the commit outlives the ranks: after a failure, the
        restarted ranks resume from the commit.

        Raises:
            HostsUpdatedInterrupt: on every rank, if the hosts have changed.
            HvdkitError: on every rank, if a rank could not save its state or store the commit.
        """
        if self._committer is None:
            self.save()
            super().check_host_updates()  # type: ignore[misc]
            return
        if self._committer.commit(self.write_saved, self.save):
            raise self._interrupt(False)

    def check_host_updates(self) -> None:
        """End the ranks if the hosts have changed. A collective.

        If the hosts have changed, commit the state first, so that no work is lost. If not, save
        nothing: the call is then cheaper than `commit`.

        Raises:
            HostsUpdatedInterrupt: on every rank, if the hosts have changed.
            HvdkitError: on every rank, if a rank could not save its state or store the commit.
        """
        if self._committer is None:
            super().check_host_updates()  # type: ignore[misc]
        elif self._committer.hosts_changed():
            self._committer.commit(self.write_saved, self.save)
            raise self._interrupt(False)


class VariablesState(CommittedState):
    """The part of an elastic state of variables that the adapters for TensorFlow and Keras share.

    Attributes:
        _saved_variables: the variables, and their values as of the last `save`.
        _saved_state: the objects as of the last `save`.
    """

    _saved_variables: Sequence[tuple[Any, Any]]
    _saved_state: Mapping[str, Any]

    def _stored_variables(self) -> Sequence[Any]:
        """Return the variables to store: those that `save` saves, without states of random seeds.

        If all ranks restored the same seed, their Dropout layers would drop the same units.
        """
        raise NotImplementedError

    def write_saved(self, file: IO[bytes]) -> None:
        """Write what `save` has saved, and the positions of checkpointers, to a file."""
        values = {id(variable): value for variable, value in self._saved_variables}
        stored = [values[id(variable)] for variable in self._stored_variables()]
        pickle.dump((stored, self._saved_state, positions()), file, protocol=5)

    def read_saved(self, path: Path) -> None:
        """Read what `write_saved` has written, for the next `restore`.

        Raises:
            UsageError: this state has other variables.
        """
        with path.open("rb") as file:
            values, self._saved_state, restored = pickle.load(file)
        variables = self._stored_variables()
        if len(values) != len(variables):
            raise UsageError(
                f"the commit has {len(values)} variables, but this state has {len(variables)}: "
                f"build the model and its optimizer in the same way at each start"
            )
        self._saved_variables = list(zip(variables, values, strict=True))
        restore_positions(restored)


@dataclass(frozen=True)
class Adapter:
    """The parts of a framework's adapter that `run` needs.

    Attributes:
        collectives: returns the collectives of all ranks.
        local_rank: returns this rank's number on its host.
        size: returns the number of ranks.
        shutdown: shuts down Horovod.
        horovods_run: Horovod's decorator, which shuts down and starts Horovod in the process.
        interrupt: Horovod's `HostsUpdatedInterrupt`.
    """

    collectives: Callable[[], Collectives]
    local_rank: Callable[[], int]
    size: Callable[[], int]
    shutdown: Callable[[], None]
    horovods_run: Callable[[Callable[..., Any]], Callable[..., Any]]
    interrupt: type[Exception]


_keys = itertools.count()


def run(func: Callable[..., Any], adapter: Adapter) -> Callable[..., Any]:
    """Return the elastic form of a training function, whose first argument is the state."""
    in_process = adapter.horovods_run(func)

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        start = ElasticStart.read()
        if start is not None:
            return _run_started(func, adapter, start, state, *args, **kwargs)
        if os.environ.get("HOROVOD_ELASTIC") == "1" or adapter.size() == 1:
            return in_process(state, *args, **kwargs)
        # After a failure, Horovod's decorator would start Horovod again on this rank, and wait for
        # the other ranks, which do not start it again.
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper


def _run_started(
    func: Callable[..., Any],
    adapter: Adapter,
    start: ElasticStart,
    state: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not isinstance(state, CommittedState):
        raise UsageError(
            f"the elastic state is a {type(state).__module__}.{type(state).__name__}, whose "
            f"commits cannot be stored: expected a state of hvdkit, such as "
            f"hvd.elastic.ObjectState, or a class derived from one"
        )
    committer = Committer(start, adapter.collectives(), next(_keys), adapter.local_rank() == 0)

    def load(path: Path) -> None:
        state.read_saved(path)
        state.restore()

    if committer.resume(load):
        state_replaced()
    if start.number > 0:
        state.on_reset()
    state.sync()
    state._committer = committer
    try:
        return func(state, *args, **kwargs)
    except adapter.interrupt:
        _end(adapter)
    finally:
        state._committer = None


def _end(adapter: Adapter) -> NoReturn:
    """End this process, with the status that asks the launcher for a start on other hosts."""
    adapter.shutdown()
    raise SystemExit(HOSTS_CHANGED)
