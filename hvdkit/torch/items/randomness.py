"""The state of random number generators."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdkit.checkpoint import randomness
from hvdkit.checkpoint.state import Tree

# The bytes of a state of the CPU: a seed and positions, and 624 words of 64 bits.
_HEAD, _WORDS = 24, 624 * 8


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
            _state,
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
        _state(tree["torch"])
        self._generators.check(tree["generators"])

    def restore(self, tree: Tree) -> None:
        """Restore the states."""
        randomness.restore(tree)
        torch.set_rng_state(_state(tree["torch"]))
        if tree["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_state(tree["cuda"]))
        self._generators.restore(tree["generators"])


def _state(content: bytes) -> torch.Tensor:
    return checked(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def checked(state: torch.Tensor) -> torch.Tensor:
    """Return the state of a generator on the CPU or a GPU.

    Raises:
        UsageError: no generator has this state.
    """
    # A state of a GPU is shorter.
    if state.dtype == torch.uint8 and state.numel() >= _HEAD + _WORDS:
        words = state.numpy()[_HEAD : _HEAD + _WORDS].view(np.uint64)
        randomness.check_twister(words.astype(np.uint32).tobytes())
    return state
