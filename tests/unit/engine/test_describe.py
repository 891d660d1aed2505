import json

import pytest

from hvdkit.engine import describe
from hvdkit.errors import HvdkitError


@pytest.fixture
def site(tmp_path):
    """A folder with the files of an installed Horovod."""
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    (package / "metadata.json").write_text('{"pytorch": "2.13.0+cpu", "dummy": "none"}')
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    return tmp_path


def test_nothing_installed_is_none(tmp_path):
    assert describe.installed(tmp_path) is None


def test_a_stock_horovod(site):
    engine = describe.installed(site)
    assert engine.version == "0.28.1"
    assert not engine.ours
    assert engine.patches == ()
    assert engine.controllers is None
    assert dict(engine.frameworks) == {"torch": "2.13.0+cpu"}


def test_an_engine_of_hvdkit(site):
    record = {"patches": ["c++17"], "controllers": ["gloo"], "gpu": "none"}
    (site / "horovod" / describe.RECORD).write_text(json.dumps(record))
    engine = describe.installed(site)
    assert engine.ours
    assert engine.patches == ("c++17",)
    assert engine.controllers == ("gloo",)
    assert engine.gpu == "none"


def test_a_damaged_record_says_what_to_do(site):
    (site / "horovod" / describe.RECORD).write_text("{")
    with pytest.raises(HvdkitError, match="is damaged.*hvdkit build"):
        describe.installed(site)


def test_an_adapter_without_an_engine_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(describe.sys, "path", [str(tmp_path)])
    with pytest.raises(ImportError, match=r"hvdkit\.torch needs Horovod.*Run `hvdkit build`"):
        describe.require("torch")


def test_an_engine_without_the_framework_says_what_to_run(site, monkeypatch):
    monkeypatch.setattr(describe.sys, "path", [str(site)])
    assert describe.require("torch").version == "0.28.1"
    with pytest.raises(ImportError, match="hvdkit build --frameworks torch,tensorflow"):
        describe.require("tensorflow")
