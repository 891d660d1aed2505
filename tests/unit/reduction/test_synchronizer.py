"""The synchronizer on simulated ranks, with the buckets of PyTorch."""

import gc
import threading
import time
import tracemalloc
import weakref
from dataclasses import replace

import pytest
import torch

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.reduction import bucketing
from hvdkit.reduction.accumulation import Window
from hvdkit.reduction.bucketing import ParameterSpec
from hvdkit.reduction.compression import BFloat16, Float16, NoCompression
from hvdkit.reduction.plan import Reduction
from hvdkit.reduction.synchronizer import Synchronizer
from tests.simulated.backend import SimulatedBackend
from tests.simulated.ranks import on_ranks, simulated


def spec(name, *shape, dtype="float64", layout=""):
    return ParameterSpec(name, shape, dtype, getattr(torch, dtype).itemsize, "cpu", layout)


# Two parameters in each bucket.
SPECS = [spec(f"p{i}", 2) for i in range(4)]
TWO = 32
NONE = NoCompression()


class Backend(SimulatedBackend):
    """A backend with parameters of its own.

    Attributes:
        sent: name -> the rank's contribution to the last collective of that name.
        memories: the number of calls of `memory`.
        temporaries: the most buffers at the same time that were packed with keep=False.
        fail_on_wait: let `wait` raise, as after a network failure.
    """

    batches_abs_max = False

    def __init__(self, collectives, specs):
        self.specs = specs
        self.parameters = [
            torch.nn.Parameter(torch.zeros(s.shape, dtype=getattr(torch, s.dtype))) for s in specs
        ]
        super().__init__(self.parameters, collectives)
        self.sent = {}
        self.memories = self.temporaries = 0
        self.fail_on_wait = False
        self._packed = []

    @property
    def gradients(self):
        return [p.grad for p in self.parameters]

    def memory(self, bucket):
        self.memories += 1
        # The names of other devices are names only.
        made = super().memory(replace(bucket, device="cpu"))
        pack = made.pack

        def counted(dtype, factor, keep=True):
            buffer = pack(dtype, factor, keep)
            if not keep:
                self._packed = [seen for seen in self._packed if seen() is not None]
                self._packed.append(weakref.ref(buffer))
                self.temporaries = max(self.temporaries, len(self._packed))
            return buffer

        made.pack = counted
        return made

    def sum(self, buffer, name, factor):
        self.sent[name] = buffer.clone()
        return super().sum(buffer, name, factor)

    def wait(self, handle):
        if self.fail_on_wait:
            raise RuntimeError("the network is down")
        return super().wait(handle)


def make(collectives, specs=SPECS, wire_format=NONE, window=None, context=(), batches=False, **how):
    how = {"bucket_bytes": TWO, "average": False, **how}
    backend = type("Batching", (Backend,), {"batches_abs_max": batches})(collectives, specs)
    reduction, window = Reduction(wire_format, **how), window or Window(1)
    return Synchronizer(specs, backend, collectives, reduction, window, context), backend


def give(backend, value):
    """Give gradients with all elements equal to `value`, in new memory."""
    for p in backend.parameters:
        p.grad = torch.full_like(p, value, requires_grad=False)


def arrive(synchronizer, backend, order=None):
    """Mark all gradients ready; return the number of collectives in flight after each."""
    order = reversed(range(len(backend.specs))) if order is None else order
    before = len(backend.diary)
    seen = []
    for i in order:
        if backend.gradients[i] is not None:
            synchronizer.mark_ready(i)
            seen.append(len(backend.diary) - before)
    return seen


def step(synchronizer, backend, value, order=None):
    """Make one step; return the value of all gradients."""
    give(backend, value)
    arrive(synchronizer, backend, order)
    synchronizer.synchronize()
    (found,) = {x for gradient in backend.gradients for x in gradient.ravel().tolist()}
    return found


