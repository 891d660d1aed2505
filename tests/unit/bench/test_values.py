"""The check of results finds wrong ones."""

import numpy as np
import pytest

from hvdkit.bench.allreduce import values
from hvdkit.bench.allreduce.cases import WIRES, Case, bus_factor, cases, parse_names
from hvdkit.errors import UsageError

ELEMENTS = 100_000


def contribution(rank, elements=ELEMENTS):
    return np.concatenate([numbers for _, numbers in values.periods(rank, elements)])


SUM = Case("float32", "sum", "none", ELEMENTS)


def wrong(result, case=SUM, ranks=3):
    return values.wrong_elements(case, ranks, lambda start, end: result[start:end])


def right_sum(ranks=3):
    return sum(contribution(rank) for rank in range(ranks))


@pytest.mark.parametrize("elements", [1, 7, values.PERIOD, 5_000_000])
def test_right_sums_have_no_wrong_elements(elements):
    case = Case("float32", "sum", "none", elements)
    result = contribution(0, elements) + contribution(1, elements)
    assert len(result) == elements
    assert wrong(result, case, 2) == (0, 0.0)


@pytest.mark.parametrize("op", ["average", "min", "max"])
def test_other_operations(op):
    case = Case("float64", op, "none", ELEMENTS)
    function = {"average": np.mean, "min": np.min, "max": np.max}[op]
    result = function([contribution(rank) for rank in range(3)], axis=0)
    assert wrong(result, case)[0] == 0
    assert wrong(right_sum(), case)[0] > ELEMENTS / 2


def test_one_wrong_element_is_found():
    result = right_sum()
    result[70_001] += 1
    assert wrong(result) == (1, 1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_element_that_is_not_finite_is_wrong(value):
    result = right_sum()
    result[5] = value
    assert wrong(result) == (1, np.inf)


def test_a_rank_that_is_missing_or_counted_twice_is_found():
    assert wrong(right_sum() - contribution(2))[0] > ELEMENTS / 2
    assert wrong(right_sum() + contribution(0))[0] > ELEMENTS / 2


def test_interchanged_chunks_are_found():
    result = right_sum()
    result[:32768], result[32768:65536] = result[32768:65536].copy(), result[:32768].copy()
    assert wrong(result)[0] > ELEMENTS / 2


def test_the_tolerance_of_int8_is_that_of_its_blocks():
    case = Case("float32", "sum", "int8", ELEMENTS)
    allowed = values.tolerance(case, 3)
    assert wrong(right_sum() + 0.9 * allowed, case)[0] == 0
    assert wrong(right_sum() + 1.1 * allowed, case)[0] == ELEMENTS
    assert allowed < 0.2


def test_sums_of_16_bit_numbers_are_exact_for_usual_numbers_of_ranks():
    assert values.tolerance(Case("bfloat16", "sum", "none", 1), 42) == 0
    assert 0 < values.tolerance(Case("bfloat16", "sum", "none", 1), 64) < 64 * values.LARGEST * 64
    assert values.tolerance(Case("int32", "sum", "none", 1), 1000) == 0


def test_cases_that_do_not_exist_are_left_out():
    found = list(cases([1000, 1003], ["float32", "int32"], ["sum", "average"], ["none", "fp16"]))
    assert [(c.dtype, c.op, c.wire, c.elements) for c in found] == [
        ("float32", "sum", "none", 250),
        ("float32", "sum", "fp16", 250),
        ("float32", "average", "none", 250),
        ("float32", "average", "fp16", 250),
        ("int32", "sum", "none", 250),
    ]


def test_names_of_other_tools_are_known():
    assert parse_names("float,half,fp32", ["float32", "float16"], "--dtypes") == [
        "float32",
        "float16",
    ]
    assert parse_names("none,fp16", WIRES, "--wires") == ["none", "fp16"]
    with pytest.raises(UsageError, match="--dtypes has 'complex64'"):
        parse_names("complex64", ["float32"], "--dtypes")


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert [bus_factor(n) for n in (1, 2, 4, 8)] == [0.0, 1.0, 1.5, 1.75]
