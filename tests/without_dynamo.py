"""The beginning of scripts that use an optimizer of PyTorch, and do not compile.

PyTorch's optimizers import torch._dynamo, which takes as long as the import of PyTorch.
"""

WITHOUT_DYNAMO = """
import sys, types
import torch

torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
torch._dynamo.graph_break = lambda: None
"""
