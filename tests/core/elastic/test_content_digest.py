"""Digests of content, which decide whether a commit of an elastic job is new."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.core.elastic.content_digest import content_digest

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.binary(max_size=3),
)
_KEYS = st.one_of(st.integers(0, 20), st.text(max_size=2), st.tuples(st.text(max_size=2)))
_CONTENTS = st.recursive(
    st.one_of(_LEAVES, st.sets(_KEYS), st.frozensets(_KEYS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3), st.tuples(inner)
    ),
    max_leaves=8,
)


@given(_CONTENTS)
def test_copies_have_the_same_digest(content):
    expected = content_digest(content)
    assert content_digest(copy.deepcopy(content)) == expected
    assert content_digest(pickle.loads(pickle.dumps(content))) == expected


def test_the_order_of_a_set_is_no_content():
    names = [f"file{i}" for i in range(1000)]
    backwards = sorted(names, reverse=True)
    sets = set(names), set(backwards)
    assert list(sets[0]) != list(sets[1])
    assert content_digest(sets[0]) == content_digest(sets[1])
    mixed = {*names, 1, ("a", 2)}, {("a", 2), 1, *backwards}
    assert content_digest([mixed[0]]) == content_digest([mixed[1]])


def test_an_object_that_occurs_twice_equals_two_equal_objects():
    one, other = ["".join(["lea", "rning"]) for _ in range(2)]
    assert one is not other
    assert content_digest({"a": one, "b": one}) == content_digest({"a": one, "b": other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"epoch": 1}, {"epoch": 2}),
        ({"a"}, {"b"}),
        ({"a"}, frozenset({"a"})),
        ({1, "a"}, {2, "a"}),
        ([[1], []], [[], [1]]),
        (np.zeros(3), np.array([0, 0, 1e-300])),
        (np.zeros(3, np.float32), np.zeros(3, np.int32)),
        (np.zeros(100_000), np.eye(1, 100_000, 99_999)[0]),
    ],
)
def test_another_content_has_another_digest(one, other):
    assert content_digest({"x": one}) != content_digest({"x": other})


def test_an_object_that_contains_itself():
    def cycle(name):
        outer = {"name": name}
        outer["self"] = [outer, {"c"}]
        return outer

    assert content_digest(cycle("a")) == content_digest(cycle("a"))
    assert content_digest(cycle("a")) != content_digest(cycle("b"))


def test_values_with_a_plain_form():
    """A pickle of an open file or a tensor is not possible, or not reproducible."""

    class Tensor:
        def __init__(self, values):
            self.values = values

        def __reduce__(self):
            raise TypeError

    def plain(value):
        return value.values if isinstance(value, Tensor) else None

    digests = [content_digest({"a": [Tensor(v)]}, plain) for v in ([1], [1], [2])]
    assert digests[0] == digests[1] != digests[2]
