"""`hvdkit inspect --live` beside folders of another user in /tmp."""

import json
import os
import subprocess
import tempfile

import pytest

from hvdkit.errors import UsageError
from hvdkit.faults import command
from hvdkit.faults.command import inspect_live
from hvdkit.faults.record_folder import RecordFolder
from tests.unit.faults.test_command import RECORD, WAITS
from tests.unit.launch.commands import hvdkit

OTHER = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")

#: Make a folder for records that leads to files of the caller, and contains what never ends.
TRAPS = """
set -e
umask 0
mkdir "$1"
cd "$1"
ln -s "$2" request
ln -s /dev/zero rank-0.json
mkfifo rank-1.json lock
touch rank-0.stacks
echo "$3" >rank-2.json
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder in which each user can make files, as /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in folder.parents:
        if parent.stat().st_uid == os.geteuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def set_traps(folder, target):
    record = json.dumps(RECORD | {"rank": 2, "size": 3, "time": 4e9})
    subprocess.run(
        ["sh", "-c", TRAPS, "sh", str(folder), str(target), record],
        user=OTHER,
        cwd="/",
        check=True,
        timeout=30,
    )


def test_folders_of_other_users_are_ignored(shared, tmp_path):
    target = tmp_path / "nologin"
    set_traps(shared / "hvdkit-records-x", target)
    with pytest.raises(UsageError, match="expected a job of this user"):
        inspect_live()
    assert not target.exists()


def test_a_link_of_another_user_to_an_own_folder_is_ignored(shared, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    subprocess.run(
        ["ln", "-s", str(own), str(shared / "hvdkit-records-x")], user=OTHER, check=True, timeout=30
    )
    with pytest.raises(UsageError, match="expected a job of this user"):
        inspect_live()
    assert not list(own.iterdir())


def test_an_own_job_is_shown_beside_them(shared, tmp_path):
    set_traps(shared / "hvdkit-records-x", tmp_path / "nologin")
    folder = RecordFolder()
    try:
        (folder.path / "rank-0.stacks").touch()
        record = RECORD | {"rank": 0, "size": 1, "time": 4e9}
        (folder.path / "rank-0.json").write_text(json.dumps(record))
        assert "1 of 1 ranks answered" in inspect_live()
    finally:
        folder.remove()


def test_a_link_that_takes_the_place_of_an_own_folder_is_ignored(shared, tmp_path, monkeypatch):
    own, folder = tmp_path / "own", shared / "hvdkit-records-x"
    own.mkdir()
    folder.mkdir(mode=0o700)
    usual = command.request

    def request_late(path):
        folder.rmdir()  # the job has ended
        folder.symlink_to(own)
        usual(path)

    monkeypatch.setattr(command, "request", request_late)
    with pytest.raises(UsageError, match="expected a job of this user"):
        inspect_live()
    assert not list(own.iterdir())


#: Write the records of a hang whose stacks name a file that this user has chosen.
RECORDS = """
set -e
mkdir "$1/hang"
cd "$1/hang"
mkfifo -m 666 pipe.py
ln -s "$2" link.py
printf %s "$3" >rank-0.json
printf %s "$4" >rank-1.json
"""


@pytest.mark.parametrize("name", ["pipe.py", "link.py", "../../secret", r"\Uffffffff"])
def test_no_file_that_the_stacks_of_another_user_name_is_shown(shared, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("my password\n")
    file = os.path.normpath(shared / "hang" / name)
    stacks = f'Current thread 0x1 (most recent call first):\n  File "{file}", line 1 in f\n'
    records = [
        json.dumps(RECORD | {"rank": rank, "stacks": stacks} | WAITS | {"open": calls})
        for rank, calls in enumerate([WAITS["open"], []])
    ]
    subprocess.run(
        ["sh", "-c", RECORDS, "sh", str(shared), str(secret), *records],
        user=OTHER,
        cwd="/",
        check=True,
        timeout=30,
    )
    done = hvdkit("why", shared / "hang", timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{file}:1 in f" in done.stdout
    assert "my password" not in done.stdout
