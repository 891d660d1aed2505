"""The ranks of a benchmark: do a step when the runner asks for it."""

import io
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Workload(Protocol):
    """The work of a rank."""

    def facts(self) -> dict[str, Any]:
        """Return the number of parameter tensors and their bytes: `parameters` and `bytes`."""
        ...

    def prepare(self) -> None:
        """Prepare a step. Not timed."""
        ...

    def step(self) -> None:
        """Make a step. Timed."""
        ...

    def after_step(self) -> None:
        """Complete a step. Not timed."""
        ...

    def norm(self) -> float:
        """Return the norm of the reduced gradients of the first step."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


def serve(spec: Mapping[str, Any], build: Callable[[], Workload]) -> None:
    """Execute the commands of the runner until `finish`."""
    with socket.socket(socket.AF_UNIX) as connection:
        # Connect first, so that the runner notices if this process ends.
        connection.connect(spec["socket"])
        with connection.makefile("rw") as stream:
            _serve(stream, build)


def _serve(stream: io.TextIOWrapper, build: Callable[[], Workload]) -> None:
    def answer(**values: Any) -> None:
        stream.write(json.dumps(values) + "\n")
        stream.flush()

    answer(pid=os.getpid())
    work = build()
    answer(**work.facts())
    for line in map(str.strip, stream):
        if line == "prepare":
            work.prepare()
            answer()
        elif line == "step":
            began, cpu_began = time.perf_counter(), time.process_time()
            work.step()
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
            work.after_step()
            answer(seconds=seconds, cpu=cpu)
        elif line == "norm":
            answer(norm=work.norm())
        else:
            answer()
            break
    work.close()


def engine_in_use(spec: Mapping[str, Any], hvd: Any) -> None:
    """Initialise `hvd`, after checking that hvdkit and the engine are the expected ones."""
    import horovod

    import hvdkit

    for package, expected in ((horovod, spec["engine"]), (hvdkit, spec["hvdkit"])):
        used = Path(str(package.__file__)).parent
        if used != Path(expected):
            raise SystemExit(f"this rank uses {used}; expected {expected}")
    hvd.init()
    if hvd.size() != spec["size"]:
        raise SystemExit(f"the job has {hvd.size()} ranks; expected {spec['size']}")
