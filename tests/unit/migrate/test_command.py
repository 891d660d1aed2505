"""`hvdkit migrate`: its files, output and exit status."""

import contextlib
import os
import subprocess
import sys

import pytest

from hvdkit import cli
from hvdkit.migrate import files

OLD = "import horovod.torch as hvd\n\nhvd.init()\n"
NEW = OLD.replace("horovod", "hvdkit")
ADVICE = OLD + "hvd.nothing()\n"


def run(*arguments):
    return cli.main(["migrate", *map(str, arguments)])


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OLD)
    return path


def test_a_summary_changes_nothing(script, capsys):
    assert run(script) == 0
    assert script.read_text() == OLD
    output = capsys.readouterr().out
    assert f"{script}\n  line 1: imports: " in output
    assert f"hvdkit migrate --write {script}" in output


def test_a_name_with_control_characters(script, capsys):
    named = script.rename(script.with_name("\x1b[31m.py"))
    cli.main(["migrate", str(named)])
    output = capsys.readouterr().out
    assert "hvdkit migrate --write" in output
    assert "\x1b" not in output


def test_write_and_a_second_run(script, capsys):
    assert run("--write", script) == 0
    assert script.read_text() == NEW
    assert "1 file changed" in capsys.readouterr().out
    assert run("--write", script) == 0
    assert "0 files changed" in capsys.readouterr().out
    assert os.listdir(script.parent) == ["train.py"]


