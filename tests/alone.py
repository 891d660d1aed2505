"""Run a script without any launcher, as a job of one rank."""

import os
import sys

import pytest

from hvdkit.engine.describe import installed
from hvdkit.ranks import RankCommand, start_ranks
from tests.ranks.fork_server import forked
from tests.ranks.rank_pool import REPOSITORY

_LAUNCHER_PREFIXES = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")


def run_alone(code, *, framework="torch", **env):
    """Run Python code in a new process and return its output; skip the test without Horovod.

    The process is a fork of one that has imported the adapter of `framework` (`fork_server`). If
    `framework` is None, it is a new interpreter.
    """
    engine = installed()
    if engine is None or (framework is not None and framework not in engine.frameworks):
        pytest.skip(f"no Horovod for {framework} here: run `hvdkit build`")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES)}
    command = RankCommand([sys.executable, "-c", code], inherited | env)
    with forked(framework):
        return start_ranks([command], cwd=REPOSITORY).wait(timeout=60)[0].output
