import pytest
import torch

DTYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


def test_every_rank_has_its_own_number(hvd):
    ranks = hvd.allgather(torch.tensor([hvd.rank()]), name="ranks")
    assert ranks.tolist() == list(range(hvd.size()))
    assert hvd.local_size() == hvd.size()
    assert hvd.local_rank() == hvd.rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_sums_what_all_ranks_have(hvd, dtype):
    own = torch.arange(1000, dtype=dtype) * (hvd.rank() + 1) % 64
    expected = sum(torch.arange(1000, dtype=dtype) * (r + 1) % 64 for r in range(hvd.size()))
    torch.testing.assert_close(hvd.allreduce(own, op=hvd.Sum, name="sum"), expected)


def test_allreduce_averages_by_default(hvd):
    result = hvd.allreduce(torch.full((3, 5), float(hvd.rank())), name="mean")
    torch.testing.assert_close(result, torch.full((3, 5), (hvd.size() - 1) / 2))


def test_alltoall_refuses_negative_splits(hvd):
    splits = torch.tensor([-1, 2, *[0] * (hvd.size() - 2)], dtype=torch.int32)
    with pytest.raises(ValueError, match="splits has a negative number"):
        hvd.alltoall(torch.ones(4), splits=splits, name="negative split")


def test_broadcast_takes_the_root_ranks_values(hvd):
    root = hvd.size() - 1
    result = hvd.broadcast(torch.full((7,), hvd.rank()), root_rank=root, name="root")
    assert result.tolist() == [root] * 7


def test_a_second_init_keeps_collectives_that_were_started(hvd):
    """For example, a library also calls `init`."""
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), compression="fp16"
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        hvd.init()
    assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(hvd.size())))


def test_allgather_joins_different_lengths(hvd):
    own = torch.full((hvd.rank() + 1, 2), hvd.rank())
    result = hvd.allgather(own, name="lengths")
    assert result[:, 0].tolist() == [r for r in range(hvd.size()) for _ in range(r + 1)]


def test_alltoall_gives_each_rank_its_part(hvd):
    own = torch.arange(hvd.size()) + 10 * hvd.rank()
    received, splits = hvd.alltoall(own, torch.ones(hvd.size(), dtype=torch.int32), name="parts")
    assert received.tolist() == [hvd.rank() + 10 * r for r in range(hvd.size())]
    assert splits.tolist() == [1] * hvd.size()


def test_reducescatter_gives_each_rank_its_part_of_the_sum(hvd):
    own = torch.arange(2.0 * hvd.size()) * (hvd.rank() + 1)
    factor = sum(range(1, hvd.size() + 1))
    first = 2.0 * hvd.rank()
    result = hvd.reducescatter(own, op=hvd.Sum, name="scatter")
    assert result.tolist() == [first * factor, (first + 1) * factor]


def test_allreduce_is_differentiable(hvd):
    x = torch.full((3,), float(hvd.rank()), requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum, name="grad") * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [sum(range(1, hvd.size() + 1))] * 3


def test_a_process_set_reduces_among_its_members_only(hvd):
    members = sorted({1, hvd.size() - 1})
    process_set = hvd.add_process_set(members)
    try:
        if hvd.rank() in members:
            own = torch.tensor([float(hvd.rank())])
            total = hvd.allreduce(own, op=hvd.Sum, name="set", process_set=process_set)
            assert total.item() == sum(members)
    finally:
        hvd.remove_process_set(process_set)


def test_join_lets_ranks_have_different_numbers_of_batches(hvd):
    for i in range(hvd.rank() + 1):
        result = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=f"batch{i}")
        assert result.tolist() == [hvd.size() - i] * 2
    assert hvd.join() == hvd.size() - 1


def test_objects_may_differ_in_type_between_ranks(hvd):
    own = {"epoch": 3} if hvd.rank() == 0 else None
    assert hvd.broadcast_object(own, root_rank=0) == {"epoch": 3}
    mixed = "text" if hvd.rank() % 2 else hvd.rank()
    expected = ["text" if rank % 2 else rank for rank in range(hvd.size())]
    assert hvd.allgather_object(mixed) == expected


def test_bytes_from_each_rank_to_each_rank(hvd):
    from hvdkit.torch.collectives import TorchCollectives

    def exchange(process_set, members):
        collectives = TorchCollectives(process_set)
        own = [b"%d" % hvd.rank() * (3 * receiver) for receiver in members]
        place = members.index(hvd.rank())
        expected = [b"%d" % sender * (3 * hvd.rank()) for sender in members]
        assert collectives.alltoall(own, "to each") == expected
        assert collectives.alltoall([b""] * len(members), "nothing") == [b""] * len(members)
        # All ranks send to the first rank only, as for a checkpoint.
        sent = [b"%d" % hvd.rank(), *[b""] * (len(members) - 1)]
        received = [b"%d" % sender for sender in members] if place == 0 else [b""] * len(members)
        assert collectives.alltoall(sent, "to the first") == received

    exchange(hvd.global_process_set, list(range(hvd.size())))
    members = list(range(1, hvd.size()))
    process_set = hvd.add_process_set(members)
    try:
        if hvd.rank() in members:
            exchange(process_set, members)
    finally:
        hvd.remove_process_set(process_set)