def members(synchronizer):
    return [bucket.parameters for bucket in synchronizer.plan.buckets]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("wire_format", [NONE, Float16(), BFloat16(wire="float32")])
@pytest.mark.parametrize(
    ("average", "predivide"), [(False, None), (True, None), (True, 1.0), (True, 4.0)]
)
@simulated("size")
def test_every_rank_gets_the_sum_or_average(collectives, size, wire_format, average, predivide):
    mean = (size + 1) / 2
    how = {"average": average, "predivide": predivide}
    synchronizer, backend = make(collectives, wire_format=wire_format, **how)
    results = [step(synchronizer, backend, 8.0 * (collectives.rank + 1) * i) for i in range(4)]
    assert results == [8.0 * (mean if average else size * mean) * i for i in range(4)]
    if wire_format is NONE and size > 1:
        # A predivision is before the sum.
        sent = {x for buffer in backend.sent.values() for x in buffer.tolist()}
        assert sent == {24.0 * (collectives.rank + 1) / (predivide or 1)}


@simulated(3)
def test_every_element_is_unpacked_to_its_own_place(collectives):
    specs = [spec("a", 3, 2), spec("b"), spec("c", 0), spec("d", 5, dtype="float32"), spec("e", 4)]
    synchronizer, backend = make(collectives, specs, average=True)
    for k in range(3):
        numbers = torch.arange(17.0, dtype=torch.float64) + 100 * k
        own = [numbers[3 * i : 3 * i + s.elements].view(s.shape) for i, s in enumerate(specs)]
        for p, values in zip(backend.parameters, own, strict=True):
            p.grad = ((collectives.rank + 1) * values).to(p.dtype)
        arrive(synchronizer, backend)
        synchronizer.synchronize()
        for p, values in zip(backend.parameters, own, strict=True):
            torch.testing.assert_close(p.grad, (2 * values).to(p.dtype), rtol=1e-6, atol=0)


@simulated(2)
def test_a_full_bucket_starts_at_the_next_arrival_in_its_thread_and_not_before(collectives):
    specs = [spec(f"p{i}", 2) for i in range(6)]
    values = [2.0, 2.0, 18.0, 16.0, 14.0, 2.0]
    synchronizer, backend = make(collectives, specs)
    step(synchronizer, backend, 1.0)
    give(backend, 1.0)
    seen = arrive(synchronizer, backend, order=[5, 4])
    # The user's later hooks may still change the gradient.
    backend.gradients[4][:] = 7.0
    other = threading.Thread(target=arrive, args=(synchronizer, backend, [3, 2]))
    other.start()
    other.join()
    seen.append(len(backend.diary) - 3)
    backend.gradients[2][:] = 9.0
    # The bucket filled by the other thread does not start here.
    seen += arrive(synchronizer, backend, order=[1, 0])
    backend.gradients[3][:] = 8.0
    synchronizer.synchronize()
    names = [f"{synchronizer.name}.{k}" for k in range(3)]
    assert backend.memories == 3, "the memory of the first step is reused"
    assert backend.diary[3] == names[0]
    assert sorted(backend.diary[3:]) == names
    assert seen == [0, 0, 0, 1, 1]
    assert [float(gradient[0]) for gradient in backend.gradients] == values


@simulated(2)
def test_a_gradient_that_arrives_again_before_its_bucket_starts_counts_once(collectives):
    synchronizer, backend = make(collectives)
    for planned in (False, True):
        give(backend, 1.0)
        seen = arrive(synchronizer, backend, order=[3, 3, 2])
        backend.gradients[3][:] = 5.0
        seen += arrive(synchronizer, backend, order=[3, 2, 1])
        # Neither a repeated arrival nor one before `make_plan` starts a bucket.
        assert seen[-3:] == [0, 0, int(planned)]
        seen += arrive(synchronizer, backend, order=[1, 0])
        synchronizer.synchronize()
        assert members(synchronizer) == [(3, 2), (1, 0)]
        assert len(backend.diary) == (4 if planned else 2)
    assert [float(gradient[0]) for gradient in backend.gradients] == [2.0, 2.0, 2.0, 10.0]


