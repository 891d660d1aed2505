"""One rank of a `RankPool`: python -m tests.ranks.rank_worker FRAMEWORK PORT."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytest

from hvdkit.system.processes import die_with_parent


def main(framework: str, port: int) -> None:
    """Run tests until the pytest process closes the connection."""
    # A rank that hangs must not outlive a pytest process that is killed.
    die_with_parent()
    # The pytest process sends SIGUSR1 to a rank that hangs, to get its stack.
    faulthandler.register(signal.SIGUSR1)
    if framework == "torch":
        _prepare_device(os.environ.get("HVDKIT_TEST_DEVICE", "cpu"))
    hvd = _adapter(framework)
    hvd.init()
    connection = Connection(socket.create_connection(("127.0.0.1", port)).detach())
    connection.send((hvd.rank(), os.getpid()))
    modules = 0
    while True:
        if len(sys.modules) > modules:
            # A collection looks at all objects that are not frozen: with those of the imported
            # modules, it takes 0.3 s.
            gc.collect()
            gc.freeze()
            modules = len(sys.modules)
        try:
            module, function, parameters = connection.recv()
        except EOFError:
            break
        connection.send(_answer(hvd, module, function, parameters))
        if framework.startswith("keras"):
            # A model and its graphs form reference cycles. Without this, dozens are freed at once
            # during some test, which takes TensorFlow half a minute.
            gc.collect()
    hvd.shutdown()


def _prepare_device(device: str) -> None:
    """Make a GPU as precise as the CPU, and allow deterministic algorithms."""
    if not device.startswith("cuda"):
        return
    # Must be set before cuBLAS starts; torch.use_deterministic_algorithms needs it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    # TF32 has a mantissa of 10 bits, but the tests' error bounds are for float32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _adapter(framework: str) -> Any:
    # "keras-torch" is hvdkit.keras with KERAS_BACKEND=torch.
    framework = framework.split("-")[0]
    ours = f"hvdkit.{framework}"
    # For a framework without an adapter only Horovod itself is tested.
    return importlib.import_module(
        ours if importlib.util.find_spec(ours) else f"horovod.{framework}"
    )


def _answer(hvd: Any, module: str, function: str, parameters: dict[str, Any]) -> tuple[str, str]:
    torch = sys.modules.get("torch")
    if torch is not None:
        # Ranks create equal models after any earlier tests.
        torch.manual_seed(0)
    try:
        getattr(importlib.import_module(module), function)(hvd=hvd, **parameters)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except (Exception, pytest.fail.Exception):
        return "failed", traceback.format_exc()
    return "passed", ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
