"""The names of a module's tensors, without the prefixes of `torch.compile` and Keras's numbers."""

import re
import sys
from collections.abc import Callable

import torch

from hvdkit.agreement.names import without_layer_numbers, without_model_names

#: The prefix, at the beginning of a name or of one of its parts.
PREFIX = re.compile(r"(?<![^.])_orig_mod\.")
#: Holds the variables of a layer of Keras by their paths, sorted.
_KERAS = "_torch_params"


def without_prefixes(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes what depends on the process from a name in `model`.

    This is the prefix of `torch.compile`, and the numbers of Keras's layers, which Keras counts
    over all models of a process. The index in `variables` makes the names unique.
    """
    of_keras: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for i, variable in enumerate(module.variables if _KERAS in module._modules else ()):
            prefix = f"{path}.{_KERAS}.".removeprefix(".")
            plain_path = without_model_names(without_layer_numbers(variable.path))
            of_keras[f"{prefix}{variable.path}"] = f"{prefix}{i}:{plain_path}"
    # `torch._dynamo` is slow to import. If it is not loaded, the script has compiled no model.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    prefixes = {
        f"{path}._orig_mod".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        if dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    }

    def plain(name: str) -> str:
        name = of_keras.get(name, name)
        if not prefixes:
            return name
        words = name.split(".")
        return ".".join(
            word
            for place, word in enumerate(words)
            if word != "_orig_mod" or ".".join(words[: place + 1]) not in prefixes
        )

    return plain