@simulated(2)
def test_a_gradient_that_arrives_again_after_its_bucket_has_started_is_an_error(collectives):
    synchronizer, backend = make(collectives)
    step(synchronizer, backend, 1.0)
    give(backend, 2.0)
    assert arrive(synchronizer, backend, order=[3, 2, 1]) == [0, 0, 1]
    with pytest.raises(HvdkitError, match="'p2' arrived again.*use_reentrant=False"):
        synchronizer.mark_ready(2)
    # The round can be completed, and the next one is not affected.
    synchronizer.synchronize()
    assert backend.gradients[0].tolist() == [4.0, 4.0]
    assert step(synchronizer, backend, 3.0) == 6.0


@simulated(2)
def test_nothing_is_reduced_before_the_ranks_have_agreed(collectives):
    names = ["hvdkit.agreement", "hvdkit.agreement.number"]
    synchronizer, backend = make(collectives)
    assert synchronizer.plan is None
    give(backend, 1.0)
    seen = arrive(synchronizer, backend)
    named = list(collectives.names)
    synchronizer.synchronize()
    assert seen == [0] * 4
    assert named == []
    assert collectives.names[:2] == names


@pytest.mark.parametrize(
    ("orders", "buckets"),
    [
        ([[1, 3, 0, 2]] * 2, [(1, 3), (0, 2)]),
        # The mean positions are 2/3, 1, 4/3 and 3.
        ([[0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3]], [(0, 1), (2, 3)]),
        # If they are equal, as in a backward pass. So are gradients that have not arrived.
        ([[3, 0, 2, 1], [0, 3, 1, 2]], [(3, 0), (2, 1)]),
        ([[1]] * 2, [(1, 3), (2, 0)]),
        ([[]] * 2, [(3, 2), (1, 0)]),
    ],
)
def test_buckets_follow_the_mean_order_in_which_gradients_arrive(orders, buckets):
    def run(collectives):
        synchronizer, backend = make(collectives)
        results = [
            step(synchronizer, backend, 1.0, orders[collectives.rank]),
            step(synchronizer, backend, 1.0, orders[collectives.rank]),
        ]
        return members(synchronizer), synchronizer.plan.digest, results

    first, *others = on_ranks(len(orders), run)
    assert first[0] == buckets
    assert first[2] == [float(len(orders))] * 2
    assert others == [first] * (len(orders) - 1)


