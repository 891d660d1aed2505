"""Report the large modules that this rank has loaded, for the spare interpreters of its agent.

A spare (`hvdkit/launch/agent/spares/`) imports the same modules before a rank is restarted. The
report is a file in the folder of HVDKIT_RECORD_DIR. It also has the environment variables that such
modules read while they are imported, because the script may have changed these variables. A script
may change a variable before some imports and after others. So the report is a list of groups: the
modules that were loaded between two notes, and the variables at the second note. The first note is
made when this module is imported, which scripts do directly after they import the framework.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdkit.runtime.recorder import FOLDER_VARIABLE
from hvdkit.system.whole_files import replacing

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
# The prefixes of environment variables that these modules, the modules that they import, and their
# libraries read while they are imported.
_PREFIXES = (
    *("AOTINDUCTOR_", "AOT_", "BLIS_", "CUDA_", "DNNL_", "GOMP_", "HDF5_", "HOROVOD_AUTOTUNE_"),
    *("INDUCTOR_", "JOBLIB_", "KERAS_", "KMP_", "LOKY_", "MKLDNN_", "MKL_", "MPL", "NPY_"),
    *("NUMEXPR_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PROTOCOL_BUFFERS_"),
    *("PYTORCH_", "SCIPY_", "SKLEARN_", "TF_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_"),
    *("TQDM_", "TRITON_", "UCX_", "XLA_"),
)
# Imports read them for `tempfile.gettempdir()`, which keeps the first folder that it has found.
_TEMPORARY_FOLDERS = {"TEMP", "TMP", "TMPDIR"}
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


def read_by_imports(name: str) -> bool:
    """Return whether modules read this environment variable while they are imported."""
    return name in _TEMPORARY_FOLDERS or (
        name.startswith(_PREFIXES) and name not in _SET_BY_IMPORTS
    )


class ImportGroups:
    """The modules of `MODULES` that were loaded, and the variables at that time.

    Attributes:
        groups: one dict for each note that found new modules: `modules` (name -> its file, in the
            order of the imports) and `variables`.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []

    def note(self, environ: Mapping[str, str]) -> None:
        """Add the modules that were loaded since the last note.

        Args:
            environ: the environment.
        """
        known = {name for group in self.groups for name in group["modules"]}
        # In the order of the script's imports, as in `sys.modules`. A script may set an entry to
        # None, which makes the import fail, or to an object without a specification, such as a
        # mock.
        origins = {
            name: getattr(spec, "origin", None)
            for name, module in list(sys.modules.items())
            if name in MODULES and name not in known
            if (spec := getattr(module, "__spec__", None)) is not None
        }
        if origins:
            variables = {name: value for name, value in environ.items() if read_by_imports(name)}
            self.groups.append({"modules": origins, "variables": variables})


_imports = ImportGroups()
_imports.note(os.environ)


def report(
    rank: int, environ: Mapping[str, str] = os.environ, imports: ImportGroups = _imports
) -> None:
    """Write the report of this rank if HVDKIT_RECORD_DIR is set. Ignore errors of the file."""
    folder = environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    imports.note(environ)
    with contextlib.suppress(OSError), replacing(Path(folder) / file_name(rank)) as draft:
        draft.write_text(json.dumps({"imports": imports.groups}))
