"""The state of random number generators."""

from collections.abc import Mapping
from typing import Any

import torch

from hvdkit.checkpoint import randomness
from hvdkit.checkpoint.state import Tree


class Randomness:
    """A `RankItem`: the random states of Python, NumPy, torch, this rank's GPU and generators.

    Args:
        generators: name -> generator of torch, NumPy or Python.
    """

    def __init__(self, generators: Mapping[str, Any] | None = None) -> None:
        self._generators = randomness.Generators(
            generators,
            torch.Generator,
            "torch.Generator",
            lambda generator: generator.get_state().numpy().tobytes(),
            lambda generator, content: generator.set_state(_state(content)),
        )

    def save(self) -> Tree:
        """Return the states of this rank."""
        # Do not initialise CUDA in a process that does not use it.
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return randomness.save() | {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "cuda": torch.cuda.get_rng_state().numpy().tobytes() if gpu else None,
            "generators": self._generators.save(),
        }

    def check(self, tree: Tree) -> None:
        """Check that the saved generators match.

        Raises:
            UsageError: names or kinds differ.
        """
        randomness.check(tree)
        self._generators.check(tree["generators"])

    def restore(self, tree: Tree) -> None:
        """Restore the states."""
        randomness.restore(tree)
        torch.set_rng_state(_state(tree["torch"]))
        if tree["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_state(tree["cuda"]))
        self._generators.restore(tree["generators"])


def _state(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
