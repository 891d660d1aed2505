"""`hvdkit run --config`: a file has the same effect as the same arguments."""

import tomllib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.errors import UsageError
from hvdkit.launch.options import config_file


def options_of(words):
    options = cli._parser(["run"]).parse_args(["run", *words])
    options.words = words
    return options


def parse_with(path, *words):
    return config_file.parse_with(path, options_of([]).parser, words)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.tuples(
    st.sampled_from([[], ["-np", "3"], ["-np", "auto"]]),
    st.sampled_from([[], ["-H", "a:1,b"], ["--hostfile", "hosts"], ["--hosts=-a"]]),
    st.lists(TEXT.map(lambda text: f"-x{text}"), max_size=3),
    st.lists(TEXT.map(lambda text: f"--ssh-arg={text}"), max_size=2),
    st.sampled_from([[], ["--all-output"], ["--start-timeout", "7.5"], ["--mpi-args", "-v --x"]]),
    st.sampled_from([[], ["--blacklist-cooldown-range", "1", "2.5"]]),
    st.lists(TEXT, max_size=3).map(lambda words: ["--", "true", *words] if words else []),
).map(lambda parts: [word for part in parts for word in part])


@settings(deadline=None)
@given(words=ARGUMENTS)
@example(words=["-x-:"])
def test_a_file_that_was_written_reads_as_the_arguments(words, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.toml"
    options = options_of(words)
    config_file.write(path, options, options.parser)
    read = parse_with(path)
    expected = {
        name: value for name, value in vars(options).items() if name not in ("words", "verb")
    }
    if expected["command"][:1] == ["--"]:
        del expected["command"][0]
    assert {name: vars(read)[name] for name in expected if name != "parser"} == {
        name: value for name, value in expected.items() if name != "parser"
    }


def test_the_command_line_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'num-proc = 8\nhosts = "a:8"\nlauncher = "mpi"\nx = ["A"]\ncommand = ["true"]\n'
        "stop-grace = 5\nall-output = true\nno-preflight = false\n"
    )
    options = parse_with(
        path, "-np", "2", "--hostfile", "h", "--launcher", "auto", "-x", "B", "false"
    )
    assert (options.num_proc, options.hosts, str(options.hostfile)) == (2, None, "h")
    assert (options.launcher, options.x) == ("auto", ["A", "B"])
    assert (options.stop_grace, options.all_output, options.no_preflight) == (5.0, True, False)
    assert options.command == ["false"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-procs = 2", "num-procs is not an option of `hvdkit run`.*Did you mean num-proc"),
        ("num-proc = true", "num-proc is True; expected a string or a number"),
        ("all-output = 1", "all-output is 1; expected true or false"),
        ("x = 'A'", "x is 'A'; expected a list of strings"),
        ("command = 'true'", "command is 'true'; expected a list of strings"),
        ("command = [1]", r"command is \[1\]; expected a list of strings"),
        ("blacklist-cooldown-range = [1]", r"is \[1\]; expected a list of 2 numbers"),
        ("[run]\nnum-proc = 2", "run is not an option"),
        ("num-proc: 2", "it is not TOML"),
        ("#" * 20_001, "more than 20,000 bytes"),
        # Python needs 0.4 GB for such a key.
        ("a." * 9_000 + "a = 1", "a key has more than 64 parts"),
        ("a = {" + '\'a\' .\t"\\"b".' * 100 + "a = 1}", "a key has more than 64 parts"),
    ],
)
def test_an_invalid_file(tmp_path, text, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        parse_with(path)


def test_a_file_that_could_not_be_read_is_not_written(tmp_path):
    path = tmp_path / "run.toml"
    options = options_of(["-H", "node:1," * 10_000, "true"])
    with pytest.raises(UsageError, match="70,0.. bytes; expected at most 20,000"):
        config_file.write(path, options, options.parser)
    assert not path.exists()


def test_an_argument_that_is_not_utf8(tmp_path, capfd):
    path = tmp_path / "run.toml"
    assert cli.main(["run", "-x", "A=\udcff", "--write-config", str(path), "true"]) == 2
    assert "an argument is not UTF-8" in capfd.readouterr().err
    assert not path.exists()


def test_from_the_command_line(tmp_path, capfd):
    path = tmp_path / "run.toml"
    write = ["run", "-np", "2", "--write-config", str(path), "sh", "-c", "echo $RANK"]
    assert cli.main(write) == 0
    assert path.stat().st_mode & 0o777 == 0o600  # the file may have secrets
    assert tomllib.loads(path.read_text()) == {"num-proc": 2, "command": ["sh", "-c", "echo $RANK"]}
    assert cli.main(write) == 1
    assert "exists; remove it" in capfd.readouterr().err
    assert cli.main(["run", "--config", str(path)]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
    assert cli.main(["run", "--config", str(tmp_path / "none"), "true"]) == 2
    assert "No such file" in capfd.readouterr().err
