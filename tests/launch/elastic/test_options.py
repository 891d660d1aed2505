"""The options of elastic jobs."""

import pytest

from hvdkit.cli import main

RUN = ["run", "--elastic"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["run", "--max-np", "2"], "--max-np needs --elastic"),
        (["run", "--reset-limit", "2"], "--reset-limit needs --elastic"),
        (
            ["run", "--elastic", "-H", "a,b", "--slots-per-host", "2"],
            "--slots-per-host needs --host-discovery-script",
        ),
        ([*RUN, "--nodes", "2"], "--elastic cannot be combined with --nodes"),
        ([*RUN, "--launcher", "mpi"], "--elastic cannot be combined with --launcher mpi"),
        ([*RUN, "--min-np", "0"], "--min-np 0, -np 0: expected 1 <= --min-np <= -np <= --max-np"),
        ([*RUN, "-np", "2", "--min-np", "3"], "expected 1 <= --min-np <= -np <= --max-np"),
        ([*RUN, "-np", "0", "--min-np", "2"], "--min-np 2, -np 0: expected"),
        ([*RUN, "-np", "2", "--max-np", "1"], "--min-np 2, -np 2, --max-np 1: expected"),
        (
            [*RUN, "--host-discovery-script", "./x", "--slots-per-host", "0"],
            "--slots-per-host is 0: expected at least 1",
        ),
        ([*RUN, "--restarts", "-1"], "--restarts is -1: expected at least 0"),
        ([*RUN, "--host-timeout", "1"], "--host-timeout is 1: expected at least 2 seconds"),
        ([*RUN, "--blacklist-cooldown-range", "9", "3"], "9 3: expected 0 < MIN <= MAX"),
        ([*RUN, "--host-discovery-script", "x", "-H", "a"], "was given with hosts"),
        ([*RUN, "--host-discovery-script", "./missing"], "No such file"),
    ],
)
def test_wrong_options(capsys, options, expected):
    assert main([*options, "true"]) == 2
    assert expected in capsys.readouterr().err


def test_a_dry_run(capsys):
    assert main([*RUN, "-H", "localhost:2", "--max-np", "1", "--dry-run", "true"]) == 0
    assert "1 ranks over Gloo" in capsys.readouterr().out


def test_a_dry_run_without_hosts(capsys, tmp_path):
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert main([*RUN, "--host-discovery-script", str(script), "--dry-run", "true"]) == 1
    assert "there are no hosts now" in capsys.readouterr().err
