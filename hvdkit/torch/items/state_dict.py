"""The state of an object with `state_dict` and `load_state_dict`."""

from collections.abc import Iterable
from typing import Any

from hvdkit.checkpoint.state import Tree
from hvdkit.errors import UsageError
from hvdkit.torch.items.trees import on_host, with_tensors, without_tensors


class StateDictItem:
    """An object with `state_dict` and `load_state_dict`, such as an LR scheduler."""

    def __init__(self, stateful: Any, subject: str) -> None:
        if not all(hasattr(stateful, name) for name in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"{subject} is a {type(stateful).__name__}: expected an object with state_dict() "
                f"and load_state_dict(state)"
            )
        self._stateful = stateful
        self._subject = subject

    def save(self) -> Tree:
        """Return the class and the `state_dict`."""
        return {
            "class": type(self._stateful).__name__,
            "state": with_tensors(self._stateful.state_dict(), self._subject),
        }

    def plan_restore(self, tree: Tree) -> Tree:
        """Allocate memory for tensors, if there are any.

        Raises:
            UsageError: the state belongs to another class. Either the saved and the current state
                each have entries that the other one lacks, or the entries and the classes differ.
                Additional entries of the same class are allowed, because another version of PyTorch
                may have added these. Also raised if the object was disabled when it was saved, and
                is enabled now.
        """
        saved_kind, saved = _class_and_state(tree)
        own = self._stateful.state_dict()
        is_enabled = getattr(self._stateful, "is_enabled", None)
        if saved == {} and is_enabled is not None and is_enabled():
            raise UsageError(
                f"{self._subject} is an enabled {type(self._stateful).__name__}, but was disabled "
                f"when it was saved: expected the same options. To restore everything else, "
                f"pass strict=False"
            )
        if isinstance(own, dict) and isinstance(saved, dict):
            kind = type(self._stateful).__name__
            saved_alone, own_alone = saved.keys() - own.keys(), own.keys() - saved.keys()
            other_kind = saved_kind not in ("", kind) and (saved_alone or own_alone)
            if other_kind or (saved_alone and own_alone):
                raise UsageError(
                    f"{self._subject} is a {kind} whose state has {_listed(own_alone)}; the saved "
                    f"state{f' of a {saved_kind}' if saved_kind else ''} has "
                    f"{_listed(saved_alone)} instead: expected an object of the same class. To "
                    f"restore everything else, pass strict=False"
                )
        return on_host(tree)

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore if the entries are the same.

        Raises:
            UsageError: the entries differ.
        """
        own, (_, saved) = self._stateful.state_dict(), _class_and_state(tree)
        if isinstance(own, dict) and isinstance(saved, dict) and own.keys() != saved.keys():
            raise UsageError(
                f"it was saved with the entries {', '.join(map(str, saved))}, and has the entries "
                f"{', '.join(map(str, own))} here"
            )
        return self.plan_restore(tree), []

    def restore(self, tree: Tree) -> None:
        """Call `load_state_dict`."""
        self._stateful.load_state_dict(without_tensors(_class_and_state(tree)[1]))


def _class_and_state(tree: Tree) -> tuple[str, Tree]:
    """Return the parts of a saved tree. Earlier versions saved the state alone, without a class."""
    if isinstance(tree, dict) and tree.keys() == {"class", "state"}:
        return tree["class"], tree["state"]
    return "", tree


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "no other entries"
