"""The stores that the tests run against: a folder and an S3 server.

In long tests also Azurite, and another S3 server: Ceph's RADOS Gateway.
"""

import itertools

import pytest
from s3fs import S3FileSystem

from hvdkit.checkpoint.checkpointers import Checkpointers
from tests.unit.checkpoint import azure_server, rados_gateway, s3_server
from tests.unit.checkpoint.material import path_of

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def without_other_checkpointers():
    """Forget the checkpointers of other tests, as a new process does."""
    Checkpointers._of_ranks.clear()


#: The S3 server that fsspec's cached clients talk to.
_connected = None


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """The address of an S3 server."""
    with s3_server.running(tmp_path_factory.mktemp("s3") / "log") as address:
        yield address


@pytest.fixture
def on_s3(s3, monkeypatch):
    """A path for a test on the S3 server."""
    return _path_on(s3, monkeypatch)


def _path_on(address, monkeypatch):
    """Return a new path on the S3 server at `address`, for clients in this test."""
    global _connected
    if address != _connected:
        # fsspec caches clients by their options. The endpoint in the environment is not one.
        S3FileSystem.clear_instance_cache()
        _connected = address
    for name, value in s3_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    return path_of(f"s3://{s3_server.BUCKET}/{next(_numbers)}")


@pytest.fixture(scope="session")
def rados():
    """The address of Ceph's RADOS Gateway."""
    if reason := rados_gateway.missing():
        pytest.skip(reason)
    with rados_gateway.running() as address:
        yield address


@pytest.fixture
def on_rados(rados, monkeypatch):
    """A path for a test on RADOS Gateway."""
    return _path_on(rados, monkeypatch)


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    """The environment for clients of Azurite."""
    pytest.importorskip("adlfs")
    if azure_server.program() is None:
        pytest.skip("no azurite here")
    with azure_server.running(tmp_path_factory.mktemp("azure") / "log") as environment:
        yield environment


@pytest.fixture
def on_azure(azure, monkeypatch):
    """A path for a test on Azurite."""
    for name, value in azure.items():
        monkeypatch.setenv(name, value)
    return path_of(f"abfs://{azure_server.CONTAINER}/{next(_numbers)}")


@pytest.fixture(
    params=[
        "folder",
        "s3",
        pytest.param("azure", marks=pytest.mark.long),
        pytest.param("rados", marks=pytest.mark.long),
    ]
)
def place(request):
    """An unused path for a test, in a folder or on one of the servers."""
    if request.param == "folder":
        return request.getfixturevalue("tmp_path") / "place"
    return request.getfixturevalue(f"on_{request.param}")


@pytest.fixture(
    params=[
        "s3",
        pytest.param("azure", marks=pytest.mark.long),
        pytest.param("rados", marks=pytest.mark.long),
    ]
)
def place_on_server(request):
    """A path for a test on one of the servers."""
    return request.getfixturevalue(f"on_{request.param}")


@pytest.fixture
def s3_proxy(s3, on_s3):
    """A proxy in front of the S3 server."""
    with s3_server.proxy(s3) as made:
        yield made
