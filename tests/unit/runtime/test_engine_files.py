import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.runtime.engine_files import EngineFiles

OTHER = 65534
VARIABLES = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG")


class Library:
    """An engine of rank 0 that opens its files as C++ does."""

    def horovod_rank(self):
        return 0

    def horovod_start_timeline(self, path, mark_cycles):
        self.start(path.value.decode())
        return 0

    def start(self, path):
        Path(path).write_text("timeline")


def init(environ):
    library = Library()
    with EngineFiles(library).given(environ):
        for name in VARIABLES:
            if environ.get(name, "DYNAMIC") != "DYNAMIC":
                library.start(environ[name])
    return library


@pytest.fixture
def shared(tmp_path):
    """A folder in which all users can make files, with a link of another user to `precious`."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o755)
    tmp_path.chmod(0o755)
    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    command = ["ln", "-s", str(tmp_path / "precious"), str(folder / "link")]
    subprocess.run(command, user=OTHER, check=True, timeout=30)
    return folder


@pytest.mark.parametrize("name", VARIABLES)
def test_the_engine_follows_no_link_of_another_user(shared, name, caplog):
    environ = {"HOROVOD_AUTOTUNE": "1", name: str(shared / "link")}
    before = dict(environ)
    init(environ)
    assert environ == before
    assert "is a link of another user" in caplog.text
    assert (shared.parent / "precious").read_text() == "precious"


def test_a_timeline_that_is_started_follows_no_link_of_another_user(shared):
    library = init({"HOROVOD_TIMELINE": "DYNAMIC"})
    with pytest.raises(HvdkitError, match="cannot be written: it is a link of another user"):
        library.horovod_start_timeline(ctypes.c_char_p(os.fsencode(shared / "link")), False)
    assert (shared.parent / "precious").read_text() == "precious"


def test_the_files_are_written(tmp_path):
    environ = {"HOROVOD_AUTOTUNE": "1"} | {name: str(tmp_path / name) for name in VARIABLES}
    before = dict(environ)
    init(environ)
    assert environ == before
    assert {path.name for path in tmp_path.iterdir()} == {*VARIABLES}
    library = init({"HOROVOD_TIMELINE": "DYNAMIC"})
    library.horovod_start_timeline(ctypes.c_char_p(os.fsencode(tmp_path / "new")), False)
    assert (tmp_path / "new").read_text() == "timeline"


@pytest.mark.parametrize("rank", [{"HOROVOD_RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "3"}])
def test_other_ranks_make_no_file(tmp_path, rank):
    environ = rank | {"HOROVOD_TIMELINE": str(tmp_path / "timeline")}
    with EngineFiles(Library()).given(environ):
        assert environ["HOROVOD_TIMELINE"] == str(tmp_path / "timeline")
    assert not list(tmp_path.iterdir())
