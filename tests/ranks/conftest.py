"""Fixtures of tests that run on real ranks; see rank_pool.py."""

from tests.ranks.rank_pool import (  # noqa: F401
    hvd,
    pytest_generate_tests,
    pytest_pyfunc_call,
    rank_pool,
)
