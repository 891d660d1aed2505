import random

import pytest

from hvdkit.agreement.names import unique_names
from hvdkit.errors import UsageError
from hvdkit.reduction.bucketing import (
    FIRST_BUCKET_BYTES,
    MB,
    ParameterSpec,
    check_bucket_bytes,
    check_groups,
    describe_devices,
    even_groups,
    plan,
)


def spec(name, elements, dtype="float32", device="cpu", itemsize=4, layout=""):
    return ParameterSpec(name, (elements,), dtype, itemsize, device, layout)


def members(made):
    return [bucket.parameters for bucket in made.buckets]


def test_last_parameters_come_first():
    made = plan([spec(f"p{i}", 100) for i in range(10)], bucket_bytes=1600)
    assert members(made) == [(9, 8, 7, 6), (5, 4, 3, 2), (1, 0)]
    assert made.buckets[0].offsets == (0, 100, 200, 300)
    assert [bucket.elements for bucket in made.buckets] == [400, 400, 200]


def test_an_order_is_kept():
    made = plan([spec(f"p{i}", 100) for i in range(6)], 800, order=[2, 5, 0, 1, 4, 3])
    assert members(made) == [(2, 5), (0, 1), (4, 3)]


def test_the_first_bucket_is_smaller_so_that_the_network_starts_early():
    quarter = FIRST_BUCKET_BYTES // 4 // 4
    made = plan([spec(f"p{i}", quarter) for i in range(20)], 2 * FIRST_BUCKET_BYTES)
    assert [len(parameters) for parameters in members(made)] == [4, 8, 8]


