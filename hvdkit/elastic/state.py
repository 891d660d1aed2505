"""The part of an elastic state that all adapters share: it stores the commits of a script."""

from __future__ import annotations

import functools
import logging
import pickle
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import group_by_text
from hvdkit.agreement.process_sets import other_ranks
from hvdkit.agreement.rank_errors import attempt
from hvdkit.checkpoint import memory
from hvdkit.checkpoint.calls import StepWord
from hvdkit.checkpoint.coordination import exchange
from hvdkit.checkpoint.memory import Allocate
from hvdkit.checkpoint.replaced_state import positions, restore_positions, state_replaced
from hvdkit.checkpoint.snapshot import SnapshotMemory, encoded
from hvdkit.checkpoint.state import StatefulItem, Tree, is_divided
from hvdkit.checkpoint.step_boundary import StepBoundary
from hvdkit.elastic import parts
from hvdkit.elastic.commits import Commits
from hvdkit.elastic.copies import check_references, check_values, is_of_keras
from hvdkit.elastic.parts import Parts, Pickled
from hvdkit.errors import UsageError
from hvdkit.runtime.elastic_start import ElasticStart
from hvdkit.training.sampling import Epochs

_log = logging.getLogger("hvdkit.elastic")


#: The positions of checkpointers, which count the steps themselves. A start restores them.
POSITIONS: dict[str, StatefulItem] = {"positions": Pickled(positions, restore_positions)}


class _Position:
    """The `StatefulItem` of a `ResumableSampler`."""

    def __init__(self, sampler: Epochs) -> None:
        self._sampler = sampler

    def save(self) -> Tree:
        return self._sampler.committed()

    def plan_restore(self, tree: Tree) -> Tree:
        # All ranks together continue at this position, also if their number has changed.
        return self._sampler.plan_restore(tree)

    def restore(self, tree: Tree) -> None:
        self._sampler.restore(tree)


def part_name(kind: str, name: str) -> str:
    """Return the name of the part of an attribute. No other part has it, whatever `name` is."""
    # The encoding has only characters that the names of parts may have.
    return f"{kind}-{name.encode('punycode').decode()}"


