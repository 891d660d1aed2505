"""`hvdkit.torchmetrics`: metrics over all ranks against one process with all samples."""

import copy
import pickle

import pytest
import torch
from torch import nn


def torchmetrics():
    """Return the package; skip the test without it."""
    return pytest.importorskip("torchmetrics")


def samples(rank):
    """Return a rank's predictions and targets; ranks have different numbers of them."""
    generator = torch.Generator().manual_seed(rank)
    count = 20 + 7 * rank
    return (
        torch.rand(count, 4, generator=generator).softmax(dim=1),
        torch.randint(4, (count,), generator=generator),
    )


def metrics():
    of = torchmetrics().classification
    return torchmetrics().MetricCollection(
        {
            "accuracy": of.MulticlassAccuracy(4, average="macro"),  # sums
            "auroc": of.MulticlassAUROC(4),  # lists of all predictions
            "confusion": of.MulticlassConfusionMatrix(4),
            "average precision": of.MulticlassAveragePrecision(4, thresholds=10),
        }
    )


@pytest.mark.parametrize("inference", [False, True])
def test_metrics_over_all_ranks(hvd, inference):
    package = torchmetrics()
    from hvdkit.torchmetrics import compute_over_ranks

    holder = nn.ModuleDict({"all": metrics(), "mean": package.MeanMetric()})
    assert compute_over_ranks(holder) is holder
    # A copy, for instance of Lightning, does the same.
    holder = copy.deepcopy(pickle.loads(pickle.dumps(holder)))
    reference = metrics()
    with torch.inference_mode(inference):
        for _ in range(2):
            holder["all"].update(*samples(hvd.rank()))
            holder["mean"].update(float(hvd.rank()), weight=2.0)
            for rank in range(hvd.size()):
                reference.update(*samples(rank))
            found = holder["all"].compute()
            for name, expected in reference.compute().items():
                torch.testing.assert_close(found[name], expected, msg=lambda m, n=name: f"{n}: {m}")
            assert holder["mean"].compute() == sum(range(hvd.size())) / hvd.size()


def test_a_rank_without_samples_and_a_metric_with_its_own_function(hvd):
    package = torchmetrics()
    from hvdkit.torchmetrics import compute_over_ranks

    cat = compute_over_ranks(package.CatMetric())
    if hvd.rank():
        cat.update(torch.tensor([1.0, 2.0]))
    assert cat.compute().tolist() == [1.0, 2.0] * (hvd.size() - 1)

    own = package.SumMetric(dist_sync_fn=lambda tensor, group=None: [tensor, tensor])
    own.distributed_available_fn = lambda: True
    own.update(1.0)
    assert compute_over_ranks(own).compute() == 2.0
