"""`hvdkit bench` on several hosts: over ssh, and on two hosts that it makes."""

import csv
import json
import os

import pytest

from hvdkit.bench import link, namespaces
from tests.hosts.launches import BOTH, HVDKIT
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.unit.bench.commands import ENVIRONMENT, bench
from tests.unit.launch.commands import execute

pytestmark = pytest.mark.long
_SECONDS = 180


@pytest.fixture(autouse=True)
def engine():
    skip_where_unsupported(Configuration("torch", "gloo", 2))


def over_ssh(launches, verb, *arguments):
    own = [*HVDKIT, "bench", verb, *arguments, f"--ssh-arg=-F{launches.access.config}"]
    command = launches.cluster.hosts[0].command(own)
    done = execute(command, env=os.environ | ENVIRONMENT, cwd=REPOSITORY, timeout=_SECONDS)
    launches.check_nothing_is_left()
    return done


def test_allreduce_on_hosts_over_ssh(launches, tmp_path):
    path = tmp_path / "run.json"
    names = "hvdkit-gloo,torch-gloo"
    arguments = ["--variants", names, "--sizes", "1KiB,1MB", "--turns", "2", "--json", str(path)]
    done = over_ssh(launches, "allreduce", *arguments, *BOTH)
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content["conditions"]["place"] == "2 ranks on host0:1, host1:1"
    assert [row["wrong"] for row in content["rows"]] == [0] * 4


def test_steps_on_hosts_over_ssh(launches):
    names = "hvdkit-gloo-fp32,ddp-gloo-fp32,alone,single"
    arguments = ["--model", "many-small", "--turns", "2", "--variants", names]
    done = over_ssh(launches, "step", *arguments, *BOTH)
    assert done.returncode == 0, done.stderr
    assert "hvdkit-gloo-fp32 / ddp-gloo-fp32" in done.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_hosts_with_a_limited_link(make_hosts, tmp_path, ranks):
    if reason := namespaces.missing():
        pytest.skip(reason)
    path = tmp_path / "run.json"
    names = "hvdkit-gloo,flat-gloo,torch-gloo"
    arguments = ["--variants", names, "--sizes", "5MB", "--turns", "3", "--json", str(path)]
    done = bench("allreduce", "-np", str(ranks), "--two-hosts", "200Mbit/s", *arguments)
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert not any(row["wrong"] for row in rows.values())
    # A ring sends 2(n-1)/n times the buffer over the link, at 25 MB/s.
    ring = 2 * (ranks - 1) / ranks * 5e6 / 25e6
    for name in ("flat-gloo", "torch-gloo"):
        # The link lets a burst of 256 KB pass.
        assert min(map(min, rows[name]["turns"])) > 0.9 * ring
    assert min(map(min, rows["hvdkit-gloo"]["turns"])) > 0.9 * 5e6 / 25e6


def test_the_limit_of_the_link_is_shown(make_hosts, tmp_path):
    if reason := namespaces.missing():
        pytest.skip(reason)
    names = "hvdkit-gloo-fp32,hvdkit-gloo-int8,alone"
    path = tmp_path / "run.csv"
    arguments = ["--model", "many-small", "--turns", "2", "--variants", names, "--csv", str(path)]
    done = bench("step", "--two-hosts", "100Mbit/s", *arguments)
    assert done.returncode == 0, done.stderr
    # 2.1 MB at 12.5 MB/s; int8 sends a quarter.
    assert "169.0" in done.stdout or link.can_measure()
    assert "/ limit" in done.stdout
    with path.open(newline="") as stream:
        limits = {row["variant"]: row["limit_ms"] for row in csv.DictReader(stream)}
    fp32, int8 = (float(limits[f"hvdkit-gloo-{wire}"]) for wire in ("fp32", "int8"))
    assert fp32 == pytest.approx(169, rel=0.15)
    assert int8 / fp32 == pytest.approx(260 / 1024, rel=0.01)
