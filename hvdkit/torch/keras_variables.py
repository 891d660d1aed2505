"""The variables of a Keras model that each rank has for itself.

With Keras on PyTorch, all variables of a model are parameters. Those of the list below correspond
to buffers and random generators of a PyTorch model.
"""

import re

_SEED = re.compile(r"_torch_params\..*\bseed_generator_state$")
_STATISTIC = re.compile(r"_torch_params\..*\b(moving|renorm)_(mean|variance|stddev)$")


def is_seed(name: str) -> bool:
    """Return whether a parameter, by its name in a model, is the state of a random generator."""
    return bool(_SEED.search(name))


def is_own(name: str) -> bool:
    """Return whether a parameter is a seed, or a moving statistic of batch normalization."""
    return is_seed(name) or bool(_STATISTIC.search(name))
