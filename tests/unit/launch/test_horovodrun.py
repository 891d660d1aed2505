"""`horovodrun` with Horovod's options, and Horovod's own parser as the reference."""

import argparse
import os
import re
import shlex
import sys
import time

import pytest

from hvdkit.engine.describe import installed
from hvdkit.errors import UsageError
from hvdkit.launch.options import horovodrun, horovodrun_options
from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.launch.commands import execute

PROGRAM = "import sys; from hvdkit.cli import horovodrun; sys.exit(horovodrun())"
OPTIONS = [option for group in horovodrun_options.OPTIONS.values() for option in group]
VARIABLES = [option for option in OPTIONS if option.is_variable]
#: The value of an option for the tests, if its kind does not say it.
VALUES = {"log_level": "DEBUG", "autotune_gaussian_process_noise": "0.5"}
RANK = "import os, sys; rank = os.environ['HOROVOD_RANK'];"


def command(*words):
    return [sys.executable, "-c", PROGRAM, *words]


def run(*words, **options):
    return execute(command(*words), **options)


def python(code):
    return (sys.executable, "-c", RANK + code)


def translated(*words, env=None):
    """Return the words for `hvdkit run`, and the notes."""
    return horovodrun.translate(horovodrun.read(words, env or {}))


def variables(*words):
    """Return the variables of the ranks."""
    found, _ = translated("-np", "2", *words, "true")
    given = [found[i + 1] for i, word in enumerate(found) if word == "-x"]
    return dict(text.split("=", 1) for text in given)


class _Found(Exception):
    pass


@pytest.fixture
def launch():
    """Horovod's own launcher, the reference."""
    return pytest.importorskip("horovod.runner.launch")


@pytest.fixture
def horovods_variables(launch, monkeypatch):
    """Returns the variables that Horovod's own launcher sets for a command line."""
    from horovod.runner.common.util import config_parser

    def variables_of(*words):
        monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", *words, "true"])
        return config_parser.set_env_from_args({}, launch.parse_args())

    return variables_of


