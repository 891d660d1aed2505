"""Tests on several hosts; see hosts.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from hvdkit.bench.namespaces import Cluster, hosts, missing
from tests.hosts import slurm_servers, ssh_servers
from tests.hosts.launches import Launches, SlurmJobs


@pytest.fixture(scope="session")
def make_hosts() -> Callable[..., AbstractContextManager[Cluster]]:
    """Return `hosts`, or skip if this machine cannot have several."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    return hosts


@pytest.fixture(scope="module")
def launches(make_hosts, tmp_path_factory):
    """Yield two hosts with ssh servers. On the second, the folder `only_here` is empty."""
    reason = ssh_servers.missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ssh")
    (folder / "only_here").mkdir()
    (folder / "only_here" / "train.py").write_text("print('trained')")
    hides = {"host1": [f"mount -t tmpfs none {folder}/only_here"]}
    with (
        make_hosts(2, interfaces=("eth0", "ens3")) as cluster,
        ssh_servers.ssh_servers(cluster, folder, hides) as access,
    ):
        yield Launches(cluster, access, folder)


@pytest.fixture(scope="module")
def jobs(make_hosts):
    """Yield two hosts with a real Slurm."""
    reason = slurm_servers.missing()
    if reason is not None:
        pytest.skip(reason)
    with (
        make_hosts(2, interfaces=("eth0", "ens3")) as cluster,
        slurm_servers.slurm(cluster) as slurm,
    ):
        yield SlurmJobs(slurm)


@pytest.fixture
def start(launches):
    """Yield a function that starts `hvdkit run`. Fail if its processes outlive the test."""
    with launches.starting() as begin:
        yield begin
