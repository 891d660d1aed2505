"""The smoke test of a built engine: collectives on real ranks, per framework and controller.

The ranks run this module: `python -m hvdkit.engine.smoke_test FRAMEWORK`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit import ranks
from hvdkit.engine import describe, toolchain
from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import read_json
from hvdkit.system.processes import python_command

SIZE = 2

#: The beginning of the last line of a rank.
_RESULT = "hvdkit smoke test:"

_SECONDS = 300  # Enough for two first imports of TensorFlow from a slow file system.


def run(
    engine: Path,
    frameworks: Sequence[str],
    controllers: Sequence[str],
    mpirun: str | None,
    report: Callable[[str], None],
) -> None:
    """Run collectives in new processes with the engine in `engine`, and check their results.

    Args:
        engine: a folder with the package `horovod`, which the ranks import.
        frameworks: the frameworks to test.
        controllers: the controllers to test.
        mpirun: the path of MPI's launcher; None only if `controllers` has no mpi.
        report: called with a line for each test that passed.

    Raises:
        HvdkitError: the engine does not load, hangs, or computes a wrong result.
    """
    environment = _environment(engine)
    for framework in frameworks:
        for controller in controllers:
            # In `/`, as `run_python`.
            command = python_command("-m", "hvdkit.engine.smoke_test", framework)
            if controller == "mpi":
                assert mpirun is not None
                group = ranks.start_mpi(command, SIZE, mpirun=mpirun, env=environment, cwd="/")
            else:
                # An engine with few patches sends no key.
                group = ranks.start_gloo(
                    command, SIZE, env=environment, cwd="/", stores_without_key=True
                )
            try:
                results = group.wait(_SECONDS)
            except ranks.RanksFailed as error:
                raise HvdkitError(
                    f"the engine was built, but does not work with {framework} over {controller}; "
                    f"nothing was installed. Remove the cause below, or build without {framework} "
                    f"(--frameworks) or {controller} (--controllers).\n{error}"
                ) from error
            report(f"{framework} over {controller}: {_result(results[0].output)}")


def _environment(engine: Path) -> Mapping[str, str]:
    return os.environ | {
        "PYTHONPATH": toolchain.python_path(engine),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Turn a hang into an error that names the tensor.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    }


def _result(output: str) -> str:
    for line in reversed(output.splitlines()):
        if line.startswith(_RESULT):
            return line.removeprefix(_RESULT).strip()
    raise HvdkitError(f"a rank succeeded without a result of the smoke test. Its output:\n{output}")


def choose_gpu(
    operations: str, gpus: int, local_rank: int, local_size: int
) -> tuple[int | None, str]:
    """Choose where a rank's tensors are in the smoke test.

    Args:
        operations: the engine's GPU operations: `nccl`, `staged` or `none`.
        gpus: the number of GPUs that the rank sees.
        local_rank: the local rank.
        local_size: the number of ranks on this host.

    Returns:
        The index of the GPU, or None for CPU tensors; and the reason, which is empty for an engine
        without GPU operations.
    """
    if operations == "none":
        return None, ""
    if gpus == 0:
        return None, "no GPU is visible"
    if operations == "staged":
        # Tensors go through host memory, so ranks can share a GPU.
        return local_rank % gpus, "through host memory"
    if gpus < local_size:
        return None, f"NCCL needs one GPU per rank; {gpus} for {local_size} ranks"
    return local_rank, "NCCL"


def _device(gpu: int | None, name: str, cpu: str, reason: str) -> str:
    """Return a description of a device, such as `cuda:0, through host memory`."""
    if gpu is None:
        return f"{cpu}: {reason}" if reason else cpu
    return f"{name}, {reason}"


def _operations() -> str:
    """Return the GPU operations of the engine that this rank has loaded."""
    package = Path(sys.modules["horovod"].__file__ or "").parent
    record = read_json(package / describe.RECORD)
    return str(record["gpu"])


def _torch() -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any], str]:
    """Return Horovod, functions from and to NumPy arrays, and a description of the device."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    gpu, reason = choose_gpu(
        _operations(), torch.cuda.device_count(), hvd.local_rank(), hvd.local_size()
    )
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    return (
        hvd,
        lambda array: torch.from_numpy(array).to(device),
        lambda tensor: tensor.cpu().numpy(),
        _device(gpu, device, "cpu", reason),
    )


def _tensorflow() -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any], str]:
    """Return the same as `_torch`."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    # Only tensors of PyTorch can go through host memory.
    operations = "none" if _operations() == "staged" else _operations()
    gpu, reason = choose_gpu(operations, len(gpus), hvd.local_rank(), hvd.local_size())
    device = "/CPU:0"
    if gpu is not None:
        tf.config.set_visible_devices(gpus[gpu], "GPU")
        device = "/GPU:0"

    def tensor(array: Any) -> Any:
        with tf.device(device):
            return tf.identity(tf.constant(array))

    return hvd, tensor, lambda result: result.numpy(), _device(gpu, device, "/CPU:0", reason)


def _rank(framework: str) -> None:
    """Check an allreduce, a broadcast and an allgather on this rank."""
    import numpy as np

    hvd, tensor, array, device = {"torch": _torch, "tensorflow": _tensorflow}[framework]()
    rank, size = hvd.rank(), hvd.size()
    if size != SIZE:
        raise SystemExit(
            f"this job has {size} ranks; expected {SIZE}. The ranks did not find each other."
        )

    def check(what: str, result: Any, expected: Any) -> None:
        # All dtypes represent small whole numbers exactly, so the results must be equal.
        if not np.array_equal(array(result), expected):
            raise SystemExit(f"{what} on rank {rank} returned {array(result)}; expected {expected}")

    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        own = np.arange(1, 20, dtype=dtype) * (rank + 1)
        check(
            f"allreduce of {dtype}",
            hvd.allreduce(tensor(own), op=hvd.Sum, name=f"sum.{dtype}"),
            np.arange(1, 20, dtype=dtype) * sum(range(1, size + 1)),
        )
        check(
            f"broadcast of {dtype}",
            hvd.broadcast(tensor(own), root_rank=1, name=f"broadcast.{dtype}"),
            np.arange(1, 20, dtype=dtype) * 2,
        )
        check(
            f"allgather of {dtype}",
            hvd.allgather(tensor(own[: rank + 1]), name=f"gather.{dtype}"),
            np.concatenate([np.arange(1, r + 2, dtype=dtype) * (r + 1) for r in range(size)]),
        )
    folder = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    if not Path(sys.modules["horovod"].__file__ or "").is_relative_to(folder):
        raise SystemExit(
            f"these ranks used {sys.modules['horovod']}; expected the engine in {folder}"
        )
    hvd.shutdown()
    print(f"{_RESULT} allreduce, broadcast, allgather on {size} ranks ({device})", flush=True)


if __name__ == "__main__":
    _rank(sys.argv[1])
