"""half_arithmetic.h against numpy: both round to nearest even, so every bit must agree."""

import ctypes
import platform
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from hvdkit.engine.toolchain import find_compiler

CHECK = Path(__file__).with_name("half_arithmetic_check.cc")

ALL_HALVES = np.arange(65536, dtype=np.uint16)

# Both zeros, the smallest and the largest subnormal and normal numbers, 1 and its neighbours,
# numbers whose sums tie, both infinities, NaNs quiet and signalling.
MAGNITUDES = [
    *(0x0000, 0x0001, 0x0002, 0x0003, 0x03FF, 0x0400, 0x0401, 0x1400, 0x1401, 0x3555),
    *(0x3BFF, 0x3C00, 0x3C01, 0x4000, 0x6400, 0x6401, 0x6800, 0x6801, 0x7800, 0x7BFE),
    *(0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF),
]
SPECIAL = np.array([m | sign for m in MAGNITUDES for sign in (0, 0x8000)], dtype=np.uint16)

# The infinities and NaNs among the inputs are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The header, compiled as strictly as a user's compiler might."""
    built = tmp_path_factory.mktemp("half") / "half_arithmetic_check.so"
    sources = resources.files("hvdkit.engine").joinpath("sources")
    strict = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
    paths = [f"-I{sources}", str(CHECK), "-o", str(built)]
    done = subprocess.run(
        [find_compiler().path, "-std=c++17", "-O3", *strict, "-shared", "-fPIC", *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(built))


@pytest.fixture(params=[False, True], ids=["vector", "scalar"])
def scalar(request, library):
    """Which of the two paths; on a CPU with one alone, the first is the same as the second."""
    if not request.param and not library.has_vector_path():
        pytest.skip("this CPU has no vector path")
    return request.param


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def assert_same_bits(halves, expected):
    """Equal as bits, but for what a NaN carries."""
    expected = expected.astype(np.float16)
    values = halves.view(np.float16)
    same = (halves == expected.view(np.uint16)) | (np.isnan(values) & np.isnan(expected))
    wrong = np.flatnonzero(~same)
    assert not wrong.size, (wrong[:5], values[wrong[:5]], expected[wrong[:5]])


def operands():
    """Each special value with each, then random bits; a number that eight does not divide."""
    random = np.random.default_rng(5).integers(0, 65536, (2, 1_000_003), dtype=np.uint16)
    first, second = np.repeat(SPECIAL, SPECIAL.size), np.tile(SPECIAL, SPECIAL.size)
    return np.concatenate([first, random[0]]), np.concatenate([second, random[1]])


OPERATIONS = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    # As std::min and std::max: the first where they are equal, or not to be compared.
    "minimum": lambda a, b: np.where(b < a, b, a),
    "maximum": lambda a, b: np.where(a < b, b, a),
}


def expected_of(operation, a, b):
    return OPERATIONS[operation](*(x.view(np.float16).astype(np.float32) for x in (a, b)))


def combine(library, operation, scalar, out, a, b):
    function = getattr(library, operation)
    function(ctypes.c_bool(scalar), pointer(out), pointer(a), pointer(b), ctypes.c_size_t(out.size))


def test_every_half_is_the_float_that_it_stands_for(library):
    floats = np.empty(65536, dtype=np.float32)
    library.halves_to_floats(pointer(ALL_HALVES), pointer(floats), ctypes.c_size_t(floats.size))
    expected = ALL_HALVES.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(floats), ~number)
    np.testing.assert_array_equal(floats[number].view(np.uint32), expected[number].view(np.uint32))


def test_every_half_survives_both_conversions(library):
    floats = np.empty(65536, dtype=np.float32)
    halves = np.empty(65536, dtype=np.uint16)
    library.halves_to_floats(pointer(ALL_HALVES), pointer(floats), ctypes.c_size_t(floats.size))
    library.floats_to_halves(pointer(floats), pointer(halves), ctypes.c_size_t(floats.size))
    assert_same_bits(halves, ALL_HALVES.view(np.float16))


