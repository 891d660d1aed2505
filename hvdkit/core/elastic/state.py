"""The part of an elastic state that all adapters share: it stores the commits of a script."""

from __future__ import annotations

import functools
import logging
import pickle
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, cast

from hvdkit.core.collectives import Collectives
from hvdkit.core.consistency import group_by_text
from hvdkit.core.elastic.committer import Committer
from hvdkit.core.elastic.content_digest import HashedFile, content_digest
from hvdkit.core.elastic.copies import check_references, check_values, copies, is_of_keras
from hvdkit.core.elastic.start import ElasticStart
from hvdkit.core.process_sets import other_ranks
from hvdkit.core.replaced_state import positions, restore_positions
from hvdkit.core.sampling import Epochs
from hvdkit.core.step_boundary import StepBoundary
from hvdkit.errors import UsageError

_log = logging.getLogger("hvdkit.elastic")


class Item(Protocol):
    """A part of the state that the script or another object holds, and that stays the same object.

    For example a part of the gradient reduction, such as the scales of fp16. The checkpointers
    store the same items.
    """

    def save(self) -> Any:
        """Return the state: a picklable object, the same on all ranks."""

    def restore(self, tree: Any, /) -> None:
        """Restore a result of `save`, possibly of another process. Not a collective."""


class _Position:
    """The `Item` of a `ResumableSampler`."""

    def __init__(self, sampler: Epochs) -> None:
        self._sampler = sampler

    def save(self) -> Any:
        return self._sampler.committed()

    def restore(self, tree: Any) -> None:
        # All ranks together continue at this position, also if their number has changed.
        self._sampler.restore(self._sampler.plan_restore(tree))


