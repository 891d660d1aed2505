"""Folders of libraries in /tmp, which another user may have made before a job."""

import getpass
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.launch.agent.library_folders import variables
from tests.ranks.rank_pool import REPOSITORY

OTHER = 65534
#: Print where PyTorch keeps compiled code.
SHOW = "from torch._inductor.codecache import cache_dir; print(cache_dir())"
#: Print the variables of another user.
OF_OTHER = f"""
import encodings.idna, os, sys
from pathlib import Path
from hvdkit.launch.agent.library_folders import variables
os.setgid({OTHER})
os.setuid({OTHER})
found = variables({{"TMPDIR": "/proc"}}, Path("/own"))
print(*(f"{{name}}={{found[name]}}" for name in found if name == "KERAS_HOME"))
"""


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """PyTorch's folder, in a folder in which all users may make files, as /tmp."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    tmp_path.chmod(0o1777)
    return tmp_path / f"torchinductor_{getpass.getuser()}"


def test_compiled_code_is_in_pytorchs_folder(usual):
    pytest.importorskip("torch")
    assert variables(os.environ, Path("/own")) == {}
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    assert python(SHOW) == str(usual)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("owner", "mode"), [(OTHER, 0o755), (0, 0o777)])
def test_no_compiled_code_of_other_users(usual, owner, mode):
    usual.mkdir()
    usual.chmod(mode)
    os.chown(usual, owner, owner)
    found = variables(os.environ, Path("/own"))
    assert found == {"TORCHINDUCTOR_CACHE_DIR": "/own/compiled"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("home", "shown"), [("/proc", "KERAS_HOME=/own/keras"), ("/dev/shm", "")])
def test_no_settings_of_keras_of_other_users(home, shown):
    assert python(OF_OTHER, HOME=home) == shown
