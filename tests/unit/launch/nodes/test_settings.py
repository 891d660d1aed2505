"""The options of `--nodes`. `tests/hosts/test_nodes.py` runs jobs with them."""

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.launchers.nodes import settings

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        (1, {}, 1),
        (None, {"JOB_COMPLETION_INDEX": "1"}, 1),
        (None, {"SKYPILOT_NODE_RANK": "0", "SLURM_NODEID": "1"}, 0),
        (0, {"NODE_RANK": "1"}, 0),
    ],
)
def test_node_rank(given, env, expected):
    assert settings.node_rank(given, 2, env) == expected


@pytest.mark.parametrize(
    ("given", "env", "words"),
    [
        (2, {}, "--node-rank is 2; with --nodes 2, expected 0 to 1"),
        (-1, {}, "--node-rank is -1"),
        (None, {"JOB_COMPLETION_INDEX": "7"}, "JOB_COMPLETION_INDEX is 7"),
        (None, {"NODE_RANK": "first"}, "the number of this node is not known"),
    ],
)
def test_invalid_node_ranks(given, env, words):
    with pytest.raises(UsageError, match=words):
        settings.node_rank(given, 2, env)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("node0:29400", ("node0", 29400)), ("[fd00::1]:80", ("fd00::1", 80)), ("::1:80", ("::1", 80))],
)
def test_rendezvous_addresses(text, expected):
    assert settings.parse_address(text) == expected


@pytest.mark.parametrize("text", ["node0", "node0:", ":80", "node0:0", "node0:65536", "node0:²"])
def test_invalid_rendezvous_addresses(text):
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        settings.parse_address(text)


def test_the_key(tmp_path):
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert settings.read_key(file, {}, optional=False) == KEY.encode()
    assert settings.read_key(None, {"HVDKIT_JOB_KEY": KEY}, optional=False) == KEY.encode()
    assert settings.read_key(None, {}, optional=True) == b""
    file.write_text("short")
    with pytest.raises(UsageError, match="has 5 characters; expected at least 16"):
        settings.read_key(file, {"HVDKIT_JOB_KEY": KEY}, optional=True)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="it is not text"):
        settings.read_key(file, {}, optional=True)
    with pytest.raises(UsageError, match="No such file"):
        settings.read_key(tmp_path / "none", {}, optional=True)
    with pytest.raises(UsageError, match="openssl rand -hex 16"):
        settings.read_key(None, {}, optional=False)
