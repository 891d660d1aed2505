"""The environment of the ranks: variables that are forwarded to other hosts or set by hvdkit.

Agents receive the variables on their standard input, because other users can read command lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.errors import UsageError
from hvdkit.launch.control.plan import Place, Plan
from hvdkit.launch.control.start_error import StartUsageError
from hvdkit.launch.hosts.allocation import BATCH_SYSTEMS
from hvdkit.runtime.recorder import stall_seconds
from hvdkit.system.plain_files import read_named
from hvdkit.system.processes import GROUP_VARIABLE, without_rank_variables

#: Variables that are valid only on one host or in one login, and are not forwarded. Variables of an
#: allocation are included: the launcher has read them, and on other hosts they would be wrong.
_HOST_VARIABLES = {
    *("_", "COLORTERM", "COLUMNS", "CUDA_VISIBLE_DEVICES", "DISPLAY", "HOME", "HOST", "HOSTNAME"),
    *("LINES", "LOGNAME", "LS_COLORS", "MAIL", "OLDPWD", "PS1", "PWD", "SHELL", "SHLVL", "STY"),
    *("TEMP", "TERM", "TMP", "TMPDIR", "USER", "WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY"),
}
_HOST_PREFIXES = (
    *("BASH_", "DBUS_", "GPG_", "LC_TERMINAL", "SLURM_", "SSH_", "TERM_", "TMUX", "VSCODE_"),
    "XDG_",
    *(prefix for system in BATCH_SYSTEMS for prefix in system.prefixes),
)

#: Variables that training programs read and that contain no secrets. A dry run shows their values.
_KNOWN = {
    *("PATH", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH"),
    *("LD_PRELOAD", "VIRTUAL_ENV", "CUDA_HOME", "LANG", "LC_ALL", "TZ"),
}
_KNOWN_PREFIXES = (
    *("CONDA_", "CUBLAS_", "FI_", "GLOO_", "HF_", "HOROVOD_", "HVDKIT_", "KERAS_", "KMP_"),
    *("MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TF_", "TORCH_", "UCX_", "XLA_"),
)

# Names of secrets. UCX_IB_PKEY (an InfiniBand partition), TOKENIZERS_PARALLELISM and
# GIT_AUTHOR_NAME do not match.
_SECRET = re.compile(
    r"TOKEN(?!IZER)|(?<!_IB_P)KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH(?!OR(_|$))", re.IGNORECASE
)

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"

# How long Horovod's Gloo waits for another rank, also during training.
_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_GLOO_DEFAULT_SECONDS = 30


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` for other hosts: all but secrets and host variables."""
    return {name: value for name, value in _common(env).items() if not _SECRET.search(name)}


def withheld(env: Mapping[str, str]) -> list[str]:
    """Return the names in `env` that are not forwarded, but may be needed on other hosts."""
    secrets = [name for name in _common(env) if _SECRET.search(name)]
    return sorted([*secrets, *({"CUDA_VISIBLE_DEVICES"} & env.keys())])


