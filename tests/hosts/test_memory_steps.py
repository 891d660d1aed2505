"""A job on two hosts that resumes from the memory of one of them."""

import re

import pytest

from tests.hosts.launches import BOTH, python
from tests.ranks.rank_pool import Configuration, skip_where_unsupported
from tests.unit.launch.commands import wait_until
from tests.unit.launch.test_memory_steps import folders

_TRAIN = """
import torch, hvdkit.torch as hvd
hvd.init()
place = hvd.broadcast_object(rank, {lost})
agents = hvd.allgather_object(agent)
model = torch.nn.Linear(512, 512, bias=False)
torch.nn.init.zeros_(model.weight)
folder = {folder!r}
checkpointer = hvd.Checkpointer(folder, model=model, every_steps=3, every_steps_in_memory=1)
restored = checkpointer.restore()
begun = step = restored.step if restored else 0
print('from', step, 'sum', model.weight.sum().item(), 'of', hvd.size(), flush=True)
while step < 9:
    with torch.no_grad():
        model.weight += 1
    step += 1
    checkpointer.maybe_save(step)
    [each.wait() for each in checkpointer._host_memory._steps or ()]
    hvd.barrier()
    if begun == 0 and step == 5 and rank == {lost}:
        os.kill(agent, signal.SIGKILL)
        time.sleep(60)
checkpointer.close()
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_the_agent_of_a_host_is_killed(launches, tmp_path, lost):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    before = folders()
    code = "exec({!r})".format(_TRAIN.format(lost=lost, folder=str(tmp_path / "steps")))
    done = launches.run(*BOTH, "--restarts", "2", "--no-spares", *python(code))
    assert done.returncode == 0, done.stderr
    begun = re.findall(r"\[0\] (from .*)", done.stdout)
    assert begun == ["from 0 sum 0.0 of 2", f"from 5 sum {5.0 * 512 * 512} of 2"], done.stderr
    # The keeper of a rank deletes the folders of the killed agent.
    wait_until(lambda: not folders() - before)
