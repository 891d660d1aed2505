"""Horovod's own elastic training, which starts Horovod again in the same process."""

from tests.alone import run_alone

BEGIN = """
import sys, torch
import hvdkit.torch as hvd
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
elastic = sys.modules["hvdkit.torch.elastic"]
hvd.init()
"""

SHRINKS = """
sampler = hvd.elastic.ElasticSampler(range(6), shuffle=False)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
    backward_passes_per_step=2,
)
removed = [True]

@hvd.elastic.run
def train(state):
    if removed:
        # As if this job had two ranks until here. Each of them has trained a sample.
        sampler.num_replicas, sampler.remaining_indices = 2, [0, 2, 4]
        sampler.record_batch(0, 1)
        model(torch.ones(1, 1)).sum().backward()
        raise HostsUpdatedInterrupt(removed.pop())
    print(list(sampler), sampler.num_replicas, optimizer.reducer.accumulated)

train(hvd.elastic.TorchState(model, optimizer, sampler=sampler))
"""


def test_the_state_is_synchronised_if_hosts_were_only_removed():
    """Horovod does not call `sync` then."""
    assert run_alone(BEGIN + SHRINKS).splitlines()[-1] == "[2, 3, 4, 5] 1 False"


MESSAGES = """
calls, changes = [], [True]

def init_while_hosts_change(init=elastic.init):
    if changes:
        # After the ranks of this start were assigned.
        state.on_hosts_updated(1, changes.pop())
    init()

elastic.init = init_while_hosts_change

@hvd.elastic.run
def train(state):
    calls.append("begin")
    if len(calls) == 1:
        raise HostsUpdatedInterrupt(False)
    state.check_host_updates()
    calls.append("no change")
    if len(calls) == 4:
        # The ranks of the next start are assigned later.
        state.on_hosts_updated(2, True)
        raise HorovodInternalError("lost")

state = hvd.elastic.TorchState(step=0)
train(state)
print(*calls, sep=", ")
"""


def test_changes_of_hosts_while_horovod_starts_again_are_not_lost():
    """Horovod discards all changes of the hosts until the end of a start."""
    wanted = "begin, begin, begin, no change, begin, no change"
    assert run_alone(BEGIN + MESSAGES).splitlines()[-1] == wanted
