import tarfile

import pytest

from hvdkit.engine import cache, sdist
from hvdkit.errors import HvdkitError, UsageError


def test_a_file_with_another_hash_is_rejected(tmp_path):
    wrong = tmp_path / sdist.NAME
    wrong.write_bytes(b"something else")
    with pytest.raises(UsageError, match=f"has sha256 .*; expected .*{sdist.SHA256}"):
        sdist.obtain(wrong, tmp_path, tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no such file"):
        sdist.obtain(tmp_path / "gone.tar.gz", tmp_path, tmp_path)


def test_a_given_file_needs_no_network(sdist_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert cache.sha256(sdist.obtain(sdist_file, tmp_path, tmp_path)) == sdist.SHA256


def test_without_a_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "2")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        HvdkitError, match="cannot be downloaded from the package index.*--sdist FILE"
    ):
        sdist.obtain(None, tmp_path, tmp_path)
    assert list((cache.folder() / "sdist").iterdir()) == []


def test_a_damaged_cached_sdist_is_not_used(sdist_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    kept = cache.make(cache.folder() / "sdist") / sdist.NAME
    kept.write_bytes(sdist_file.read_bytes()[:1000])

    def download(into, tools):
        path = into / sdist.NAME
        path.write_bytes(sdist_file.read_bytes())
        return path

    monkeypatch.setattr(sdist, "_download", download)
    assert cache.sha256(sdist.obtain(None, tmp_path, tmp_path)) == sdist.SHA256


def test_it_unpacks_to_the_source_tree(pristine):
    assert (pristine / "setup.py").is_file()
    assert (pristine / "third_party/gloo/CMakeLists.txt").is_file()


def test_it_unpacks_with_a_python_that_has_no_extraction_filters(sdist_file, tmp_path, monkeypatch):
    extractall = tarfile.TarFile.extractall

    def as_before_3_11_4(self, path=".", members=None, *, numeric_owner=False):
        extractall(self, path, members, numeric_owner=numeric_owner)

    monkeypatch.setattr(tarfile.TarFile, "extractall", as_before_3_11_4)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # it may be such a Python
    assert (sdist.unpack(sdist_file, tmp_path) / "setup.py").is_file()


@pytest.mark.parametrize("where", ["given", "cached"])
def test_a_file_that_another_user_replaces_after_the_check(
    sdist_file, tmp_path, monkeypatch, where
):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    shared = cache.make(tmp_path / "cache" / "sdist") / sdist.NAME
    shared.write_bytes(sdist_file.read_bytes())
    into = tmp_path / "scratch"
    into.mkdir()
    source = sdist.obtain(shared if where == "given" else None, tmp_path, into)
    shared.write_bytes(b"of another user")
    assert (sdist.unpack(source, into) / "setup.py").is_file()


def test_a_given_file_that_is_replaced_after_its_first_check(sdist_file, tmp_path, monkeypatch):
    shared, into = tmp_path / "shared.tar.gz", tmp_path / "scratch"
    shared.write_bytes(sdist_file.read_bytes())
    into.mkdir()
    check = sdist.check

    def replaced_afterwards(given):
        check(given)
        shared.write_bytes(b"of another user")

    monkeypatch.setattr(sdist, "check", replaced_afterwards)
    with pytest.raises(UsageError, match="has sha256"):
        sdist.obtain(shared, tmp_path, into)