def test_default_sizes_suit_a_resnet_50():
    specs = [spec(f"p{i}", 25_600_000 // 161) for i in range(161)]
    sizes = [bucket.elements * 4 for bucket in plan(specs).buckets]
    assert sizes[0] <= 1 * MB
    assert max(sizes) <= 25 * MB
    assert len(sizes) == 6


def test_a_group_shares_one_bucket_of_any_size_with_no_one_else():
    specs = [spec(f"p{i}", 100) for i in range(8)]
    made = plan(specs, 800, groups=[[0, 3, 7], [5, 4]])
    # Members of a group are in the order of the backward pass. Parameters 6, 2 and 1 are in no
    # group.
    assert sorted(members(made)) == [(1,), (5, 4), (6, 2), (7, 3, 0)]


@pytest.mark.parametrize("seed", range(30))
def test_every_element_has_one_place(seed):
    def kind(spec):
        return spec.dtype, spec.device

    rng = random.Random(seed)
    specs = [
        spec(
            f"p{i}",
            rng.randrange(0, 400),
            dtype=rng.choice(["float32", "int32"]),
            device=rng.choice(["cpu", "cpu", "cuda:0"]),
        )
        for i in range(rng.randrange(1, 40))
    ]
    everyone = list(range(len(specs)))
    limit = rng.randrange(1, 3000)
    grouped = rng.sample(everyone, len(everyone) // 3)
    sparse = {i: 1 for i in everyone if rng.random() < 0.1}
    made = plan(
        specs,
        limit,
        order=rng.sample(everyone, len(everyone)),
        groups=[grouped],
        sparse_dims=sparse,
    )
    places = [(i, bucket) for bucket in made.buckets for i in bucket.parameters]
    assert sorted(i for i, _ in places) == everyone
    for i, bucket in places:
        assert made.bucket_of[i] == bucket.index
        if i in sparse:
            assert (bucket.parameters, bucket.sparse_dims) == ((i,), sparse[i])
        elif i in grouped:
            same = {j for j in grouped if kind(specs[j]) == kind(specs[i]) and j not in sparse}
            assert set(bucket.parameters) == same
        else:
            assert len(bucket.parameters) == 1 or bucket.elements * 4 <= limit
    for bucket in made.buckets:
        assert {kind(specs[i]) for i in bucket.parameters} == {(bucket.dtype, bucket.device)}
        end = 0
        for i, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert offset == end
            end += specs[i].elements
        assert bucket.elements == end
    assert [bucket.index for bucket in made.buckets] == list(range(len(made.buckets)))


def test_different_plans_have_different_digests():
    base = [spec("a", 10), spec("b", 20)]
    others = [
        plan([spec("a", 10), spec("b", 21)]),
        plan([spec("a", 10), spec("c", 20)]),
        plan([spec("b", 20), spec("a", 10)]),
        plan([spec("a", 10), spec("b", 20, dtype="float16")]),
        plan([spec("a", 10), spec("b", 20, layout="strides [1, 10]")]),
        plan([spec("a", 10)]),
        plan(base, 40),
        plan(base, order=[0, 1]),
        plan(base, order=[0, 1], groups=[[0]]),
        plan(base, sparse_dims={0: 1}),
        plan(base, sparse_dims={0: 2}),
        plan([ParameterSpec("a", (2, 5), "float32", 4, "cpu"), spec("b", 20)]),
    ]
    digests = {made.digest for made in [plan(base), *others]}
    assert len(digests) == 13


def test_equal_plans_have_equal_digests_however_they_came_about():
    base = [spec("a", 10), spec("b", 20)]
    assert plan(base).digest == plan(list(base), 30 * MB, order=(1, 0), groups=[[0, 1]]).digest


def test_names_of_devices_are_not_part_of_the_digest():
    # Ranks of a host use different GPUs.
    first = plan([spec("a", 10, device="cuda:0"), spec("b", 10, device="cuda:1")])
    second = plan([spec("a", 10, device="cuda:2"), spec("b", 10, device="cuda:3")])
    assert first.digest == second.digest
    assert first.digest != plan([spec("a", 10), spec("b", 10)]).digest


def test_devices_are_described_by_their_kind_and_the_order_in_which_they_occur():
    def described(*devices):
        return describe_devices([spec(f"p{i}", 1, device=d) for i, d in enumerate(devices)])

    first = described("cuda:0", "cuda:1", "cuda:0")
    assert first == described("cuda:5", "cuda:4", "cuda:5")
    assert first == [
        "gradient 0 is on cuda device number 0 of the model",
        "gradient 1 is on cuda device number 1 of the model",
        "gradient 2 is on cuda device number 0 of the model",
    ]
    others = [
        described("cuda:0", "cuda:1", "cuda:1"),
        described("cuda:0", "cuda:0", "cuda:0"),
        described("cuda:0", "cpu", "cuda:0"),
        described("cuda:0", "cuda:1"),
    ]
    assert first not in others


def test_no_parameters_make_no_buckets():
    assert plan([]).buckets == ()


def test_bad_input_is_refused():
    with pytest.raises(UsageError, match="'a'"):
        plan([spec("a", 1), spec("a", 2)])
    with pytest.raises(UsageError, match="bucket_bytes is 0"):
        plan([spec("a", 1)], bucket_bytes=0)


@pytest.mark.parametrize(("count", "groups"), [(0, 3), (2, 5), (7, 1), (7, 3), (7, 7), (5, 0)])
def test_even_groups_are_not_empty(count, groups):
    found = even_groups(count, groups)
    assert len(found) == min(count, groups)
    assert all(found)
    assert [k for group in found for k in group] == (list(range(count)) if groups else [])
    assert max(map(len, found), default=0) - min(map(len, found), default=0) <= 1


def test_gradients_of_different_kinds_do_not_share_a_bucket():
    specs = [spec(f"p{i}", size) for i, size in enumerate([10, 5000, 20, 6000])]
    made = plan(specs, groups=[[0, 1]], kind=lambda s: "int8" if s.elements > 100 else "bf16")
    kinds = {bucket.parameters: bucket.kind for bucket in made.buckets}
    assert kinds == {(0,): "bf16", (1,): "int8", (2,): "bf16", (3,): "int8"}
    assert made.digest != plan(specs, groups=[[0, 1]]).digest


@pytest.mark.parametrize("wrong", [0, -1, True, None, "25MB", float("nan")])
def test_a_bucket_size_that_is_no_number_from_one_on_is_refused(wrong):
    with pytest.raises(UsageError, match="bucket_bytes is"):
        check_bucket_bytes(wrong)
    check_bucket_bytes(25e6)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None, "a", [1], ["ab"], [["a"], ["b", "a"]]])
def test_groups_that_are_neither_a_number_nor_distinct_lists_are_refused(wrong):
    with pytest.raises(UsageError, match="^groups "):
        check_groups(wrong, "parameters")
    for right in (0, 3, [], [["a", "b"], ("c",)]):
        check_groups(right, "parameters")


def test_unique_names_differ_also_from_names_that_were_there():
    assert unique_names(["a", "a (2)", "a", "a"]) == ["a", "a (2)", "a (2) (2)", "a (3)"]
