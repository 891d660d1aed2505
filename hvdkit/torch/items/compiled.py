"""The names of a module's tensors, without the prefixes that `torch.compile` adds."""

import re
import sys
from collections.abc import Callable

import torch

#: The prefix, at the beginning of a name or of one of its parts.
PREFIX = re.compile(r"(?<![^.])_orig_mod\.")


def without_prefixes(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the prefixes of `torch.compile` from a name in `model`."""
    # `torch._dynamo` is slow to import. If it is not loaded, the script has compiled no model.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    prefixes = {
        f"{path}._orig_mod".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    }

    def plain(name: str) -> str:
        if not prefixes:
            return name
        words = name.split(".")
        return ".".join(
            word
            for place, word in enumerate(words)
            if word != "_orig_mod" or ".".join(words[: place + 1]) not in prefixes
        )

    return plain
