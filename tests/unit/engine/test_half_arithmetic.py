"""Compare half_arithmetic.h with numpy. Both round to nearest even, so all bits must be equal."""

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest

ALL_BITS = np.arange(65536, dtype=np.uint16)

# The inputs have infinities and NaNs on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Half:
    """float16, with numpy's conversions. Arrays have the bits of the numbers."""

    name = "half"
    infinity = 0x7C00
    cpu_flags = frozenset({"avx", "f16c"})
    # Zero, the smallest and the largest subnormal and normal numbers, 1 and its neighbours, numbers
    # whose sums are ties, infinity, quiet and signalling NaNs.
    magnitudes = (
        *(0x0000, 0x0001, 0x0002, 0x0003, 0x03FF, 0x0400, 0x0401, 0x1400, 0x1401, 0x3555),
        *(0x3BFF, 0x3C00, 0x3C01, 0x4000, 0x6400, 0x6401, 0x6800, 0x6801, 0x7800, 0x7BFE),
        *(0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF),
    )
    # The smallest float32 that is rounded to infinity.
    first_infinite = np.float32(65520)
    # The range of the bits of float32 numbers whose rounding loses bits.
    rounded_floats = (0x33000000, 0x47800000)

    @staticmethod
    def widened(bits):
        return bits.view(np.float16).astype(np.float32)

    @staticmethod
    def rounded(floats):
        return floats.astype(np.float16).view(np.uint16)


class Bfloat16:
    """bfloat16, the upper half of a float32. numpy does not have this dtype."""

    name = "bfloat16"
    infinity = 0x7F80
    cpu_flags = frozenset({"avx2"})
    magnitudes = (
        *(0x0000, 0x0001, 0x0002, 0x0003, 0x007F, 0x0080, 0x0081, 0x3E80, 0x3E81, 0x3EAA),
        *(0x3F7F, 0x3F80, 0x3F81, 0x4000, 0x4300, 0x4301, 0x4380, 0x4381, 0x7F00, 0x7F7E),
        *(0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF),
    )
    first_infinite = np.uint32(0x7F7F8000).view(np.float32)
    rounded_floats = (0x00000000, 0x7F800000)

    @staticmethod
    def widened(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    @classmethod
    def rounded(cls, floats):
        """Return the nearer neighbour. The distances are exact in float64."""
        below = (floats.view(np.uint32) >> 16).astype(np.uint16)
        above = below + np.uint16(1)
        # Replace infinity by the number that would follow the largest one.
        far = np.abs(cls.widened(above)).astype(np.float64)
        far[(above & 0x7FFF) == cls.infinity] = 2.0**128
        magnitude = np.abs(floats.astype(np.float64))
        from_below, to_above = magnitude - np.abs(cls.widened(below)), far - magnitude
        up = (to_above < from_below) | ((to_above == from_below) & (below % 2 == 1))
        return np.where(
            np.isnan(floats), 0x7FC0, np.where(np.isfinite(floats) & up, above, below)
        ).astype(np.uint16)


@pytest.fixture(params=[Half, Bfloat16], ids=lambda kind: kind.name)
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def library(compile_header):
    return compile_header("half_arithmetic_check.cc")


def has_vector_path(library, kind):
    return bool(getattr(library, f"{kind.name}_has_vector_path")())


@pytest.fixture(params=[False, True], ids=["vector", "scalar"])
def scalar(request, library, kind):
    """Whether to force the scalar path. Skip the vector path if this CPU has none."""
    if not request.param and not has_vector_path(library, kind):
        pytest.skip("this CPU has no vector path")
    return request.param


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def assert_same_bits(kind, bits, expected):
    """Assert that `bits` are those of `expected`, rounded. The payloads of NaNs may differ."""
    expected = kind.rounded(expected)
    values, wanted = kind.widened(bits), kind.widened(expected)
    same = (bits == expected) | (np.isnan(values) & np.isnan(wanted))
    wrong = np.flatnonzero(~same)
    assert not wrong.size, (wrong[:5], values[wrong[:5]], wanted[wrong[:5]])


def operands(kind):
    """Return all pairs of special values, then random bits. The length is no multiple of 8."""
    special = np.array([m | sign for m in kind.magnitudes for sign in (0, 0x8000)], dtype=np.uint16)
    random = np.random.default_rng(5).integers(0, 65536, (2, 1_000_003), dtype=np.uint16)
    first, second = np.repeat(special, special.size), np.tile(special, special.size)
    return np.concatenate([first, random[0]]), np.concatenate([second, random[1]])


OPERATIONS = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    # Like std::min and std::max: the first operand if they are equal or unordered.
    "minimum": lambda a, b: np.where(b < a, b, a),
    "maximum": lambda a, b: np.where(a < b, b, a),
}


