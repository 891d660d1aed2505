"""Start and shut down Horovod in a process.

Each adapter (`hvdkit.torch`, `hvdkit.tensorflow`) makes one `Runtime` for its framework's Horovod.
`hvd.init` and `hvd.shutdown` call it.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdkit.engine.describe import Engine
from hvdkit.errors import HvdkitError
from hvdkit.runtime import loaded_modules, record_files
from hvdkit.runtime.departure import Departure
from hvdkit.runtime.engine_files import EngineFiles
from hvdkit.runtime.environment import (
    check_gloo_timeout,
    limit_stalls,
    one_rank_over_gloo,
    processes_started_for_mpi,
    ranks_started_by_torchrun,
    stall_limit,
)
from hvdkit.runtime.host_collectives import HostCollectives, check_choice
from hvdkit.runtime.import_in_root import import_in_root
from hvdkit.runtime.recorder import Recorder, stall_seconds, use_folder
from hvdkit.runtime.shared_gpus import separate_for_nccl
from hvdkit.runtime.standard_streams import write_whole_output

# A framework's Horovod extension is loaded by the module horovod.FRAMEWORK.mpi_ops.
_FRAMEWORKS = ("torch", "tensorflow")


@contextmanager
def loading(
    framework: str,
    version: str,
    engine: Engine,
    errors: tuple[type[Exception], ...] = (ImportError,),
) -> Iterator[None]:
    """Context in which an adapter imports its Horovod.

    Args:
        framework: `torch` or `tensorflow`.
        version: the imported version of the framework.
        engine: the installed Horovod.
        errors: the classes of errors that the import may raise if the extension was built for
            another version.

    Raises:
        ImportError: the extension does not load with this version of the framework, or another
            framework's extension is loaded already. Two extensions in one process crash or hang.
    """
    for other in _FRAMEWORKS:
        if other != framework and f"horovod.{other}.mpi_ops" in sys.modules:
            raise ImportError(
                f"horovod.{other} is loaded already, and Horovod works with one framework per "
                f"process: import either hvdkit.{framework} or hvdkit.{other}"
            )
    with warnings.catch_warnings():
        # Horovod warns about another version of the framework, with a pip command that does not
        # work. `init` warns with a command that does.
        warnings.filterwarnings("ignore", message=r"Framework \w+ installed with version")
        try:
            import_in_root(f"horovod.{framework}.mpi_ops")
            yield
        except errors as error:
            raise ImportError(
                f"Horovod {engine.version} was built for {framework} "
                f"{engine.frameworks[framework]} and does not load with {framework} {version} "
                f"({error}). Run `hvdkit build`."
            ) from error


@dataclass(eq=False)
class Runtime:
    """Start and shut down Horovod in this process.

    Attributes:
        framework: `torch` or `tensorflow`.
        version: the imported version of the framework.
        engine: the installed Horovod.
        horovod: the framework's `horovod.*.mpi_ops`.
        use_own_gpu: called with the local rank; makes the GPU with this number the default GPU.
            Called only if several ranks share a host.
        torchrun_variables: returns Horovod's environment variables for this rank. Called only if
            torchrun started several ranks.
        refuse_collectives: makes all collectives raise. Called in each process that is forked from
            this one.
    """

    framework: str
    version: str
    engine: Engine
    horovod: Any
    use_own_gpu: Callable[[int], None]
    torchrun_variables: Callable[[], Mapping[str, str]]
    refuse_collectives: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        # For each generation, whether it began with an `init` of all ranks.
        self._generations: list[bool] = []
        library = self.horovod._basics.MPI_LIB_CTYPES
        #: The notes of ranks that have called `shutdown`.
        self.departure = Departure()
        #: The engine's shared memory for the ranks of one host.
        self.host_collectives = HostCollectives(library)
        #: The engine's flight recorder.
        self.recorder = Recorder(library)
        self._files = EngineFiles(library)
        libc = ctypes.CDLL(None)
        os.register_at_fork(after_in_child=lambda: self._after_fork(libc))

    @property
    def generation(self) -> int:
        """A number that `init` and the return from `join` increase, on all ranks."""
        return len(self._generations)

    def begin_generation(self) -> None:
        """Increase `generation`: the ranks must check their consistency again."""
        self._generations.append(False)

    @property
    def _starts(self) -> int:
        """The calls of `init` that have connected this rank with all ranks."""
        return sum(self._generations)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialise Horovod. Takes the arguments of Horovod's `init`: `comm`, `process_sets`.

        Differences from Horovod:
        - If not all ranks enter a collective, the job ends after half an hour. Horovod would wait
          forever. HOROVOD_STALL_SHUTDOWN_TIME_SECONDS changes this time, and
          HOROVOD_STALL_CHECK_DISABLE=1 removes the limit.
        - `python script.py` is a job of one rank, without MPI and without a network.
        - Ranks that torchrun started connect to each other through torchrun's store.
        - If several ranks share a host, the default GPU of a rank is the GPU whose number is the
          local rank, unless the script chooses another GPU.
        - Buckets of ranks on one host are reduced in shared memory, unless a rank has
          HVDKIT_COLLECTIVES=flat.

        As in Horovod, a second call without `shutdown` between the two calls does nothing.

        Raises:
            HvdkitError: a launcher started several processes, but they did not form one job, or
                the installed Horovod cannot connect them. Or `shutdown` has finalized MPI.
            UsageError: HVDKIT_COLLECTIVES, HVDKIT_STALL_TIMEOUT, HOROVOD_GLOO_TIMEOUT_SECONDS, or a
                variable for Horovod's stall check has an invalid value.
        """
        check_choice()
        stall_seconds(os.environ)
        horovod = self.horovod
        if horovod.is_initialized():
            # The `init` of horovod.torch would also forget the handles of started collectives.
            horovod._basics.init(*args, **kwargs)
            return
        write_whole_output()
        limit_stalls(os.environ)
        check_gloo_timeout(os.environ)
        use_folder(os.environ)
        # `comm` may name only some of the ranks that were started.
        whole_world = not (args or kwargs.get("comm"))
        by_torchrun = ranks_started_by_torchrun(os.environ)
        if by_torchrun > 1:
            if not horovod.gloo_built():
                raise HvdkitError(
                    f"torchrun started {by_torchrun} ranks, but the installed Horovod "
                    f"{self.engine.version} has no Gloo to connect them. Run `hvdkit build "
                    f"--controllers gloo,mpi`, or start the script with mpirun."
                )
            # The variables stay set, because `init` may be called again after `shutdown`.
            os.environ.update(self.torchrun_variables())
        processes = 1 if by_torchrun == 1 else processes_started_for_mpi(os.environ)
        if processes > 1 and not horovod.mpi_built():
            raise HvdkitError(
                f"mpirun or srun started {processes} processes, but the installed Horovod "
                f"{self.engine.version} has no MPI to connect them. Run `hvdkit build "
                f"--controllers gloo,mpi`, or start the script with `hvdkit run`."
            )
        if processes > 1 and os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
            raise HvdkitError(
                f"mpirun or srun started {processes} processes, but HOROVOD_CONTROLLER is gloo, "
                f"which cannot connect them. Unset HOROVOD_CONTROLLER, or start the script with "
                f"`hvdkit run`."
            )
        single = whole_world and processes == 1 and horovod.gloo_built()
        over_gloo = single or os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
        if not over_gloo and mpi_finalized(horovod._basics.MPI_LIB_CTYPES):
            raise HvdkitError(
                "hvd.init() is called after hvd.shutdown(), which has finalized MPI. MPI cannot "
                "start again in a process. Call hvd.shutdown() only once, import mpi4py.MPI before "
                "the first hvd.init(), or use Gloo (`hvdkit run --launcher gloo`)."
            )
        # Before the engine's thread starts, which reads the environment.
        separate_for_nccl()
        self.departure.remove()
        if whole_world:
            # Otherwise the launcher would wait for ranks that do not take part.
            self.recorder.note_init(record_files.ENTERED, self._starts + 1)
        with (
            one_rank_over_gloo(os.environ) if single else nullcontext(),
            self._files.given(os.environ),
        ):
            horovod.init(*args, **kwargs)
        if whole_world and processes > 1 and horovod.size() == 1:
            horovod.shutdown()
            raise HvdkitError(
                f"mpirun or srun started {processes} processes, but each formed its own job. Use "
                f"the launcher of the MPI that Horovod was built with (see `hvdkit doctor`). srun "
                f"may need --mpi=pmix."
            )
        self._generations.append(whole_world)
        if whole_world:
            self.recorder.note_init(record_files.CONNECTED, self._starts)
        # This runs once, and before the shutdown that Horovod has registered.
        atexit.unregister(self._note_leaving)
        atexit.register(self._note_leaving)
        if horovod.local_size() > 1:
            self.use_own_gpu(horovod.local_rank())
        self.departure.begin(horovod.size())
        self.recorder.watch(horovod.rank(), horovod.size(), stall_limit(os.environ))
        loaded_modules.report(horovod.rank())
        self._report()
        # A rank that has started before has warned.
        if self.generation == 1:
            self._warn_of_engine()

    def shutdown(self) -> None:
        """Shut down Horovod in this process. Ranks that wait for this one get an error."""
        with contextlib.suppress(ValueError):  # Horovod has not been initialized
            self.departure.write(self.horovod.rank())
        self.recorder.unwatch()
        self._note_leaving()
        self.horovod.shutdown()
        # The script may now run for any time without Horovod.
        self.recorder.note_init(record_files.LEAVING, self._starts, ended=True)

    def _note_leaving(self) -> None:
        """Note for the launcher that this rank shuts Horovod down."""
        self.recorder.note_init(record_files.LEAVING, self._starts)

    def _after_fork(self, libc: ctypes.CDLL) -> None:
        """Let a process that is forked after `init` end without the engine's clean-up.

        The engine's thread does not exist in a forked process, so a shutdown would wait forever.
        The destructors of Gloo would close connections of this rank.
        """
        if not self._generations:
            return
        self.refuse_collectives()
        atexit.unregister(self.horovod._basics.shutdown)
        atexit.unregister(self._note_leaving)
        with contextlib.suppress(AttributeError):  # a C library without `on_exit`
            # `exit` then calls `_exit` with its status, before the destructors.
            libc.on_exit(libc._exit, None)

    def _report(self) -> None:
        """Log on rank 0 how buckets are reduced."""
        if self.horovod.rank() != 0 or self.horovod.size() == 1:
            return
        reason = self.host_collectives.flat_reason()
        logging.getLogger(f"hvdkit.{self.framework}").info(
            "buckets are reduced %s", f"through sockets: {reason}" if reason else "in shared memory"
        )

    def _warn_of_engine(self) -> None:
        """Warn on rank 0 about an engine without hvdkit's patches or for another version."""
        if self.horovod.rank() != 0:
            return
        engine = self.engine
        log = logging.getLogger(f"hvdkit.{self.framework}")
        if not engine.ours:
            log.warning(
                "Horovod %s was not built by `hvdkit build`. Over Gloo the start may hang if a "
                "rank is missing, jobs on several hosts may use the wrong interface, float16 is "
                "slow, and gradients are copied more often. A few float16 sums are wrong. To "
                "avoid this, run `hvdkit build`.",
                engine.version,
            )
        built_for = engine.frameworks[self.framework]
        if built_for not in ("unknown", self.version):
            log.warning(
                "Horovod %s was built for %s %s, but %s %s is installed: run `hvdkit build`.",
                engine.version,
                self.framework,
                built_for,
                self.framework,
                self.version,
            )


def refuse_in_fork(*_: Any) -> NoReturn:
    """Raise the error of a collective in a forked process, where it could wait forever."""
    raise HvdkitError(
        "a collective was called in a process that a rank has forked after hvd.init(). Only the "
        "rank itself can call collectives. Move the call out of the forked process"
    )


def mpi_finalized(library: ctypes.CDLL) -> bool:
    """Return whether this process has ended its use of MPI; False without MPI.

    Args:
        library: the loaded extension of Horovod.
    """
    flag = ctypes.c_int()
    # The library finds the functions of the MPI that it is linked to.
    with contextlib.suppress(AttributeError):
        library.MPI_Finalized(ctypes.byref(flag))
    return bool(flag.value)
