import json
import math
import struct
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest

from hvdkit.checkpoint import dtypes, tree
from hvdkit.checkpoint.state import SmallTensor, TensorSpec
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.errors import UsageError

F32 = TensorSpec("F32", (2,))


class Color(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


def through_json(value, **how):
    encoded, tensors = tree.encode(value, "it", **how)
    return tree.decode(json.loads(json.dumps(encoded, allow_nan=False)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**53,
        2**200,
        -(2**200),
        0.1,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "ä\n\0\ud800",
        b"",
        bytes(range(256)),
        1 + 2j,
        complex(math.inf, -0.0),
        [],
        (),
        {},
        [1, (2, [3])],
        (1,),
        {"a": {"b": [None]}},
        {"$tuple": [1], "$x": 2},
        {1: "a", "1": "b", None: 3, (1, "x"): 4, 2.5: 5},
        Counter({30: 2, 80: 1}),
        np.float32(0.1),
        np.int64(-(2**63)),
        np.bool_(True),
        np.complex128(1 - 1j),
        np.array(258, ">u2")[()],
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value):
    again = through_json(value)
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)


def test_nan_and_infinities_come_back():
    assert math.isnan(through_json(math.nan))
    value = struct.unpack("<f", b"\1\0\xc0\x7f")[0]
    assert math.isnan(through_json(np.float32(value)))


def test_true_and_one_stay_different():
    assert repr(through_json([True, 1, 1.0, np.float64(1)])) == repr([True, 1, 1.0, np.float64(1)])


def test_the_order_of_a_dict_is_kept():
    assert list(through_json({"b": 1, "a": 2})) == ["b", "a"]
    assert list(through_json({2: 1, 1: 2})) == [2, 1]


def test_an_ordered_dict_comes_back_as_a_dict():
    again = through_json(OrderedDict(b=1, a=2))
    assert again == {"b": 1, "a": 2}
    assert type(again) is dict


def test_tensors_are_named_by_the_path_to_them():
    value = {
        "layer.weight": F32,
        "state": {0: {"exp_avg": F32}},
        "pair": (F32, [F32]),
        "__metadata__": F32,
    }
    _, tensors = tree.encode(value, "it")
    assert list(tensors) == [
        *("layer.weight", "state.0.exp_avg", "pair.0", "pair.1.0", "__metadata__~2"),
    ]
    assert through_json(value) == value
    assert tree.encode(F32, "it")[1] == {"tensor": F32}


def test_two_paths_of_one_name():
    value = {"a.b": TensorSpec("F32", (1,)), "a": {"b": TensorSpec("F32", (2,))}}
    encoded, tensors = tree.encode(value, "it")
    assert list(tensors) == ["a.b", "a.b~2"]
    assert tree.decode(encoded, tensors) == value


def test_arrays_are_tensors_that_come_back_as_arrays():
    value = {"a": np.array([1, 2], ">i4"), "b": [np.array(True), np.zeros((0, 2), complex)]}
    encoded, tensors = tree.encode(value, "it")
    assert encoded == {"a": {"$array": "a"}, "b": [{"$array": "b.0"}, {"$array": ["b.1", "C128"]}]}
    stored = {name: dtypes.in_file(tensor.spec) for name, tensor in tensors.items()}
    assert stored["b.1"] == TensorSpec("F64", (0, 2, 2))
    again = tree.decode(encoded, stored)
    _, places = tree.encode(again, "it")
    for name, tensor in tensors.items():
        content = np.empty(nbytes(tensor.spec), np.uint8)
        tensor.read(content)
        places[name].write(content)
    np.testing.assert_array_equal(again["a"], value["a"])
    assert again["a"].dtype == np.int32
    for one, other in zip(again["b"], value["b"], strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


def test_the_tree_has_dtypes_that_safetensors_lacks():
    value = {"x": TensorSpec("C128", (3,)), "y": TensorSpec("C32", ())}
    encoded, tensors = tree.encode(value, "it")
    assert encoded == {"x": {"$tensor": ["x", "C128"]}, "y": {"$tensor": ["y", "C32"]}}
    assert tree.decode(encoded, tensors) == value
    stored = {name: dtypes.in_file(spec) for name, spec in tensors.items()}
    assert stored == {"x": TensorSpec("F64", (3, 2)), "y": TensorSpec("F16", (2,))}
    assert tree.decode(encoded, stored) == value


@pytest.mark.parametrize(
    "mark",
    [
        ["x", "C128"],
        ["x", "F32"],
        ["x"],
        ["x", "C64", "C64"],
        [[], "C128"],
        {"x": 1},
        None,
    ],
)
@pytest.mark.parametrize("kind", ["$tensor", "$array"])
def test_a_dtype_that_the_file_does_not_have(kind, mark):
    with pytest.raises(ValueError, match=r"wrong content of \$") as caught:
        tree.decode({kind: mark}, {"x": TensorSpec("F64", (3, 4))})
    if mark == ["x", "C128"]:
        assert "the file has F64 [3, 4]: expected F64 [..., 2]" in str(caught.value)
    if mark == ["x", "F32"]:
        assert "the dtype is 'F32': expected F64 as in the file, or one of C32, C128" in str(
            caught.value
        )


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([[1.5, -0.0], [np.nan, np.inf]]),
        np.array(True),
        np.zeros((0, 4), np.complex64),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.arange(3, dtype=">u4"),
        np.zeros(125_000),
    ],
)
def test_small_arrays(array):
    back = through_json({"a": [array]}, inline=True)["a"][0]
    assert type(back) is np.ndarray
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("<")
    np.testing.assert_array_equal(back, array)
    back[...] = 0