def known(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `forwarded(env)` that training is known to read."""
    return {
        name: value
        for name, value in forwarded(env).items()
        if name in _KNOWN or name.startswith(_KNOWN_PREFIXES)
    }


def _common(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_rank_variables(env).items()
        if name not in _HOST_VARIABLES
        and not name.startswith(_HOST_PREFIXES)
        and name != GROUP_VARIABLE
    }


def explicit(env: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """Return the variables of `-x NAME` (its value here), `-x 'PREFIX_*'` and `-x NAME=VALUE`.

    Raises:
        UsageError: a name is not valid, or is not set here.
    """
    chosen: dict[str, str] = {}
    for text in extra:
        name, equals, value = text.partition("=")
        if not equals and name.endswith("*"):
            found = {key: env[key] for key in env if key.startswith(name[:-1])}
            if not found:
                raise UsageError(
                    f"-x {name}: no variable here has this prefix; set one, or correct the prefix"
                )
            chosen |= found
            continue
        if not re.fullmatch(_NAME, name):
            raise UsageError(
                f"-x {name}: {name!r} is not the name of a variable; expected letters, digits and _"
            )
        if not equals and name not in env:
            raise UsageError(f"-x {name}: {name} is not set here; set it, or give -x {name}=VALUE")
        chosen[name] = value if equals else env[name]
    return chosen


#: Variables for ranks that wait while one rank is at a breakpoint.
DEBUG_DEFAULTS: dict[str, str] = {
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    _GLOO_TIMEOUT: str(7 * 24 * 3600),
}


def rank_stall_seconds(env: Mapping[str, str], extra: Sequence[str], debug: bool) -> float:
    """Return the seconds without progress after which ranks write a record; 0 for never.

    Args:
        env: the environment of the launcher.
        extra: the user's `-x` arguments.
        debug: whether the ranks get `DEBUG_DEFAULTS`.

    Raises:
        UsageError: HVDKIT_STALL_TIMEOUT is not a number of seconds, or an argument is not valid.
    """
    return stall_seconds((DEBUG_DEFAULTS if debug else {}) | dict(env) | explicit(env, extra))


def defaults(place: Place, cores: int, start_timeout: float) -> dict[str, str]:
    """Return variables for a rank, which apply only if neither the user nor the host sets them.

    Args:
        cores: the number of cores of the rank's host.
        start_timeout: seconds for all ranks to register after the first one.
    """
    return {
        # Without this, every rank starts a thread per core, which is too many for the host.
        "OMP_NUM_THREADS": str(max(1, cores // place.local_size)),
        # Python writes to a pipe in blocks of 8 KB: lines would appear minutes later.
        "PYTHONUNBUFFERED": "1",
        # A rank waits for the last rank at least as long as the launcher does.
        _GLOO_TIMEOUT: str(max(_GLOO_DEFAULT_SECONDS, round(start_timeout) + 5)),
    }


def read_file(path: Path) -> list[str]:
    """Return the lines of an `--env-file`, each as an argument of `-x`.

    The format is Docker's: `NAME=VALUE` without quotes, or `NAME` for the value here. Lines that
    begin with `#` are comments.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        lines = read_named(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--env-file {path}: {reason}") from error
    found = []
    for number, text in enumerate(lines, 1):
        line = text.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        # The line may be a secret, and is not shown.
        if "\0" in line or not re.fullmatch(_NAME, line.partition("=")[0]):
            raise UsageError(f"--env-file {path}, line {number}: expected NAME=VALUE or NAME")
        found.append(line)
    return found


def torch_variables(plan: Plan, place: Place, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and those that litdata reads.

    Lightning, Accelerate and `torch.distributed.init_process_group()` read torchrun's variables.
    The user's own MASTER_ADDR and MASTER_PORT (`-x`) take precedence; see
    `prepare.rank_messages`. Without GLOBAL_RANK, litdata reads the samples of rank 0 on all ranks.

    Args:
        address: the address of rank 0's host.
        port: a free port of rank 0's host.
    """
    node = str(plan.node(place.host))
    # litdata divides WORLD_SIZE by NNODES, so it needs equally many ranks on all hosts.
    even = len({len(plan.on(host)) for host in plan.hosts}) == 1
    return {
        **({"NNODES": str(len(plan.hosts))} if even else {}),
        "GLOBAL_RANK": str(place.rank),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(plan.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": str(len(plan.hosts)),
        "NODE_RANK": node,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def pinned_gpu(place: Place, visible: str | None) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the one GPU of this local rank.

    Args:
        visible: the value of the variable on the rank's host; None if unset. One of its GPUs is
            chosen.

    Raises:
        StartUsageError: there are fewer GPUs in `visible` than ranks on the host.
    """
    devices = [str(n) for n in range(place.local_size)]
    if visible is not None:
        devices = [device for device in visible.split(",") if device]
    if len(devices) < place.local_size:
        raise StartUsageError(
            f"--pin-gpus: {place.host.name} has CUDA_VISIBLE_DEVICES={visible} and "
            f"{place.local_size} ranks; expected a GPU for each",
            [place.host.name],
        )
    return {"CUDA_VISIBLE_DEVICES": devices[place.local_rank]}
