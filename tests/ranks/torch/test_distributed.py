"""The backend `hvd` of torch.distributed: its collectives, groups, bits, and what fails."""

import contextlib
import datetime
import functools
import hashlib
import os
import socket
import sys
import tempfile
import textwrap
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.ranks import RanksFailed
from tests.ranks.rank_pool import Configuration, start_ranks_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
#: Elements: on the board, odd, and of more than one chunk for each rank.
SIZES = [1, 300, 4099, 300_001]


def new_store(hvd):
    """Return a store of all ranks."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    return dist.FileStore(os.path.join(folder, "store"), hvd.size())


@contextlib.contextmanager
def world(hvd, seconds=60, store=None):
    """Initialize torch.distributed over hvd for the duration of a block."""
    import hvdkit.torch.distributed  # noqa: F401

    store = store or new_store(hvd)
    dist.init_process_group(
        "hvd",
        store=store,
        rank=hvd.rank(),
        world_size=hvd.size(),
        timeout=datetime.timedelta(seconds=seconds),
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def values(size, dtype, rank):
    """Return whole numbers whose sums and products over 4 ranks are exact in each dtype."""
    return ((torch.arange(size) + rank) % 5 + 1).to(dtype)


def check_collectives(ranks, rank, dtype, size, group=None):
    """Compare each collective with NumPy. `ranks` are those of the group, and `rank` is in it."""
    count, place = len(ranks), ranks.index(rank)
    inputs = [values(size * count, dtype, r) for r in ranks]
    numbers = np.stack([t.double().numpy() for t in inputs])
    own = inputs[place]

    def equal(tensor, expected):
        assert np.array_equal(tensor.double().numpy(), expected), (dtype, size)

    operations = {"SUM": np.sum, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod}
    for name, reduction in operations.items():
        if dtype == torch.bfloat16 and name != "SUM":
            continue  # Gloo does not have it
        tensor = own.clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group)
        equal(tensor, reduction(numbers, axis=0))
    part = slice(place * size, (place + 1) * size)
    output = torch.empty(size, dtype=dtype)
    dist.reduce_scatter_tensor(output, own.clone(), group=group)
    equal(output, numbers.sum(axis=0)[part])
    dist.reduce_scatter(output, list(own.clone().split(size)), group=group)
    equal(output, numbers.sum(axis=0)[part])
    gathered = torch.empty(count * size * count, dtype=dtype)
    dist.all_gather_into_tensor(gathered, own, group=group)
    equal(gathered, numbers.ravel())
    outputs = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(outputs, own, group=group)
    equal(torch.cat(outputs), numbers.ravel())
    tensor = own.clone()
    dist.broadcast(tensor, ranks[-1], group=group)
    equal(tensor, numbers[-1])
    exchanged = torch.empty_like(own)
    dist.all_to_all_single(exchanged, own, group=group)
    equal(exchanged, numbers[:, part].ravel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_of_all_ranks_and_of_groups(hvd, dtype):
    ranks = list(range(hvd.size()))
    with world(hvd):
        for size in SIZES:
            check_collectives(ranks, hvd.rank(), dtype, size)
        # They overlap, and ranks use them in different orders.
        groups = [ranks[:1], ranks[1:], ranks[:-1], ranks[::2]]
        made = [(members, dist.new_group(members)) for members in groups]
        for members, group in made:
            if hvd.rank() in members:
                check_collectives(members, hvd.rank(), dtype, 4099, group)


#: In "flat", each rank counts as a host of its own.
LAYOUTS = pytest.mark.parametrize("layout", ["by host", "flat"])


@contextlib.contextmanager
def world_in(hvd, layout):
    with pytest.MonkeyPatch.context() as patch:
        if layout == "flat":
            patch.setenv("HVDKIT_COLLECTIVES", "flat")
        with world(hvd):
            yield


@LAYOUTS
def test_drawn_calls_in_drawn_groups(hvd, layout):
    from tests.ranks.torch.drawn_groups import draw_calls

    with world_in(hvd, layout):
        draw_calls(seed=1, calls=120)


def test_a_store_can_be_used_again(hvd):
    store = new_store(hvd)
    for _ in range(2):
        with world(hvd, store=store):
            tensor = torch.ones(5)
            dist.all_reduce(tensor)
            assert tensor.eq(hvd.size()).all()


def test_alltoall_with_splits(hvd):
    rank, size = hvd.rank(), hvd.size()
    with world(hvd):
        sent = [rank + other for other in range(size)]
        outputs = [torch.empty(rank + other, 3) for other in range(size)]
        output = torch.empty(sum(sent), 3)
        dist.all_to_all_single(output, torch.full((sum(sent), 3), float(rank)), sent, sent)
        dist.all_to_all(outputs, [torch.full((n, 3), float(rank)) for n in sent])
    expected = torch.cat([torch.full((rank + other, 3), float(other)) for other in range(size)])
    assert torch.equal(output, expected)
    assert torch.equal(torch.cat(outputs), expected)


def test_asynchronous_calls_and_futures(hvd):
    total = sum(range(hvd.size()))
    with world(hvd):
        tensors = [torch.full((1000 * (k + 1),), float(hvd.rank())) for k in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work, tensor in reversed(list(zip(works, tensors, strict=True))):
            work.wait()
            assert tensor.eq(total).all()
        future = dist.all_reduce(tensors[0], async_op=True).get_future()
        doubled = future.then(lambda done: 2 * done.value()[0]).wait()
        assert doubled.eq(2 * hvd.size() * total).all()
        # A callback may call a collective itself.
        again = dist.all_reduce(torch.ones(5), async_op=True).get_future()

        def once_more(done):
            dist.all_reduce(done.value()[0])
            return done.value()[0]

        assert again.then(once_more).wait().eq(hvd.size() ** 2).all()


def test_messages_and_objects_go_to_gloo(hvd):
    with world(hvd):
        rank, size = hvd.rank(), hvd.size()
        received = torch.empty(5)
        work = dist.irecv(received, (rank - 1) % size)
        dist.send(torch.full((5,), float(rank)), (rank + 1) % size)
        work.wait()
        assert received.eq((rank - 1) % size).all()
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(size)]


@LAYOUTS
def test_different_calls_are_an_error(hvd, layout):
    with world_in(hvd, layout):
        group = dist.new_group()
        tensor = torch.ones(3000)
        call = functools.partial(dist.broadcast, src=0) if hvd.rank() else dist.all_reduce
        sizes = dist.new_group()
        for wrong in (
            lambda: call(tensor, group=group),
            lambda: dist.all_reduce(torch.ones(7 + hvd.rank() % 2), group=sizes),
        ):
            with pytest.raises(RuntimeError) as error:
                wrong()
            # Between hosts, that another rank has ended the group may be known first.
            assert layout == "flat" or "has called" in str(error.value)
        # Other groups are not affected.
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        assert tensor.eq(hvd.size()).all()


def test_a_group_with_work_in_flight_can_be_destroyed(hvd):
    with world(hvd):
        group = dist.new_group()
        if hvd.rank() == 0:
            work = dist.all_reduce(torch.ones(5000), group=group, async_op=True)
            time.sleep(0.1)
            dist.destroy_process_group(group)
            with pytest.raises(RuntimeError, match="has ended the group"):
                work.wait()
        dist.barrier()


def test_a_callback_can_destroy_its_group(hvd):
    with world(hvd):
        group = dist.new_group()
        future = dist.all_reduce(torch.ones(5), group=group, async_op=True).get_future()
        future.then(lambda _: dist.destroy_process_group(group)).wait()


def test_ddp_and_fsdp_and_hvdkit_have_the_same_bits(hvd):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 300), torch.nn.GELU(), torch.nn.Linear(300, 8)
        )
        net, optimizer = wrap(model)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(6, 40, generator=generator)).square().mean().backward()
            optimizer.step()
        digest = hashlib.sha256()
        for p in model.parameters():
            full = p.full_tensor() if hasattr(p, "full_tensor") else p
            digest.update(full.detach().numpy().tobytes())
        return digest.hexdigest()

    def adam(model):
        return torch.optim.AdamW(model.parameters(), 1e-3)

    def fsdp(model):
        mesh = init_device_mesh("cpu", (hvd.size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model, adam(model)

    with world(hvd):
        digests = {
            trained(lambda model: (DistributedDataParallel(model), adam(model))),
            trained(fsdp),
            trained(lambda m: (m, hvd.DistributedOptimizer(adam(m), m.named_parameters()))),
        }
        assert len(digests) == 1


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_rank_of_a_group_that_dies_or_stops(fault):
    code = f"""
    import datetime, os, signal, time, torch, torch.distributed as dist
    import hvdkit.torch.distributed
    rank = int(os.environ["HOROVOD_RANK"])
    store = dist.TCPStore("127.0.0.1", PORT, 3, rank == 0)
    dist.init_process_group("hvd", store=store, rank=rank, world_size=3)
    limit = datetime.timedelta(seconds=4)
    some, others = (dist.new_group(ranks, timeout=limit) for ranks in ([0, 1], [0, 2]))
    if rank == 1:
        os.kill(os.getpid(), signal.{fault})
    if rank == 0:
        begin = time.monotonic()
        try:
            dist.all_reduce(torch.ones(5000), group=some)
        except RuntimeError as error:
            print(error, flush=True)
        assert time.monotonic() - begin < 8
        store.set("failed", "yes")
    else:
        store.wait(["failed"], datetime.timedelta(seconds=30))
    tensor = torch.ones(5000)
    dist.all_reduce(tensor, group=others)
    assert tensor.eq(2).all()
    print("the other group works", flush=True)
    os._exit(3)
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(code).replace("PORT", str(port))]
    group = start_ranks_of(Configuration("torch", "gloo", 3), command)
    with pytest.raises(RanksFailed) as failed:
        group.wait(timeout=60, failure_grace=15)
    outputs = [failed.value.results[rank].output for rank in (0, 2)]
    assert all("the other group works" in output for output in outputs), outputs
    expected = "has ended" if fault == "SIGKILL" else "has not answered for 4 s"
    assert f"rank 1 {expected}" in outputs[0]
