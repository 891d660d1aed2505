"""The digest that an accelerator computes; here, a CPU computes it with the same operations."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit.torch import digests
from hvdkit.torch.digests import bytes_of

# A small chunk, so that small tensors have several.
CHUNK = 16
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor):
    with mock.patch.object(digests, "_CHUNK", CHUNK):
        return digests._digest_on_device(bytes_of(tensor)).item() % (1 << 64)


def expected_digest(content):
    """Compute the digest in Python's integers, as every device and release of PyTorch must."""
    limit, mixer = 1 << 64, digests._MIXER
    whole = len(content) // 8 * 8
    starts = range(0, whole, 8 * CHUNK)
    chunks = [content[start : min(start + 8 * CHUNK, whole)] for start in starts]
    total = len(content)
    for number, chunk in enumerate([*chunks, content[whole:]], 1):
        for place, start in enumerate(range(0, len(chunk), 8)):
            word = int.from_bytes(chunk[start : start + 8], "little")
            word = (word + pow(mixer, number, limit) * (2 * place + 1)) % limit
            for _ in range(2):
                word = (word ^ word >> 32) * mixer % limit
            total += word ^ word >> 32
    return total % limit


def flip(tensor, bit):
    """Flip one bit of each element of a tensor that is a view."""
    words = tensor.view(WORDS[tensor.element_size()])
    words ^= torch.tensor(1, dtype=words.dtype) << bit


def initial(kind, size, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    made = {
        "random": lambda: torch.randn(size, size, generator=generator),
        "constant": lambda: torch.ones(size, size),
        # Half of them are -0.0.
        "zeros": lambda: torch.randn(size, size, generator=generator) * 0,
        "counted": lambda: torch.arange(size * size).view(size, size),
    }
    return made[kind]().to(dtype)


def change(tensor, kind, first, second, bit):
    """Change a square matrix in place, at two of its rows, columns or elements."""
    rows = [first % len(tensor), second % len(tensor)]
    elements = [first % tensor.numel(), second % tensor.numel()]
    flat, backward = tensor.view(-1), [1, 0]
    if kind == "negate":
        tensor.neg_()
    elif kind == "negate rows":
        tensor[rows] = -tensor[rows]
    elif kind == "negate columns":
        tensor[:, rows] = -tensor[:, rows]
    elif kind == "swap rows":
        tensor[rows] = tensor[rows][backward]
    elif kind == "swap columns":
        tensor[:, rows] = tensor[:, rows][:, backward]
    elif kind == "transpose":
        tensor.copy_(tensor.t().clone())
    elif kind == "reverse":
        tensor.copy_(flat.flip(0).view_as(tensor))
    elif kind == "rotate":
        tensor.copy_(flat.roll(first).view_as(tensor))
    elif kind == "swap elements":
        flat[elements] = flat[elements][backward]
    elif kind == "flip bits":
        for element in elements:
            flip(flat[element : element + 1], bit % (8 * tensor.element_size()))
    elif kind == "flip a bit":
        flip(flat[first % tensor.numel()].view(1), bit % (8 * tensor.element_size()))


CHANGES = [
    *("negate", "negate rows", "negate columns", "swap rows", "swap columns", "transpose"),
    *("reverse", "rotate", "swap elements", "flip bits", "flip a bit"),
]


@settings(deadline=None)
@given(
    kind=st.sampled_from(["random", "constant", "zeros", "counted"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]),
    size=st.integers(1, 12),
    seed=st.integers(0, 100),
    changes=st.lists(
        st.tuples(
            st.sampled_from(CHANGES),
            st.integers(0, 150),
            st.integers(0, 150),
            st.sampled_from([63, 31, 15, *range(64)]),
        ),
        min_size=1,
        max_size=3,
    ),
)
@example("random", torch.float64, 8, 0, [("negate", 0, 0, 0)])
@example("random", torch.bfloat16, 8, 0, [("negate columns", 3, 7, 0)])
@example("random", torch.float32, 8, 0, [("flip bits", 1, 11, 31)])
@example("constant", torch.float64, 12, 0, [("flip bits", 3, 83, 63)])
@example("zeros", torch.float64, 8, 0, [("swap elements", 0, 1, 0)])
@example("zeros", torch.float64, 12, 0, [("reverse", 0, 0, 0)])
def test_a_digest_differs_exactly_if_the_bytes_differ(kind, dtype, size, seed, changes):
    before = initial(kind, size, seed, dtype)
    after = before.clone()
    for each in changes:
        change(after, *each)
    assert (digest(before) == digest(after)) == torch.equal(bytes_of(before), bytes_of(after))


@pytest.mark.parametrize("bit", [0, 31, 62, 63])
def test_pairs_of_equal_changes_do_not_cancel(bit):
    """Test every pair of elements: the change of the sum by one element is never minus another."""
    size = 3 * CHUNK
    words = torch.ones(size, dtype=torch.float64)
    original = digest(words)
    moved = set()
    for element in range(size):
        flip(words[element : element + 1], bit)
        moved.add((digest(words) - original) % (1 << 64))
        flip(words[element : element + 1], bit)
    assert len(moved) == size
    assert not moved & {-each % (1 << 64) for each in moved}


@settings(deadline=None)
@given(size=st.integers(0, 9 * CHUNK), start=st.integers(0, 9), zeros=st.integers(1, 9))
def test_a_digest_depends_on_the_content_alone(size, start, zeros):
    """It does not depend on the address or the strides, and bytes after the last word count."""
    content = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size))
    content = content.to(torch.uint8)
    moved = torch.cat([content.new_ones(start), content])[start:]
    spread = torch.stack([content, content + 1], 1)[:, 0]
    expected = expected_digest(bytes(content.tolist()))
    assert digest(moved) == digest(spread) == digest(content) == expected
    assert digest(torch.cat([content, content.new_zeros(zeros)])) != digest(content)
    for index in range(max(0, size - 8), size):
        changed = content.clone()
        changed[index] ^= 0x80
        assert digest(changed) != digest(content)
