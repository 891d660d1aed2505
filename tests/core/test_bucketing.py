import random

import pytest

from hvdkit.core.bucketing import MB, ParameterSpec, plan
from hvdkit.errors import UsageError


def spec(name, elements, dtype="float32", device="cpu", itemsize=4):
    return ParameterSpec(name, (elements,), dtype, itemsize, device)


def test_last_parameters_come_first_and_the_first_bucket_is_smaller():
    specs = [spec(f"p{i}", 100) for i in range(10)]
    buckets = plan(specs, bucket_bytes=1600, first_bucket_bytes=800).buckets
    assert [bucket.parameters for bucket in buckets] == [(9, 8), (7, 6, 5, 4), (3, 2, 1, 0)]
    assert buckets[0].offsets == (0, 100)
    assert buckets[1].elements == 400


def test_default_sizes_suit_a_resnet_50():
    specs = [spec(f"p{i}", 25_600_000 // 161) for i in range(161)]
    sizes = [bucket.elements * 4 for bucket in plan(specs).buckets]
    assert sizes[0] <= 1 * MB
    assert max(sizes) <= 25 * MB
    assert len(sizes) == 6


def test_a_bucket_holds_one_dtype_and_one_device():
    specs = [
        spec("a", 10),
        spec("b", 10, dtype="float16", itemsize=2),
        spec("c", 10, device="cuda:0"),
        spec("d", 10),
    ]
    buckets = plan(specs).buckets
    assert sorted(bucket.parameters for bucket in buckets) == [(1,), (2,), (3, 0)]
    for bucket in buckets:
        assert {(specs[i].dtype, specs[i].device) for i in bucket.parameters} == {
            (bucket.dtype, bucket.device)
        }


def test_a_parameter_above_the_limit_has_a_bucket_for_itself():
    buckets = plan([spec("a", 10), spec("big", 10_000), spec("b", 10)], 100, 100).buckets
    assert [bucket.parameters for bucket in buckets] == [(2,), (1,), (0,)]


@pytest.mark.parametrize("seed", range(20))
def test_every_element_has_one_place(seed):
    rng = random.Random(seed)
    specs = [
        spec(f"p{i}", rng.randrange(0, 400), dtype=rng.choice(["float32", "float64"]))
        for i in range(rng.randrange(1, 40))
    ]
    limit = rng.randrange(1, 3000)
    made = plan(specs, limit, rng.randrange(1, limit + 1))
    places = [(i, bucket) for bucket in made.buckets for i in bucket.parameters]
    assert sorted(i for i, _ in places) == list(range(len(specs)))
    for i, bucket in places:
        assert made.bucket_of[i] == bucket.index
        assert len(bucket.parameters) == 1 or bucket.elements * 4 <= limit
    for bucket in made.buckets:
        end = 0
        for i, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert offset == end
            end += specs[i].elements
        assert bucket.elements == end
    assert [bucket.index for bucket in made.buckets] == list(range(len(made.buckets)))


def test_the_digest_tells_plans_apart():
    base = [spec("a", 10), spec("b", 20)]
    others = [
        [spec("a", 10), spec("b", 21)],
        [spec("a", 10), spec("c", 20)],
        [spec("b", 20), spec("a", 10)],
        [spec("a", 10), spec("b", 20, dtype="float16")],
        [spec("a", 10)],
    ]
    digests = {plan(specs).digest for specs in [base, *others]}
    assert len(digests) == 6
    assert plan(base).digest == plan(base).digest
    assert plan(base, 40, 40).digest != plan(base).digest


def test_what_a_device_is_called_does_not_enter_the_digest():
    # Each rank of a host has another GPU.
    first = plan([spec("a", 10, device="cuda:0"), spec("b", 10, device="cuda:1")])
    second = plan([spec("a", 10, device="cuda:2"), spec("b", 10, device="cuda:3")])
    assert first.digest == second.digest
    assert first.digest != plan([spec("a", 10), spec("b", 10)]).digest


def test_no_parameters_make_no_buckets():
    assert plan([]).buckets == ()


def test_bad_input_is_refused():
    with pytest.raises(UsageError, match="'a'"):
        plan([spec("a", 1), spec("a", 2)])
    with pytest.raises(UsageError, match="at least 1"):
        plan([spec("a", 1)], bucket_bytes=0)
