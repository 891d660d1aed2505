import warnings

import pytest
import torch

DTYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]


def test_every_rank_has_its_own_number(hvd):
    ranks = hvd.allgather(torch.tensor([hvd.rank()]), name="ranks")
    assert ranks.tolist() == list(range(hvd.size()))
    assert hvd.local_size() == hvd.size()
    assert hvd.local_rank() == hvd.rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


def test_allreduce_averages_by_default(hvd):
    result = hvd.allreduce(torch.full((3, 5), float(hvd.rank())), name="mean")
    torch.testing.assert_close(result, torch.full((3, 5), (hvd.size() - 1) / 2))


def test_alltoall_refuses_negative_splits(hvd):
    splits = torch.tensor([-1, 2, *[0] * (hvd.size() - 2)], dtype=torch.int32)
    with pytest.raises(ValueError, match="splits has a negative number"):
        hvd.alltoall(torch.ones(4), splits=splits, name="negative split")


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


def test_scalars_are_gathered_to_a_vector(hvd):
    own = torch.tensor(hvd.rank() + 0.5, requires_grad=True)
    expected = [r + 0.5 for r in range(hvd.size())]
    gathered = hvd.allgather(own, name="scalar")
    assert gathered.tolist() == expected
    gathered[hvd.rank()].backward()
    assert own.grad.shape == ()
    assert own.grad.item() == pytest.approx(1 / hvd.size())
    handle = hvd.allgather_async(own.detach(), name="async scalar")
    assert hvd.synchronize(handle).tolist() == expected
    group = hvd.grouped_allgather([own.detach(), own.detach().reshape(1, 1)], name="scalars")
    assert [each.flatten().tolist() for each in group] == [expected] * 2


def test_a_mean_of_integers_warns(hvd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hvd.allreduce(torch.tensor([7 * (hvd.rank() == 0)]), name="whole").item() < 7
        hvd.allreduce(torch.tensor([7]), op=hvd.Sum, name="sum")
        hvd.allreduce(torch.tensor([7.0]), name="mean")
    texts = [str(each.message) for each in caught]
    expected = ["the mean of torch.int64 tensors is cut to an integer"]
    assert [text.partition(",")[0] for text in texts] == (expected if hvd.rank() == 0 else [])


def layouts(own):
    """Return the values of a tensor of shape (4, 4) in other layouts."""
    channels_last = torch.empty(1, 2, 2, 4).permute(0, 3, 1, 2).copy_(own.view(1, 4, 2, 2))
    wide = torch.zeros(4, 9)
    wide[:, ::2][:, :4] = own
    return {
        "transposed": own.t().contiguous().t(),
        "channels_last": channels_last,
        "strided": wide[:, ::2][:, :4],
        "negated": torch.complex(own, -own).conj().imag,
    }


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided", "negated"])
def test_tensors_of_any_layout(hvd, layout):
    n, rank = hvd.size(), hvd.rank()

    def on(rank):
        return torch.arange(16.0).reshape(4, 4) * (rank + 1)

    # Ranks may have different layouts.
    own = on(rank) if rank == 1 else layouts(on(rank))[layout]
    own = own.reshape(on(0).shape) if rank == 1 and layout != "channels_last" else own
    if layout == "channels_last" and rank == 1:
        own = own.view(1, 4, 2, 2)
    total = sum(on(r) for r in range(n)).reshape(own.shape)
    every = torch.cat([on(r).reshape(own.shape) for r in range(n)])
    plain = on(rank)

    results = {
        "allreduce": (hvd.allreduce(own, op=hvd.Sum, name="sum"), total),
        "group": (hvd.grouped_allreduce([plain, own], op=hvd.Sum, name="group")[1], total),
        "allgather": (hvd.allgather(own, name="all"), every),
        "gathers": (hvd.grouped_allgather([plain, own], name="gathers")[1], every),
        "broadcast": (hvd.broadcast(own, 1, name="root"), on(1).reshape(own.shape)),
    }
    if layout != "channels_last":
        part = total.tensor_split(n)[rank]
        results["scatter"] = (hvd.reducescatter(own, op=hvd.Sum, name="scatter"), part)
        scattered = hvd.grouped_reducescatter([plain, own], op=hvd.Sum, name="scatters")[1]
        results["scatters"] = (scattered, part)
        splits = torch.tensor([4] + [0] * (n - 1), dtype=torch.int32)
        received, _ = hvd.alltoall(own, splits, name="to the first")
        results["alltoall"] = (received, every if rank == 0 else every[:0])
    for name, (found, wanted) in results.items():
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided", "negated"])
def test_collectives_in_place_on_tensors_of_any_layout(hvd, layout):
    def own():
        return layouts(torch.arange(16.0).reshape(4, 4) * (hvd.rank() + 1))[layout]

    factor = sum(range(1, hvd.size() + 1))
    base = layouts(torch.arange(16.0).reshape(4, 4))[layout]
    x = own()
    assert hvd.allreduce_(x, op=hvd.Sum, name="sum") is x
    assert torch.equal(x, base * factor)
    x, y = own(), torch.ones(2)
    handle = hvd.grouped_allreduce_async_([y, x], op=hvd.Sum, name="group")
    first, second = hvd.synchronize(handle)
    assert first is y
    assert second is x
    assert torch.equal(x, base * factor)
    x = own()
    assert hvd.broadcast_(x, 1, name="root") is x
    assert torch.equal(x, base * 2)
    parameter = torch.nn.Parameter(own())
    hvd.allreduce_(parameter, op=hvd.Sum, name="parameter")
    assert torch.equal(parameter.detach(), base * factor)


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
