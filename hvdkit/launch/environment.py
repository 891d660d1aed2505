"""The environment of the ranks: what is forwarded to other hosts, and what each rank is given.

It travels on an agent's standard input, never on a command line, which other users of a host can
read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hvdkit.errors import UsageError
from hvdkit.launch.plan import Place
from hvdkit.processes import MARK, without_place

#: What the ranks on other hosts need of this process's environment, besides _PREFIXES.
_NAMES = {
    "PATH",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "CUDA_HOME",
    "LANG",
    "LC_ALL",
    "TZ",
}
_PREFIXES = (
    "CONDA_",
    "CUBLAS_",
    "FI_",
    "GLOO_",
    "HF_",
    "HOROVOD_",
    "HVDKIT_",
    "KERAS_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TF_",
    "TORCH_",
    "UCX_",
    "XLA_",
)

# `HF_TOKEN` and `HOROVOD_SECRET_KEY` begin as others do that are needed.
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)

# Horovod's Gloo waits this long for a peer, also in mid-training.
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_GLOO_DEFAULT_SECONDS = 30


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """What of `env` goes to ranks on other hosts: what training needs, and no secret."""
    return {
        name: value
        for name, value in without_place(env).items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and name != MARK
        and not _SECRET.search(name)
    }


def explicit(env: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """The variables of `-x NAME` (its value here) and `-x NAME=VALUE`.

    Raises:
        UsageError: a name is none, or is not set here.
    """
    chosen = {}
    for text in extra:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-x {text}: {name!r} is not the name of a variable")
        if not equals and name not in env:
            raise UsageError(f"-x {name}: it is not set here; set it, or give -x {name}=VALUE")
        chosen[name] = value if equals else env[name]
    return chosen


def defaults(place: Place, cores: int, start_timeout: float) -> dict[str, str]:
    """What a rank is given where neither the user nor its host's environment sets it.

    Args:
        place: the rank's place.
        cores: the number of cores of its host.
        start_timeout: seconds that ranks may take, one after the other, to come up.
    """
    return {
        # Else every rank on a host starts a thread per core, and they fight for them.
        "OMP_NUM_THREADS": str(max(1, cores // place.local_size)),
        # Into a pipe Python writes in blocks of 8 KB: a log would stand still for minutes.
        "PYTHONUNBUFFERED": "1",
        # A rank that is up waits for the last one at least as long as the launcher does.
        _GLOO_TIMEOUT: str(max(_GLOO_DEFAULT_SECONDS, round(start_timeout) + 5)),
    }


def pinned_gpu(place: Place, visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES with the one GPU of this local rank.

    Args:
        place: the rank's place.
        visible: what the variable is where the rank would run, if set; GPUs are taken from it.

    Raises:
        UsageError: there are fewer GPUs in `visible` than ranks on the host.
    """
    devices = visible.split(",") if visible else [str(n) for n in range(place.local_size)]
    if len(devices) < place.local_size:
        raise UsageError(
            f"--pin-gpus: {place.host.name} has CUDA_VISIBLE_DEVICES={visible} and "
            f"{place.local_size} ranks; expected a GPU for each"
        )
    return {"CUDA_VISIBLE_DEVICES": devices[place.local_rank]}
