"""The model of a step, against results by hand and by a simulation."""

import random
from dataclasses import replace

import pytest

from hvdkit.bench.scale.layers import Layer
from hvdkit.bench.scale.prediction import (
    FLAT,
    FUSION,
    FUSION_BYTES,
    GROUPINGS,
    HVDKIT,
    ONE,
    PARAMETER,
    TWO_LEVELS,
    Link,
    Network,
    Reduction,
    Step,
    predict,
    ready_gradients,
)

BETWEEN, WITHIN = Link(1e-5, 1e9), Link(1e-6, 1e10)
NETWORK = Network(BETWEEN, WITHIN, ranks_per_host=4, overhead=1e-3)
#: Four layers of 4 MB, whose backward passes take 10, 20, 30 and 40 ms.
LAYERS = [Layer((1_000_000,), work) for work in (1, 2, 3, 4)]
STEP = Step(LAYERS, forward=0.05, backward=0.1, update=0.01)


def ring_by_steps(nbytes, ranks, link):
    """A ring allreduce: n-1 steps that add a chunk, and n-1 that pass it on."""
    chunk = nbytes / ranks
    return sum(link.latency + chunk / link.bandwidth for _ in range(2 * (ranks - 1)))


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_a_ring(ranks):
    assert BETWEEN.ring(1e6, ranks) == pytest.approx(ring_by_steps(1e6, ranks, BETWEEN))


def test_two_levels_send_less_than_one_ring():
    nbytes = 1e8
    two = NETWORK.allreduce(nbytes, nbytes, 32)
    flat = NETWORK.with_levels(FLAT).allreduce(nbytes, nbytes, 32)
    assert two == pytest.approx(1e-3 + WITHIN.ring(nbytes, 4) + BETWEEN.ring(nbytes, 8))
    assert flat == pytest.approx(1e-3 + BETWEEN.ring(nbytes, 32))
    within = 1e-3 + WITHIN.ring(nbytes, 4)
    for levels in (FLAT, TWO_LEVELS):
        assert NETWORK.with_levels(levels).allreduce(nbytes, nbytes, 4) == pytest.approx(within)
        assert NETWORK.with_levels(levels).allreduce(nbytes, nbytes, 1) == 0


def test_a_flat_ring_is_as_slow_as_its_slowest_link():
    slow_hosts = replace(NETWORK, within=Link(1e-6, 1e8), levels=FLAT)
    expected = 1e-3 + Link(1e-5, 1e8).ring(1e6, 8)
    assert slow_hosts.allreduce(1e6, 1e6, 8) == pytest.approx(expected)


def test_gradients_become_ready_from_the_last_layer_on():
    ready = [time for time, _ in ready_gradients(LAYERS, 0.1)]
    assert ready == pytest.approx([0.04, 0.07, 0.09, 0.1])


def test_one_rank_reduces_nothing():
    found = predict(STEP, NETWORK, Reduction(), 1)
    assert (found.seconds, found.efficiency) == pytest.approx((0.16, 1.0))
    assert found.collectives == 0
    assert predict(replace(STEP, alone=0.15), NETWORK, Reduction(), 1).seconds == 0.15


def test_collectives_wait_for_gradients_and_for_each_other():
    """4 MB take 7 ms and more between 8 ranks, each on its own host."""
    network = replace(NETWORK, ranks_per_host=1)
    each = network.allreduce(4e6, 4e6, 8)
    found = predict(STEP, network, Reduction(PARAMETER), 8)
    # The first three end before the last gradient is ready.
    assert found.seconds == pytest.approx(0.05 + 0.1 + each + 0.01)
    slow = replace(network, between=Link(0.0, 1e8))
    each = slow.allreduce(4e6, 4e6, 8)
    found = predict(STEP, slow, Reduction(PARAMETER), 8)
    assert each > 0.03
    assert found.seconds == pytest.approx(0.05 + 0.04 + 4 * each + 0.01)
    assert found.exposed == pytest.approx(found.seconds - 0.16)
    assert found.communication == pytest.approx(4 * each)
    whole = slow.allreduce(16e6, 16e6, 8)
    assert predict(STEP, slow, Reduction(ONE), 8).seconds == pytest.approx(0.16 + whole)


def test_fusion_sums_what_is_ready():
    slow = replace(NETWORK, ranks_per_host=1, between=Link(0.0, 1e8))
    # The first collective ends after all other gradients are ready.
    assert predict(STEP, slow, Reduction(FUSION), 8).collectives == 2
    large = replace(STEP, layers=4 * [Layer((FUSION_BYTES // 4,))])
    assert predict(large, slow, Reduction(FUSION), 8).collectives == 4


def test_hvdkits_buckets_are_those_of_the_synchronizer():
    buckets = Reduction(HVDKIT, bucket_bytes=8_000_000)
    # The first bucket has 1 MB at most, or one gradient.
    assert predict(STEP, NETWORK, buckets, 8).collectives == 3
    assert predict(STEP, NETWORK, Reduction(HVDKIT), 8).collectives == 2


def test_a_step_waits_for_the_slowest_rank():
    step = replace(STEP, jitter=0.05)
    draw = random.Random(0).gauss
    drawn = [max(draw(1, 0.05) for _ in range(64)) for _ in range(4000)]
    assert step.slowest(64) == pytest.approx(sum(drawn) / len(drawn), rel=0.005)
    assert STEP.slowest(64) == step.slowest(1) == 1


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("levels", [FLAT, TWO_LEVELS])
def test_bounds_of_every_prediction(grouping, levels):
    """No step is faster than its passes or the bytes on the link, none slower than their sum."""
    draw = random.Random(1)
    for _ in range(50):
        layers = [
            Layer((draw.randint(1, 10**7),), draw.random()) for _ in range(draw.randint(1, 30))
        ]
        step = Step(layers, draw.random(), draw.random(), draw.random())
        network = replace(NETWORK, levels=levels, ranks_per_host=draw.choice([1, 2, 8]))
        ranks = 8 * draw.randint(1, 30)
        found = predict(step, network, Reduction(grouping), ranks)
        alone = step.forward + step.backward + step.update
        lowest = max(alone, step.forward + found.communication + step.update)
        assert lowest <= found.seconds * (1 + 1e-9)
        assert found.seconds <= (alone + found.communication) * (1 + 1e-9)
        faster = replace(network, between=Link(BETWEEN.latency, 2 * BETWEEN.bandwidth))
        assert predict(step, faster, Reduction(grouping), ranks).communication <= (
            found.communication * (1 + 1e-9) or grouping == FUSION
        )
