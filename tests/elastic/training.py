"""The trainings of the elastic tests, and what one process trains with the same batches.

The state keeps the samples of each batch. So the final state tells which samples were trained, and
the weights must be those of these batches.
"""

import json

#: Samples of the data set. Without a remainder for 1, 2 and 3 ranks, none is repeated.
SAMPLES = 96
BATCH = 4
EPOCHS = 2

DATA = f"""
import numpy as np

generator = np.random.default_rng(0)
inputs = generator.normal(size=({SAMPLES}, 8)).astype("float32")
targets = generator.normal(size=({SAMPLES}, 1)).astype("float32")
"""

TORCH = f"""
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import hvdkit.torch as hvd
{DATA}
hvd.init()
torch.manual_seed(hvd.rank())
data = TensorDataset(*map(torch.from_numpy, (inputs, targets)), torch.arange({SAMPLES}))
model = torch.nn.Linear(8, 1)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.constant_(model.bias, 0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size={BATCH}, sampler=sampler)


@hvd.elastic.run
def train(state):
    print("begin", state.epoch, state.batch, "size", hvd.size(), "resets", resets, flush=True)
    while state.epoch < {EPOCHS}:
        for number, (x, y, samples) in enumerate(loader):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            everywhere = sum(hvd.allgather_object(samples.tolist()), [])
            state.trained = [*state.trained, [state.epoch, everywhere]]
            state.sampler.record_batch(number, len(samples))
            state.batch += 1
            time.sleep(float(os.environ["PAUSE"]))
            after_batch(state)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def after_batch(state):
    if os.environ.get("COMMITS") == "rarely" and state.batch % 3:
        state.check_host_updates()
    else:
        state.commit()
    if hvd.rank() == 0:
        print("batch", state.epoch, state.batch, os.getpid(), flush=True)


resets = []
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, trained=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
weights = [p.tolist() for p in model.parameters()]
print("trained", json.dumps([weights, state.trained]), flush=True)
"""


def check(lines, ranks):
    """Check the results of all ranks: equal weights, each sample once, one process's weights."""
    results = [line.partition("trained ")[2] for line in lines if "] trained " in line]
    assert len(results) == ranks
    assert len(set(results)) == 1
    weights, trained = json.loads(results[0])
    for epoch in range(EPOCHS):
        samples = [s for number, batch in trained if number == epoch for s in batch]
        assert sorted(samples) == list(range(SAMPLES))
    assert_close(weights, expected(trained))
    return trained


def assert_close(found, wanted):
    import numpy as np

    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.array(mine), theirs, rtol=1e-3, atol=1e-5)


def expected(trained):
    """Return weights and bias after the batches, by SGD with momentum in NumPy."""
    import numpy as np

    names = {}
    exec(DATA, names)
    weight, bias = np.full((1, 8), 0.5), np.zeros(1)
    velocity = [np.zeros_like(weight), np.zeros_like(bias)]
    for _, samples in trained:
        x, y = (names[name][samples].astype(np.float64) for name in ("inputs", "targets"))
        error = 2 * (x @ weight.T + bias - y) / len(x)
        velocity[0] = 0.9 * velocity[0] + error.T @ x
        velocity[1] = 0.9 * velocity[1] + error.sum(0)
        weight -= 0.01 * velocity[0]
        bias -= 0.01 * velocity[1]
    return [weight, bias]