def test_a_diff_can_be_applied(script, capsys):
    script.write_text(OLD.removesuffix("\n") + "\n# no line end")
    assert run("--diff", script) == 0
    assert script.read_text().startswith(OLD)
    diff = capsys.readouterr().out
    done = subprocess.run(
        ["git", "apply", "-p0", "-"],
        input=diff.replace(str(script), "train.py"),
        cwd=script.parent,
        text=True,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert script.read_text().startswith(NEW)


def test_advice_is_status_1_and_on_stderr_beside_a_diff(script, capsys):
    script.write_text(ADVICE)
    assert run(script) == 1
    assert f"{script}:4: hvdkit.torch has no `nothing`" in capsys.readouterr().out
    assert run("--diff", script) == 1
    output, errors = capsys.readouterr()
    assert "nothing" in errors
    assert all(line[:1] in "+-@ " for line in output.splitlines())
    assert run("--write", script) == 1
    assert script.read_text() == ADVICE.replace("horovod", "hvdkit")


def test_notes_are_printed_with_and_without_a_diff(script, capsys):
    script.write_text(
        "import torch\nimport torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\n"
        "dist.init_process_group('gloo')\ntotal = torch.ones(1)\ndist.reduce(total, dst=0)\n"
        "model = DDP(torch.nn.Linear(1, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    run(script)
    assert "note, line 7: " in capsys.readouterr().out
    run("--diff", script)
    assert "note, line 7: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["/gone.py"], ["--write", "--diff", "x"], ["--wirte", "x"]]
)
def test_wrong_arguments_are_status_2(arguments, capsys):
    try:
        status = run(*arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert capsys.readouterr().err


def test_libcst_is_optional(script):
    code = (
        "import sys; sys.modules['libcst'] = None\n"
        f"from hvdkit import cli; sys.exit(cli.main(['migrate', {str(script)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("-m pip install 'libcst>=1.5'")
    loaded = subprocess.run(
        [sys.executable, "-c", "import hvdkit.cli, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "libcst" not in loaded


def test_folders(tmp_path, capsys):
    places = ["a/b/one.py", ".hidden/two.py", "env/three.py", "node_modules/four.py", "five.txt"]
    for place in [*places, "outside/six.py"]:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(OLD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    project = tmp_path / "a"
    (project / "link.py").symlink_to(tmp_path / "outside" / "six.py")
    (project / "folder").symlink_to(tmp_path / "outside")
    assert run("--write", tmp_path / "a", tmp_path / ".hidden" / "two.py") == 0
    changed = [p for p in [*places, "outside/six.py"] if (tmp_path / p).read_text() == NEW]
    assert changed == ["a/b/one.py", ".hidden/two.py"]
    assert run("--write", tmp_path) == 0
    changed = [p for p in places if (tmp_path / p).read_text() == NEW]
    assert changed == ["a/b/one.py", ".hidden/two.py"]
    assert (tmp_path / "outside" / "six.py").read_text() == NEW


def test_a_link_that_is_given_stays_a_link(script, tmp_path):
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert run("--write", link, script) == 0
    assert link.is_symlink()
    assert script.read_text() == NEW


@pytest.mark.parametrize("mode", [0o755, 0o640])
def test_mode_mark_and_line_ends_stay(script, mode):
    script.write_bytes(b"\xef\xbb\xbf" + OLD.replace("\n", "\r\n").encode())
    script.chmod(mode)
    assert run("--write", script) == 0
    assert script.read_bytes() == b"\xef\xbb\xbf" + NEW.replace("\n", "\r\n").encode()
    assert script.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ("# -*- coding: latin-1 -*-\nimport horovod  # ü".encode("latin-1"), "not UTF-8"),
        (b"import horovod.torch as hvd\nprint 'x'\n", "train.py:2: Python 2"),
        (b"import horovod.torch as hvd\nif:\n", "train.py:2: not Python 3"),
        # LibCST parses this, and Python does not.
        (
            b"import horovod.torch as hvd\ntry:\n    pass\nexcept ValueError, error:\n    pass\n",
            "train.py:4: not Python 3",
        ),
    ],
)
def test_a_file_that_cannot_be_parsed_is_reported_and_left(script, content, advice, capsys):
    script.write_bytes(content)
    (script.parent / "other.py").write_text(OLD)
    assert run("--write", script.parent) == 1
    assert script.read_bytes() == content
    assert (script.parent / "other.py").read_text() == NEW
    assert advice in capsys.readouterr().out


def test_other_files_of_a_folder_are_not_mentioned(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("if:\n")
    (tmp_path / "data.py").write_bytes(b"\xff\xfe")
    (tmp_path / "plain.py").write_text("import torch\n")
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.startswith("0 files to change of 2 read")


def test_files_that_a_script_imports(tmp_path, capsys):
    main, used, unused = (tmp_path / name for name in ("train.py", "kit/parts.py", "other.py"))
    used.parent.mkdir()
    main.write_text("import horovod.keras as hvd\nfrom kit.parts import make\n\nmake(0.1)\n")
    helper = "import keras\n\n\ndef make(rate):\n    return keras.optimizers.SGD(lr=rate)\n"
    used.write_text(helper)
    unused.write_text(helper)
    assert run(main) == 1
    text = f"{main}:1: this file imports kit/parts.py, which has to change"
    assert text in capsys.readouterr().out
    assert run("--write", tmp_path) == 0
    assert used.read_text() == helper.replace("lr=", "learning_rate=")
    assert unused.read_text() == helper
    assert run(main) == 0
    used.write_text("print 'old'\n")
    assert run(tmp_path) == 1
    assert "parts.py:1: Python 2" in capsys.readouterr().out


def test_a_package_beside_the_folder_of_the_script(tmp_path):
    package = tmp_path / "kit"
    package.mkdir()
    (package / "__init__.py").write_text("from kit.parts import f\n")
    (package / "parts.py").write_text("import torch\n\nf = torch.symeig(x, eigenvectors=True)\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train.py").write_text("import kit\nimport horovod.torch as hvd\n")
    assert run("--write", tmp_path) == 0
    assert "eigh" in (package / "parts.py").read_text()


def test_a_huge_file_and_a_pipe_are_reported(tmp_path, capsys):
    """Files with a hole take no space on the disk, and much memory; reading a pipe waits."""
    huge, other, pipe = tmp_path / "huge.py", tmp_path / "other.py", tmp_path / "pipe.py"
    huge.write_text(OLD + "import other\n")
    os.mkfifo(pipe)
    for path in (huge, other):
        with path.open("ab") as file:
            file.truncate(1 << 40)
    assert run(huge, other, pipe) == 1
    output = capsys.readouterr().out
    assert f"{huge}: has more than 500,000 bytes, so it is left alone" in output
    assert f"{pipe}: not a regular file" in output
    assert str(other) not in output
    script = tmp_path / "train.py"
    script.write_text("import other\n" + OLD)
    assert run(script) == 0


def test_a_notebook_is_reported(tmp_path, capsys):
    (tmp_path / "train.ipynb").write_text('{"cells": ["import horovod.torch as hvd"]}')
    assert run(tmp_path) == 1
    assert "nbconvert" in capsys.readouterr().out


def test_a_failed_write_leaves_the_file(script, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    assert run("--write", script) == 1
    monkeypatch.undo()
    assert script.read_text() == OLD
    assert os.listdir(script.parent) == ["train.py"]
    assert "cannot be written: No space left on device" in capsys.readouterr().out


def test_a_new_file_has_no_set_user_id(script, monkeypatch):
    """It belongs to this user, in place of a file of another user, who may change it."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "fchown", refuse)
    script.chmod(0o6777)
    assert run("--write", script) == 0
    assert script.stat().st_mode & 0o7777 == 0o777


@pytest.mark.parametrize("change", ["edit", "link"])
def test_a_file_that_has_changed_since_it_was_read_stays(tmp_path, monkeypatch, capsys, change):
    """Another user may put a link to a folder of this user in the place of a folder of a script."""
    folder, own = tmp_path / "model", tmp_path / "own"
    for each in (folder, own):
        each.mkdir()
        (each / "train.py").write_text(OLD)
    read_files = files.read

    def read(paths):
        found = read_files(paths)
        if change == "edit":
            (folder / "train.py").write_text(OLD + "# my edit\n")
        else:
            folder.rename(tmp_path / "moved")
            folder.symlink_to(own)
        return found

    monkeypatch.setattr(files, "read", read)
    assert run("--write", folder) == 1
    assert (folder / "train.py").read_text().startswith(OLD)
    assert os.listdir(own) == ["train.py"]
    assert "it has changed meanwhile: run the command again" in capsys.readouterr().out


def test_an_unreadable_file_is_reported(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.py"
    path.write_text(OLD)

    def fail(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open_regular", fail)
    assert run(path) == 1
    assert f"{path}: Permission denied" in capsys.readouterr().out


def test_an_unreadable_folder_is_reported(script, monkeypatch, capsys):
    folder = script.parent / "model"
    folder.mkdir()
    real = os.scandir

    def fail(path):
        if os.fspath(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(folder))
        return real(path)

    monkeypatch.setattr(os, "scandir", fail)
    assert run(script.parent) == 1
    assert f"{folder}: Permission denied" in capsys.readouterr().out


def test_control_characters_of_a_script_do_not_reach_a_terminal(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OLD.replace("hvd.init()", 'hvd.init(); x = "\x1b]0;title\x07 \u202e"', 1))
    reader, terminal = os.openpty()
    for arguments in ([path], ["--diff", path]):
        subprocess.run(
            [sys.executable, "-m", "hvdkit", "migrate", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            timeout=60,
            check=False,
        )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(reader, 65536):
            shown += piece
    os.close(reader)
    assert b"train.py" in shown
    assert b"\x1b" not in shown
    assert "\u202e".encode() not in shown


def test_a_form_feed_does_not_end_a_line_of_the_diff(script, capsys):
    script.write_text("import horovod.torch as hvd\n\fhvd.init()\n")
    assert run("--diff", script) == 0
    output = capsys.readouterr().out
    assert "+import hvdkit.torch as hvd\n \fhvd.init()\n" in output
    assert "No newline" not in output