@simulated(2)
def test_ranks_compare_again_after_another_init(collectives):
    synchronizer, backend = make(collectives)
    step(synchronizer, backend, 1.0, order=[0, 1, 2, 3])
    names = set(backend.diary)
    collectives.generation += 1
    give(backend, 2.0)
    seen = arrive(synchronizer, backend, order=[3, 1, 2, 0])
    assert seen == [0] * 4
    synchronizer.synchronize()
    assert backend.gradients[0].tolist() == [4.0, 4.0]
    assert not names & set(backend.diary[2:])
    assert step(synchronizer, backend, 3.0) == 6.0
    assert collectives.names.count("hvdkit.agreement") == 2
    assert members(synchronizer) == [(3, 1), (2, 0)]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"wire_format": Float16()}, "compression"),
        ({"average": True}, "op"),
        ({"predivide": 2.0}, "gradient_predivide_factor"),
        ({"passes": 2}, "backward passes per step"),
        ({"bucket_bytes": 64}, "bucket_bytes"),
        ({"groups": [[0, 1]]}, "groups"),
        ({"sparse_as_dense": True}, "sparse_as_dense"),
        ({"find_unused": True}, "find_unused_parameters"),
        ({"window": Window(2)}, "accumulation_steps"),
        ({"context": ["optimizer: Adam"]}, "optimizer: Adam"),
        ({"specs": [*SPECS[:3], spec("p3", 3)]}, "'p3'"),
        ({"specs": [*SPECS[:3], spec("p3", 2, dtype="float32")]}, "'p3', float32"),
        ({"specs": [*SPECS[:3], spec("p3", 2, layout="strides [7]")]}, r"strides \[7\]"),
        ({"specs": [*SPECS[:3], spec("q", 2)]}, "'q'"),
        ({"specs": SPECS[:3]}, "'p3', .*; rank 1: 3 gradients in all"),
        ({"specs": [*SPECS[:3], replace(SPECS[3], device="gpu:0")]}, "3 is on gpu device number 1"),
        # A second device of the same kind.
        (
            {"specs": [*SPECS[:2], *(replace(s, device="cpu:1") for s in SPECS[2:])]},
            "ranks 0, 2: gradient 2 is on cpu device number 0 of the model; rank 1: ",
        ),
    ],
)
@simulated(3)
def test_ranks_that_differ_fail_on_all_of_them_before_anything_is_reduced(
    collectives, setting, words
):
    synchronizer, backend = make(collectives, **(setting if collectives.rank == 1 else {}))
    give(backend, 1.0)
    arrive(synchronizer, backend)
    with pytest.raises(RankMismatchError, match=words):
        synchronizer.synchronize()
    assert backend.diary == []
    assert [gradient.tolist() for gradient in backend.gradients[:3]] == [[1.0, 1.0]] * 3


def test_ranks_may_use_devices_of_other_names():
    def run(collectives):
        first = 2 * collectives.rank
        devices = [first, first, first + 1, first]
        specs = [replace(s, device=f"cuda:{d}") for s, d in zip(SPECS, devices, strict=True)]
        synchronizer, backend = make(collectives, specs)
        return [step(synchronizer, backend, 1.0) for _ in range(2)], members(synchronizer)

    first, *others = on_ranks(3, run)
    assert first[0] == [3.0, 3.0]
    assert sorted(map(sorted, first[1])) == [[0], [1, 3], [2]]
    assert others == [first] * 2


def test_names_are_the_same_on_all_ranks_and_different_between_synchronizers():
    def run(collectives):
        if collectives.rank == 0:
            make(collectives)  # an additional synchronizer on this rank, never used
        names = []
        for _ in range(2):
            synchronizer, backend = make(collectives)
            step(synchronizer, backend, 1.0)
            names += backend.diary
        return names

    results = on_ranks(3, run)
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 4
    assert all(name.startswith("hvdkit.") for name in results[0])


@simulated(2)
def test_a_generation_that_changes_while_nothing_is_in_flight_costs_nothing_but_an_agreement(
    collectives,
):
    synchronizer, backend = make(collectives)
    step(synchronizer, backend, 1.0)
    give(backend, 2.0)
    synchronizer.mark_ready(3)
    collectives.generation += 1
    arrive(synchronizer, backend, order=[2, 1, 0])
    synchronizer.synchronize()
    assert backend.gradients[0].tolist() == [4.0, 4.0]
    assert collectives.names.count("hvdkit.agreement") == 2


@simulated(2)
def test_after_a_failed_collective_the_ranks_agree_anew_in_new_memory(collectives):
    synchronizer, backend = make(collectives)
    step(synchronizer, backend, 1.0)
    backend.fail_on_wait = True
    give(backend, 2.0)
    arrive(synchronizer, backend)
    left = list(backend.gradients)
    with pytest.raises(RuntimeError, match="network"):
        synchronizer.synchronize()
    backend.fail_on_wait = False
    give(backend, 3.0)
    arrive(synchronizer, backend)
    assert len(backend.diary) == 4, "begun before the ranks have agreed anew"
    synchronizer.synchronize()
    for gradient in left:
        gradient[:] = -1.0  # like a collective that completes late
    assert not set(backend.diary[:4]) & set(backend.diary[4:])
    assert backend.gradients[0].tolist() == [6.0, 6.0]
    assert collectives.names.count("hvdkit.agreement") == 2


