"""Elastic jobs on several hosts: hosts are added, removed and lost."""

import contextlib

import pytest

from tests.elastic.jobs import ElasticJob
from tests.elastic.training import TORCH, check
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

LIMITS = ("--min-np", "1", "--max-np", "2")


@pytest.fixture
def start(launches, tmp_path):
    """Yield a function that starts an elastic job on the first host."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(TORCH)
    with contextlib.ExitStack() as jobs:

        def begin(hosts, *options):
            return jobs.enter_context(
                ElasticJob(
                    tmp_path,
                    hosts,
                    f"--ssh-arg=-F{launches.access.config}",
                    *LIMITS,
                    *options,
                    prefix=launches.cluster.hosts[0].command([]),
                )
            )

        yield begin
    launches.check_nothing_is_left()


@pytest.mark.long
def test_all_hosts_are_replaced_at_once(start):
    job = start("host0:1")
    job.wait_for("batch 0 3 ")
    job.set_hosts("host1:1")
    job.wait_for("host0, which has left the list, takes part with 1 rank until the next commit")
    job.wait_for("2 ranks on host0:1, host1:1")
    assert int(job.wait_for(r"begin 0 (\d+) size 2")[1]) >= 3
    job.wait_for("1 rank on host1:1")
    assert int(job.wait_for(r"begin 0 (\d+) size 1")[1]) >= 4
    assert job.finish() == 0
    check(job.lines, ranks=1)


def test_a_new_host_that_cannot_take_part_does_not_interrupt_the_job(start):
    job = start("host0:1")
    job.wait_for("batch 0 2 ")
    job.set_hosts("host0:1,host9:1")
    job.wait_for("host9 cannot take part")
    assert job.finish() == 0
    assert "the hosts have changed" not in job.text
    check(job.lines, ranks=1)
