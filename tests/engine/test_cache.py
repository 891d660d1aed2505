import pytest

from hvdkit.engine import cache
from hvdkit.errors import HvdkitError


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    path.write_bytes(b"first")
    return path


def test_what_is_stored_is_found(wheel):
    assert cache.lookup("k") is None
    kept = cache.store("k", wheel, {"a": 1})
    assert cache.lookup("k") == kept
    assert kept.read_bytes() == b"first"
    assert cache.lookup("other") is None


def test_storing_again_replaces(wheel):
    cache.store("k", wheel, {})
    wheel.write_bytes(b"second")
    assert cache.store("k", wheel, {}).read_bytes() == b"second"
    assert [entry.name for entry in (cache.folder() / "wheels").iterdir()] == ["k"]


@pytest.mark.parametrize("damage", ["truncate", "entry", "gone"])
def test_a_damaged_entry_is_no_entry(wheel, damage):
    kept = cache.store("k", wheel, {})
    if damage == "truncate":
        kept.write_bytes(b"fir")
    elif damage == "entry":
        (kept.parent / "entry.json").write_text("{")
    else:
        kept.unlink()
    assert cache.lookup("k") is None
    assert cache.store("k", wheel, {}) == kept
    assert cache.lookup("k") == kept


def test_an_interrupted_store_leaves_the_cache_as_it_was(wheel, monkeypatch):
    cache.store("k", wheel, {})
    wheel.write_bytes(b"second")

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "sha256", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.store("k", wheel, {})
    monkeypatch.undo()
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(wheel.parent / "cache"))
    assert cache.lookup("k").read_bytes() == b"first"
    assert [entry.name for entry in (cache.folder() / "wheels").iterdir()] == ["k"]


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(HvdkitError, match="set HVDKIT_CACHE_DIR"):
        cache.make(cache.folder() / "wheels")
