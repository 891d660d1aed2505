"""The folders of a host for commits and steps, in a rank."""

import os

import pytest

from hvdkit.runtime.host_folders import folders, variables


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_folders_of_other_users_are_left_out(tmp_path):
    own, other, shared = (tmp_path / name for name in ("own", "other", "shared"))
    for folder in (own, other, shared):
        folder.mkdir(mode=0o700)
    os.chown(other, 65534, 65534)
    shared.chmod(0o777)
    assert folders(variables([own, other, shared, tmp_path / "missing"])) == [own]
