"""Tests of hvdkit.keras in a job of one rank, on each backend; see tests/parallel/rank_pool.py."""

from tests.parallel.rank_pool import (  # noqa: F401
    hvd,
    pytest_generate_tests,
    pytest_pyfunc_call,
    rank_pool,
)
