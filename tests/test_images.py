"""The images of docker/: checks of their files, and the build of one image."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ENTRYPOINT = ROOT / "docker" / "entrypoint"

_LONG_SECONDS = 1500


def entrypoint(*command, **variables):
    began = time.monotonic()
    answer = subprocess.run(
        ["sh", str(ENTRYPOINT), *command],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | variables,
    )
    return answer, time.monotonic() - began


def test_the_entrypoint_runs_the_command_and_returns_its_status():
    answer, _ = entrypoint("sh", "-c", "echo $1; exit 75", "-", "a b")
    assert answer.stdout == "a b\n"
    assert answer.returncode == 75


def test_the_entrypoint_waits_for_names_and_reports_a_missing_one(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# two hosts\nlocalhost slots=2\nno-such-host.invalid:1\n")
    answer, seconds = entrypoint(
        "echo", "on", HVDKIT_WAIT_FOR_HOSTS=str(hosts), HVDKIT_WAIT_SECONDS="2"
    )
    assert answer.stdout == "on\n"
    assert "no-such-host.invalid" in answer.stderr
    assert "localhost" not in answer.stderr
    assert seconds >= 1


def test_the_compose_file_has_two_nodes_that_differ_in_name_only():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    nodes = [dict(services[name]) for name in ("node0", "node1")]
    assert [node.pop("hostname") for node in nodes] == ["node0", "node1"]
    assert nodes[0] == nodes[1]
    assert nodes[0]["command"] == ["sshd"]
    assert nodes[0]["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_copied_files_exist_and_are_sent_to_the_builder(name):
    sent = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for line in (ROOT / "docker" / name).read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists()
                assert source in sent


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="buildah and debootstrap need root here")
@pytest.mark.skipif(
    not (shutil.which("buildah") and shutil.which("debootstrap", path="/usr/sbin:/sbin:/usr/bin")),
    reason="no buildah and debootstrap here",
)
def test_the_image_is_built_and_trains():
    answer = subprocess.run(
        [ROOT / "scripts" / "check_images"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LONG_SECONDS,
    )
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert answer.stdout.count("same weights") == 8
