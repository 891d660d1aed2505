"""Environment variables that `init` reads and sets: those of launchers, and limits of Horovod."""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from hvdkit.errors import HvdkitError, UsageError

# Seconds after which Horovod ends the job if some ranks have not entered a collective. The value
#: is the default of torch.distributed for Gloo. It is longer than rank 0 needs for a checkpoint or
#: a validation.
_STALL_SECONDS = 1800
# Horovod stores the numbers of its variables as `int`.
_MOST = 2**31 - 1
# Variables of MPI and Slurm with the number of processes that they started.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
# Only processes started by torchrun have all of these variables.
_TORCHRUN = frozenset(
    {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
)


def limit_stalls(environ: MutableMapping[str, str]) -> None:
    """Limit how long Horovod waits for ranks that do not enter a collective.

    Variables that the user has set are kept.

    Raises:
        UsageError: one of Horovod's variables for the stall check is not a whole number of at
            least 0.
    """
    if _integer(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        return
    # Horovod ignores a shutdown time below its check time (60 s by default).
    check = _integer(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS")
    shutdown = _integer(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    if shutdown is None:
        shutdown = min(_MOST, max(_STALL_SECONDS, 2 * (check or 0)))
        environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(shutdown)
    elif check is None and 0 < shutdown < 60:
        environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(max(1, shutdown // 2))


def stall_limit(environ: Mapping[str, str]) -> int:
    """Return the seconds that a collective may wait before the job ends; 0 for no limit.

    Call `limit_stalls` first.
    """
    if _integer(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        return 0
    return _integer(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0


def check_gloo_timeout(environ: Mapping[str, str]) -> None:
    """Check the variable that says how long Gloo waits for other ranks.

    Raises:
        UsageError: it is not a whole number of at least 1. Horovod would wait for 0 s.
    """
    _integer(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", least=1)


def _integer(environ: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not least <= number <= _MOST:
        raise UsageError(f"{name} is {text!r}: expected a whole number from {least} to {_MOST}")
    return number


def ranks_started_by_torchrun(environ: Mapping[str, str]) -> int:
    """Return the number of ranks that torchrun started, including this one; 0 without torchrun.

    Horovod's variables take precedence, because `hvdkit run` also sets torchrun's variables.
    torchrun's variables take precedence over MPI's and Slurm's, because `srun torchrun` starts one
    torchrun on each node.

    Raises:
        HvdkitError: a rank of another job started torchrun.
    """
    started = (_integer(environ, "WORLD_SIZE") or 0) if environ.keys() >= _TORCHRUN else 0
    if "HOROVOD_SIZE" not in environ and "HOROVOD_RANK" not in environ:
        return started
    outer = _integer(environ, "HOROVOD_SIZE")
    if started and outer is not None and started != outer:
        raise HvdkitError(
            f"torchrun started {started} ranks inside a rank of a job of {outer} ranks "
            f"(HOROVOD_SIZE). Start the script with one launcher only."
        )
    return 0


def processes_started_for_mpi(environ: Mapping[str, str]) -> int:
    """Return the number of processes that mpirun or srun started, including this one.

    Return 1 if neither mpirun nor srun started it, and 0 if the number is not known. The number is
    not known under Horovod's own launchers.
    """
    if "HOROVOD_SIZE" in environ or "HOROVOD_RANK" in environ:
        return 0
    for name in _SIZE_VARIABLES:
        if name in environ:
            return _integer(environ, name) or 0
    return 0 if "PMIX_RANK" in environ else 1


@contextmanager
def one_rank_over_gloo(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Context that selects Gloo for a job of one rank, because MPI would start a daemon.

    The variables are removed at the end, so that a launcher started by the script does not inherit
    them. A controller that the user has chosen is kept.
    """
    settings = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Without this Gloo resolves the hostname, which may fail.
        "HOROVOD_GLOO_IFACE": "lo",
    }
    added = []
    if "HOROVOD_CONTROLLER" not in environ:
        added = [name for name in settings if name not in environ]
    environ.update((name, settings[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            del environ[name]
