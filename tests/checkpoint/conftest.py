"""The two stores that the tests run against: a folder, and an S3 server."""

import itertools

import pytest

from tests.checkpoint import s3_server
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


@pytest.fixture(params=["folder", "s3"])
def place(request):
    """A path for a test, which nothing is at yet: in a folder, and on the S3 server."""
    if request.param == "folder":
        return request.getfixturevalue("tmp_path") / "place"
    return request.getfixturevalue("on_s3")


@pytest.fixture
def s3_proxy(s3, on_s3):
    """A proxy before the S3 server."""
    with s3_server.proxy(s3) as made:
        yield made
