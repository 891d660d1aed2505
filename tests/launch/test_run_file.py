"""`hvdkit run --config`: a file means what the same arguments mean."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.errors import UsageError
from hvdkit.launch import run_file


def options_of(words):
    options = cli._parser().parse_args(["run", *words])
    options.words = words
    return options


def combined(path, *words):
    return run_file.combined(path, options_of([]).parser, words)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.tuples(
    st.sampled_from([[], ["-np", "3"], ["-np", "auto"]]),
    st.sampled_from([[], ["-H", "a:1,b"], ["--hostfile", "hosts"], ["--hosts=-a"]]),
    st.lists(TEXT.map(lambda text: f"-x{text}"), max_size=3),
    st.lists(TEXT.map(lambda text: f"--ssh-arg={text}"), max_size=2),
    st.sampled_from([[], ["--all-output"], ["--start-timeout", "7.5"], ["--mpi-args", "-v --x"]]),
    st.lists(TEXT, max_size=3).map(lambda words: ["--", "true", *words] if words else []),
).map(lambda parts: [word for part in parts for word in part])


@settings(deadline=None)
@given(words=ARGUMENTS)
def test_a_file_that_was_written_reads_as_the_arguments(words, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.toml"
    options = options_of(words)
    run_file.write(path, options, options.parser)
    read = combined(path)
    ours = {name: value for name, value in vars(options).items() if name not in ("words", "verb")}
    if ours["command"][:1] == ["--"]:
        del ours["command"][0]
    # Numbers are texts or not; the file says what the arguments said.
    assert {name: vars(read)[name] for name in ours if name != "parser"} == {
        name: value for name, value in ours.items() if name != "parser"
    }


def test_the_command_line_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'num-proc = 8\nhosts = "a:8"\nlauncher = "mpi"\nx = ["A"]\ncommand = ["true"]\n'
        "stop-grace = 5\nall-output = true\nno-preflight = false\n"
    )
    options = combined(
        path, "-np", "2", "--hostfile", "h", "--launcher", "auto", "-x", "B", "false"
    )
    assert (options.num_proc, options.hosts, str(options.hostfile)) == (2, None, "h")
    assert (options.launcher, options.variables) == ("auto", ["A", "B"])
    assert (options.stop_grace, options.all_output, options.no_preflight) == (5.0, True, False)
    assert options.command == ["false"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-procs = 2", "num-procs is no option of `hvdkit run`.*Did you mean num-proc"),
        ("config = 'other'", "config is no option"),
        ("num-proc = true", "num-proc is True; expected a text or a number"),
        ("all-output = 1", "all-output is 1; expected true or false"),
        ("x = 'A'", "x is 'A'; expected a list of texts"),
        ("command = 'true'", "command is 'true'; expected a list of words"),
        ("command = [1]", r"command is \[1\]; expected a list of words"),
        ("[run]\nnum-proc = 2", "run is no option"),
        ("num-proc: 2", "it is not TOML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        combined(path)


def test_what_a_file_cannot_have(tmp_path, capfd):
    path = tmp_path / "run.toml"
    assert cli.main(["run", "-x", "A=\udcff", "--write-config", str(path), "true"]) == 2
    assert "an argument is not UTF-8" in capfd.readouterr().err
    assert not path.exists()


def test_from_the_command_line(tmp_path, capfd):
    path = tmp_path / "run.toml"
    write = ["run", "-np", "2", "--write-config", str(path), "sh", "-c", "echo $RANK"]
    assert cli.main(write) == 0
    assert path.stat().st_mode & 0o777 == 0o600  # there may be secrets in it
    assert tomllib.loads(path.read_text()) == {
        "num-proc": 2,
        "command": ["sh", "-c", "echo $RANK"],
    }
    assert cli.main(write) == 1
    assert "exists; remove it" in capfd.readouterr().err
    assert cli.main(["run", "--config", str(path)]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
    assert cli.main(["run", "--config", str(tmp_path / "none"), "true"]) == 2
    assert "No such file" in capfd.readouterr().err
