import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from hvdkit.checkpoint import dtypes, tensors
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError


def content(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write(path, entries):
    with path.open("wb") as stream:
        for piece in tensors.serialize(entries):
            stream.write(piece)


ARRAYS = {
    "mask": (TensorSpec("BOOL", (3,)), np.array([True, False, True])),
    "weight": (TensorSpec("F32", (2, 3)), np.arange(6, dtype=np.float32).reshape(2, 3)),
    "half": (TensorSpec("F16", (1, 1)), np.ones((1, 1), np.float16)),
    "empty": (TensorSpec("I32", (0, 7)), np.zeros((0, 7), np.int32)),
    "ä b": (TensorSpec("I64", ()), np.array(-5)),
}


def test_the_library_reads_what_we_write(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {name: (spec, content(array)) for name, (spec, array) in ARRAYS.items()})
    read = safetensors.numpy.load_file(path)
    assert read.keys() == ARRAYS.keys()
    for name, (_, array) in ARRAYS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize("dtype", dtypes.ELEMENT_BYTES)
def test_every_dtype_is_one_that_the_library_knows(tmp_path, dtype):
    spec = TensorSpec(dtype, (3,))
    path = tmp_path / "x.safetensors"
    write(path, {"x": (spec, np.zeros(tensors.nbytes(spec), np.uint8))})
    with safe_open(path, framework="np") as file:
        assert file.get_slice("x").get_dtype() == dtypes.PAIRS.get(dtype, dtype)


def test_each_tensor_is_aligned_to_its_elements(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {name: (spec, content(array)) for name, (spec, array) in ARRAYS.items()})
    data = np.fromfile(path, np.uint8)

    def read_into(out, offset):
        out[:] = data[offset : offset + out.size]

    begin, specs = tensors.read_header(read_into, data.size, path.name)
    assert begin % 8 == 0
    assert specs == {name: ARRAYS[name][0] for name in specs}
    assert list(specs) == ["ä b", "weight", "empty", "half", "mask"]
    for name, (at, _) in tensors.spans(specs).items():
        assert at % dtypes.ELEMENT_BYTES[specs[name].dtype] == 0


def test_contents_are_not_copied():
    data = np.zeros(4_000_000, np.uint8)
    _, piece = tensors.serialize({"x": (TensorSpec("U8", (4_000_000,)), data)})
    assert np.shares_memory(np.frombuffer(piece, np.uint8), data)


@pytest.mark.parametrize(
    ("spec", "data", "said"),
    [
        (TensorSpec("F4", (2,)), np.zeros(1, np.uint8), "dtype is F4; expected one of BOOL"),
        (TensorSpec("F32", (2,)), np.zeros(4, np.uint8), "expected 8 contiguous bytes"),
        (TensorSpec("F32", (2,)), np.zeros(8, np.int8), "is 8 x int8"),
        (TensorSpec("F32", (2,)), np.zeros(16, np.uint8)[::2], "contiguous"),
    ],
)
def test_content_that_does_not_fit(spec, data, said):
    with pytest.raises(UsageError, match=said):
        list(tensors.serialize({"x": (spec, data)}))


def test_a_name_that_is_no_text():
    with pytest.raises(UsageError, match="name is not Unicode text"):
        list(tensors.serialize({"\ud800": (TensorSpec("U8", (0,)), np.zeros(0, np.uint8))}))


def test_more_names_than_a_header_may_have(monkeypatch):
    monkeypatch.setattr(tensors, "MAX_HEADER_BYTES", 100)
    entries = {str(i): (TensorSpec("U8", (0,)), np.zeros(0, np.uint8)) for i in range(10)}
    with pytest.raises(UsageError, match="10 tensors take .*expected at most 100"):
        list(tensors.serialize(entries))