def table_rows(rank):
    """Return rows of a 5 x 2 table: row 0 once, and row rank + 1 twice."""
    values = torch.full((3, 2), rank + 1.0, dtype=torch.float64)
    return torch.sparse_coo_tensor([[0, rank + 1, rank + 1]], values, (5, 2))


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_rows_of_a_sparse_gradient_are_gathered_or_reduced_as_dense(sparse_as_dense):
    specs = [SPECS[0], spec("table", 5, 2), SPECS[1]]
    whole = sum(table_rows(rank).to_dense() for rank in range(3)) / 3

    def run(collectives):
        synchronizer, backend = make(
            collectives, specs, average=True, sparse_as_dense=sparse_as_dense, bucket_bytes=1000
        )
        for _ in range(2):
            give(backend, 1.0)
            backend.parameters[1].grad = table_rows(collectives.rank)
            arrive(synchronizer, backend)
            synchronizer.synchronize()
            gradient = backend.gradients[1]
            assert gradient.is_sparse != sparse_as_dense
            torch.testing.assert_close(gradient.to_dense(), whole)
        return sorted(members(synchronizer))

    plan = [(2, 1, 0)] if sparse_as_dense else [(1,), (2, 0)]
    assert on_ranks(3, run) == [plan] * 3


@pytest.mark.parametrize(
    ("by_tensor", "buckets"), [(True, [(0,), (1,), (2,), (3,)]), (False, [(1,), (3, 2, 0)])]
)
@simulated(2)
def test_a_group_shares_a_bucket_unless_the_format_is_tensor_by_tensor(
    collectives, by_tensor, buckets
):
    class Format(NoCompression):
        tensor_by_tensor = by_tensor

    synchronizer, backend = make(collectives, wire_format=Format(), groups=[[0, 2, 3]])
    assert step(synchronizer, backend, 1.0) == 2.0
    assert sorted(members(synchronizer)) == buckets


@pytest.mark.parametrize("batches", [False, True])
def test_a_bucket_that_overflows_is_reduced_again_under_another_name(batches):
    def run(collectives):
        synchronizer, backend = make(collectives, wire_format=Float16(), batches=batches)
        for _ in range(3):
            step(synchronizer, backend, 1.0)
        before = len(backend.diary)
        give(backend, 1.0)
        backend.gradients[0][1] = 1e9 if collectives.rank else 0.0
        arrive(synchronizer, backend)
        synchronizer.synchronize()
        assert [g.tolist() for g in backend.gradients] == [[2.0, 1e9], *[[2.0, 2.0]] * 3]
        return backend.diary[before:]

    results = on_ranks(2, run)
    assert len(set(results[0])) == len(results[0]) == 3
    assert sorted(results[0]) == sorted(results[1])


@pytest.mark.parametrize("batches", [False, True])
@simulated(2)
def test_all_buckets_scales_are_agreed_on_by_one_small_collective_in_every_step(
    collectives, batches
):
    specs = [spec(f"p{i}", 2) for i in range(12)]
    synchronizer, backend = make(collectives, specs, wire_format=Float16(), batches=batches)
    asked = []
    whole = collectives.start_max

    def listen(values, name):
        if name.endswith(".largest"):
            asked[-1].append(len(values))
        return whole(values, name)

    collectives.start_max = listen
    # 1e9 is repeated in float32, 0.0 has no magnitude.
    for value in (1.0, 1.0, 1e9, 1.0, 1.0, 0.0, 0.0, 1.0):
        asked.append([])
        step(synchronizer, backend, value)
    assert len(synchronizer.plan.buckets) == 6
    assert asked == [[6]] * 8


