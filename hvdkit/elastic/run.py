"""The decorator of elastic training functions."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdkit.agreement.collectives import Collectives
from hvdkit.elastic.commits import Commits
from hvdkit.elastic.state import CommittedState
from hvdkit.errors import HOSTS_CHANGED, UsageError
from hvdkit.runtime.elastic_start import ElasticStart
from hvdkit.runtime.script_end import note_end_with


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


def elastic_function(func: Callable[..., Any], adapter: Adapter) -> Callable[..., Any]:
    """Return the elastic form of a training function, whose first argument is the state."""

    @functools.wraps(func)
    def followed_by_reset(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except adapter.interrupt as interrupt:
            # Without a `sync`, samplers would keep the number of ranks, and optimizers the
            # accumulated gradients. Horovod omits it if hosts or slots were only removed.
            interrupt.skip_sync = False  # type: ignore[attr-defined]
            raise
        finally:
            # The assignment of ranks that follows is newer than these messages.
            if isinstance(state, CommittedState):
                state.discard_host_messages()

    in_process = adapter.horovods_run(followed_by_reset)

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
    if CommittedState.running is not None:
        raise UsageError(
            f"an elastic training function was called with a {type(state).__name__} within another "
            f"elastic training function: expected one at a time, because the commits of a call are "
            f"stored under its number. Remove hvd.elastic.run from the inner function, and put its "
            f"objects into the state of the outer function"
        )
    commits = Commits(start, adapter.collectives(), next(_keys), adapter.local_rank() == 0)
    try:
        state._begin(commits)
        CommittedState.running = state
        return func(state, *args, **kwargs)
    except adapter.interrupt:
        # The commit must be complete, and Horovod still run, for an error on all ranks.
        commits.close()
        _end(adapter)
    finally:
        state._commits = CommittedState.running = None
        commits.close()


def _end(adapter: Adapter) -> NoReturn:
    """End this process, with the status that asks the launcher for a start on other hosts."""
    adapter.shutdown()
    note_end_with(HOSTS_CHANGED)
    raise SystemExit(HOSTS_CHANGED)