def expected_of(kind, operation, a, b):
    return OPERATIONS[operation](kind.widened(a), kind.widened(b))


def combine(library, kind, operation, scalar, out, a, b):
    function = getattr(library, f"{kind.name}_{operation}")
    function(ctypes.c_bool(scalar), pointer(out), pointer(a), pointer(b), ctypes.c_size_t(out.size))


def floats_of(library, kind, bits, scalar, addend=None):
    floats = np.empty(bits.size, dtype=np.float32)
    function = getattr(library, f"{kind.name}_widen")
    first = None if addend is None else pointer(addend)
    function(
        *(ctypes.c_bool(scalar), pointer(floats), first, pointer(bits)),
        ctypes.c_size_t(floats.size),
    )
    return floats


def bits_of(library, kind, floats, scalar):
    bits = np.empty(floats.size, dtype=np.uint16)
    function = getattr(library, f"{kind.name}_narrow")
    function(ctypes.c_bool(scalar), pointer(bits), pointer(floats), ctypes.c_size_t(floats.size))
    return bits


def test_all_bits_are_converted_to_the_right_float(library, kind, scalar):
    floats = floats_of(library, kind, ALL_BITS, scalar)
    expected = kind.widened(ALL_BITS)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(floats), ~number)
    np.testing.assert_array_equal(floats[number].view(np.uint32), expected[number].view(np.uint32))


def test_both_conversions_together_keep_all_bits(library, kind, scalar):
    bits = bits_of(library, kind, floats_of(library, kind, ALL_BITS, scalar), scalar)
    assert_same_bits(kind, bits, kind.widened(ALL_BITS))


def test_a_sum_in_float32(library, kind, scalar):
    bits, _ = operands(kind)
    addend = np.random.default_rng(4).standard_normal(bits.size).astype(np.float32)
    sums = floats_of(library, kind, bits, scalar, addend)
    np.testing.assert_array_equal(sums, addend + kind.widened(bits))


def test_floats_are_rounded_to_the_nearest_and_ties_to_even(library, kind, scalar):
    finite = kind.widened(ALL_BITS[: kind.infinity])
    # Halve before the addition, because the sum of two large numbers is infinite.
    ties = np.append(finite[:-1] / 2 + finite[1:] / 2, kind.first_infinite)
    rng = np.random.default_rng(3)
    hard = [
        *(ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))),
        np.array([np.inf, np.nan, 3.4e38, 1e-45, 1.17549435e-38, 2.0**-25], dtype=np.float32),
        # NaNs, also with a payload in the lower half only.
        np.array([0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0x7FFF8000], np.uint32).view(np.float32),
        rng.integers(0, 2**32, 10**6, dtype=np.uint32).view(np.float32),
        rng.integers(*kind.rounded_floats, 10**6, dtype=np.uint32).view(np.float32),
    ]
    floats = np.concatenate([*hard, *(-x for x in hard)])
    assert_same_bits(kind, bits_of(library, kind, floats, scalar), floats)


