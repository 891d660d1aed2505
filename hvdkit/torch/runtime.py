"""Starting and ending Horovod in a PyTorch process."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hvdkit.engine.describe import require
from hvdkit.errors import HvdkitError, UsageError

engine = require("torch")

with warnings.catch_warnings():
    # On another version of torch than it was built for, Horovod advises a pip command that cannot
    # work. `init` says it again, with one that can.
    warnings.filterwarnings("ignore", message="Framework pytorch installed with version")
    try:
        from horovod.torch import mpi_ops
    except ImportError as error:
        raise ImportError(
            f"Horovod {engine.version} was built for torch {engine.frameworks['torch']} and does "
            f"not load with torch {torch.__version__} ({error}). Run `hvdkit build`."
        ) from error

log = logging.getLogger("hvdkit.torch")

#: Seconds after which a collective that some ranks never entered ends the job. Half an hour is
#: what torch.distributed grants its Gloo collectives: longer than rank 0 needs to write a
#: checkpoint or to evaluate, shorter than a night of reserved machines.
STALL_SHUTDOWN_SECONDS = 1800

# How launchers other than Horovod's say how many processes they started.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)

_generation = 0
_announced = False


def generation() -> int:
    """Changes, on all ranks alike, when what they agreed on before may be void."""
    return _generation


def init(*args: Any, **kwargs: Any) -> None:
    """Initialise Horovod; takes what `horovod.torch.init` takes (`comm`, `process_sets`).

    Beyond that, a collective that not all ranks enter ends the job after half an hour instead of
    never (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and its relatives, where set, win), and a plain
    `python script.py` is a job of one rank that needs neither MPI nor a network.

    Raises:
        HvdkitError: a launcher started several processes, and they did not become one job.
    """
    global _generation
    _limit_stalls(os.environ)
    # Ranks given as `comm` are the user's choice, and may well be a part of those started.
    whole_world = not (args or kwargs.get("comm"))
    processes = _processes_started_for_mpi(os.environ)
    if processes > 1 and not mpi_ops.mpi_built():
        raise HvdkitError(
            f"{processes} processes were started by mpirun or srun, and Horovod {engine.version} "
            f"here has no MPI to connect them. Run `hvdkit build --controllers gloo,mpi`, or "
            f"start the script with horovodrun."
        )
    if processes > 1 and os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        raise HvdkitError(
            f"{processes} processes were started by mpirun or srun, and HOROVOD_CONTROLLER is "
            f"gloo, which cannot connect them: unset it, or start the script with horovodrun"
        )
    alone = whole_world and processes == 1
    with _one_rank_over_gloo(os.environ) if alone else nullcontext():
        mpi_ops.init(*args, **kwargs)
    if whole_world and processes > 1 and mpi_ops.size() == 1:
        mpi_ops.shutdown()
        raise HvdkitError(
            f"{processes} processes were started by mpirun or srun, but each became a job of its "
            f"own. The launcher must be of the MPI that Horovod was built with (see `hvdkit "
            f"doctor`), and srun may need --mpi=pmix."
        )
    _generation += 1
    _announce()


def shutdown() -> None:
    """End Horovod in this process. Ranks that wait for this one get an error."""
    mpi_ops.shutdown()


def join(device: int = -1) -> int:
    """Take no further part until every rank has come here; what the others reduce gets zeros.

    Horovod's, for ranks with fewer batches than others. Afterwards the ranks compare anew what
    they mean to reduce, because one that has joined before its first step never did.

    Args:
        device: where to make the zeros: a GPU's number, or -1 for the CPU.

    Returns:
        The last rank to join.
    """
    global _generation
    last = int(mpi_ops.join(device))
    _generation += 1
    return last


def _limit_stalls(environ: MutableMapping[str, str]) -> None:
    if _integer(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        return
    # Horovod ignores a shutdown time that is below its check time (60 s unless set), so each is
    # given a value that goes with the other.
    check = _integer(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS")
    ends = _integer(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    if ends is None:
        ends = max(STALL_SHUTDOWN_SECONDS, 2 * (check or 0))
        environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(ends)
    elif check is None and 0 < ends < 60:
        environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(max(1, ends // 2))


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}: expected a whole number") from None


def _processes_started_for_mpi(environ: Mapping[str, str]) -> int:
    """How many processes mpirun or srun started with this one, itself included; 0 if unknown.

    Horovod's own launchers tell Horovod, not MPI, so under them the number is unknown, too.
    """
    if "HOROVOD_SIZE" in environ or "HOROVOD_RANK" in environ:
        return 0
    for name in _SIZE_VARIABLES:
        if name in environ:
            return _integer(environ, name) or 0
    return 0 if "PMIX_RANK" in environ else 1


@contextmanager
def _one_rank_over_gloo(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let Horovod make a job of one rank without MPI, its default, which would start a daemon.

    The settings are taken back, so that a launcher which the script itself starts does not get
    them.
    """
    settings = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Otherwise Gloo wants the address of the hostname, which may not resolve.
        "HOROVOD_GLOO_IFACE": "lo",
    }
    added = []
    if mpi_ops.gloo_built() and "HOROVOD_CONTROLLER" not in environ:
        added = [name for name in settings if name not in environ]
    environ.update((name, settings[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            del environ[name]


def _announce() -> None:
    """Say on rank 0, once, what will be missing."""
    global _announced
    if _announced or mpi_ops.rank() != 0:
        return
    _announced = True
    if not engine.ours:
        log.warning(
            "Horovod %s was not built by `hvdkit build`: over Gloo a rank that never comes is "
            "waited for without end, jobs on several hosts may bind to the wrong interface, and "
            "float16 is slow; gradients are copied more often than needed. Results are the same.",
            engine.version,
        )
    built_for = engine.frameworks["torch"]
    if built_for not in ("unknown", torch.__version__):
        log.warning(
            "Horovod %s was built for torch %s, and this is torch %s: run `hvdkit build`.",
            engine.version,
            built_for,
            torch.__version__,
        )
