"""Export a checkpoint to Keras's `.weights.h5` file, without Keras and without the model's code.

The place of each variable in such a file depends on the model. A checkpoint of Keras therefore
stores the layout: a list of groups, each `[path, name of the layer or None, [[key, part, tensor],
…]]`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.checkpoint.dtypes import numpy_dtype
from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.exporting import exporting
from hvdkit.checkpoint.manifest import STATE
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.errors import UsageError

#: The part of a checkpoint that holds the layout, and its key in this part.
PART = "keras"
LAYOUT = "weights.h5"
# The exceptions for entries of another form, and for names that HDF5 refuses.
_WRONG = (KeyError, TypeError, ValueError)


def export(checkpoint: OpenCheckpoint, file: str | os.PathLike[str]) -> None:
    """Write a checkpoint's weights and optimizer state like `model.save_weights`.

    Args:
        checkpoint: a checkpoint that `hvd.callbacks.Checkpoint` of hvdkit.keras saved.
        file: the new file, whose name must end in `.weights.h5`. An existing file is replaced
            once the new one is complete.

    Raises:
        UsageError: the checkpoint has no layout, or the name ends differently.
        Damaged: the layout is not valid.
        HvdkitError: the file cannot be written.
    """
    path = Path(file)
    if not path.name.endswith(".weights.h5"):
        raise UsageError(f"the file is {path}: expected a name that ends in .weights.h5")
    layout = _layout(checkpoint)
    # Keras requires h5py; hvdkit does not.
    import h5py  # type: ignore[import-untyped]

    with exporting(path) as beside, h5py.File(beside, "w") as h5:
        try:
            for group_path, name, variables in layout:
                group = h5.create_group(f"{group_path}/vars" if group_path else "vars")
                if name is not None:
                    group.attrs["name"] = name
                for key, part, tensor in variables:
                    array = _read(checkpoint, part, tensor)
                    dataset = group.create_dataset(key, data=array)
                    if array.dtype.name == "bfloat16":
                        # HDF5 has no such dtype. Keras marks the dataset with this attribute.
                        dataset.attrs["dtype"] = "bfloat16"
        except _WRONG as error:
            raise Damaged(STATE, f"its {LAYOUT} has wrong entries ({error})") from error


def _layout(checkpoint: OpenCheckpoint) -> Sequence[Any]:
    outline = checkpoint.outline
    if PART not in outline.trees:
        raise UsageError(
            f"step {checkpoint.manifest.step} was not saved by hvd.callbacks.Checkpoint of "
            f"hvdkit.keras: only such a checkpoint has the layout of a .weights.h5 file"
        )
    content = outline.tree(PART)
    layout = content.get(LAYOUT) if isinstance(content, dict) else None
    if isinstance(layout, str):
        raise UsageError(
            f"step {checkpoint.manifest.step} cannot be exported as .weights.h5: {layout}"
        )
    if not isinstance(layout, list):
        raise Damaged(STATE, f"its part {PART} has no {LAYOUT}")
    return layout


def _read(checkpoint: OpenCheckpoint, part: str, tensor: str) -> np.ndarray:
    spec: TensorSpec = checkpoint.outline.specs[part][tensor]
    content = np.empty(nbytes(spec), np.uint8)
    checkpoint.read(part, tensor, content)
    return content.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