def test_floats_are_rounded_to_the_nearest_half_and_ties_to_even(library):
    finite = ALL_HALVES[:0x7C00].view(np.float16).astype(np.float32)
    # 65520 lies between the largest half and what would be the next one: it becomes infinity.
    ties = np.append((finite[:-1] + finite[1:]) / 2, np.float32(65520))
    hard = [
        *(ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))),
        np.array([np.inf, np.nan, 3.4e38, 1e-45, 1.17549435e-38, 2.0**-25], dtype=np.float32),
        np.random.default_rng(3).integers(0, 2**32, 10**6, dtype=np.uint32).view(np.float32),
        # Bits between those of the smallest subnormal half and of the largest half.
        np.random.default_rng(4)
        .integers(0x33000000, 0x47800000, 10**6, dtype=np.uint32)
        .view(np.float32),
    ]
    floats = np.concatenate([*hard, *(-x for x in hard)])
    halves = np.empty(floats.size, dtype=np.uint16)
    library.floats_to_halves(pointer(floats), pointer(halves), ctypes.c_size_t(floats.size))
    assert_same_bits(halves, floats)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 chooses at run time")
def test_the_vector_path_is_taken_where_the_cpu_has_it(library):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.split() for line in lines if line.startswith("flags"))
    assert bool(library.has_vector_path()) == ({"avx", "f16c"} <= set(flags))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_that_of_floats_rounded_once(library, operation, scalar):
    a, b = operands()
    out = np.empty_like(a)
    combine(library, operation, scalar, out, a, b)
    assert_same_bits(out, expected_of(operation, a, b))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_result_may_replace_an_operand(library, operation, scalar):
    a, b = operands()
    expected = expected_of(operation, a, b)
    first, second = a.copy(), b.copy()
    combine(library, operation, scalar, first, first, b)
    assert_same_bits(first, expected)
    combine(library, operation, scalar, second, a, second)
    assert_same_bits(second, expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_length_and_alignment(library, operation, scalar):
    a, b = (x[-200:] for x in operands())
    for n in range(40):
        for shift in range(9):
            out = np.full(n + 20, 0x1234, dtype=np.uint16)
            part = out[shift : shift + n]
            left, right = a[2 * shift :][:n], b[3 * shift + 1 :][:n]
            combine(library, operation, scalar, part, left, right)
            assert_same_bits(part, expected_of(operation, left, right))
            assert (np.delete(out, slice(shift, shift + n)) == 0x1234).all()


@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, -2.0, 4096.0, 2.0**-20, np.inf, 0.0])
def test_scaling_is_that_of_floats_rounded_once(library, factor, scalar):
    expected = ALL_HALVES.view(np.float16).astype(np.float32) * np.float32(factor)
    source, out = np.append(ALL_HALVES, ALL_HALVES[:5]), np.zeros(65541, dtype=np.uint16)
    expected = np.append(expected, expected[:5])
    arguments = (ctypes.c_float(factor), ctypes.c_size_t(out.size))
    library.scale(ctypes.c_bool(scalar), pointer(out), pointer(source), *arguments)
    assert_same_bits(out, expected)
    library.scale(ctypes.c_bool(scalar), pointer(source), pointer(source), *arguments)
    assert_same_bits(source, expected)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 1001])
def test_adasum_dot_and_norms(library, n):
    rng = np.random.default_rng(n)
    # Beyond what a float16 sum holds, and down to subnormal numbers.
    a, b = (rng.normal(0, 10.0 ** rng.integers(-7, 4, n)).astype(np.float16) for _ in range(2))
    results = np.full(3, np.nan)
    library.dot_and_norms(pointer(a), pointer(b), ctypes.c_size_t(n), pointer(results))
    x, y = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(results, [x @ y, x @ x, y @ y], rtol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 1001])
def test_adasum_scaled_add(library, n):
    a, b = (x[-n:] if n else x[:0] for x in operands())
    # Factors of few bits: their products are exact, whether or not a compiler fuses the sum.
    left, right = 0.6875, -1.71875
    x, y = (v.view(np.float16).astype(np.float32) for v in (a, b))
    expected = np.float32(left) * x + np.float32(right) * y
    result = a.copy()
    library.scaled_add(
        *(ctypes.c_size_t(n), ctypes.c_double(left), pointer(result)),
        *(ctypes.c_double(right), pointer(b)),
    )
    assert_same_bits(result, expected)
