"""torchrun on two hosts whose network interfaces have different names."""

import contextlib
import os
import sys

import pytest

from tests.hosts.test_launchers import PLACES, REDUCE
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.unit.launch.commands import started_command

SECONDS = 100


@pytest.mark.long
def test_ranks_on_two_hosts(launches, tmp_path):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    script = tmp_path / "train.py"
    script.write_text(REDUCE)
    hosts = launches.cluster.hosts
    master = ["--master-addr", hosts[0].address, "--master-port", "29500", str(script)]
    options = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "cwd": REPOSITORY}
    with contextlib.ExitStack() as stack:
        started = []
        for number, host in enumerate(hosts):
            node = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
            command = [sys.executable, "-m", "torch.distributed.run", *node, *master]
            context = started_command(*host.command(command), **options)
            started.append(stack.enter_context(context))
        said = [job.communicate(timeout=SECONDS) for job in started]
        assert [job.wait() for job in started] == [0, 0], said
    lines = [f"[{rank}] {out.strip()}" for rank, (out, _) in enumerate(said)]
    assert lines == PLACES[2]
    launches.check_nothing_is_left()
