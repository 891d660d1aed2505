"""Positions in data for a checkpoint: the argument `data` of `hvd.Checkpointer`.

A `ResumableSampler` has one position for all ranks. A `StatefulDataLoader`, or anything else with
`state_dict` and `load_state_dict`, has a position on each rank.
"""

import json
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hvdkit.checkpoint import tree
from hvdkit.checkpoint.items import is_item, several
from hvdkit.checkpoint.manifest import check_part_name
from hvdkit.checkpoint.state import RankItem, StatefulItem, Tree
from hvdkit.errors import UsageError
from hvdkit.torch.data.sampling import ResumableSampler, sampler_of
from hvdkit.torch.data.workers import shield_workers
from hvdkit.torch.items.randomness import Randomness, checked
from hvdkit.torch.items.trees import with_small_tensors, without_small_tensors

# Bytes of JSON. The first rank has the states of all ranks in memory.
_LARGEST_STATE = 16_000_000
_STATEFUL = "torchdata.stateful_dataloader.StatefulDataLoader"


def data_parts(data: Any) -> tuple[dict[str, StatefulItem], dict[str, RankItem]]:
    """Return the stateful items of `data` by name: those of all ranks, and those of each rank.

    Args:
        data: see `Checkpointer`; None for no items.

    Raises:
        UsageError: an object has no position that can be saved.
    """
    given = several("data", data)
    shared = {name: each for name, each in given.items() if is_item(each)}
    own: dict[str, RankItem] = {
        name: DataState(each, name) for name, each in given.items() if name not in shared
    }
    for name in given:
        check_part_name(name)
    return shared, own


class DataState:
    """A `RequiredRankItem`: the `state_dict` of an object with this rank's position.

    Args:
        stateful: an object with `state_dict` and `load_state_dict`.
        subject: the name of this object in errors.

    Raises:
        UsageError: the object has no such methods, or its sampler is a `ResumableSampler`.
    """

    required = True

    def __init__(self, stateful: Any, subject: str) -> None:
        _check_stateful(stateful, subject)
        shield_workers(stateful)
        self._stateful = stateful
        self._subject = subject

    def save(self) -> Tree:
        """Return the state and the number of workers.

        Raises:
            UsageError: `state_dict()` raised, or a checkpoint cannot hold its result.
        """
        state = with_small_tensors(self._call("state_dict"), self._subject)
        encoded, _ = tree.encode(state, self._subject, inline=True)
        size = len(json.dumps(encoded))
        if size > _LARGEST_STATE:
            raise UsageError(
                f"the state of {self._subject} takes {size} bytes on this rank: expected at most "
                f"{_LARGEST_STATE}. state_dict() should return positions, not data"
            )
        if _lacks_position(state):
            raise UsageError(
                f"{self._subject} is a {type(self._stateful).__name__} over an IterableDataset "
                f"without a state, which would lose samples at the second resume. Add the methods "
                f"state_dict() and load_state_dict(state) to the data set or to its iterator"
            )
        return {"workers": self._workers, "state": state, "generator": self._generator_state()}

    def check(self, tree: Tree) -> None:
        """Check the number of workers, because each worker has its own part of the state.

        Raises:
            UsageError: the number has changed.
        """
        if tree["workers"] != self._workers:
            raise UsageError(
                f"{self._subject} was saved with num_workers {tree['workers']}, and has "
                f"num_workers {self._workers} now: expected the same number, or strict=False, "
                f"which does not restore {self._subject}"
            )

    def restore(self, tree: Tree) -> None:
        """Load a saved state.

        Raises:
            UsageError: `load_state_dict()` raised.
        """
        self._call("load_state_dict", without_small_tensors(tree["state"]))
        if isinstance(self._stateful, DataLoader):
            if self._stateful.generator is not None and tree["generator"] is not None:
                saved = without_small_tensors(tree["generator"])
                self._stateful.generator.set_state(checked(saved))
            _keep_random_numbers(self._stateful)

    def _generator_state(self) -> Tree:
        generator = getattr(self._stateful, "generator", None)
        if not isinstance(self._stateful, DataLoader) or generator is None:
            return None
        return with_small_tensors(generator.get_state(), self._subject)

    @property
    def _workers(self) -> int | None:
        return self._stateful.num_workers if isinstance(self._stateful, DataLoader) else None

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._stateful, method)(*arguments)
        except Exception as error:
            raise UsageError(
                f"{self._subject}: {method}() of the {type(self._stateful).__name__} raised "
                f"{type(error).__name__}: {error}"
            ) from error


def _keep_random_numbers(loader: Any) -> None:
    """Make the next iterator of a loader leave the random state unchanged.

    The next iterator continues an iterator of the saved job. That iterator had drawn its random
    numbers before the save, so they must not be drawn again.
    """

    def get_iterator_once() -> Any:
        del loader._get_iterator
        generators = {} if loader.generator is None else {"loader": loader.generator}
        randomness = Randomness(generators)
        before = randomness.save()
        try:
            return loader._get_iterator()
        finally:
            randomness.restore(before)

    # Create the iterator when the loop begins, because the script may call
    # `sampler.set_epoch(epoch)` before it.
    loader._get_iterator = get_iterator_once


def _lacks_position(state: Any) -> bool:
    """Return whether `state` is that of a loader over an IterableDataset without a state.

    With such a state, torchdata 0.11 reads batches, drops them and counts them twice, so the second
    resume leaves out samples.
    """
    if not isinstance(state, dict):
        return False
    fetcher = state.get("fetcher_state")
    if isinstance(fetcher, dict) and "dataset_state" in state:
        return state["dataset_state"] is None and fetcher.get("dataset_iter_state") is None
    return any(map(_lacks_position, state.values()))


def _check_stateful(given: Any, subject: str) -> None:
    kind = type(given).__name__
    loader = isinstance(given, DataLoader)
    if loader and isinstance(sampler_of(given), ResumableSampler):
        raise UsageError(
            f"{subject} is a {kind} with a ResumableSampler, which has the position: pass "
            f"data=sampler to hvd.Checkpointer, and iterate sampler.batches(loader)"
        )
    if all(hasattr(given, method) for method in ("state_dict", "load_state_dict")):
        return
    if loader and isinstance(given.dataset, IterableDataset):
        raise UsageError(
            f"{subject} is a {kind} over an IterableDataset, which has no position: use "
            f"{_STATEFUL} instead (pip install torchdata)"
        )
    if loader:
        raise UsageError(
            f"{subject} is a {kind}, which has no position: use it with a hvd.ResumableSampler and "
            f"pass data=sampler to hvd.Checkpointer, or use {_STATEFUL} instead (pip install "
            f"torchdata)"
        )
    raise UsageError(
        f"{subject} is a {kind}: expected a hvd.ResumableSampler, or an object with state_dict() "
        f"and load_state_dict(state), such as {_STATEFUL}"
    )