def test_a_nan_stays_a_nan_and_is_quiet(library, kind, scalar):
    nans = ALL_BITS[np.isnan(kind.widened(ALL_BITS))]
    quiet_bit = (0x7FFF - kind.infinity + 1) // 2
    for operation, other in (("sum", 0), ("product", 0x3F80)):
        out = np.empty_like(nans)
        combine(library, kind, operation, scalar, out, nans, np.full_like(nans, other))
        assert np.isnan(kind.widened(out)).all()
        assert (out & quiet_bit).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 chooses at run time")
def test_the_vector_path_is_used_if_the_cpu_has_it(library, kind):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.split() for line in lines if line.startswith("flags"))
    assert has_vector_path(library, kind) == (kind.cpu_flags <= set(flags))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_done_in_float32_and_rounded_once(library, kind, operation, scalar):
    a, b = operands(kind)
    out = np.empty_like(a)
    combine(library, kind, operation, scalar, out, a, b)
    assert_same_bits(kind, out, expected_of(kind, operation, a, b))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_result_may_replace_an_operand(library, kind, operation, scalar):
    a, b = operands(kind)
    expected = expected_of(kind, operation, a, b)
    first, second = a.copy(), b.copy()
    combine(library, kind, operation, scalar, first, first, b)
    assert_same_bits(kind, first, expected)
    combine(library, kind, operation, scalar, second, a, second)
    assert_same_bits(kind, second, expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_length_and_alignment(library, kind, operation, scalar):
    a, b = (x[-200:] for x in operands(kind))
    for n in range(40):
        for shift in range(9):
            out = np.full(n + 20, 0x1234, dtype=np.uint16)
            part = out[shift : shift + n]
            left, right = a[2 * shift :][:n], b[3 * shift + 1 :][:n]
            combine(library, kind, operation, scalar, part, left, right)
            assert_same_bits(kind, part, expected_of(kind, operation, left, right))
            assert (np.delete(out, slice(shift, shift + n)) == 0x1234).all()


@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, -2.0, 4096.0, 2.0**-20, np.inf, 0.0])
def test_scaling_is_done_in_float32_and_rounded_once(library, kind, factor, scalar):
    expected = kind.widened(ALL_BITS) * np.float32(factor)
    source, out = np.append(ALL_BITS, ALL_BITS[:5]), np.zeros(65541, dtype=np.uint16)
    expected = np.append(expected, expected[:5])
    arguments = (ctypes.c_float(factor), ctypes.c_size_t(out.size))
    scale = getattr(library, f"{kind.name}_scale")
    scale(ctypes.c_bool(scalar), pointer(out), pointer(source), *arguments)
    assert_same_bits(kind, out, expected)
    scale(ctypes.c_bool(scalar), pointer(source), pointer(source), *arguments)
    assert_same_bits(kind, source, expected)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 1001])
def test_adasum_dot_and_norms(library, n):
    rng = np.random.default_rng(n)
    # Larger than a float16 sum can be, and as small as subnormal numbers.
    a, b = (rng.normal(0, 10.0 ** rng.integers(-7, 4, n)).astype(np.float16) for _ in range(2))
    results = np.full(3, np.nan)
    library.dot_and_norms(pointer(a), pointer(b), ctypes.c_size_t(n), pointer(results))
    x, y = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(results, [x @ y, x @ x, y @ y], rtol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 1001])
def test_adasum_scaled_add(library, n):
    a, b = (x[-n:] if n else x[:0] for x in operands(Half))
    # Factors of few bits have exact products, so a fused multiply-add gives the same sum.
    left, right = 0.6875, -1.71875
    x, y = Half.widened(a), Half.widened(b)
    expected = np.float32(left) * x + np.float32(right) * y
    result = a.copy()
    library.scaled_add(
        *(ctypes.c_size_t(n), ctypes.c_double(left), pointer(result)),
        *(ctypes.c_double(right), pointer(b)),
    )
    assert_same_bits(Half, result, expected)
