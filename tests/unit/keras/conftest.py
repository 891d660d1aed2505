"""Tests of hvdkit.keras in a job of one rank, on each backend; see tests/ranks/rank_pool.py."""

from tests.ranks.rank_pool import (  # noqa: F401
    hvd,
    pytest_generate_tests,
    pytest_pyfunc_call,
    rank_pool,
)
