"""Options of `hvdkit run` that are wrong, contradict each other, or describe a job."""

import shlex

import pytest

from hvdkit import cli
from tests.unit.launch.test_allocation import ENV

NODE_0 = "--nodes 2 --node-rank 0 --rdzv localhost:29400"
SIZES = "expected 1 <= --min-np <= -np <= --max-np"

WRONG = [
    ("-np 0 true", "-np is 0; expected at least 1"),
    ("-np many true", "'many' is not a number; expected a number, or auto"),
    ("-np 2", "there is no command to run"),
    ("-H a:1 --hostfile b true", "not allowed with"),
    ("--start-timeout inf true", "'inf': expected a number of seconds above 0"),
    ("--stop-grace -1 true", "'-1': expected a number of seconds above 0"),
    ("-np 1 --env-file /nonexistent true", "--env-file /nonexistent: No such"),
    ("-np 1 -x 'NOT_HERE_*' true", "-x NOT_HERE_*: no variable here has this prefix"),
    ("-np 1 -x NOT_SET_ANYWHERE true", "is not set here"),
    ("-np 1 --launcher pbs true", "invalid choice: 'pbs'"),
    ('-np 1 --launcher mpi --mpi-args "\'a" true', "No closing quotation"),
    ("-np 1 --launcher gloo --mpi-args=-v true", "needs --launcher mpi"),
    # Restarts, and a debugger.
    ("-np 2 --restarts -1 true", "--restarts is -1: expected at least 0"),
    ("-np 2 --min-np 1 true", "--min-np needs --restarts N"),
    ("-np 2 --restarts 1 --min-np 3 true", "--min-np is 3: expected at least 1, and at most 2"),
    ("-np 2 --restarts 1 --debug-rank 0 true", "cannot be combined with --debug-rank"),
    ("-np 2 --host-timeout 1 true", "--host-timeout is 1: expected at least 2"),
    ("-np 2 --host-discovery-script x -H localhost:2 true", "was given with hosts"),
    ("-np 2 --debug-rank 2 true", "--debug-rank is 2; the ranks are 0 to 1"),
    ("-np 2 --debug-rank 0 --launcher mpi true", "--launcher gloo"),
    ("-np 2 --debug-rank 1 -H localhost:1,192.0.2.1:1 true", "runs on 192.0.2.1"),
    # Elastic jobs.
    ("--max-np 2 true", "--max-np needs --elastic"),
    ("--reset-limit 2 true", "--reset-limit needs --elastic"),
    ("--elastic -H a,b --slots-per-host 2 true", "--slots-per-host needs --host-discovery-script"),
    ("--elastic --nodes 2 true", "--elastic cannot be combined with --nodes"),
    ("--elastic --launcher mpi true", "--elastic cannot be combined with --launcher mpi"),
    ("--elastic --min-np 0 true", f"--min-np 0, -np 0: {SIZES}"),
    ("--elastic -np 0 --min-np 2 true", "--min-np 2, -np 0: expected"),
    ("--elastic -np 2 --max-np 1 true", "--min-np 2, -np 2, --max-np 1: expected"),
    ("--elastic --host-discovery-script ./x --slots-per-host 0 true", "--slots-per-host is 0"),
    ("--elastic --blacklist-cooldown-range 9 3 true", "9 3: expected 0 < MIN <= MAX"),
    ("--elastic --host-discovery-script ./missing true", "No such file"),
    # Nodes.
    ("--node-rank 0 true", "--node-rank needs --nodes N"),
    ("--nodes 0 true", "--nodes is 0: expected at least 1"),
    ("--nodes 2 true", "give --rdzv or --rdzv-file"),
    (f"{NODE_0} -H a,b true", "-H cannot be combined with --nodes"),
    (f"{NODE_0} --launcher mpi true", "--launcher mpi cannot be combined with --nodes"),
    (f"{NODE_0} -np 3 true", "expected a multiple of 2"),
    (f"{NODE_0} --rdzv-file x true", "not allowed with"),
    (f"{NODE_0} true", "the job has no key"),
    ("--nodes 1 --node-rank 0 --rdzv-file /nonexistent/x true", "No such"),
    # Slurm.
    ("--launcher slurm true", "there is no allocation here"),
    ("--mpi pmix -np 1 true", "--mpi pmix is an option of srun"),
]
WRONG_IN_AN_ALLOCATION = [
    ("--launcher slurm -H a:1 true", "Remove -H, --hostfile and"),
    ("-np 8 true", "-np is 8, but the allocation has 7 tasks"),
    ("--elastic true", "--elastic was given in an allocation, whose nodes stay the same"),
]


@pytest.fixture
def refused(capsys):
    """Return a function that returns the error of options that are refused."""

    def error_of(words):
        try:
            status = cli.main(["run", *words])
        except SystemExit as error:  # by argparse
            status = error.code
        assert status == 2
        return capsys.readouterr().err

    return error_of


@pytest.mark.parametrize(("words", "expected"), WRONG)
def test_wrong_options(refused, words, expected):
    assert expected in refused(shlex.split(words))


@pytest.mark.parametrize(("words", "expected"), WRONG_IN_AN_ALLOCATION)
def test_wrong_options_in_an_allocation(refused, monkeypatch, words, expected):
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    error = refused(shlex.split(words))
    assert expected in error
    assert len(error.splitlines()) == 1


def test_an_invalid_line_is_not_shown(refused, tmp_path):
    (tmp_path / "env").write_text("\ufeffA=1\n\nmy-token=hunter2\n")
    error = refused(["-np", "1", "--env-file", str(tmp_path / "env"), "true"])
    assert f"--env-file {tmp_path}/env, line 3: expected NAME=VALUE or NAME" in error
    assert "hunter2" not in error


@pytest.mark.parametrize(
    ("value", "options", "status"),
    [("1", [], 2), ("0", ["-xHVDKIT_SHARE_GPUS=1"], 2), ("1", ["-xHVDKIT_SHARE_GPUS=0"], 0)],
)
def test_pinned_gpus_cannot_be_shared(value, options, status, monkeypatch, capsys):
    monkeypatch.setenv("HVDKIT_SHARE_GPUS", value)
    assert cli.main(["run", "--pin-gpus", *options, "--dry-run", "-np", "1", "true"]) == status
    assert ("Remove one of them" in capsys.readouterr().err) == (status == 2)


def test_a_dry_run_starts_nothing(capsys, tmp_path, monkeypatch):
    def shown(words, status=0):
        assert cli.main(["run", *shlex.split(words), "--dry-run", "true"]) == status
        return capsys.readouterr()

    monkeypatch.delenv("HVDKIT_JOB_KEY", raising=False)
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert "1 ranks over Gloo" in shown("--elastic -H localhost:2 --max-np 1").out
    assert "there are no hosts now" in shown(f"--elastic --host-discovery-script {script}", 1).err
    node_1 = shown(f"--nodes 2 --node-rank 1 --rdzv-file {tmp_path}/job -np 4").out
    assert node_1.startswith(f"node 1 of 2: joins node 0 at --rdzv-file {tmp_path}/job\n")
    assert "then runs 2 ranks" in node_1
