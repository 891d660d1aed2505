"""Tests of the TensorFlow adapter in a job of one rank; see tests/ranks/rank_pool.py."""

from tests.ranks.rank_pool import (  # noqa: F401
    hvd,
    pytest_generate_tests,
    pytest_pyfunc_call,
    rank_pool,
)
