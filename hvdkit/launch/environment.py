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

#: What belongs to one host or to one login, and has its own value on another host. An allocation's
#: variables are read here, and would mislead there.
_OF_HOST = {
    "_",
    "COLORTERM",
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "DISPLAY",
    "HOME",
    "HOST",
    "HOSTNAME",
    "LINES",
    "LOGNAME",
    "LS_COLORS",
    "MAIL",
    "OLDPWD",
    "PS1",
    "PWD",
    "SHELL",
    "SHLVL",
    "STY",
    "TEMP",
    "TERM",
    "TMP",
    "TMPDIR",
    "USER",
    "WAYLAND_DISPLAY",
    "WINDOWID",
    "XAUTHORITY",
}
_PREFIXES_OF_HOST = (
    "BASH_",
    "DBUS_",
    "GPG_",
    "LC_TERMINAL",
    "LSB_",
    "PBS_",
    "SGE_",
    "SLURM_",
    "SSH_",
    "TERM_",
    "TMUX",
    "VSCODE_",
    "XDG_",
)

#: What training is known to read: shown by a dry run, with values.
_KNOWN = {
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
_KNOWN_PREFIXES = (
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

# But not an InfiniBand partition (UCX_IB_PKEY), TOKENIZERS_PARALLELISM or GIT_AUTHOR_NAME.
_SECRET = re.compile(
    r"TOKEN(?!IZER)|(?<!_IB_P)KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR(_|$))", re.IGNORECASE
)

# Horovod's Gloo waits this long for a peer, also in mid-training.
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_GLOO_DEFAULT_SECONDS = 30


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Return what of `env` goes to ranks on other hosts, so that all ranks have the same.

    All but secrets and what belongs to this host.
    """
    return {name: value for name, value in _common(env).items() if not _SECRET.search(name)}


def withheld(env: Mapping[str, str]) -> list[str]:
    """Return the names in `env` whose values the user may miss on other hosts."""
    secrets = [name for name in _common(env) if _SECRET.search(name)]
    return sorted([*secrets, *({"CUDA_VISIBLE_DEVICES"} & env.keys())])


def known(env: Mapping[str, str]) -> dict[str, str]:
    """Return what of `forwarded(env)` training is known to read."""
    return {
        name: value
        for name, value in forwarded(env).items()
        if name in _KNOWN or name.startswith(_KNOWN_PREFIXES)
    }


def _common(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_place(env).items()
        if name not in _OF_HOST and not name.startswith(_PREFIXES_OF_HOST) and name != MARK
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
