"""The first act of a rank, on import: parse the arguments, write the process id, start a helper.

Import it before slow modules, so that faults can hit a rank while it starts. The helper stands for
a worker of a DataLoader, which a job must end too.
"""

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def append(path: Path, *words: Any) -> None:
    """Append a line in one write, which no other rank interrupts."""
    with path.open("ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def _announce() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoints")
    parser.add_argument("--wire", default="none")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of sleep in a pass")
    args = parser.parse_args()
    rank, size = (
        next(int(os.environ[name]) for name in names if name in os.environ)
        for names in (_RANK_VARIABLES, _SIZE_VARIABLES)
    )
    helper = subprocess.Popen(["sleep", "3600"])
    append(args.out / "starts", os.getpid(), rank, size, helper.pid)
    return args


#: The arguments of the training script.
args = _announce()
