"""What a user may say of nodes; `tests/cluster/test_nodes.py` runs jobs of them."""

import subprocess
import sys

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch import membership

KEY = "0123456789abcdef"
PLACE = ("--nodes", "2", "--node-rank", "0", "--rdzv", "localhost:29400")


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        (1, {}, 1),
        (None, {"JOB_COMPLETION_INDEX": "1"}, 1),
        (None, {"SKYPILOT_NODE_RANK": "0", "SLURM_NODEID": "1"}, 0),
        (0, {"NODE_RANK": "1"}, 0),
    ],
)
def test_which_node_this_is(given, env, expected):
    assert membership.node_rank(given, 2, env) == expected


@pytest.mark.parametrize(
    ("given", "env", "words"),
    [
        (2, {}, "--node-rank is 2; with --nodes 2, expected 0 to 1"),
        (-1, {}, "--node-rank is -1"),
        (None, {"JOB_COMPLETION_INDEX": "7"}, "JOB_COMPLETION_INDEX is 7"),
        (None, {"NODE_RANK": "first"}, "which of them is this"),
    ],
)
def test_no_such_node(given, env, words):
    with pytest.raises(UsageError, match=words):
        membership.node_rank(given, 2, env)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("node0:29400", ("node0", 29400)), ("[fd00::1]:80", ("fd00::1", 80)), ("::1:80", ("::1", 80))],
)
def test_where_nodes_meet(text, expected):
    assert membership.parse_address(text) == expected


@pytest.mark.parametrize("text", ["node0", "node0:", ":80", "node0:0", "node0:65536", "node0:²"])
def test_where_they_cannot(text):
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        membership.parse_address(text)


def test_the_key(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert membership.read_key(file, {}, may_lack=False) == KEY.encode()
    assert membership.read_key(None, {"HVDKIT_JOB_KEY": KEY}, may_lack=False) == KEY.encode()
    assert membership.read_key(None, {}, may_lack=True) == b""
    file.write_text("short")
    with pytest.raises(UsageError, match="has 5 characters; expected at least 16"):
        membership.read_key(file, {"HVDKIT_JOB_KEY": KEY}, may_lack=True)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="it is no text"):
        membership.read_key(file, {}, may_lack=True)
    with pytest.raises(UsageError, match="No such file"):
        membership.read_key(tmp_path / "none", {}, may_lack=True)
    with pytest.raises(UsageError, match="openssl rand -hex 16"):
        membership.read_key(None, {}, may_lack=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node-rank", "0", "true"], "--node-rank needs --nodes N"),
        (["--nodes", "0", "true"], "--nodes is 0; expected at least 1"),
        (["--nodes", "2", "true"], "where do they meet"),
        ([*PLACE, "-H", "a,b", "true"], "-H does not go with --nodes"),
        ([*PLACE, "--launcher", "mpi", "true"], "--launcher does not go with --nodes"),
        ([*PLACE, "-np", "3", "true"], "expected a multiple of 2"),
        ([*PLACE, "--rdzv-file", "x", "true"], "not allowed with"),
        ([*PLACE], "there is no command to run"),
        ([*PLACE, "true"], "there is no key for the job"),
        (["--nodes", "1", "--node-rank", "0", "--rdzv-file", "/nonexistent/x", "true"], "No such"),
    ],
)
def test_arguments_that_do_not_fit(arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_starts_nothing(tmp_path):
    file = tmp_path / "job"
    place = ("--nodes", "2", "--node-rank", "1", "--rdzv-file", str(file))
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", "run", *place, "-np", "4", "--dry-run", "true"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.startswith(f"node 1 of 2: joins node 0 at --rdzv-file {file}\n")
    assert "then runs 2 ranks" in done.stdout


def test_a_single_node(tmp_path):
    place = ("--nodes", "1", "--node-rank", "0", "--rdzv-file", str(tmp_path / "job"))
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", "run", *place, "-np", "2", "sh", "-c", "echo $RANK"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"]