def options_of(parser):
    return {
        name: (action.nargs == 0, getattr(action.type, "__name__", None))
        for action in parser._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


def test_every_option_of_horovod_is_known(launch, monkeypatch):
    def found(parser, *words):
        raise _Found(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", found)
        with pytest.raises(_Found) as horovods:
            launch.parse_args()
    ours = options_of(horovodrun.make_parser())
    expected = options_of(horovods.value.args[0])
    assert ours.keys() == expected.keys()
    for name, (is_flag, kind) in expected.items():
        assert ours[name] == (is_flag, kind if kind or is_flag else "str"), name


def words_of(option, name):
    if option.kind is None:
        return [name]
    return [name, VALUES.get(option.key, "7" if option.kind is int else "2.5")]


def needed(option):
    """Return the words without which an option has no effect."""
    names = {"mpi": ["--mpi"], "autotune": ["--autotune"]}
    return names.get(option.needs, ["--timeline-filename", "x"] if option.needs else [])


@pytest.mark.parametrize(
    ("option", "name"),
    [(option, name) for option in VARIABLES for name in f"{option.names} {option.off}".split()],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_variable_is_that_of_horovod(option, name, horovods_variables):
    words = [*needed(option), *words_of(option, name)]
    expected = horovods_variables(*words)
    if name == "--no-autotune":
        expected |= {"HOROVOD_AUTOTUNE": "0"}  # Horovod keeps the launcher's own
    assert variables(*words) == expected
    assert option.becomes in expected


YAML = """\
controller: MPI
params: {fusion_threshold_mb: 32, cycle_time_ms: 10, cache_capacity: 2048,
  hierarchical_allreduce: true, hierarchical_allgather: false, torus_allreduce: true}
autotune: {enabled: true, log_file: a.txt, warmup_samples: 5, steps_per_sample: 20,
  bayes_opt_max_samples: 50, gaussian_process_noise: 0.9}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, thread_affinity: 1,
  gloo_timeout_seconds: 60}
logging: {level: INFO, with_timestamp: false}
"""


def test_a_file_is_read_as_by_horovod(horovods_variables, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(YAML)
    words = ["--config-file", str(file), "--fusion-threshold-mb", "1", "--stall-check"]
    ours = variables(*words)
    assert float(ours["HOROVOD_CYCLE_TIME"]) == 10
    # Horovod keeps the spelling of the file.
    assert ours == horovods_variables(*words) | {"HOROVOD_CYCLE_TIME": ours["HOROVOD_CYCLE_TIME"]}
    assert ours["HOROVOD_FUSION_THRESHOLD"] == str(1024 * 1024)
    assert ours["HOROVOD_STALL_CHECK_DISABLE"] == "0"
    assert ours.keys() == {option.becomes for option in VARIABLES} - {"NCCL_IB_DISABLE"}
    assert translated("-np", "2", *words, "true")[0].count("mpi") == 1
    assert "mpi" not in translated("-np", "2", "--gloo", *words, "true")[0]


def test_arguments_of_hvdkit_run():
    words, notes = translated(
        *shlex.split("--num-proc 4 -hostfile h -p 22 -i key --start-timeout 9 --mpi --verbose"),
        *("--mpi-args=--report-bindings -x A=b", "--binding-args=--bind-to core"),
        *("--network-interfaces", "eth0,eth1", "--network-interface", "eth2"),
        *("python", "train.py", "--mpi", "-np", "8"),
    )
    text = shlex.join(words)
    assert text.endswith(" python train.py --mpi -np 8")
    for part in (
        *("-np 4 ", "--hostfile=h ", "--ssh-port=22 ", "--ssh-identity=key ", "--start-timeout=9 "),
        "'--mpi-args=--report-bindings -x A=b --bind-to core' ",
        *("--launcher mpi ", "--network=eth0 ", "-x NCCL_SOCKET_IFNAME=eth0,eth1,eth2 "),
        *("--all-output ", "--no-torch-env ", "StrictHostKeyChecking=accept-new "),
    ):
        assert part in text, part
    assert notes == []


def test_elastic_options():
    words, notes = translated(
        *shlex.split(
            "-np 4 --min-np 2 --max-num-proc 8 --slots-per-host 3 --reset-limit 5 "
            "--blacklist-cooldown-range 10 60 --host-discovery-script ./hosts.sh --mpi -- true"
        ),
        env={"HOROVOD_ELASTIC_TIMEOUT": "77", "HOROVOD_START_TIMEOUT": "33"},
    )
    for part in (
        *("--elastic", "--min-np=2", "--max-np=8", "--slots-per-host=3", "--reset-limit=5"),
        *("--host-discovery-script=./hosts.sh", "--elastic-timeout=77", "--start-timeout=33"),
    ):
        assert part in words
    assert "--blacklist-cooldown-range 10 60" in " ".join(words)
    assert "-H" not in words
    assert notes == ["--mpi has no effect here: an elastic job runs over Gloo"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--max-np 3", "the job is not elastic (--min-np or --host-discovery-script)"),
        ("--min-np 1 --slots-per-host 3", "it needs --host-discovery-script"),
        ("--mpi-args=-x", "the ranks run over Gloo (--mpi)"),
        ("--autotune-log-file x", "it needs --autotune"),
        ("--timeline-mark-cycles", "it needs --timeline-filename"),
    ],
)
def test_an_option_without_effect_says_why(words, reason):
    _, (note,) = translated(*shlex.split(f"-np 2 {words} true"))
    assert note.startswith("--")
    assert note.endswith(f" has no effect here: {reason}")


def test_without_hosts_a_job_runs_here_also_in_an_allocation():
    assert "-H localhost:2" in " ".join(translated("-np", "2", "true")[0])
    # The hosts of an allocation of LSF are those of `hvdkit run`.
    words, _ = translated("true", env={"LSB_JOBID": "1"})
    assert not {"-H", "-np"} & {*words}


def test_ranks_on_other_hosts_get_all_variables_as_in_horovod():
    env = {"API_TOKEN": "x", "HOME": "/", "CUDA_VISIBLE_DEVICES": "0"}
    words, _ = translated("-np", "2", "-H", "a:1,b:1", "true", env=env)
    assert words[words.index("-x") + 1] == "API_TOKEN"
    assert words.count("-x") == 1


def test_jobs_that_only_horovods_launcher_can_start(tmp_path, monkeypatch):
    (tmp_path / "jsrun").write_text("#!/bin/sh\n")
    (tmp_path / "jsrun").chmod(0o755)
    monkeypatch.setattr(horovodrun, "_controllers", lambda: ("gloo", "mpi"))
    lsf = {"LSB_JOBID": "1", "PATH": str(tmp_path)}
    for words, env, expected in (
        (["true"], lsf, True),
        (["--gloo", "true"], lsf, False),
        (["-np", "2", "--min-np", "1", "true"], lsf, False),
        (["true"], lsf | {"PATH": "/nowhere"}, False),
        (["-np", "2", "true"], {"PATH": str(tmp_path)}, False),
        (["-np", "2", "--jsrun", "true"], {}, True),
        (["-np", "2", "true"], {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}, True),
        (["--check-build"], {}, True),
    ):
        assert horovodrun.read(words, env).is_for_horovod == expected, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import horovod.torch as hvd\n", True),
        ("try:\n    from horovod import torch\nexcept ImportError:\n    pass\n", True),
        ("import hvdkit.torch as hvd\nfrom horovod.common import util\n", False),
        ("import torch  # without horovod\n", False),
    ],
)
def test_elastic_states_of_horovod_are_left_to_horovod(text, expected, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    words = ["-np", "2", "--min-np", "1", "python", str(script)]
    assert horovodrun.read(words, {}).is_for_horovod == expected
    # A job that is not elastic has no such state.
    assert not horovodrun.read([*words[:2], *words[4:]], {}).is_for_horovod


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("true", "-np was not given: expected -np N"),
        ("-np 2 --gloo --mpi true", "--gloo and --mpi were given: expected one of them"),
        ("-np 2 --cycle-time-ms -1 true", "--cycle-time-ms is -1.0: expected at least 0"),
        ("-np 2 --autotune-gaussian-process-noise 2 true", "is 2.0: expected 0 to 1"),
        ("-np 2 --config-file none.yaml true", "--config-file none.yaml: No such file"),
    ],
)
def test_errors(words, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(expected)):
        translated(*shlex.split(words))


