"""Wire formats on simulated ranks in lockstep, compared with sums in float64."""

import math

import numpy as np
import pytest
import torch

from hvdkit.errors import UsageError
from hvdkit.reduction.bucketing import Bucket
from hvdkit.reduction.compression import BFloat16, Float16, NoCompression, by_name
from hvdkit.reduction.wire_format import AbsMax, GlobalMax, Scaling, Sum, run_conditions
from hvdkit.torch.reduction.backend import _abs_max
from hvdkit.torch.reduction.memory import TorchMemory
from tests.simulated.backend import ring_sum

ELEMENTS = 96


def nudged(buffer, direction):
    """Return each value moved to the next float, if both are finite."""
    with np.errstate(over="ignore"):
        neighbour = np.nextafter(buffer, buffer.dtype.type(direction))
    return np.where(np.isfinite(buffer) & np.isfinite(neighbour), neighbour, buffer)


class Memory(TorchMemory):
    """The memory of a bucket of one parameter.

    Attributes:
        packed: the calls of `pack` in the last step: dtype, factor, keep.
    """

    def __init__(self, bucket, parameter):
        super().__init__(bucket, [parameter])
        self.parameter = parameter
        self.packed = []

    def pack(self, dtype, factor, keep=True):
        self.packed.append((dtype, factor, keep))
        return super().pack(dtype, factor, keep)


class Ranks:
    """One bucket on `count` ranks, whose codecs run in lockstep.

    Attributes:
        requests: the requests of the last step, the same on all ranks, such as `Sum float16`.
        codes: the values of every `GlobalMax`, by rank.
    """

    def __init__(self, count, wire_format=None, dtype="float32", total=None, elements=ELEMENTS):
        bucket = Bucket(0, (0,), (0,), elements, dtype, "cpu")
        wire_format = wire_format or Float16()
        self.count = count
        self.dtype = dtype
        zeros = torch.zeros(elements, dtype=getattr(torch, dtype))
        self.memories = [
            Memory(bucket, torch.nn.Parameter(zeros, zeros.is_floating_point()))
            for _ in range(count)
        ]
        self.codecs = [wire_format.codec(dtype) for _ in range(count)]
        self.scaling = Scaling(1 / count if total is None else total, None, count)
        self.requests = []
        self.codes = []
        self.differ = None

    def step(self, gradients):
        """Return every rank's result."""
        for memory, gradient in zip(self.memories, gradients, strict=True):
            own = None if gradient is None else torch.from_numpy(np.array(gradient, self.dtype))
            memory.parameter.grad = own
            memory.packed.clear()
        reductions = [
            run_conditions(codec.reduce(memory, self.scaling))
            for codec, memory in zip(self.codecs, self.memories, strict=True)
        ]
        self.requests = []
        answers = [None] * self.count
        while requests := self._advance(reductions, answers):
            answers = self._answer(requests)
        return self.gradients

    @property
    def gradients(self):
        return [memory.parameter.grad.numpy().copy() for memory in self.memories]

    def _advance(self, reductions, answers):
        requests = []
        for reduction, answer in zip(reductions, answers, strict=True):
            try:
                requests.append(reduction.send(answer))
            except StopIteration:
                requests.append(None)
        kinds = {
            f"Sum {str(r.buffer.dtype).removeprefix('torch.')}"
            if isinstance(r, Sum)
            else type(r).__name__
            for r in requests
        }
        assert len(kinds) == 1, f"ranks make different requests: {kinds}"
        if requests[0] is None:
            return None
        self.requests += kinds
        return requests

    def _answer(self, requests):
        if isinstance(requests[0], Sum):
            total = ring_sum([request.buffer for request in requests], requests[0].factor)
            for rank, request in enumerate(requests):
                own = self.differ(rank, total.numpy()) if self.differ else total
                request.buffer.copy_(torch.as_tensor(own))
            return [request.buffer for request in requests]
        if isinstance(requests[0], AbsMax):
            return [float(_abs_max(r.buffer)) if r.buffer.numel() else 0.0 for r in requests]
        values = [request.value for request in requests]
        self.codes.append(values)
        assert all(isinstance(value, int) and value >= 0 for value in values)
        return [max(values)] * self.count

    @property
    def scale(self):
        """The float16 scale of the last step; None if it was sent in float32."""
        scales = {
            tuple(factor for dtype, factor, _ in memory.packed if dtype == "float16")
            for memory in self.memories
        }
        assert len(scales) == 1, f"ranks scale differently: {scales}"
        (found,) = scales
        return found[0] if found else None


