"""Alias of `horovod.tensorflow.util` for scripts that import this name."""

from horovod.tensorflow.util import refs_to_vars, vars_to_refs

__all__ = ["refs_to_vars", "vars_to_refs"]
