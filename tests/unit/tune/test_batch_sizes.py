"""The search for the largest batch size, and the advice on the learning rate."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.training.noise_scale import Estimate, confidence, learning_rate_factor
from hvdkit.tune import batch_sizes


@given(first=st.integers(1, 100), span=st.integers(1, 5000), largest=st.integers(0, 6000))
def test_the_search_in_a_range(first, span, largest):
    last = first + span
    tried = []

    def fits(size):
        assert first <= size <= last
        assert size not in tried
        tried.append(size)
        return size <= largest

    found = batch_sizes.largest_in_range(first, last, fits)
    if largest < first:
        assert found is None
        assert tried == [first]
    elif largest >= last:
        assert found == last
    else:
        assert found <= largest
        # The smallest size that was refused is at most a sixteenth larger.
        assert min(s for s in tried if s > largest) - found <= max(1, found // 16)
    assert len(tried) <= 20


@given(sizes=st.sets(st.integers(1, 100), min_size=1), largest=st.integers(0, 101))
def test_the_search_in_a_list(sizes, largest):
    sizes = sorted(sizes)
    found = batch_sizes.largest_of(sizes, lambda size: size <= largest)
    assert found == max((size for size in sizes if size <= largest), default=None)


@pytest.mark.parametrize("text", ["", "16..", "64..16", "0..8", "a,b", "1,,2", "8-16", "0,1"])
def test_sizes_that_are_not_valid(text):
    with pytest.raises(UsageError, match=r"expected FIRST\.\.LAST"):
        batch_sizes.parse(text)


def test_valid_sizes():
    assert batch_sizes.parse("16..1024") == [16, 1024]
    assert batch_sizes.parse("32, 16,32") == [16, 32]


def test_the_learning_rate():
    """It is linear far below the noise scale, and constant far above."""
    assert learning_rate_factor(1e6, 10, 40) == pytest.approx(4, rel=1e-4)
    assert learning_rate_factor(10, 1e6, 4e6) == pytest.approx(1, rel=1e-4)
    assert learning_rate_factor(100, 100, 1e9) == pytest.approx(2, rel=1e-4)


def test_the_interval_contains_the_noise_scale():
    """In 95 of 100 measurements; here in at least 85 of 100."""
    generator = random.Random(0)
    signal, noise, contained = 1.0, 400.0, 0
    for _ in range(100):
        blocks = [
            Estimate(generator.gauss(signal, 0.3), generator.gauss(noise, 40)) for _ in range(10)
        ]
        low, high = confidence(blocks)
        contained += low <= noise / signal <= high
    assert contained >= 85
    assert confidence(blocks[:4]) is None
    assert confidence([Estimate(-1.0, 1.0)] * 10) is None


def test_the_advice():
    lines = batch_sizes.advice([Estimate(1.0, 1000.0)] * 10, 2, [16, 32, 512])
    assert "is 1,000 samples (1,000 to 1,000" in lines[0]
    rows = [line.split() for line in lines[3:6]]
    assert rows[0] == ["16", "32", "x", "1.00", "100.0%", "100%"]
    assert rows[1] == ["32", "64", "x", "1.94", "51.6%", "103%"]
    assert rows[2][:2] == ["512", "1,024"]
    assert "is not known" in batch_sizes.advice([Estimate(-1.0, 1.0)] * 10, 2, [16])[0]
