"""The loop of a benchmark's rank: execute the commands of the runner, `hvdkit bench`."""

import os
import resource
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from hvdkit.bench import control

# The variables in which launchers tell a process its rank.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class Workload(Protocol):
    """The work of a rank."""

    def facts(self) -> dict[str, Any]:
        """Return what the runner needs to know about this rank, once."""
        ...

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Execute a command of the runner, and return the answer."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


def rank_of_this_process() -> int:
    """Return the rank that the launcher has given to this process."""
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit(f"this process has no rank: expected one of {', '.join(_RANK_VARIABLES)}")


def serve(spec: Mapping[str, Any], rank: int, build: Callable[[], Workload]) -> None:
    """Execute the commands of the runner until `finish`."""
    # Connect first, so that the runner notices if this process ends.
    runner = control.connect(spec, control.RANK, rank)
    runner.send({})
    work = build()
    host = {"host": socket.gethostname(), "available": psutil.virtual_memory().available}
    runner.send(work.facts() | host)
    while (message := runner.receive()) is not None:
        if message["do"] == "finish":
            runner.send({"peak": peak_memory()})
            work.close()
            return
        runner.send(work.answer(message["do"], message))
    # The runner has ended. Other ranks may have ended too, so call no collective.
    os._exit(1)


def peak_memory() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def init_checked(spec: Mapping[str, Any], hvd: Any) -> None:
    """Check that the imported hvdkit and engine are the expected ones, and call `hvd.init()`.

    Raises:
        SystemExit: an imported package is in another folder than expected, or the job has another
            number of ranks.
    """
    import horovod

    import hvdkit

    for package, expected in ((horovod, spec["engine"]), (hvdkit, spec["hvdkit"])):
        used = Path(str(package.__file__)).parent
        # None: any folder, because another host may have its installation elsewhere.
        if expected is not None and used != Path(expected):
            raise SystemExit(f"this rank uses {used}; expected {expected}")
    hvd.init()
    if hvd.size() != spec["size"]:
        raise SystemExit(f"the job has {hvd.size()} ranks; expected {spec['size']}")
