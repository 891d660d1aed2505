"""`hvdkit.torchmetrics`: metrics over all ranks against one process with all samples."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.ranks.torch.oracle import assert_raised_on_all_ranks


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

    # Two states without values: other dtypes, and fewer dimensions, than those of the other ranks.
    auroc = compute_over_ranks(package.classification.MulticlassAUROC(4))
    if hvd.rank():
        auroc.update(*samples(hvd.rank()))
    reference = package.classification.MulticlassAUROC(4)
    for rank in range(1, hvd.size()):
        reference.update(*samples(rank))
    torch.testing.assert_close(auroc.compute(), reference.compute())

    own = package.SumMetric(dist_sync_fn=lambda tensor, group=None: [tensor, tensor])
    own.distributed_available_fn = lambda: True
    own.update(1.0)
    assert compute_over_ranks(own).compute() == 2.0


def test_metrics_over_the_ranks_of_a_process_set(hvd):
    package = torchmetrics()
    from hvdkit.torchmetrics import compute_over_ranks, gather

    last = hvd.add_process_set([hvd.size() - 1])
    both = hvd.add_process_set(list(range(hvd.size() - 1))) if hvd.size() > 2 else None
    try:
        for process_set in filter(None, (last, both)):
            metric = compute_over_ranks(package.SumMetric(), process_set)
            metric.update(hvd.rank() + 1.0)
            metric = copy.deepcopy(metric)
            if process_set.included():
                assert metric.compute() == sum(rank + 1.0 for rank in process_set.ranks)
            else:
                with pytest.raises(UsageError, match=f"on rank {hvd.rank()}"):
                    metric.compute()
    finally:
        hvd.remove_process_set(last)
        if both:
            hvd.remove_process_set(both)
    # A metric that was made with the function.
    metric = compute_over_ranks(package.SumMetric(dist_sync_fn=gather))
    metric.update(1.0)
    assert metric.compute() == hvd.size()


def test_different_states_raise_on_all_ranks(hvd):
    package = torchmetrics()
    from hvdkit.torchmetrics import compute_over_ranks

    metric = compute_over_ranks(package.CatMetric())
    metric.value.append(torch.ones(2, dtype=torch.float64 if hvd.rank() else torch.float32))
    metric._update_count = 1
    with pytest.raises(UsageError, match="different states") as caught:
        metric.compute()
    assert_raised_on_all_ranks(hvd, caught)


def test_lists_of_different_lengths_are_an_error_on_all_ranks(hvd):
    """torchmetrics #3336: states that are not concatenated, after different numbers of updates."""
    package = torchmetrics()
    from hvdkit.torchmetrics import compute_over_ranks

    class Boxes(package.Metric):
        def __init__(self):
            super().__init__()
            for name in ("boxes", "scores"):
                self.add_state(name, default=[], dist_reduce_fx=None)

        def update(self, value):
            self.boxes.append(value)
            self.scores.append(10 * value)

        def compute(self):
            return sorted(box.item() for box in self.boxes), len(self.scores)

    uneven, even = compute_over_ranks(Boxes()), compute_over_ranks(Boxes())
    own = torch.tensor([1.0 + hvd.rank()])
    for _ in range(3 - (hvd.rank() == 0)):
        uneven.update(own)
    for _ in range(2):
        even.update(own)
    with pytest.raises(RankMismatchError, match=r"its state 'boxes' has [23] tensors"):
        uneven.compute()
    expected = sorted(2 * [1.0 + rank for rank in range(hvd.size())])
    assert even.compute() == (expected, 2 * hvd.size())