@pytest.mark.parametrize("batches", [False, True])
def test_no_rank_waits_in_a_step_for_the_scales_of_the_next_one(batches):
    done = threading.Event()

    def run(collectives):
        synchronizer, backend = make(collectives, wire_format=Float16(), batches=batches)
        whole = collectives.start_max

        def late(values, name):
            if name.endswith(".largest"):
                assert done.wait(10), "rank 0 waits"
            return whole(values, name)

        if collectives.rank:
            collectives.start_max = late
        results = [step(synchronizer, backend, 1.0)]
        if not collectives.rank:
            done.set()
        return [*results, step(synchronizer, backend, 3.0)]

    assert on_ranks(2, run) == [[2.0, 6.0]] * 2


def watch_scales(collectives, backend):
    """Return a list that records each start of and wait for scales, and each pack."""
    events = []
    start_max, memory = collectives.start_max, backend.memory

    def start(values, name):
        result = start_max(values, name)
        events.append("start")
        return lambda: (events.append("wait"), result())[1]

    def watched(bucket):
        made = memory(bucket)
        pack = made.pack
        made.pack = lambda *args, **how: (events.append("pack"), pack(*args, **how))[1]
        return made

    collectives.start_max, backend.memory = start, watched
    return events


@simulated(2)
def test_scales_are_waited_for_before_the_next_pack(collectives):
    one = ["pack", "pack", "start", "wait"]
    synchronizer, backend = make(collectives, wire_format=Float16())
    events = watch_scales(collectives, backend)
    for _ in range(3):
        step(synchronizer, backend, 1.0)
    synchronizer.complete_deferred()
    synchronizer.complete_deferred()
    assert events == one * 3


@simulated(2)
def test_scales_are_waited_for_before_the_state_is_returned(collectives):
    synchronizer, backend = make(collectives, wire_format=Float16())
    step(synchronizer, backend, 1.0)
    settled, other = make(collectives, wire_format=Float16())
    step(settled, other, 1.0)
    settled.complete_deferred()
    events = watch_scales(collectives, backend)
    step(synchronizer, backend, 1.0)
    step(settled, other, 1.0)
    settled.complete_deferred()
    del events[:]
    state = synchronizer.state
    assert events == ["wait"]
    # `known` is 1: the next step is in float16.
    assert [codec[0] for codec in state.codecs] == [1, 1]
    assert state == settled.state
    backend.sent.clear()
    step(synchronizer, backend, 1.0)
    assert [buffer.dtype for buffer in backend.sent.values()] == [torch.float16] * 2


@pytest.mark.parametrize("settles", [False, True])
@simulated(2)
def test_scales_of_before_a_restart_are_not_waited_for(collectives, settles):
    synchronizer, backend = make(collectives, wire_format=Float16())
    events = watch_scales(collectives, backend)
    step(synchronizer, backend, 1.0)
    collectives.generation += 1
    del events[:]
    if settles:
        synchronizer.complete_deferred()
    value = step(synchronizer, backend, 2.0)
    assert value == 4.0
    assert events == ["pack", "pack", "start"]


@pytest.mark.parametrize("batches", [False, True])
@simulated(2)
def test_an_infinity_in_one_bucket_does_not_change_others(collectives, batches):
    synchronizer, backend = make(collectives, wire_format=Float16(), batches=batches)
    asked = []
    for number in range(1, 7):
        give(backend, 1.0)
        if collectives.rank and number in (1, 4):
            backend.gradients[0][1] = float("inf")
        elif collectives.rank and number == 5:
            for gradient in backend.gradients:
                gradient[1] = float("inf")
        arrive(synchronizer, backend)
        before = len(collectives.names)
        synchronizer.synchronize()
        asked.append(sum(name.endswith(".largest") for name in collectives.names[before:]))
        infinite = [bool(gradient.isinf().any()) for gradient in backend.gradients]
        assert infinite == [number in (1, 4, 5), *[number == 5] * 3]
        finite = torch.cat(backend.gradients)
        assert (finite[finite.isfinite()] == 2.0).all()
    assert asked == [1] * 6