class CommittedState:
    """The part of an elastic state that stores its commits. A mixin before Horovod's state class.

    It keeps the items of `_items`, as a checkpointer does, in host memory: `save` copies them,
    `restore` restores them from the copy, `sync` broadcasts the copy of the first rank, and
    `commit` stores the copy on each host. An adapter adds the items of models and optimizers. All
    adapters have two kinds of items more:

    - objects, which become attributes. They are replaced by copies. An object that others refer to
      is therefore an error: see `_advice`;
    - every `ResumableSampler` that is given as an attribute. The sampler itself gets the position.

    Attributes:
        _saved: the state as of the last `save` or `sync`.
        _saved_state: the objects and samplers by name, as of the last `save`.
    """

    #: The state of the running training function of `hvdkit run --elastic`; None without one.
    running: ClassVar[CommittedState | None] = None

    #: Raised when the hosts have changed: Horovod's `HostsUpdatedInterrupt`.
    _interrupt: type[Exception]
    #: Allocates the memory of the copy.
    _allocate: Allocate = staticmethod(memory.allocate)
    #: Unpickles objects, also those of another rank.
    _loads: Callable[[bytes], Any] = staticmethod(pickle.loads)
    _commits: Commits | None = None
    # Whether `run` has called a training function with this state in this process.
    _began = False
    _saved: Parts = MappingProxyType({})
    # Whether this state has warned that its commits are not stored.
    _warned = False

    _saved_state: dict[str, Any]
    _rank: Callable[[], int]
    _host_messages: queue.Queue[Any]
    _reset_callbacks: Sequence[Callable[[], None]]
    reset: Callable[[], None]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check_objects()

    def _check_objects(self) -> None:
        """Check the objects, and save the state. Call it in the constructor.

        Raises:
            UsageError: a copy of an object would be useless.
        """
        self._forget_uncounted()
        for name, value in self._objects().items():
            check_values(name, value, self._advice)
            check_references(name, value, self._originals())
        if ElasticStart.read() is None:
            self.save()

    def _samplers(self) -> dict[str, Epochs]:
        """Return the samplers, by the name of their attribute."""
        return {k: v for k, v in self._saved_state.items() if isinstance(v, Epochs)}

    def _objects(self) -> dict[str, Any]:
        """Return the objects as they are now, by the name of their attribute."""
        samplers = self._samplers()
        return {k: getattr(self, k) for k in self._saved_state if k not in samplers}

    def _forget_uncounted(self) -> None:
        """Forget samples that were read before the training, for instance to build the model."""
        for sampler in self._samplers().values():
            sampler.uncounted = False

    def __setattr__(self, name: str, value: Any) -> None:
        known: dict[str, Any] = vars(self).get("_saved_state", {})
        if isinstance(known.get(name), Epochs):
            if not isinstance(value, Epochs):
                raise UsageError(
                    f"state.{name} is a ResumableSampler, and was set to {value!r:.80} of type "
                    f"{type(value).__name__}: expected a ResumableSampler"
                )
            known[name] = value
        elif name in known and value is not known[name]:
            check_values(name, value, self._advice)
        super().__setattr__(name, value)

    def _advice(self, value: Any) -> str:
        """Return what to do with a value that must not be copied; "" if it may be copied.

        A value must not be copied if others usually refer to it: the script, a DataLoader that
        has a sampler, or an optimizer that has variables. They would not notice the copy.
        """
        if isinstance(value, Epochs):
            return (
                "pass each ResumableSampler to the constructor of the state, as a keyword argument "
                "of its own"
            )
        if is_of_keras(value):
            return (
                "use the arguments `model`, `variables` and `optimizer` of the states. KerasState "
                "also keeps the layers of its model, and the optimizers that are attributes of its "
                "model"
            )
        return ""

    def _originals(self) -> Iterable[Any]:
        """Return the objects that the state keeps without copies, such as models."""
        return self._samplers().values()

    def keep(self, name: str, value: Any) -> None:
        """Set an attribute, and make it an object of the state. Call this on every rank."""
        self._saved_state.setdefault(name, value)
        setattr(self, name, value)

    def _model_items(self) -> Mapping[str, StatefulItem]:
        """Return the items of models, optimizers and the gradient reduction, by name."""
        return {}

    def _items(self) -> dict[str, StatefulItem]:
        """Return the items of the state, in the order in which they are restored."""
        return {
            **self._model_items(),
            **{part_name("sampler", n): _Position(each) for n, each in self._samplers().items()},
            "objects": Pickled(self._objects, self._take_objects, self._loads),
        }

    def _take_objects(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            # The value was checked when the script set it.
            self._saved_state[name] = value
            setattr(self, name, value)

    def _make_boundary(self) -> StepBoundary:
        return StepBoundary()

    @functools.cached_property
    def _boundary(self) -> StepBoundary:
        # The objects of the state are known after the constructor only.
        return self._make_boundary()

    @functools.cached_property
    def _memory(self) -> SnapshotMemory:
        return SnapshotMemory(self._allocate)

    def _must_wait(self, checks: bool = False) -> bool:
        """Return whether a commit must wait for a step boundary, unless none ever comes.

        A collective in a job of `hvdkit run --elastic`: equal on all ranks. Ranks may have
        different optimizers, so that only some of them may have windows.

        Args:
            checks: whether the call is `check_host_updates`, and not `commit`.
        """
        waits, never = self._boundary.ask()
        if self._commits is not None:
            own = StepWord(waiting=waits, wrong=never, commits=not checks, checks=checks)
            agreed = self._commits.begin(own)
            waits, never = agreed.waiting > 0, agreed.wrong > 0
            if never:
                self._commits.warn_of_window(stores=True)
        if not waits:
            self._boundary.reach()
        return waits and not never

    def _collectives(self) -> Collectives:
        """Return the collectives of all ranks."""
        raise NotImplementedError

    def _reduced_over(self) -> Mapping[str, Sequence[int]]:
        """Return the ranks that each optimizer of the state reduces over, by its name."""
        return {}

    def _check_ranks(self) -> None:
        """Check that all ranks train one model: commits and `sync` have that of rank 0.

        A collective, because each rank may have another optimizer, with another process set.

        Raises:
            UsageError: on every rank, if an optimizer of a rank reduces over other ranks, or a
                model has DTensors.
        """
        collectives = self._collectives()
        own = other_ranks(self._reduced_over(), collectives.ranks)
        if not own and any(map(is_divided, self._items().values())):
            own = "tensors are divided"
        name = "hvdkit.elastic.ranks"
        if collectives.sum([int(bool(own))], name)[0]:
            text = own or "all over all ranks"
            found = "; ".join(group_by_text(collectives, text, f"{name}.who"))
            raise UsageError(_several_models(type(self).__name__, found))

    def _discard_gradients(self) -> None:
        """Discard accumulated gradients, which differ between ranks after an interruption."""

    def on_reset(self) -> None:
        """Call the functions of `register_reset_callbacks`. Horovod has started again.

        Horovod's method also discards the messages of its launcher about changed hosts. A message
        may arrive while Horovod starts again, after the launcher has assigned the ranks: without
        this message, the job would never use the new hosts. So `discard_host_messages` is called
        before Horovod is shut down.
        """
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def discard_host_messages(self) -> None:
        """Discard the messages of Horovod's launcher about changed hosts that have arrived."""
        self._host_messages = queue.Queue()

    def save(self) -> None:
        """Copy everything to host memory, except accumulated gradients.

        In a training function of `hvdkit run --elastic`, one rank of each host has a copy.
        """
        if self._commits is not None:
            if not self._commits.writes:
                return
            # The thread that stores the last commit reads the copy.
            self._commits.wait()
        items = self._items() | POSITIONS
        self._saved = self._memory.copy(
            encoded({name: item.save() for name, item in items.items()})
        )

    def restore(self) -> None:
        """Restore everything as of the last `save`, and discard accumulated gradients.

        In a training function of `hvdkit run --elastic`, a collective: rank 0 sends its copy.
        """
        if self._commits is not None:
            self._receive(0)
            return
        self._discard_gradients()
        parts.restore(self._saved, self._items())

    def sync(self) -> None:
        """Broadcast everything from rank 0, and discard accumulated gradients. A collective.

        Raises:
            UsageError: on every rank, if the process set of an optimizer is not all ranks, or if
                the state of rank 0 does not fit the state of a rank.
        """
        self._check_ranks()
        self._discard_gradients()
        self._save_on(self._rank() == 0)
        self._receive(0)
        self._save_on(self._rank() != 0)

    def _save_on(self, this_rank: bool) -> None:
        """Save the state on some ranks, and raise on all ranks if one fails. A collective."""
        _, problem = attempt(self.save) if this_rank else (None, None)
        exchange(self._collectives(), {}, problem)

    def _receive(self, root_rank: int, more: Mapping[str, StatefulItem] = {}) -> None:
        """Restore what a rank has saved. A collective.

        Args:
            root_rank: the rank.
            more: further items to restore.

        Raises:
            UsageError, CheckpointError: on every rank, if a rank could not restore it.
        """
        self._discard_gradients()
        parts.restore_everywhere(
            *(self._collectives(), self._saved, {**self._items(), **more}),
            root_rank,
            "hvdkit.elastic.state",
        )
        self._forget_uncounted()

    def _begin(self, commits: Commits) -> None:
        """Begin a training function: continue from the newest commit. A collective.

        Args:
            commits: the commits of this call of the function.
        """
        found = commits.newest()
        if found is not None:
            holder, own = found
            self._saved = own or self._saved
            self._receive(holder, POSITIONS)
            state_replaced()
        # A state that continues from an earlier call in this process was not reset.
        if commits.restarted and (found is not None or not self._began):
            self.on_reset()
        self._began = True
        self._commits = commits
        self.sync()
        if found is not None:
            # From now on, each host has the commit.
            commits.store_restored(self._saved)

    def commit(self) -> None:
        """Save the state, and end the ranks if the hosts have changed. A collective.

        In a job of `hvdkit run --elastic` the commit outlives the ranks: after a failure, the
        restarted ranks resume from the commit.

        Between a backward pass and its step, and within an accumulation window, the call stores
        nothing, and does not end the ranks: the gradients would be lost. The next commit after the
        step stores the state. If the calls always come between a pass and its step, the state is
        stored without these gradients.

        Raises:
            HostsUpdatedInterrupt: on every rank, if the hosts have changed.
            HvdkitError: on every rank, if a rank could not save its state, or a host could not
                store the commit before.
            UsageError: on every rank, if ranks call different methods, or a rank waits in `join`;
                or `hvdkit run --elastic` is calling a training function with another state.
        """
        must_wait = self._must_wait()
        if self._commits is None:
            self._check_stored()
            if not must_wait:
                self.save()
            super().check_host_updates()  # type: ignore[misc]
        elif must_wait:
            self._commits.warn_of_window(stores=False)
        elif self._store():
            raise self._interrupt(False)

    def check_host_updates(self) -> None:
        """End the ranks if the hosts have changed. A collective.

        If the hosts have changed, commit the state first, so that no work is lost. If not, save
        nothing: the call is then cheaper than `commit`. Between a pass and its step, the call does
        not end the ranks, as `commit`.

        Raises:
            HostsUpdatedInterrupt: on every rank, if the hosts have changed.
            HvdkitError: on every rank, if a rank could not save its state or store the commit.
            UsageError: on every rank, if ranks call different methods, or a rank waits in `join`;
                or `hvdkit run --elastic` is calling a training function with another state.
        """
        if self._commits is None:
            self._check_stored()
            super().check_host_updates()  # type: ignore[misc]
        elif self._commits.hosts_changed() and not self._must_wait(checks=True):
            self._store(ends=True)
            raise self._interrupt(False)

    def _store(self, ends: bool = False) -> bool:
        """Store a commit, and return whether the hosts have changed. A collective.

        Args:
            ends: whether the ranks end after this commit.
        """
        assert self._commits is not None
        _, problem = attempt(self.save)
        items = self._items() | POSITIONS
        differing = [name for name, item in items.items() if isinstance(item, Pickled)]
        return self._commits.store(self._saved, differing, problem, ends)

    def _check_stored(self) -> None:
        """Check a call without commits: no commit is stored, and no host change is noticed.

        Raises:
            UsageError: `hvdkit run --elastic` is calling a training function with another state.
        """
        if ElasticStart.read() is None:
            return
        kind = type(self).__name__
        # Otherwise this state has commits.
        if (running := CommittedState.running) is not None:
            raise UsageError(
                f"commit() or check_host_updates() was called for this {kind}, but the elastic "
                f"training function was called with another {type(running).__name__}: hvdkit run "
                f"--elastic stores only the state of the function. Put all objects into that state"
            )
        if not self._warned and self._rank() == 0:
            _log.warning(
                "commit() or check_host_updates() of a %s was called outside its elastic training "
                "function, so no commit is stored, and no change of hosts is noticed. Call both "
                "in a function with hvd.elastic.run that was called with this state",
                kind,
            )
        self._warned = True


def _several_models(kind: str, found: str) -> str:
    return (
        f"gradients are not reduced over all ranks, or tensors are divided among them ({found}), "
        f"and a {kind} has one model for all ranks, that of rank 0: expected plain tensors, "
        f"no shard=, and the process set of all ranks in each optimizer. "
        f"Start a job for each model; or use no elastic state, and save each model "
        f"with hvd.Checkpointer(folder, process_set=process_set) in a folder for each process set"
    )
