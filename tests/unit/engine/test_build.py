"""The whole build, and the installed engine."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from hvdkit.engine import build, cache, describe, patches, plan
from hvdkit.errors import HvdkitError


def run_build(*arguments, cache_dir, timeout=600, **environment):
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", "build", *arguments],
        env=os.environ | {"HVDKIT_CACHE_DIR": str(cache_dir)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def engine():
    found = describe.installed()
    if found is None or not found.ours:
        pytest.skip("no engine of hvdkit is installed: run `hvdkit build`")
    return found


@pytest.fixture
def private_cache(sdist_file, tmp_path):
    """A cache for this test only, with the sdist and without a wheel."""
    folder = tmp_path / "cache"
    (folder / "sdist").mkdir(parents=True)
    shutil.copy(sdist_file, folder / "sdist")
    return folder


def scratch_folders():
    return set(Path(os.environ.get("TMPDIR", "/tmp")).glob("hvdkit-build-*"))


def sections(library):
    answer = subprocess.run(
        ["readelf", "--wide", "--sections", "--dynamic", str(library)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return answer.stdout


def extensions(engine):
    return sorted(engine.path.glob("*/mpi_lib*.so"))


def test_a_build_that_prints_nothing_ends_at_its_timeout(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_SECONDS", 0.5)
    began = time.monotonic()
    with (
        pytest.raises(HvdkitError, match="did not end within"),
        build._running(["sleep", "9"], os.environ, tmp_path) as (_, lines),
    ):
        list(lines)
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("source", ["cached", "built"])
def test_a_wheel_that_another_user_replaces_in_the_cache_is_not_installed(
    tmp_path, monkeypatch, source
):
    monkeypatch.setenv("HVDKIT_CACHE_DIR", str(tmp_path / "cache"))
    wheel = tmp_path / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_bytes(b"ours")
    record = {"key": "k"}
    made = SimpleNamespace(
        key="k", version="0.28.1", ingredients={}, patches=(), frameworks=(), controllers=(),
        mpi=None, build_requirements=list,
    )  # fmt: skip
    if source == "cached":
        cache.store("k", wheel, record)
    installed = []

    def install_wheel(path, target=None):
        for kept in (tmp_path / "cache").rglob("*.whl"):
            kept.write_bytes(b"of another user")
        installed.append(path.read_bytes())

    tree = tmp_path / "tree"
    (tree / "horovod").mkdir(parents=True)
    for module, name, replaced in (
        (build.install, "check_pip", lambda: None),
        (build.install, "install_tools", lambda *_: None),
        (build.install, "install_wheel", install_wheel),
        (build.sdist, "obtain", lambda *_: None),
        (build.sdist, "unpack", lambda *_: tree),
        (build.patches, "apply", lambda *_: None),
        (build.smoke_test, "run", lambda *_: None),
        (build, "_compile", lambda *_: wheel),
        (build.describe, "installed", lambda _: engine if installed[1:] else None),
    ):
        monkeypatch.setattr(module, name, replaced)
    engine = SimpleNamespace(record=record, version="0.28.1", frameworks=(), path=tmp_path)
    if source == "cached":
        installed.append(b"ours")  # there is no smoke test
    build.build(made, build.Options(), Console(quiet=True))
    assert installed == [b"ours", b"ours"]
    assert cache.lookup("k") is None or source == "built"


def test_the_engine_leaves_horovodrun_to_hvdkit(engine):
    assert not [file for file in metadata.files("horovod") if file.name == "horovodrun"]


def test_nothing_is_built_in_a_folder_whose_files_others_can_replace(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(HvdkitError, match="all users may write to .* Set TMPDIR to a folder"):
        build._scratch().__enter__()
    assert not any(tmp_path.iterdir())
    tmp_path.chmod(0o1777)
    with build._scratch() as scratch:
        assert scratch.parent == tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_wheel_is_not_copied_through_a_link_of_another_user(tmp_path):
    wheel, own, folder = tmp_path / "horovod.whl", tmp_path / "own", tmp_path / "wheels"
    for text in ("old", "new"):
        wheel.write_text(text)
        assert build._copy(wheel, folder).read_text() == text
    own.write_text("not a wheel")
    (folder / wheel.name).unlink()
    (folder / wheel.name).symlink_to(own)
    os.chown(folder / wheel.name, 65534, 65534, follow_symlinks=False)
    with pytest.raises(HvdkitError, match="link of another user"):
        build._copy(wheel, folder)
    assert own.read_text() == "not a wheel"


def test_installed_engine_describes_itself(engine):
    assert re.fullmatch(r"0\.28\.1\+hvdkit\.\d+(\.minimal)?", engine.version)
    assert engine.record["frameworks"] == dict(engine.frameworks)
    assert "c++17" in engine.patches
    assert "gloo" in engine.controllers
    assert set(engine.patches) <= {patch.name for patch in patches.series()}


def test_installed_engine_has_no_debug_information(engine):
    assert extensions(engine)
    for library in extensions(engine):
        assert ".debug_info" not in sections(library), library


def test_installed_engine_finds_mpi_beside_itself(engine):
    if not engine.record["mpi"] or engine.record["mpi"]["library"] != "environment":
        pytest.skip("the engine's MPI is not in this Python's environment")
    for library in extensions(engine):
        assert "$ORIGIN/../../../.." in sections(library), library
    assert (engine.path / "torch" / "../../../../.." / "lib").resolve().is_dir()


def test_a_missing_sdist_is_an_error_also_if_the_engine_is_installed(engine, tmp_path):
    answer = run_build("--sdist", str(tmp_path / "gone.tar.gz"), cache_dir=cache.folder())
    assert answer.returncode == 2
    assert "there is no such file" in answer.stderr


@pytest.mark.long
def test_the_cache_gives_the_same_engine_into_a_folder(engine, tmp_path):
    made = plan.make_plan(plan.Request())
    if cache.lookup(made.key) is None:
        pytest.skip("the cache has no engine for the installed frameworks")
    answer = run_build("--target", str(tmp_path / "engine"), cache_dir=cache.folder())
    assert answer.returncode == 0, answer.stderr
    assert "Building Horovod" not in answer.stdout
    there = describe.installed(tmp_path / "engine")
    assert there.record == engine.record
    assert f"Installed Horovod {there.version}" in answer.stdout
    again = run_build("--target", str(tmp_path / "engine"), cache_dir=cache.folder())
    assert "is already installed" in again.stdout


def test_a_failed_build_changes_nothing_and_says_why(engine, private_cache, tmp_path):
    before = scratch_folders()
    answer = run_build(
        *("--frameworks", "torch", "--controllers", "gloo", "--target", str(tmp_path / "t")),
        cache_dir=private_cache,
        CXXFLAGS="-fno-such-option",
    )
    assert answer.returncode == 1
    assert "the build failed" in answer.stderr
    assert "nothing was changed" in answer.stderr
    log = Path(re.search(r"Full log: (\S+)", answer.stderr)[1])
    assert "-fno-such-option" in log.read_text()
    assert not (private_cache / "wheels").exists()
    assert not (tmp_path / "t").exists()
    assert describe.installed().record == engine.record
    assert scratch_folders() <= before


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
    ],
)
def test_an_interrupted_build_leaves_nothing(engine, private_cache, tmp_path, number, status):
    before = scratch_folders()
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdkit", "build", "--frameworks", "torch", "--controllers", "gloo"],
        env=os.environ | {"HVDKIT_CACHE_DIR": str(private_cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not compiling(private_cache) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert compiling(private_cache)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, output
    assert f"hvdkit build: {number.name}; the build was interrupted; the cache and" in output
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not (private_cache / "wheels").exists()
    assert describe.installed().record == engine.record
    assert scratch_folders() <= before


def compiling(cache_folder):
    return any("[  " in log.read_text() for log in cache_folder.glob("logs/*.log"))


@pytest.mark.long
def test_a_rebuild_from_nothing_is_the_same_engine(engine, private_cache, tmp_path):
    """The build runs the smoke test with every framework and controller, and installs."""
    answer = run_build("--target", str(tmp_path / "engine"), cache_dir=private_cache, timeout=3600)
    assert answer.returncode == 0, answer.stderr + answer.stdout
    for framework in engine.frameworks:
        for controller in engine.controllers:
            assert f"{framework} over {controller}: allreduce, broadcast" in answer.stdout
    there = describe.installed(tmp_path / "engine")
    assert there.record["patches"] == engine.record["patches"]
    assert len(list((private_cache / "wheels").iterdir())) == 1
