"""Report the large modules that this rank has loaded, for the spare interpreters of its agent.

A spare (`hvdkit/launch/spares/`) imports the same modules before a rank is restarted. The report is
a file in the folder of HVDKIT_RECORD_DIR. The report also has the environment variables that such
modules read while they are imported, because the script may have changed these variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.core.recorder import FOLDER_VARIABLE

#: The modules that a spare imports, if the rank has loaded them.
MODULES = (
    "numpy",
    "scipy",
    "h5py",
    "torch",
    "torch._dynamo",
    "tensorflow",
    "keras",
    "hvdkit.torch",
    "hvdkit.tensorflow",
    "hvdkit.keras",
)
# The prefixes of environment variables that these modules and their libraries read while they are
# imported.
_PREFIXES = (
    "BLIS_",
    "CUDA_",
    "GOMP_",
    "HDF5_",
    "KERAS_",
    "KMP_",
    "MKL_",
    "NUMEXPR_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "TF_",
    "TORCH_",
    "XLA_",
)
# Environment variables that the modules set themselves.
_SET_BY_IMPORTS = {
    "HDF5_PLUGIN_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TF_FORCE_GPU_ALLOW_GROWTH",
}


def file_name(rank: int) -> str:
    """Return the name of a rank's report in the folder."""
    return f"modules-{rank}.json"


def report(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Write the report of this rank if HVDKIT_RECORD_DIR is set. Ignore errors of the file."""
    folder = environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    with contextlib.suppress(OSError):
        path = Path(folder) / file_name(rank)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(_describe(environ)))
        draft.replace(path)


def _describe(environ: Mapping[str, str]) -> dict[str, Any]:
    # In the order of the script's imports, as in `sys.modules`. A script may set an entry to None,
    # which makes the import fail.
    loaded = {
        name: module
        for name, module in list(sys.modules.items())
        if name in MODULES and module is not None
    }
    origins = {name: getattr(module.__spec__, "origin", None) for name, module in loaded.items()}
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) and name not in _SET_BY_IMPORTS
    }
    return {"modules": origins, "variables": variables}
