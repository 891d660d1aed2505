"""The state of Python's and NumPy's random numbers, which every process has for itself."""

import random
from typing import Any

import numpy as np

from hvdkit.checkpoint.state import Tree


def capture() -> Tree:
    """Where the generators of the modules `random` and `numpy.random` are."""
    version, internal, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    inner = legacy["state"]
    return {
        # 625 numbers of 32 bits.
        "python": [version, np.array(internal, np.uint32).tobytes(), gauss],
        "numpy": {
            "kind": legacy["bit_generator"],
            "key": np.asarray(inner["key"], np.uint32).tobytes(),
            "pos": int(inner["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        }
        if legacy["bit_generator"] == "MT19937"
        else None,
    }


def adopt(tree: Tree) -> None:
    """Go on with what `capture` gave."""
    version, internal, gauss = tree["python"]
    random.setstate((version, tuple(np.frombuffer(internal, np.uint32).tolist()), gauss))
    legacy = tree["numpy"]
    # Someone may have put another generator there, whose state is theirs.
    if legacy is not None:
        key = np.frombuffer(legacy["key"], np.uint32)
        np.random.set_state(
            (legacy["kind"], key, legacy["pos"], legacy["has_gauss"], legacy["gauss"])
        )
