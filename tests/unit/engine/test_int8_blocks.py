"""Compare int8_blocks.h with numpy, bit by bit."""

import ctypes

import numpy as np
import pytest

BLOCK = 256

LARGEST = np.array([np.finfo("f4").max] * 40 + [1.0] * 40, np.float32)

# The inputs have infinities and NaNs on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="session")
def library(compile_header):
    loaded = compile_header("int8_blocks_check.cc")
    loaded.bytes.restype = ctypes.c_size_t
    return loaded


def encode(library, numbers):
    numbers = np.ascontiguousarray(numbers)
    out = np.full(library.bytes(ctypes.c_size_t(len(numbers))) + 1, 0x55, np.uint8)
    count = ctypes.c_size_t(len(numbers))
    library.encode(ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(numbers.ctypes.data), count)
    assert out[-1] == 0x55, "wrote too much"
    return out[:-1]


def decode(library, blocks, count):
    out = np.full(count + 1, 7.0, np.float32)
    data = ctypes.c_void_p(blocks.ctypes.data)
    library.decode(ctypes.c_void_p(out.ctypes.data), data, ctypes.c_size_t(count))
    assert out[-1] == 7.0, "wrote too much"
    return out[:-1]


def expected(numbers):
    """Return the blocks' bytes and the decoded numbers."""
    encoded, decoded = [], []
    for start in range(0, len(numbers), BLOCK):
        block = numbers[start : start + BLOCK]
        largest = np.abs(block).max()
        scale = np.float32(largest / np.float32(127))
        if scale * np.float32(127) < largest:
            scale = np.nextafter(scale, np.float32(np.inf))
        if np.isinf(scale * np.float32(127)) and np.isfinite(largest):
            scale = np.nextafter(scale, np.float32(0))
        if not np.isfinite(largest):
            scale = np.uint32(0x7FC00000).view(np.float32)
        codes = np.zeros(len(block), np.int8)
        if scale > 0:
            codes = np.rint(block / scale).astype(np.int8)
        encoded.append(np.concatenate([scale.reshape(1).view(np.uint8), codes.view(np.uint8)]))
        decoded.append(scale * codes.astype(np.float32))
    return np.concatenate(encoded), np.concatenate(decoded)


def inputs():
    random = np.random.default_rng(3)
    normal = random.standard_normal(5003).astype(np.float32)
    yield "normal numbers", normal
    yield "small blocks, in the scalar path", normal[:7]
    yield "one number", normal[:1]
    yield "any bits", random.integers(0, 2**32, 100_003, dtype=np.uint32).view(np.float32)
    yield "only zeros", np.zeros(300, np.float32)
    yield "negative zeros", -np.zeros(300, np.float32)
    yield "magnitudes of all sizes", (normal * 10.0 ** random.integers(-45, 38, 5003)).astype("f4")
    yield "subnormal numbers", random.integers(0, 500, 5003, dtype=np.uint32).view(np.float32)
    yield "the largest number", LARGEST
    yield "ties", np.array([127.0, *(np.arange(-126, 126) + 0.5)], np.float32)
    for name, value in (("infinity", np.inf), ("NaN", np.nan)):
        block = normal[:600].copy()
        block[300] = value
        yield name, block


@pytest.mark.parametrize("numbers", [pytest.param(n, id=name) for name, n in inputs()])
def test_blocks_have_the_bits_of_numpy(library, numbers):
    encoded, decoded = expected(numbers)
    blocks = encode(library, numbers)
    np.testing.assert_array_equal(blocks, encoded)
    found = decode(library, blocks, len(numbers))
    np.testing.assert_array_equal(found.view(np.uint32), decoded.view(np.uint32))


@pytest.mark.parametrize("count", [*range(1, 70), 255, 256, 257, 511, 512, 513, 4099])
def test_the_scalar_path_has_the_bits_of_the_vector_path(library, count):
    """The scale of a block depends only on its largest number, which is the first one here."""
    numbers = np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)
    numbers[::BLOCK] = 1.5
    found = decode(library, encode(library, numbers), count)
    alone = [
        decode(library, encode(library, np.array([1.5, x], np.float32)), 2)[1] for x in numbers
    ]
    np.testing.assert_array_equal(found, np.array(alone, np.float32))


@pytest.mark.parametrize("count", [1, 64, 256])
def test_finite_numbers_remain_finite(library, count):
    """Near the largest float32, the last bits decide whether 127 x scale is still finite."""
    for below in range(300):
        bits = LARGEST[:1].view(np.uint32) - np.uint32(below)
        numbers = np.resize(np.array([bits.view(np.float32)[0], 1.0], np.float32), count)
        found = decode(library, encode(library, numbers), count)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[0], numbers[0], rtol=1e-6)


def test_the_error_is_at_most_half_of_a_code(library):
    random = np.random.default_rng(9)
    numbers = random.standard_cauchy(256 * 400).astype(np.float32)
    found = decode(library, encode(library, numbers), len(numbers))
    largest = np.abs(numbers).reshape(-1, BLOCK).max(1).repeat(BLOCK).astype(np.float64)
    error = np.abs(found.astype(np.float64) - numbers)
    assert (error <= largest / 254 * (1 + 2**-20)).all()
    # Ranks encode a sum of decoded numbers again. This changes a number by at most one float32
    # rounding of the largest number of the block.
    again = decode(library, encode(library, found), len(numbers))
    assert (np.abs(again - found) <= np.spacing(largest.astype(np.float32))).all()
