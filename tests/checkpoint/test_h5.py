"""Keras's weights file of a checkpoint that others have made."""

import h5py
import pytest

from hvdkit.checkpoint import h5
from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.writing import EncodedPart
from tests.checkpoint.test_weights import stored

_TREE, _SPECS = {"w": {"$tensor": "w"}}, {"w": TensorSpec("F32", (1000, 100))}


def export(folder, part):
    store, _ = stored(folder / "place", _TREE, _SPECS, {"keras": EncodedPart(part)})
    with store.newest_good() as opened:
        h5.export(opened, folder / "a.weights.h5")


@pytest.mark.parametrize(
    "part",
    [
        [1],
        {},
        {"weights.h5": 5},
        {"weights.h5": [[1]]},
        {"weights.h5": [["g", "n", [["k", "other", "w"]]]]},
        {"weights.h5": [["g", "n", [["k", "model", "other"]]]]},
        {"weights.h5": [["g", "n", [["k", "model", ["w"]]]]]},
        {"weights.h5": [["g", "n", [[7, "model", "w"]]]]},
        {"weights.h5": [["g", "n", []], ["g", "n", []]]},
    ],
)
def test_a_layout_that_is_not_valid(tmp_path, part):
    with pytest.raises(Damaged, match=r"state.json: its .*weights.h5"):
        export(tmp_path, part)
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_tensor_with_many_names_takes_the_space_of_one(tmp_path):
    export(tmp_path, {"weights.h5": [["g", "n", [[str(i), "model", "w"] for i in range(100)]]]})
    file = tmp_path / "a.weights.h5"
    assert file.stat().st_size < 1_000_000
    with h5py.File(file) as found:
        group = found["g/vars"]
        assert len(group) == 100
        assert group["0"][...].tobytes() == group["99"][...].tobytes()
