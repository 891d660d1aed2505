"""The states of gradient reductions, needed to resume with bit-identical sums."""

from collections.abc import Mapping
from typing import Any

from hvdkit.checkpoint.items import Plain
from hvdkit.checkpoint.state import Tree
from hvdkit.tensorflow import tape_reducers


def distribution_of(optimizer: Any) -> Any:
    """Return the `Distribution` of an optimizer that hvdkit.keras has wrapped; otherwise None."""
    # The attribute that hvdkit.keras sets. This layer must not import that package.
    return getattr(optimizer, "_hvdkit_distribution", None)


def tape_items() -> dict[str, Plain]:
    """Return the item of the reductions of all gradient tapes of this process."""
    return {"tapes": Plain(tape_reducers.reduction_state, tape_reducers.restore_reduction_state)}


def reduction_item(optimizers: Mapping[str, Any]) -> Plain:
    """Return the item of the reductions of all gradient tapes and of wrapped optimizers.

    Args:
        optimizers: name -> optimizer. Optimizers that are not wrapped are ignored.
    """
    found = {name: distribution_of(optimizer) for name, optimizer in optimizers.items()}
    distributions = {name: each for name, each in found.items() if each is not None}

    def save() -> Tree:
        states = {name: each.reduction_state() for name, each in distributions.items()}
        return {"tapes": tape_reducers.reduction_state(), "optimizers": states}

    def restore(tree: Tree) -> None:
        tape_reducers.restore_reduction_state(tree["tapes"])
        for name, distribution in distributions.items():
            distribution.restore_reduction_state(tree["optimizers"].get(name))

    return Plain(save, restore)