def test_small_tensors():
    value = [SmallTensor(TensorSpec("BF16", (2, 1)), b"\1\2\3\4"), SmallTensor(F32, bytes(8))]
    assert through_json(value) == value


@pytest.mark.parametrize(
    "encoded",
    [
        {"$inline": ["<f4", [2], "AAAA"]},
        {"$inline": ["<f4", [-1], "AAAAAA=="]},
        {"$inline": ["|O", [1], "AAAAAAAAAAA="]},
        {"$inline": ["<f4", 1, "AAAAAA=="]},
        {"$inline": ["<f4", [True], "AAAAAA=="]},
        {"$small": ["F32", [2], "AAAA"]},
        {"$small": ["X", [1], "AAAA"]},
        {"$small": ["F32", [1]]},
    ],
)
def test_invalid_encoded_arrays(encoded):
    with pytest.raises(ValueError, match="wrong content of"):
        tree.decode(encoded, {})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"x": object()}, r"metadata\['x'\] is a builtins.object, which a checkpoint cannot hold"),
        ([1, {2: {3}}], r"metadata\[1\]\[2\] is a builtins.set"),
        (Color.RED, "metadata is a .*Color"),
        (Point(1, 2), "metadata is a .*Point"),
        (np.ma.zeros(2), "metadata is a numpy.ma.*MaskedArray"),
        ([np.array(["x"])], r"the array metadata\[0\] is of <U1: expected one of bool"),
        (np.random.default_rng(0), r"metadata is a .*Generator.* generators={...}"),
        (SmallTensor(F32, bytes(1_000_001)), "metadata is a tensor of 1000001 bytes"),
        (np.str_("x"), "metadata is a NumPy scalar of dtype <U1"),
        (np.datetime64("2020-01-01"), "metadata is a NumPy scalar"),
        ({b"x": 1}, r"metadata has a key b'x' of type bytes"),
        ({np.int64(1): 1}, r"of type int64"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_by_its_path(value, said):
    with pytest.raises(UsageError, match=said):
        tree.encode(value, "metadata")


def test_arrays_that_are_too_large_to_be_inline():
    with pytest.raises(UsageError, match=r"metadata\['x'\] is an array of 1000008 bytes; expected"):
        tree.encode({"x": np.zeros(125_001)}, "metadata", inline=True)
    with pytest.raises(UsageError, match="metadata is a NumPy array of dtype object"):
        tree.encode(np.array([object()]), "metadata", inline=True)


def test_a_tree_that_contains_itself():
    value = []
    value.append(value)
    with pytest.raises(UsageError, match="more than 50 nested levels, or contains itself"):
        tree.encode(value, "metadata")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {0: v}])
def test_any_tree_that_can_be_written_can_be_read(wrap):
    value = F32
    for _ in range(tree.MAX_DEPTH):
        value = wrap(value)
    assert through_json(value) == value
