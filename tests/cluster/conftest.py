"""Tests on several hosts; see hosts.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.cluster.hosts import Cluster, hosts, missing


@pytest.fixture(scope="session")
def make_hosts() -> Callable[[int], AbstractContextManager[Cluster]]:
    """`hosts`, where this machine can have several."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    return hosts
