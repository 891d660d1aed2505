"""`horovodrun`, which Horovod's wheels may replace or remove."""

from pathlib import Path

import pytest

from hvdkit import doctor
from hvdkit.console.diagnostics import OK, WARNING
from hvdkit.engine import script

OURS = """\
#!/env/hvdkit/bin/python
from hvdkit.cli import main
if __name__ == '__main__':
    main()
"""
HOROVODS = "#!/env/hvdkit/bin/python\nfrom horovod.runner.launch import run_commandline\n"


class _File:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def locate(self) -> Path:
        return self.path


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """An environment's folder of scripts, with `hvdkit`, which is first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write(folder / "hvdkit", OURS)
    monkeypatch.setattr(script.metadata, "files", lambda name: [_File(folder / "hvdkit")])
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("before", [None, HOROVODS])
def test_the_script_is_restored(programs, before):
    if before is not None:
        write(programs / "horovodrun", before)
    diagnostic = doctor._horovodrun()
    assert diagnostic.status == WARNING
    assert diagnostic.advice == "run `hvdkit build`, which restores it"
    script.restore()
    assert (programs / "horovodrun").read_text() == OURS.replace("main\n", "horovodrun\n").replace(
        "main()", "horovodrun()"
    )
    assert (programs / "horovodrun").stat().st_mode & 0o111
    assert doctor._horovodrun().status == OK


def test_another_script_that_comes_first_in_path(programs, monkeypatch, tmp_path):
    script.restore()
    write(tmp_path / "other" / "horovodrun", HOROVODS)
    monkeypatch.setenv("PATH", f"{tmp_path}/other:{programs}")
    diagnostic = doctor._horovodrun()
    assert diagnostic.status == WARNING
    assert diagnostic.found == f"not a command of hvdkit, {tmp_path}/other/horovodrun"
    assert diagnostic.advice == f"put {programs} before {tmp_path}/other in PATH"
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor._horovodrun().status == OK
