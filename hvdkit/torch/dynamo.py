"""Exclude hvdkit from torch.compile.

A compiled function may contain `loss.backward()` and `optimizer.step()`. TorchDynamo also traces
the functions that these calls run, such as hooks. Functions of hvdkit must not be compiled: they
depend on counters, so each step would recompile them, and compiled results were wrong.
"""

import functools
import importlib


@functools.cache
def exclude_hvdkit() -> None:
    """Let TorchDynamo run functions of hvdkit and Horovod as they are.

    The first call imports torch._dynamo, as every optimizer of PyTorch does.
    """
    rules = importlib.import_module("torch._dynamo.trace_rules")
    if not hasattr(rules, "add"):  # PyTorch 2.1 and 2.2
        rules = importlib.import_module("torch._dynamo.skipfiles")
    for package in ("hvdkit", "horovod"):
        rules.add(package)
