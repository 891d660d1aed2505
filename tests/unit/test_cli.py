import os
import shlex
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdkit
from hvdkit import cli
from hvdkit.engine import patches


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "verb", ["build", "doctor", "checkpoint", "run", "bench", "generate", "migrate"]
)
def test_every_verb_has_help_with_an_example(verb):
    answer = run(verb, "--help")
    assert answer.returncode == 0
    assert f"example:\n  hvdkit {verb}" in answer.stdout


_OPTIONS = ["--num-proc", "--nodes", "--hosts", "--no-preflight", "--ssh-arg", "--python", "--help"]
_OF_A_SCRIPT = st.one_of(
    # A prefix of one or several of our options: Python 3.11 took them for abbreviations.
    st.sampled_from(_OPTIONS).flatmap(
        lambda option: st.integers(2, len(option)).map(lambda end: option[:end])
    ),
    st.sampled_from(["-n", "-np", "-p", "-H", "-s", "-x=1", "--", "-", "", "50", "--n=50"]),
)


@settings(deadline=None)  # the first call imports the commands
@given(before=st.sampled_from([[], ["--"]]), arguments=st.lists(_OF_A_SCRIPT, max_size=5))
def test_the_arguments_of_a_script_are_its_own(before, arguments):
    command = ["python", "train.py", *arguments]
    options = cli._parser(["run"]).parse_args(["run", "-np", "2", *before, *command])
    assert options.num_proc == 2
    assert options.command in (command, [*before, *command])


def test_version():
    assert run("--version").stdout.strip() == f"hvdkit {hvdkit.__version__}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "VERB"),
        (["biuld"], "biuld"),
        (["build", "--frameworks", "mxnet"], "unknown framework 'mxnet'; expected some of"),
        (["build", "--controllers", "ucx"], "unknown controller 'ucx'; expected some of"),
        (["build", "--jobs", "0"], "--jobs is 0; expected at least 1"),
        (["build", "--gpu", "yes"], "--gpu yes is unknown; expected auto, nccl, none"),
        (["doctor", "--bandwidth"], "--bandwidth was given without hosts: expected --hosts"),
        (["doctor", "--ssh-arg=-v"], "--ssh-arg was given without hosts"),
        (["why", ".", "--timeline", "0"], "'0': expected a number of at least 1"),
        pytest.param(
            ["build", "--sdist", "/gone", "--no-cache"],
            "there is no such file",
            marks=pytest.mark.long,
        ),
    ],
)
def test_wrong_arguments_are_status_2_with_a_short_error(arguments, expected):
    answer = run(*arguments)
    assert answer.returncode == 2
    assert expected in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) <= 3


def test_list_patches_names_all_of_them():
    answer = run("build", "--list-patches")
    assert answer.returncode == 0
    for patch in patches.series():
        assert f"{patch.name} (" in answer.stdout
        assert patch.origin in answer.stdout


def test_a_closed_pipe_is_not_an_error():
    job = subprocess.Popen(
        [sys.executable, "-m", "hvdkit", "build", "--list-patches"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    job.stdout.close()
    assert job.stderr.read() == b""
    assert job.wait(timeout=60) == 128 + signal.SIGPIPE
    job.stderr.close()


def test_a_character_that_the_terminal_cannot_show():
    shown = run("build", "--list-patches", PYTHONIOENCODING="ascii")
    assert shown.returncode == 0
    assert "\\xb2" in shown.stdout


def test_processes_that_are_started_also_have_the_streams_that_were_closed():
    code = (
        "import subprocess, sys; from hvdkit import cli; cli._open_closed_streams();"
        "sys.exit(subprocess.call(['sh', '-c', 'cat && echo up >&2']))"
    )
    line = shlex.join([sys.executable, "-c", code])
    subprocess.run(["bash", "-c", f"exec {line} <&- 2>&-"], timeout=60, check=True)


def test_a_job_file_is_utf8_on_every_terminal():
    words = ["generate", "slurm", "--", "python", "größe.py"]
    answer = subprocess.run(
        [sys.executable, "-m", "hvdkit", *words],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert "python größe.py".encode() in answer.stdout.replace(b"'", b"")


def test_a_job_file_is_refused_if_an_argument_is_not_utf8(capsys):
    assert cli.main(["generate", "slurm", "python", "a\udcff.py"]) == 2
    assert "an argument is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["why", "report"])
def test_a_path_that_cannot_be_used_is_an_error_of_one_line(verb, capsys):
    path = 300 * "a"
    assert cli.main([verb, path]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hvdkit {verb}: {path}")
    assert line.endswith(": File name too long")


def test_a_working_directory_that_was_deleted(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert cli.main(["checkpoint", "ls", "."]) == 1
    expected = "hvdkit checkpoint: the working directory: No such file or directory\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("can't start new thread"), "can't start new thread. This process has"),
        (MemoryError(), "no memory. This process has reached a limit"),
    ],
    ids=str,
)
def test_a_limit_of_the_system_is_an_error_of_one_line(monkeypatch, capsys, error, expected):
    def refuse(thread):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        assert cli.main(["run", "-np", "1", "true"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hvdkit run: {expected}")
