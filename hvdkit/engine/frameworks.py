"""Find the installed deep-learning frameworks and their build settings.

Each framework is imported in a new interpreter, because an import here would load gigabytes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from hvdkit.engine import toolchain
from hvdkit.errors import HvdkitError, UsageError

#: Framework -> the oldest supported version.
OLDEST = {"torch": "2.1", "tensorflow": "2.16"}

_PROBES = {
    "torch": """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
    "cuda": torch.version.cuda,
    "cuda_architectures": [a[3:] for a in torch._C._cuda_getArchFlags().split() if a[:3] == "sm_"]
        if torch.version.cuda else [],
}))
""",
    "tensorflow": """
import json, tensorflow as tf
build = tf.sysconfig.get_build_info()
print(json.dumps({
    "version": tf.__version__,
    "cxx11_abi": "-D_GLIBCXX_USE_CXX11_ABI=1" in tf.sysconfig.get_compile_flags(),
    "cuda": build.get("cuda_version") if build.get("is_cuda_build") else None,
    "cuda_architectures": [
        c.split("_")[1] for c in build.get("cuda_compute_capabilities", []) if c[:3] == "sm_"
    ],
}))
""",
}

_PROBE_SECONDS = 180  # Enough for the first import of TensorFlow from a network file system.


@dataclass(frozen=True)
class Framework:
    """An installed framework.

    Attributes:
        name: torch or tensorflow.
        version: its full version, local part included.
        cxx11_abi: whether its libraries use libstdc++'s C++11 ABI.
        cuda: the CUDA version that it was built for; None for a CPU build.
        cuda_architectures: the compute capabilities that it has code for, such as `90`.
    """

    name: str
    version: str
    cxx11_abi: bool
    cuda: str | None
    cuda_architectures: tuple[str, ...] = ()


def find(names: Sequence[str] | None = None) -> tuple[Framework, ...]:
    """Return the frameworks `names`; by default all installed ones.

    Raises:
        UsageError: an unknown name, or one that is not installed.
        HvdkitError: none is installed, one does not import, or is too old.
    """
    if names is None:
        wanted = [name for name in OLDEST if importlib.util.find_spec(name)]
        if not wanted:
            raise HvdkitError(
                f"no framework is importable by {sys.executable}; expected PyTorch >= "
                f"{OLDEST['torch']} or TensorFlow >= {OLDEST['tensorflow']}. Install one into this "
                "environment first: pip install torch, or pip install tensorflow-cpu."
            )
    else:
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name not in OLDEST:
                raise UsageError(f"unknown framework {name!r}; expected some of: torch, tensorflow")
            if importlib.util.find_spec(name) is None:
                raise UsageError(
                    f"the framework {name} was requested, but {sys.executable} cannot import it. "
                    f"Install it into this environment, or omit it from --frameworks."
                )
    return tuple(_probe(name) for name in wanted)


def _probe(name: str) -> Framework:
    try:
        found = toolchain.ask_python(_PROBES[name], _PROBE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise HvdkitError(
            f"{name} did not import within {_PROBE_SECONDS} s; try `{sys.executable} -c "
            f"'import {name}'`"
        ) from error
    except HvdkitError as error:
        raise HvdkitError(
            f"{name} is installed, but importing it fails: {error}. Repair it, or omit it from "
            "--frameworks."
        ) from error
    architectures = tuple(found.pop("cuda_architectures"))
    framework = Framework(name, cuda_architectures=architectures, **found)
    # Accept a pre-release of the oldest version: vendors' distributions have such versions.
    if Version(Version(framework.version).base_version) < Version(OLDEST[name]):
        raise HvdkitError(
            f"{name} {framework.version} is too old; hvdkit builds against {name} >= "
            f"{OLDEST[name]}. Upgrade it. Or, if a Horovod for it is installed, keep this Horovod."
        )
    return framework
