"""Run a script without any launcher, as a job of one rank."""

import os
import sys

import pytest

from hvdkit.engine.describe import installed
from hvdkit.ranks import RankCommand, start_ranks
from tests.parallel.rank_pool import REPOSITORY

_LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")


def run_alone(code, *, framework="torch", **env):
    """Run Python code in a new interpreter and return its output; skip the test without Horovod."""
    engine = installed()
    if engine is None or framework not in engine.frameworks:
        pytest.skip(f"no Horovod for {framework} here: run `hvdkit build`")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    command = RankCommand([sys.executable, "-c", code], inherited | env)
    return start_ranks([command], cwd=REPOSITORY).wait(timeout=60)[0].output
