"""torchrun on two hosts whose network interfaces have different names."""

import os
import subprocess
import sys

import pytest

from tests.cluster.test_run import REDUCE
from tests.parallel.rank_pool import REPOSITORY, Configuration, skip_where_unsupported

SECONDS = 100


@pytest.mark.long
def test_ranks_on_two_hosts(launches, tmp_path):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    script = tmp_path / "train.py"
    script.write_text(REDUCE)
    hosts = launches.cluster.hosts
    master = ["--master-addr", hosts[0].address, "--master-port", "29500"]
    started = []
    try:
        for number, host in enumerate(hosts):
            node = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1"]
            command = [sys.executable, "-m", "torch.distributed.run", *node, *master, str(script)]
            started.append(
                subprocess.Popen(
                    host.command(command),
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    cwd=REPOSITORY,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = [job.communicate(timeout=SECONDS) for job in started]
    finally:
        for job in started:
            job.kill()
            job.wait(timeout=10)
    assert [job.returncode for job in started] == [0, 0], said
    assert "".join(out for out, _ in said).splitlines() == ["place 0 0 1 0 2", "place 1 0 1 1 2"]
    launches.check_nothing_is_left()
