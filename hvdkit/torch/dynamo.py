"""Exclude hvdkit from torch.compile.

A compiled function may contain `loss.backward()` and `optimizer.step()`. TorchDynamo also traces
the functions that these calls run, such as hooks. Functions of hvdkit must not be compiled: they
depend on counters, so each step would recompile them, and compiled results were wrong.
"""

import sys

_excluded: set[str] = set()


def exclude_hvdkit() -> None:
    """Let TorchDynamo run functions of hvdkit and Horovod as they are.

    PyTorch's optimizers import TorchDynamo. Without an optimizer, there is nothing to do.
    """
    dynamo = sys.modules.get("torch._dynamo")
    rules = getattr(dynamo, "trace_rules", None)
    if not hasattr(rules, "add"):
        rules = getattr(dynamo, "skipfiles", None)  # PyTorch 2.1 and 2.2
    if rules is None:
        return
    for package in {"hvdkit", "horovod"} - _excluded:
        rules.add(package)
        _excluded.add(package)
