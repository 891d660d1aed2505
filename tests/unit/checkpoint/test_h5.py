"""Keras's weights file of a checkpoint that others have made."""

import pytest

from hvdkit.checkpoint import h5
from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.step_files import EncodedPart
from tests.unit.checkpoint.test_weights import stored

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
