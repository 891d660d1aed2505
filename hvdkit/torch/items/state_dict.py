"""The state of an object with `state_dict` and `load_state_dict`."""

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
        """Return the `state_dict`."""
        return with_tensors(self._stateful.state_dict(), self._subject)

    def plan_restore(self, tree: Tree) -> Tree:
        """Allocate memory for tensors, if there are any.

        Raises:
            UsageError: the saved and the current state each have entries that the other one lacks,
                so they are of different classes. Additional entries in only one of them are
                allowed, because another version of PyTorch may have added these. Also raised if
                the object was disabled when it was saved, and is enabled now.
        """
        own = self._stateful.state_dict()
        is_enabled = getattr(self._stateful, "is_enabled", None)
        if tree == {} and is_enabled is not None and is_enabled():
            raise UsageError(
                f"{self._subject} is an enabled {type(self._stateful).__name__}, but was disabled "
                f"when it was saved: expected the same options. To restore everything else, "
                f"pass strict=False"
            )
        if isinstance(own, dict) and isinstance(tree, dict):
            saved_alone, own_alone = tree.keys() - own.keys(), own.keys() - tree.keys()
            if saved_alone and own_alone:
                raise UsageError(
                    f"{self._subject} is a {type(self._stateful).__name__} whose state has "
                    f"{', '.join(sorted(map(str, own_alone)))}; the saved state has "
                    f"{', '.join(sorted(map(str, saved_alone)))} instead: expected an object of "
                    f"the same class. To restore everything else, pass strict=False"
                )
        return on_host(tree)

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore if the entries are the same.

        Raises:
            UsageError: the entries differ.
        """
        own = self._stateful.state_dict()
        if isinstance(own, dict) and isinstance(tree, dict) and own.keys() != tree.keys():
            raise UsageError(
                f"it was saved with the entries {', '.join(map(str, tree))}, and has the entries "
                f"{', '.join(map(str, own))} here"
            )
        return self.plan_restore(tree), []

    def restore(self, tree: Tree) -> None:
        """Call `load_state_dict`."""
        self._stateful.load_state_dict(without_tensors(tree))