# The possible requests of a step of `Float16`.
NARROW = ["Sum float16", "AbsMax", "GlobalMax"]
WIDE = ["Sum float32", "AbsMax", "GlobalMax"]
REPEATED = ["Sum float16", "AbsMax", "Sum float32", "AbsMax", "GlobalMax"]


def test_float16_gradients_are_final_before_the_largest_sum_of_the_ranks_is_known():
    ranks = Ranks(3)
    answer, before = ranks._answer, []

    def watched(requests):
        if isinstance(requests[0], GlobalMax):
            assert all(request.deferred for request in requests)
            before.append(ranks.gradients)
        return answer(requests)

    ranks._answer = watched
    requests = []
    for value in (1.0, 3.0, 1e9):
        results = ranks.step([np.full(ELEMENTS, value * (rank + 1)) for rank in range(3)])
        requests.append(ranks.requests)
        assert np.array_equal(before.pop(), results)
        assert not before
        assert np.allclose(results, 2 * value)
    assert requests == [WIDE, NARROW, REPEATED]


def check_bound(ranks, gradients, results):
    """Check the error bound of `Float16` for every element on every rank."""
    exact = np.array(gradients, ranks.dtype).astype("float64")
    mean = exact.mean(axis=0)
    limit = (ranks.count + 1) * 2.0**-11 * np.abs(exact).mean(axis=0)
    limit += 0.0 if ranks.scale is None else 2.0**-25 / ranks.scale
    # The rounding error of the gradients' dtype.
    limit += np.finfo(ranks.dtype).smallest_subnormal * ranks.count
    for result in results:
        assert np.isfinite(result).all()
        excess = np.abs(result.astype("float64") - mean) - limit
        assert (excess <= 0).all(), f"{excess.max()} above the bound, scale {ranks.scale}"


def normal(rng, count):
    return rng.standard_normal((count, ELEMENTS))


def mixed(rng, count):
    return normal(rng, count) * 10.0 ** rng.uniform(-30, 30, ELEMENTS)


def mixed_over_ranks(rng, count):
    return normal(rng, count) * 10.0 ** rng.uniform(-20, 20, (count, 1))


