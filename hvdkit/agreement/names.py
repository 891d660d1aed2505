"""Names of variables and gradients that are equal on all ranks, and unique on each."""

import re
from collections.abc import Sequence


def without_layer_numbers(path: str) -> str:
    """Return a variable's path without the numbers that Keras appends to names of layers.

    Keras counts layers over all models of a process, and ranks may have built different numbers of
    models.
    """
    return re.sub(r"_\d+(?=/|$)", "", path)


def without_model_names(path: str) -> str:
    """Return the name of a variable and of its layer, without the names of models around it.

    A Sequential model that Keras has loaded from a file does not have its own name in the paths of
    its variables, other than a model that a script has built.
    """
    return "/".join(path.split("/")[-2:])


def unique_names(names: Sequence[str]) -> list[str]:
    """Return unique names: append its index to each name that occurs earlier in `names`.

    The index is appended again as long as the result occurs earlier, too.
    """
    seen: set[str] = set()
    result = []
    for i, name in enumerate(names):
        while name in seen:
            name = f"{name} ({i})"
        result.append(name)
        seen.add(name)
    return result