@pytest.mark.parametrize("batches", [False, True])
@simulated(2)
def test_only_one_bucket_at_a_time_has_memory_for_a_repetition(collectives, batches):
    specs = [spec(f"p{i}", 4, dtype="float32") for i in range(24)]
    synchronizer, backend = make(collectives, specs, Float16(), batches=batches)
    for _ in range(3):
        step(synchronizer, backend, 1.0)
    assert len(synchronizer.plan.buckets) == 12
    backend.temporaries = 0
    assert step(synchronizer, backend, 1e9) == 2e9
    assert backend.temporaries == 1


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("wire_format", [NONE, Float16()])
@simulated(2)
def test_few_buckets_are_in_flight_at_once_in_the_first_step(collectives, wire_format, batches):
    specs = [spec(f"p{i}", 4, dtype="float32") for i in range(24)]
    synchronizer, backend = make(collectives, specs, wire_format, batches=batches)
    begin, wait, flying, most = backend.sum, backend.wait, [], []

    def count_up(buffer, name, factor):
        flying.append(name)
        most.append(len(flying))
        return begin(buffer, name, factor)

    def count_down(handle):
        flying.remove(handle.name)
        return wait(handle)

    backend.sum, backend.wait = count_up, count_down
    assert step(synchronizer, backend, 3.0) == 6.0
    assert len(synchronizer.plan.buckets) == 12
    assert not flying
    # The bucket that `wait` waits for, and four more.
    assert max(most) == 5
    assert backend.temporaries == 0 if wire_format is NONE else 5