def one_rank_at_zero(rng, count):
    return normal(rng, count) * (np.arange(count) != count // 2)[:, None]


def one_rank_at_60000(rng, count):
    return np.where((np.arange(count) == count - 1)[:, None], 60000.0, normal(rng, count))


def cancelling(rng, count):
    signs = np.where(np.arange(count) % 2, -1.0, 1.0)[:, None]
    return signs * 60000.0 + normal(rng, count)


def cancelling_in_halves(rng, count):
    signs = np.where(np.arange(count) < count // 2, -1.0, 1.0)[:, None]
    return signs * 60000.0 + normal(rng, count)


STEADY = {
    "ordinary": normal,
    "1e30": lambda rng, count: normal(rng, count) * 1e30,
    "1e-30": lambda rng, count: normal(rng, count) * 1e-30,
    "at float32's end": lambda rng, count: np.full((count, ELEMENTS), 3.4e38),
    "mixed in the bucket": mixed,
    "mixed over the ranks": mixed_over_ranks,
    "one rank at zero": one_rank_at_zero,
    "one rank at 60000": one_rank_at_60000,
    "all at 60000": lambda rng, count: np.full((count, ELEMENTS), 60000.0),
    "cancelling": cancelling,
    "cancelling in halves": cancelling_in_halves,
    "every time another": lambda rng, count: normal(rng, count) * 10.0 ** rng.uniform(-30, 30),
}


@pytest.mark.parametrize("count", [2, 4, 64])
@pytest.mark.parametrize("name", STEADY)
def test_the_error_of_float16_is_bounded_on_adversarial_gradients(name, count):
    rng = np.random.default_rng(count)
    ranks = Ranks(count)
    for _ in range(20):
        gradients = STEADY[name](rng, count)
        check_bound(ranks, gradients, ranks.step(gradients))


DRIFTING = {
    "growing": lambda step: 10.0 ** (-6 + 0.06 * step),
    "shrinking": lambda step: 10.0 ** (6 - 0.06 * step),
    "up and down": lambda step: 10.0 ** (3 * math.sin(step / 50)),
    "a jump up": lambda step: 1.0 if step < 90 else 1e6,
    "a jump down": lambda step: 1.0 if step < 90 else 1e-6,
    "a spike": lambda step: 1e6 if step == 90 else 1.0,
}


@pytest.mark.parametrize("count", [4, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", DRIFTING)
def test_the_error_of_float16_is_bounded_while_magnitudes_change(name, count):
    rng = np.random.default_rng(count)
    ranks = Ranks(count)
    wide = 0
    for step in range(200):
        gradients = normal(rng, count) * DRIFTING[name](step)
        results = ranks.step(gradients)
        check_bound(ranks, gradients, results)
        # The bound is not trivial: no value of a usual magnitude becomes 0.
        mean = np.array(gradients, "float32").astype("float64").mean(axis=0)
        share = np.linalg.norm(results[0] - mean) / np.linalg.norm(mean)
        assert share < 0.05
        wide += "Sum float32" in ranks.requests
    # The first step, the step whose magnitude jumps, and the step after it.
    assert wide <= 3


def test_the_largest_sum_is_scaled_to_between_two_to_the_9_and_10():
    for magnitude in (1e-20, 0.999, 1.0, 1.001, 3e7):
        ranks = Ranks(2)
        gradients = np.full((2, ELEMENTS), magnitude)
        ranks.step(gradients)
        ranks.step(gradients)
        assert 2**9 <= 2 * magnitude * ranks.scale < 2**10


def test_a_sum_may_grow_64_times_before_it_is_repeated():
    almost = 2.0 - 2.0**-9  # just below a power of two: the worst case
    for growth, requests in ((64, NARROW), (66, REPEATED)):
        ranks = Ranks(2)
        for factor in (1, 1, growth):
            results = ranks.step(np.full((2, ELEMENTS), almost * factor))
        assert ranks.requests == requests
        assert results[0] == pytest.approx(almost * growth, rel=2**-9)


@pytest.mark.parametrize(
    ("odd", "even", "wide"),
    [(1e6, 1.0, [1]), (1.0, 1e6, [1, 2, 3]), (1e-3, 0.5, [1, 2, 3])],
)
def test_the_scale_suits_the_largest_of_the_last_steps_and_not_the_last_one(odd, even, wide):
    ranks = Ranks(2)
    rng = np.random.default_rng(0)
    found = []
    for step in range(1, 150):
        gradients = np.full((2, ELEMENTS), odd if step % 2 else even)
        gradients *= rng.uniform(0.9, 1.0, gradients.shape)
        check_bound(ranks, gradients, ranks.step(gradients))
        if "Sum float32" in ranks.requests:
            found.append(step)
    assert found == wide


@pytest.mark.parametrize("large", [2.0**21, 1e9])
def test_magnitudes_that_alternate_by_more_than_two_to_the_20_are_repeated_less_and_less_often(
    large,
):
    ranks = Ranks(2)
    found = {"Sum float16": [], "Sum float32": []}
    for step in range(1, 300):
        gradients = np.full((2, ELEMENTS), 1.0 if step % 2 else large)
        assert ranks.step(gradients)[0] == pytest.approx(gradients[0], rel=2.0**-10)
        for request, steps in found.items():
            if request in ranks.requests:
                steps.append(step)
    both = sorted(set(found["Sum float16"]) & set(found["Sum float32"]))
    # 1, 2, 4 ... 64 steps in float32, then one in float16 if its magnitude is small, and so on.
    assert both == [2, 4, 8, 14, 24, 42, 76, 142, 208, 274]
    assert found["Sum float16"] == sorted([*both, *(step - 1 for step in both[2:])])


@pytest.mark.parametrize("between", [math.inf, math.nan, 0.0])
def test_infinities_and_zeros_do_not_change_the_scale(between):
    ranks = Ranks(2)
    ordinary = np.ones((2, ELEMENTS))
    for magnitude in (1e6, 1.0):
        ranks.step(ordinary * magnitude)
    before = ranks.scale
    for _ in range(10):
        ranks.step(ordinary * between)
    for requests in ([WIDE] if between == 0 else []) + [NARROW] * 3:
        ranks.step(ordinary)
        assert ranks.requests == requests
        assert ranks.scale == (None if requests == WIDE else before)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_one_ranks_infinity_reaches_all_and_keeps_the_scale(poison):
    rng = np.random.default_rng(0)
    ranks = Ranks(4)
    for _ in range(5):
        ranks.step(normal(rng, 4))
    before = ranks.scale
    for _ in range(20):
        poisoned = normal(rng, 4)
        poisoned[2, 7] = poison
        results = ranks.step(poisoned)
        assert ranks.requests == REPEATED
        assert ranks.codes[-1] == [0] * 4
        for result in results:
            assert not np.isfinite(result[7])
            assert np.isfinite(np.delete(result, 7)).all()
    gradients = normal(rng, 4)
    check_bound(ranks, gradients, ranks.step(gradients))
    assert ranks.requests == NARROW
    assert ranks.scale == before


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_after_an_infinity_the_next_step_learns_the_magnitude(poison):
    ranks = Ranks(2)
    gradients = np.ones((2, ELEMENTS))
    poisoned = np.where(np.arange(ELEMENTS) == 3, poison, gradients)
    # In the first step, and in the step after an overflow.
    for too_large in (None, 1e9 * gradients):
        if too_large is not None:
            ranks.step(too_large)
            assert ranks.requests == REPEATED
        ranks.step(poisoned)
        assert ranks.requests == WIDE
        assert ranks.codes[-1] == [0] * 2
        assert np.array_equal(ranks.step(gradients)[0], np.ones(ELEMENTS))
        assert ranks.requests == WIDE
        ranks.step(gradients)
        assert ranks.requests == NARROW
        assert ranks.scale == 2.0**8


def opposite(magnitude):
    """The ranks' values are too large for float16 at the scale of their sum, which is 2."""
    return np.stack([np.full(ELEMENTS, magnitude), np.full(ELEMENTS, 2 - magnitude)])


def test_a_sum_that_keeps_overflowing_is_correct_and_repeated_less_and_less_often():
    ranks = Ranks(2)
    repeated = []
    for step in range(1, 300):
        results = ranks.step(opposite(1e6))
        check_bound(ranks, opposite(1e6), results)
        assert results[1] == pytest.approx(1.0)
        assert ranks.requests in (REPEATED, WIDE)
        if ranks.requests == REPEATED:
            repeated.append(step)
    # 1, 2, 4 ... at most 64 steps in float32 between them.
    assert repeated == [2, 4, 7, 12, 21, 38, 71, 136, 201, 266]


@pytest.mark.parametrize(("calm", "wide"), [(7, 4), (8, 1), (9, 1)])
def test_after_8_steps_in_float16_an_overflow_is_the_first_again(calm, wide):
    ranks = Ranks(2)
    ordinary = np.ones((2, ELEMENTS))

    def wide_after_an_overflow():
        ranks.step(opposite(1e6))
        assert ranks.requests == REPEATED
        count = 0
        while ranks.step(ordinary) and ranks.requests == WIDE:
            count += 1
        assert ranks.requests == NARROW
        return count

    ranks.step(ordinary)
    assert [wide_after_an_overflow() for _ in range(2)] == [1, 2]
    for _ in range(calm - 1):  # one step was made already
        ranks.step(ordinary)
        assert ranks.requests == NARROW
    assert wide_after_an_overflow() == wide


@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 100.0, 1e6, 1e30])
def test_sums_that_cancel_are_zero_and_others_are_exact(magnitude):
    ranks = Ranks(4)
    ordinary = np.ones((4, ELEMENTS))
    cancelling = magnitude * np.where(np.arange(4) % 2, -1.0, 1.0)[:, None] * ordinary
    partly = np.where(np.arange(ELEMENTS) % 2, cancelling, ordinary)
    for _ in range(3):
        for gradients in (ordinary, cancelling, cancelling, ordinary, ordinary, partly, partly):
            mean = np.array(gradients, "float32").mean(axis=0)
            for result in ranks.step(gradients):
                assert np.array_equal(result, mean), ranks.requests


@pytest.mark.parametrize("direction", [-np.inf, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranks_whose_sums_differ_in_the_last_bit_make_the_same_requests(direction, dtype):
    rng = np.random.default_rng(1)
    ranks = Ranks(3, dtype=dtype)
    ranks.differ = lambda rank, total: nudged(total, direction) if rank == 1 else total
    for step in range(140):
        if step % 3:
            gradients = normal(rng, 3) * 10.0 ** rng.uniform(-8, 8)
        else:
            # The largest sum is a power of two.
            gradients = np.full((3, ELEMENTS), 2.0 ** rng.integers(-20, 20)) / [[2], [4], [4]]
        ranks.step(gradients)  # fails if the ranks' requests differ
        assert ranks.scale is None or math.frexp(ranks.scale)[0] == 0.5


@pytest.mark.parametrize("magnitude", [0.0, 1e-13])
def test_ranks_make_the_same_requests_if_only_one_sum_is_not_zero(magnitude):
    ranks = Ranks(3)
    rng = np.random.default_rng(3)
    ranks.differ = lambda rank, total: nudged(total, np.inf) if rank == 1 else total
    for _ in range(5):
        for _ in range(12):  # enough successes to reset the number of steps in float32
            gradients = normal(rng, 3)
            assert ranks.step(gradients)[0] == pytest.approx(
                gradients.mean(axis=0), rel=2.0**-8, abs=2.0**-8
            )
        ranks.codes.clear()
        ranks.step(np.full((3, ELEMENTS), magnitude))
        assert any(0 < codes.count(0) < 3 for codes in ranks.codes), "no ranks that differ"
        for _ in range(2):
            ranks.step(np.full((3, ELEMENTS), magnitude))


def test_sums_in_another_order_on_each_rank_keep_the_ranks_in_step():
    rng = np.random.default_rng(2)
    ranks = Ranks(8)
    orders = [rng.permutation(8) for _ in range(8)]
    stacks = []

    def step(gradients):
        # Each rank adds in its own order. `total` is the sum in the order of the ring.
        def differ(rank, total):
            factor = ranks.scale if total.dtype == np.float16 else ranks.scaling.total
            stack = (np.array(gradients, "float32").astype("float64") * factor)[orders[rank]]
            stacks.append(total.dtype)
            return ring_sum([torch.tensor(part.astype(total.dtype)) for part in stack]).numpy()

        ranks.differ = differ
        return ranks.step(gradients)

    for number in range(100):
        gradients = normal(rng, 8) * (1e6 if number > 50 else 1.0)
        check_bound(ranks, gradients, step(gradients))
    assert np.dtype("float16") in stacks


def test_after_zeros_the_magnitude_is_learned_anew():
    ranks = Ranks(2)
    gradients = np.ones((2, ELEMENTS))
    for _ in range(70):
        assert not ranks.step(0 * gradients)[0].any()
        assert ranks.requests == WIDE
    for magnitude in (1.0, 1e-25, 1e30):
        for requests in (WIDE, NARROW, NARROW):
            assert ranks.step(gradients * magnitude)[0] == pytest.approx(magnitude, rel=2**-10)
            assert ranks.requests == requests
        for requests in (NARROW, WIDE, WIDE):
            assert not ranks.step(np.zeros((2, ELEMENTS)))[0].any()
            assert ranks.requests == requests


def course(magnitudes, steps=300):
    """Reduce a bucket whose elements have a magnitude that changes from step to step.

    Args:
        magnitudes: step -> magnitude, 1 for other steps; or a function of the step.
        steps: the number of steps.

    Returns:
        The steps that were repeated in float32, the steps that began in float32, and the steps
        whose result was all zeros.
    """
    ranks = Ranks(2)
    repeated, wide, lost = [], [], []
    for step in range(1, steps):
        magnitude = magnitudes(step) if callable(magnitudes) else magnitudes.get(step, 1.0)
        result = ranks.step(np.full((2, ELEMENTS), magnitude))[0]
        if ranks.requests == REPEATED:
            repeated.append(step)
        elif ranks.requests == WIDE:
            wide.append(step)
        else:
            assert ranks.requests == NARROW
        if not result.any():
            lost.append(step)
        else:
            # 2^-6, because the values may be subnormal in float16.
            assert result == pytest.approx(magnitude, rel=2.0**-6)
    return repeated, wide, lost


def jump(size):
    """Return the magnitudes of a course that changes to `size` for good."""
    return lambda step: 1.0 if step < 100 else size


@pytest.mark.parametrize(
    ("magnitudes", "expected"),
    [
        # In float16 from the second step on.
        ({}, ([], [1], [])),
        # A spike is repeated once, and costs no other step.
        *(({100: spike}, ([100], [1, 101], [])) for spike in (1e3, 1e6, 1e12, 1e30)),
        ({100: 1e12, 110: 1e24, 120: 1e36}, ([100, 110, 120], [1, 101, 111, 121], [])),
        # Of spikes in a row, fewer and fewer are repeated. The second repetition is followed by two
        # steps in float32.
        ({100: 1e6, 101: 1e12, 102: 1e18}, ([100, 102], [1, 101, 103, 104], [])),
        ({100: 1e6, 101: 1e12, 102: 1e18, 103: 1e24}, ([100, 102], [1, 101, 103, 104], [])),
        *((jump(size), ([100], [1, 101], [])) for size in (1e3, 1e6, 1e12, 1e30)),
        # A drop by less than 2^28 costs nothing.
        *((jump(size), ([], [1], [])) for size in (1e-3, 1e-6, 1e-8)),
        # After a drop out of range, one step is lost, and the next one is in float32.
        *((jump(size), ([], [1, 101], [100])) for size in (1e-13, 1e-20, 1e-25)),
        ({100: 1e-13}, ([], [1, 101], [100])),
        ({100: 1e-13, 101: 1e-26, 102: 1e-26}, ([103], [1, 101, 104, 105], [100])),
    ],
)
def test_spikes_jumps_and_drops(magnitudes, expected):
    assert course(magnitudes) == expected


def test_after_two_spikes_the_last_of_which_was_sent_in_float32_one_step_is_lost():
    repeated, wide, lost = course({100: 1e12, 101: 1e13})
    assert (repeated, lost) == ([100], [102])
    assert wide[:3] == [1, 101, 103]


@pytest.mark.parametrize("large_first", [True, False])
@pytest.mark.parametrize("large", [1e10, 1e12])
def test_magnitudes_that_alternate_out_of_range_are_lost_less_and_less_often(large, large_first):
    repeated, _, lost = course(lambda step: large if step % 2 == large_first else 1.0)
    assert len(lost) <= 8
    assert len(repeated) <= 8


@pytest.mark.parametrize(
    ("magnitude", "flushed"),
    [
        # A spike's scale is in use from the step after the wide one until it is 8 steps ago,
        (lambda step: 1e6 if step == 100 else 1.0, range(102, 109)),
        # unless it is 2^20 above.
        (lambda step: 1e7 if step == 100 else 1.0, []),
        (lambda step: 1e12 if step == 100 else 1.0, []),
        (lambda step: 1e6 if step < 100 else 1.0, range(100, 108)),
        (lambda step: 1e7 if step < 100 else 1.0, [100]),
    ],
)
def test_small_values_are_sent_again_8_steps_after_large_ones(magnitude, flushed):
    ranks = Ranks(2)
    found = []
    for step in range(1, 200):
        gradients = np.full((2, ELEMENTS), 2.0**-30)
        gradients[:, 0] = magnitude(step)
        small = ranks.step(gradients)[0][1:]
        if magnitude(step) == 1.0:
            assert small.any() == small.all()
            if not small.any():
                found.append(step)
            else:
                assert small == pytest.approx(2.0**-30)
    assert found == list(flushed)


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [("float32", 1e-38), ("float32", 1e37), ("float64", 1e-40), ("float64", 1e40)],
)
def test_gradients_that_need_a_scale_beyond_two_to_the_100_are_not_lost(dtype, magnitude):
    ranks = Ranks(2, dtype=dtype)
    for _ in range(20):
        result = ranks.step(np.full((2, ELEMENTS), magnitude))[0]
        assert result == pytest.approx(magnitude, rel=1e-6)
        assert ranks.requests == [f"Sum {dtype}", "AbsMax", "GlobalMax"]
    # The steps after it have a correct scale.
    for requests in ([f"Sum {dtype}", "AbsMax", "GlobalMax"], NARROW):
        assert (ranks.step(np.ones((2, ELEMENTS)))[0] == 1.0).all()
        assert ranks.requests == requests


@pytest.mark.parametrize(
    ("exponent", "narrow"), [(-92, True), (-93, False), (108, True), (109, False)]
)
def test_scales_from_two_to_the_minus_100_to_two_to_the_100_are_used(exponent, narrow):
    ranks = Ranks(2)
    gradients = np.full((2, ELEMENTS), 2.0**exponent)
    for _ in range(3):
        assert np.array_equal(ranks.step(gradients)[0], gradients[0])
    assert ranks.requests == (NARROW if narrow else WIDE)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_float16_carries_other_floating_point_types(dtype):
    rng = np.random.default_rng(3)
    ranks = Ranks(4, dtype=dtype)
    magnitude = 1e-5 if dtype == "float16" else 1e-22
    for _ in range(10):
        gradients = normal(rng, 4) * magnitude
        check_bound(ranks, gradients, ranks.step(gradients))
    assert ranks.requests[0] == "Sum float16"


@pytest.mark.parametrize("elements", [0, ELEMENTS])
@pytest.mark.parametrize(("dtype", "value"), [("float16", 60000.0), ("float64", 1 + 2.0**-40)])
def test_the_first_step_is_exact_and_a_sum_may_be_too_large_for_float16(dtype, value, elements):
    ranks = Ranks(4, dtype=dtype, elements=elements)
    for bits in (40, 10, 10):
        (result, *_) = ranks.step(np.full((4, elements), value))
        assert result.shape == (elements,)
        assert result == pytest.approx(value, rel=2.0**-bits)


@pytest.mark.parametrize("wire_format", [Float16(), BFloat16(), NoCompression()])
def test_whole_numbers_are_added_up_as_they_are(wire_format):
    ranks = Ranks(3, wire_format, dtype="int64", total=1.0)
    gradients = np.arange(3 * ELEMENTS).reshape(3, ELEMENTS) + 2**40
    assert np.array_equal(ranks.step(gradients)[2], gradients.sum(axis=0))


def test_a_missing_gradient_counts_as_zeros_on_a_float16_wire():
    ranks = Ranks(2)
    for _ in range(3):
        results = ranks.step([np.ones(ELEMENTS), None])
    assert ranks.requests[0] == "Sum float16"
    assert np.array_equal(results[0], np.full(ELEMENTS, 0.5, "float32"))
    assert np.array_equal(results[1], results[0])


def test_bfloat16_has_the_range_of_float32_and_two_digits():
    rng = np.random.default_rng(5)
    ranks = Ranks(4, BFloat16())
    for magnitude in (1e-30, 1.0, 1e30):
        gradients = np.abs(normal(rng, 4)) * magnitude
        mean = np.array(gradients, "float32").astype("float64").mean(axis=0)
        result = ranks.step(gradients)[0]
        # Each rank rounds, and each addition.
        assert (np.abs(result - mean) <= 5 * 2.0**-9 * mean).all()
        assert not np.allclose(result, mean, rtol=2.0**-14, atol=0)
        assert list(ranks.memories[0].packed) == [("bfloat16", 1.0, True)]


def test_another_dtype_is_sent_if_horovod_lacks_bfloat16():
    gradients = normal(np.random.default_rng(6), 2)
    ranks = Ranks(2, BFloat16(wire="float32"), dtype="float64")
    assert ranks.step(gradients)[0] == pytest.approx(gradients.mean(axis=0), rel=1e-5, abs=1e-7)
    assert ranks.requests == ["Sum float32"]
    ranks = Ranks(2, NoCompression(instead={"float16": "float32"}), dtype="float16")
    assert (ranks.step(np.full((2, ELEMENTS), 60000.0))[0] == 60000).all()
    assert ranks.requests == ["Sum float32"]


def test_formats_have_names():
    for name in ("none", "fp16", "bf16"):
        assert by_name(name).name == name
    with pytest.raises(UsageError, match="'fp8'.*'none', 'fp16', 'bf16'"):
        by_name("fp8")