ALIASES = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 8)}]\n"
    for last, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "it is not YAML: "),
        ("- 1", "has a list: expected sections"),
        ("controller: tcp", "controller is 'tcp': expected gloo or mpi"),
        ("params: {cycle_time_ms: soon}", "params.cycle_time_ms is 'soon': expected a number"),
        ("timeline: {mark_cycles: 1}", "timeline.mark_cycles is 1: expected true or false"),
        ("logging: {level: LOUD}", "logging.level is 'LOUD': expected TRACE, DEBUG"),
        # Nine times nine aliases ...: more values than the memory has.
        (ALIASES + "params:\n  cache_capacity: *l\n", "cache_capacity is a list: expected one"),
        ("[" * 700, "it is not YAML: maximum recursion"),
        (f"params:\n  cache_capacity: {'9' * 6000}", "it is not YAML: Exceeds the limit"),
        (f"logging:\n  level: {'b' * 300}", "b…: expected TRACE"),
        ("a: !!python/object/apply:os.abort []", "it is not YAML: could not determine"),
    ],
)
def test_errors_in_a_file(text, expected, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(expected)):
        translated("-np", "2", "--config-file", str(tmp_path / "x.yaml"), "true")


def test_prefixes_and_files(tmp_path):
    (tmp_path / "out" / "rank.0").mkdir(parents=True)
    (tmp_path / "out" / "rank.0" / "stdout").write_text("of an earlier job\n")
    code = (
        "print(os.environ['HOROVOD_CYCLE_TIME'], 'RANK' in os.environ); print();"
        "sys.stdout.write('no end'); print('error', rank, file=sys.stderr)"
    )
    done = run(
        *("-np", "2", "--gloo", "--network-interfaces", "lo", "--cycle-time-ms", "3.5"),
        *("--output-filename", "out", "--disable-cache", *python(code)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = ["[{0}]<stdout>:3.5 False", "[{0}]<stdout>:", "[{0}]<stdout>:no end"]
    expected = [line.format(rank) for rank in (0, 1) for line in lines]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert {"[0]<stderr>:error 0", "[1]<stderr>:error 1"} == {*done.stderr.splitlines()}
    for rank in (0, 1):
        folder = tmp_path / "out" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == "".join(f"{x.format(rank)}\n" for x in lines)
        assert (folder / "stderr").read_text() == f"[{rank}]<stderr>:error {rank}\n"
    assert sorted(os.listdir(tmp_path / "out")) == ["rank.0", "rank.1"]


def test_prefixes_with_the_time_and_files_of_larger_jobs(tmp_path):
    """All ranks are shown, and their files are sorted by name."""
    words = ("--prefix-output-with-timestamp", "--output-filename", str(tmp_path))
    done = run("-np", "17", *words, "echo", "x")
    times, texts = zip(*(line.split("[", 1) for line in done.stdout.splitlines()), strict=True)
    assert sorted(texts) == sorted(f"{n}]<stdout>:x" for n in range(17))
    assert abs(time.mktime(time.strptime(times[0])) - time.time()) < 100
    assert sorted(os.listdir(tmp_path)) == [f"rank.{n:02}" for n in range(17)]


def test_an_unknown_key_cannot_change_the_terminal(tmp_path, capfd):
    (tmp_path / "x.yaml").write_text('"\\e[2J": 1\n')
    translated("-np", "2", "--config-file", str(tmp_path / "x.yaml"), "true")
    assert "x.yaml: \N{REPLACEMENT CHARACTER}[2J has no effect" in capfd.readouterr().err


def test_the_status_is_that_of_the_rank_that_failed():
    done = run("-np", "2", *python("sys.exit(3 if rank == '1' else 0)"))
    assert done.returncode == 3
    assert "rank 1 on localhost failed: exit status 3" in done.stderr


def test_an_elastic_job_with_a_discovery_script(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text('#!/bin/sh\necho localhost:"$1"\n')
    script.chmod(0o755)
    code = (
        "print('size', os.environ['HOROVOD_SIZE']); first = not os.path.exists('failed');"
        "open('failed', 'w'); sys.exit(3 if first else 0)"
    )
    done = run(
        *("-np", "1", "--min-np", "1", "--network-interfaces", "lo", "--output-filename", "out"),
        # A command line for the shell, as in Horovod.
        *("--host-discovery-script", f"{script} 1", *python(code)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = "[0]<stdout>:size 1\n" * 2
    assert done.stdout == lines
    # The output of all starts.
    assert (tmp_path / "out" / "rank.0" / "stdout").read_text() == lines


def test_over_mpi(tmp_path):
    skip_where_unsupported(Configuration("torch", "mpi", 1))
    code = "import os; print(len(os.sched_getaffinity(0)), os.environ['HOROVOD_CONTROLLER'])"
    done = run(
        *("-np", "1", "--mpi", "--binding-args=--bind-to core --map-by core"),
        *("--output-filename", str(tmp_path), sys.executable, "-c", code),
    )
    assert done.stdout == "[1,0]<stdout>:1 mpi\n", done.stderr
    assert (tmp_path / "rank.0" / "stdout").read_text() == done.stdout


def test_horovods_own_launcher(monkeypatch, capfd):
    """The real one imports the frameworks nine times."""
    if installed() is None:
        pytest.skip("no Horovod here")
    started = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    for words in (["--check-build"], ["-np", "2", "--jsrun", "true"], ["--version"]):
        options = horovodrun.parse(words)
        options.run(options)
    command = [sys.executable, "-P", "-m", "hvdkit.launch.horovods_launcher"]
    assert started[0] == (sys.executable, [*command, "--check-build"])
    assert [words for _, (*_, words) in started] == ["--check-build", "true"]
    assert capfd.readouterr().out == "0.28.1\n"


def test_the_help_shows_the_effect_of_each_option(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        horovodrun.parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        for name in f"{option.names} {option.off}".split():
            assert name in shown
        assert horovodrun_options.describe(option) in shown