class CommittedState:
    """The part of an elastic state that stores its commits. A mixin before Horovod's state class.

    It keeps three kinds of values:

    - objects, which become attributes. They are replaced by copies. An object that others refer to
      is therefore an error: see `_advice`;
    - every `ResumableSampler` that is given as an attribute. The sampler itself gets the position;
    - the state of the gradient reduction. Sums have the same bits again only with this state.

    An adapter that keeps more than this extends `save`, `restore`, and the pair `_content` and
    `read_saved`. `_content` takes small values that may differ between ranks from
    `_values_to_write`. The classes of users extend `write_saved` instead of `_content`.

    Attributes:
        _samplers: the samplers, by the name of their attribute.
        _saved_items: the states of `_items` as of the last `save`.
        _saved_state: the objects as of the last `save`.
    """

    #: The state of the running training function of `hvdkit run --elastic`; None without one.
    running: ClassVar[CommittedState | None] = None

    #: Raised when the hosts have changed: Horovod's `HostsUpdatedInterrupt`.
    _interrupt: type[Exception]
    _committer: Committer | None = None
    # Whether `run` has called a training function with this state in this process.
    _began = False
    _samplers: Mapping[str, Epochs] = {}
    _saved_items: Mapping[str, Any] = {}
    # The values of the first rank, while a commit is written.
    _first_ranks_values: Mapping[str, Any] | None = None
    # Whether this state has warned that its commits are not stored.
    _warned = False

    _bcast_object: Callable[[Any], Any]
    _saved_state: dict[str, Any]
    _rank: Callable[[], int]
    _host_messages: queue.Queue[Any]
    _reset_callbacks: Sequence[Callable[[], None]]
    reset: Callable[[], None]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sort_objects()

    def _sort_objects(self) -> None:
        """Separate the samplers from the objects, and save both. Call it in the constructor.

        Raises:
            UsageError: a copy of an object would be useless.
        """
        self._samplers = {k: v for k, v in self._saved_state.items() if isinstance(v, Epochs)}
        self._forget_uncounted()
        objects = {k: v for k, v in self._saved_state.items() if k not in self._samplers}
        self._saved_state = objects
        for name, value in objects.items():
            check_values(name, value, self._advice)
            check_references(name, value, self._originals())
        self._copy_objects()
        self._save_items()

    def _forget_uncounted(self) -> None:
        """Forget samples that were read before the training, for instance to build the model."""
        for sampler in self._samplers.values():
            sampler.uncounted = False

    def __setattr__(self, name: str, value: Any) -> None:
        objects: Mapping[str, Any] = vars(self).get("_saved_state", {})
        if name in self._samplers:
            if value is not self._samplers[name]:
                self._set_sampler(name, value)
        # `restore` and `sync` set the saved objects themselves, which were checked.
        elif name in objects and value is not objects[name]:
            check_values(name, value, self._advice)
        super().__setattr__(name, value)

    def _set_sampler(self, name: str, value: Any) -> None:
        if not isinstance(value, Epochs):
            raise UsageError(
                f"state.{name} is a ResumableSampler, and was set to {value!r:.80} of type "
                f"{type(value).__name__}: expected a ResumableSampler"
            )
        self._samplers = {**self._samplers, name: value}
        self._saved_items = {**self._saved_items, _key_of(name): _Position(value).save()}

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
        return self._samplers.values()

    def _copy_objects(self) -> None:
        """Replace the saved objects by copies.

        Horovod's `ObjectState` keeps references. A script may change an object of the state in
        place, for example append to a list. This must not change what `save` has saved.
        """
        self._saved_state = copies(self._saved_state)

    def keep(self, name: str, value: Any) -> None:
        """Set an attribute, and make it an object of the state. Call this on every rank."""
        self._saved_state.setdefault(name, value)
        setattr(self, name, value)

    def _reduction_items(self) -> Mapping[str, Item]:
        """Return the items of the gradient reduction, by name."""
        return {}

    def _items(self) -> Mapping[str, Item]:
        samplers = {_key_of(name): _Position(each) for name, each in self._samplers.items()}
        return {**self._reduction_items(), **samplers}

    def _make_boundary(self) -> StepBoundary:
        return StepBoundary()

    @functools.cached_property
    def _boundary(self) -> StepBoundary:
        # The objects of the state are known after the constructor only.
        return self._make_boundary()

    def _ask(self) -> tuple[bool, bool]:
        """Return whether a commit must wait for a step boundary, and whether none ever comes.

        A collective in a job of `hvdkit run --elastic`: equal on all ranks. Ranks may have
        different optimizers, so that only some of them may have windows.
        """
        own = self._boundary.ask()
        waits, never = own if self._committer is None else self._committer.anywhere(own)
        if not waits:
            self._boundary.reach()
        return waits, never

    def _must_wait(self) -> bool:
        """Return whether a commit must wait for a step boundary. A collective, see `_ask`."""
        waits, never = self._ask()
        return waits and not never

    def _collectives(self) -> Collectives | None:
        """Return the collectives of all ranks; None for a state without optimizers."""
        return None

    def _reduced_over(self) -> Mapping[str, Sequence[int]]:
        """Return the ranks that each optimizer of the state reduces over, by its name."""
        return {}

    def _check_ranks(self) -> None:
        """Check that all ranks train one model: commits and `sync` have that of rank 0.

        A collective, because each rank may have another optimizer, with another process set.

        Raises:
            UsageError: on every rank, if an optimizer of a rank reduces over other ranks.
        """
        if (collectives := self._collectives()) is None:
            return
        own = other_ranks(self._reduced_over(), collectives.ranks)
        name = "hvdkit.elastic.ranks"
        if collectives.sum([int(bool(own))], name)[0]:
            text = own or "all over all ranks"
            found = "; ".join(group_by_text(collectives, text, f"{name}.who"))
            raise UsageError(_several_models(type(self).__name__, found))

    def _broadcast_variables(self) -> None:
        """Broadcast the variables from rank 0. A collective."""

    def _discard_gradients(self) -> None:
        """Discard accumulated gradients, which differ between ranks after an interruption."""

    def _save_items(self) -> None:
        self._saved_items = {name: item.save() for name, item in self._items().items()}

    def _restore_items(self) -> None:
        for name, item in self._items().items():
            # Commits of earlier versions lack some items.
            if name in self._saved_items:
                item.restore(self._saved_items[name])

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
        """Copy everything, except accumulated gradients.

        PyTorch tensors are copied on their devices, so a state needs its GPU memory twice. The
        variables of TensorFlow and Keras are copied to host memory.
        """
        super().save()  # type: ignore[misc]
        self._copy_objects()
        self._save_items()

    def restore(self) -> None:
        """Restore everything as of the last `save`, and discard accumulated gradients."""
        super().restore()  # type: ignore[misc]
        self._copy_objects()
        self._discard_gradients()
        self._restore_items()

    def sync(self) -> None:
        """Broadcast everything from rank 0, and discard accumulated gradients. A collective.

        Raises:
            UsageError: on every rank, if the process set of an optimizer is not all ranks.
        """
        self._check_ranks()
        self._broadcast_variables()
        # Horovod broadcasts the objects of the last `save`, but the weights of now. The script may
        # have restored both from a checkpoint.
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}
        super().sync()  # type: ignore[misc]
        self._copy_objects()
        self._discard_gradients()
        self._forget_uncounted()
        self._save_items()
        # A rank on a host without a commit has no state, and the ranks' states must be equal.
        self._saved_items = self._bcast_object(self._saved_items)
        self._restore_items()

    def _values(self) -> Mapping[str, Any]:
        """Return small values as of the last `save` that may differ between ranks.

        For example, a script may set an attribute on the first rank only, and only the first rank
        of a `fit` has callbacks that write files.
        """
        return {"objects": self._saved_state, "positions": positions()}

    def _values_to_write(self) -> Mapping[str, Any]:
        """Return the `_values` for `write_saved`: those of the first rank in a commit.

        After a restart, the first rank may be on another host.
        """
        return self._values() if self._first_ranks_values is None else self._first_ranks_values

    def _content(self) -> Any:
        """Return what `save` has saved, and the positions of checkpointers: a picklable object."""
        raise NotImplementedError

    def _dump(self, content: Any, file: IO[bytes]) -> None:
        """Write a result of `_content` to a file."""
        pickle.dump(content, file, protocol=5)

    def _plain(self, value: Any) -> Any:
        """Return a picklable object with the same content, as for `content_digest`."""

    def write_saved(self, file: IO[bytes]) -> None:
        """Write what `save` has saved to a file. Not a collective.

        One rank of each host calls this.
        """
        self._dump(self._content(), file)

    def read_saved(self, path: Path) -> None:
        """Read what `write_saved` has written, for the next `restore`. Not a collective."""
        raise NotImplementedError

    def _set_saved(
        self, objects: dict[str, Any], items: Mapping[str, Any], restored: Mapping[str, Any]
    ) -> None:
        """Set what the next `restore` restores, and the positions of checkpointers."""
        self._saved_state, self._saved_items = objects, items
        restore_positions(restored)

    def digest_saved(self) -> bytes:
        """Return a digest of what `write_saved` writes, to find out whether it has changed."""
        if type(self).write_saved is CommittedState.write_saved:
            return content_digest(self._content(), self._plain)
        # The class of a user may write more than the content.
        file = HashedFile()
        self.write_saved(cast("IO[bytes]", file))
        return file.digest()

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
            HvdkitError: on every rank, if a rank could not save its state or store the commit. Also
                if another rank waits in `join`.
            UsageError: `hvdkit run --elastic` is calling a training function with another state.
        """
        waits, never = self._ask()
        if self._committer is None:
            self._check_stored()
            if never or not waits:
                self.save()
            super().check_host_updates()  # type: ignore[misc]
            return
        if waits:
            self._committer.warn_of_window(stores=never)
        if (never or not waits) and self._store():
            raise self._interrupt(False)

    def check_host_updates(self) -> None:
        """End the ranks if the hosts have changed. A collective.

        If the hosts have changed, commit the state first, so that no work is lost. If not, save
        nothing: the call is then cheaper than `commit`. Between a pass and its step, the call does
        not end the ranks, as `commit`.

        Raises:
            HostsUpdatedInterrupt: on every rank, if the hosts have changed.
            HvdkitError: on every rank, if a rank could not save its state or store the commit. Also
                if another rank waits in `join`.
            UsageError: `hvdkit run --elastic` is calling a training function with another state.
        """
        if self._committer is None:
            self._check_stored()
            super().check_host_updates()  # type: ignore[misc]
        elif self._committer.hosts_changed():
            if self._must_wait():
                return
            self._store()
            raise self._interrupt(False)

    def _store(self) -> bool:
        """Store a commit, and return whether the hosts have changed. A collective."""
        assert self._committer is not None

        def write(file: IO[bytes], values: Mapping[str, Any]) -> None:
            self._first_ranks_values = values
            try:
                self.write_saved(file)
            finally:
                self._first_ranks_values = None

        return self._committer.commit(write, self.save, self._values, self.digest_saved)

    def _check_stored(self) -> None:
        """Check a call without a committer: no commit is stored, and no host change is noticed.

        Raises:
            UsageError: `hvdkit run --elastic` is calling a training function with another state.
        """
        if ElasticStart.read() is None:
            return
        kind = type(self).__name__
        # Otherwise this state has a committer.
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
        f"gradients are not reduced over all ranks ({found}), and a {kind} has one model for all "
        f"ranks, that of rank 0: expected the process set of all ranks in each optimizer. "
        f"Start a job for each model; or use no elastic state, and save each model "
        f"with hvd.Checkpointer(folder, process_set=process_set) in a folder for each process set"
    )


def _key_of(name: str) -> str:
    """Return the key of a sampler in `_saved_items`. The items of the reduction have no spaces."""
    return f"sampler {name}"
