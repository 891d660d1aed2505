"""The stores that the tests run against: a folder, an S3 server, and Azurite in long tests."""

import itertools

import pytest

from tests.checkpoint import azure_server, s3_server
from tests.checkpoint.material import path_of

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """The address of an S3 server."""
    with s3_server.running(tmp_path_factory.mktemp("s3") / "log") as address:
        yield address


@pytest.fixture
def on_s3(s3, monkeypatch):
    """A path for a test on the S3 server."""
    for name, value in s3_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    return path_of(f"s3://{s3_server.BUCKET}/{next(_numbers)}")


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


@pytest.fixture(params=["folder", "s3", pytest.param("azure", marks=pytest.mark.long)])
def place(request):
    """A path for a test, which nothing is at yet: in a folder, on the S3 server, on Azurite."""
    if request.param == "folder":
        return request.getfixturevalue("tmp_path") / "place"
    return request.getfixturevalue(f"on_{request.param}")


@pytest.fixture
def s3_proxy(s3, on_s3):
    """A proxy before the S3 server."""
    with s3_server.proxy(s3) as made:
        yield made