@simulated(2)
def test_gradients_may_arrive_in_several_threads(collectives):
    specs = [spec(f"p{i}", 2) for i in range(16)]
    synchronizer, backend = make(collectives, specs, bucket_bytes=16)
    begin, inside, most = backend.sum, [], []

    def one_at_a_time(buffer, name, factor):
        inside.append(name)
        time.sleep(0.001)
        most.append(len(inside))
        inside.remove(name)
        return begin(buffer, name, factor)

    backend.sum = one_at_a_time
    for _ in range(3):
        give(backend, 1.0)
        threads = [
            threading.Thread(target=arrive, args=(synchronizer, backend, order))
            for order in (range(0, 16, 2), range(15, 0, -2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        synchronizer.synchronize()
        assert all(gradient.tolist() == [2.0, 2.0] for gradient in backend.gradients)
    assert len(set(backend.diary)) == 16
    assert len(backend.diary) == 3 * 16
    assert max(most) == 1


@pytest.mark.parametrize("wire_format", [NONE, Float16()])
def test_many_steps_do_not_leak(wire_format):
    def run(collectives):
        synchronizer, backend = make(collectives, wire_format=wire_format, find_unused=True)

        def held():
            # This also empties Python's free lists of tuples and floats.
            gc.collect()
            snapshot = tracemalloc.take_snapshot()
            core = snapshot.filter_traces([tracemalloc.Filter(True, "*/hvdkit/reduction/*")])
            return sum(trace.size for trace in core.traces)

        def steps(count):
            for k in range(count):
                step(synchronizer, backend, 10.0 ** (k % 7))
            # The recorded names would count as leaked memory.
            for kept in (backend.diary, backend.sent, collectives.names):
                kept.clear()
            collectives.group.slots.clear()

        steps(30)
        before = held()
        steps(100)
        return held() - before

    tracemalloc.start()
    try:
        (growth,) = on_ranks(1, run)
    finally:
        tracemalloc.stop()
    assert growth < 2000


@simulated(2)
def test_a_model_without_parameters_synchronizes(collectives):
    synchronizer, backend = make(collectives, specs=[], passes=2)
    synchronizer.synchronize()
    assert backend.diary == []


@simulated(1)
def test_invalid_settings_are_refused_before_anything_is_communicated(collectives):
    with pytest.raises(UsageError, match="bucket_bytes is 0"):
        make(collectives, bucket_bytes=0)
    with pytest.raises(UsageError, match="'p0'"):
        make(collectives, specs=[SPECS[0], SPECS[0]])
    assert collectives.names == []


WILD = [2, 0, 3, 1]


@pytest.mark.parametrize("wire_format", [NONE, Float16()])
def test_a_resumed_state_restores_the_buckets_and_scales(wire_format):
    def run(collectives):
        before, backend = make(collectives, wire_format=wire_format)
        assert before.state is None
        for k in range(5):
            step(before, backend, 1000.0 * 4**k, WILD)
        state = before.state
        after, other = make(collectives, wire_format=wire_format)
        after.resume(state)
        # The restored state can be saved before the first step.
        assert after.state == state
        expected = step(before, backend, 3.3, WILD)
        assert step(after, other, 3.3) == expected
        assert members(after) == members(before)
        assert after.state == before.state
        return members(before)

    (buckets, *_) = on_ranks(3, run)
    assert buckets != [bucket.parameters for bucket in bucketing.plan(SPECS, TWO).buckets]


@simulated(3)
def test_a_state_of_other_gradients_is_ignored(collectives):
    before, backend = make(collectives)
    step(before, backend, 1.0, WILD)
    for how in ({"specs": [*SPECS[:3], spec("q", 2)]}, {"average": True}):
        after, other = make(collectives, **how)
        after.resume(before.state)
        step(after, other, 1.0)
        assert members(after) == [(3, 2), (1, 0)]


def test_a_state_is_resumed_after_rounds_have_been_made():
    def run(collectives):
        before, backend = make(collectives)
        step(before, backend, 1.0, WILD)
        state = before.state
        after, other = make(collectives)
        step(after, other, 1.0, [0, 1, 2, 3])
        planned = members(after)
        after.resume(state)
        step(after, other, 1.0, [0, 1, 2, 3])
        return planned, members(after), members(before), after.state == before.state

    for planned, resumed, expected, same in on_ranks(2, run):
        assert planned != resumed == expected
        assert same


@simulated(2)
def test_a_state_may_be_resumed_on_other_devices(collectives):
    before, backend = make(collectives, wire_format=Float16())
    for _ in range(3):
        step(before, backend, 1000.0, WILD)
    moved = [replace(s, device="gpu:0") for s in SPECS]
    after, other = make(collectives, moved, wire_format=Float16())
    after.resume(before.state)
    assert step(after, other, 3.3) == step(before, backend, 3.3, WILD)
    assert after.state == before.state
    assert (members(after), members(before)) == ([(2, 0), (3, 1)],) * 2


@simulated(2)
def test_a_synchronizer_that_forgets_its_agreement_begins_anew(collectives):
    synchronizer, backend = make(collectives)
    step(synchronizer, backend, 1.0, [0, 1, 2, 3])
    assert synchronizer.planned
    synchronizer.forget()
    assert not synchronizer.planned
    give(backend, 2.0)
    assert arrive(synchronizer, backend) == [0] * 4
    synchronizer.synchronize()
    assert not set(backend.diary[:2]) & set(backend.diary[2:])
    assert backend.gradients[0].tolist() == [4.0, 4.0]
    assert members(synchronizer) == [(3, 2), (1, 0)]


@simulated(3)
def test_ranks_that_resume_from_different_states_get_an_error(collectives):
    before, backend = make(collectives)
    step(before, backend, 1.0, WILD)
    after, other = make(collectives)
    if collectives.rank == 1:
        after.resume(before.state)
    give(other, 1.0)
    arrive(after, other)
    with pytest.raises(RankMismatchError, match="resumes from: None"):
        after.synchronize()
