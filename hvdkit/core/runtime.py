"""Start and end Horovod in a process. Each adapter has one `Runtime`."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from hvdkit.errors import HvdkitError, UsageError

#: Seconds after which a collective that some ranks have not entered ends the job.
#: torch.distributed has the same timeout for Gloo. Half an hour is longer than rank 0 needs to
#: write a checkpoint or to evaluate, and shorter than a night of reserved machines.
STALL_SHUTDOWN_SECONDS = 1800

# The number of processes, from launchers other than Horovod's.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)

# Only processes of torchrun have all of these variables.
_TORCHRUN = frozenset(
    {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
)

# The module of each framework that loads Horovod's extension for it.
_EXTENSIONS = {"torch": "horovod.torch.mpi_ops", "tensorflow": "horovod.tensorflow.mpi_ops"}


class Engine(Protocol):
    """The installed Horovod; see `hvdkit.engine.describe.Engine`."""

    @property
    def version(self) -> str:
        """The version of the package."""
        ...

    @property
    def frameworks(self) -> Mapping[str, str]:
        """Framework -> the version that its extension was compiled against."""
        ...

    @property
    def ours(self) -> bool:
        """Whether it was built by `hvdkit build`."""
        ...


class Horovod(Protocol):
    """The functions of a framework's `horovod.*.mpi_ops` that this module calls."""

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialise Horovod."""
        ...

    def shutdown(self) -> None:
        """End it."""
        ...

    def rank(self) -> int:
        """This process's rank."""
        ...

    def size(self) -> int:
        """The number of ranks."""
        ...

    def local_rank(self) -> int:
        """The local rank of this process."""
        ...

    def local_size(self) -> int:
        """The number of ranks on this host."""
        ...

    def mpi_built(self) -> bool:
        """Whether MPI is compiled in."""
        ...

    def gloo_built(self) -> bool:
        """Whether Gloo is compiled in."""
        ...


@contextmanager
def loading(
    framework: str,
    version: str,
    engine: Engine,
    errors: tuple[type[Exception], ...] = (ImportError,),
) -> Iterator[None]:
    """Let an adapter import its Horovod in the block, and convert errors.

    Args:
        framework: `torch` or `tensorflow`.
        version: the imported version of the framework.
        engine: the installed Horovod.
        errors: exceptions of importing an extension for another version.

    Raises:
        ImportError: Horovod does not load with this version of the framework, or the extension of
            another framework is already loaded: two in one process crash or hang.
    """
    for other, extension in _EXTENSIONS.items():
        if other != framework and extension in sys.modules:
            raise ImportError(
                f"horovod.{other} is loaded already, and Horovod works with one framework per "
                f"process: import either hvdkit.{framework} or hvdkit.{other}"
            )
    with warnings.catch_warnings():
        # For another version of the framework, Horovod advises a pip command that cannot work.
        # `init` logs a better one.
        warnings.filterwarnings("ignore", message=r"Framework \w+ installed with version")
        try:
            yield
        except errors as error:
            raise ImportError(
                f"Horovod {engine.version} was built for {framework} "
                f"{engine.frameworks[framework]} and does not load with {framework} {version} "
                f"({error}). Run `hvdkit build`."
            ) from error


class Runtime:
    """Starts and ends Horovod in this process.

    Args:
        framework: `torch` or `tensorflow`.
        version: the imported version of the framework.
        engine: the installed Horovod.
        horovod: the framework's `mpi_ops`.
        use_own_gpu: selects the GPU with the index of the local rank; called if several ranks share
            a host.
        connect_under_torchrun: returns Horovod's variables for this rank; called if torchrun
            started several ranks.
    """

    def __init__(
        self,
        framework: str,
        version: str,
        engine: Engine,
        horovod: Horovod,
        use_own_gpu: Callable[[int], None],
        connect_under_torchrun: Callable[[], Mapping[str, str]],
    ) -> None:
        self._framework = framework
        self._version = version
        self._engine = engine
        self._horovod = horovod
        self._use_own_gpu = use_own_gpu
        self._connect_under_torchrun = connect_under_torchrun
        self._generation = 0
        self._announced = False

    @property
    def generation(self) -> int:
        """A number that changes on all ranks when earlier agreements are void."""
        return self._generation

    def begin_generation(self) -> None:
        """Make earlier agreements of the ranks void, for example after `join`."""
        self._generation += 1

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialise Horovod, with the arguments of Horovod's `init` (`comm`, `process_sets`).

        In addition:
        - A collective that not all ranks enter ends the job after half an hour. Horovod's variables
          (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and others) take precedence.
        - `python script.py` is a job of one rank, without MPI and network.
        - Ranks that torchrun started connect through its store.
        - If several ranks share a host, each uses the GPU of its local rank, unless the script
          selects one.

        Raises:
            HvdkitError: a launcher started several processes, and they did not become one job.
        """
        horovod = self._horovod
        limit_stalls(os.environ)
        # The user may select some of the started ranks with `comm`.
        whole_world = not (args or kwargs.get("comm"))
        by_torchrun = ranks_started_by_torchrun(os.environ)
        if by_torchrun > 1:
            if not horovod.gloo_built():
                raise HvdkitError(
                    f"{by_torchrun} ranks were started by torchrun, and Horovod "
                    f"{self._engine.version} here has no Gloo to connect them. Run `hvdkit build "
                    f"--controllers gloo,mpi`, or start the script with mpirun."
                )
            # Keep the variables for `init` after `shutdown`.
            os.environ.update(self._connect_under_torchrun())
        processes = 1 if by_torchrun == 1 else processes_started_for_mpi(os.environ)
        if processes > 1 and not horovod.mpi_built():
            raise HvdkitError(
                f"{processes} processes were started by mpirun or srun, and Horovod "
                f"{self._engine.version} here has no MPI to connect them. Run `hvdkit build "
                f"--controllers gloo,mpi`, or start the script with horovodrun."
            )
        if processes > 1 and os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
            raise HvdkitError(
                f"{processes} processes were started by mpirun or srun, and HOROVOD_CONTROLLER is "
                f"gloo, which cannot connect them: unset it, or start the script with horovodrun"
            )
        alone = whole_world and processes == 1 and horovod.gloo_built()
        with one_rank_over_gloo(os.environ) if alone else nullcontext():
            horovod.init(*args, **kwargs)
        if whole_world and processes > 1 and horovod.size() == 1:
            horovod.shutdown()
            raise HvdkitError(
                f"{processes} processes were started by mpirun or srun, but each became a separate "
                f"job. Use the launcher of the MPI that Horovod was built with (see "
                f"`hvdkit doctor`); srun may need --mpi=pmix."
            )
        if horovod.local_size() > 1:
            self._use_own_gpu(horovod.local_rank())
        self.begin_generation()
        self._announce()

    def shutdown(self) -> None:
        """End Horovod in this process. Ranks that wait for this one get an error."""
        self._horovod.shutdown()

    def _announce(self) -> None:
        """Log on rank 0, once, the limits of this Horovod."""
        if self._announced or self._horovod.rank() != 0:
            return
        self._announced = True
        engine = self._engine
        log = logging.getLogger(f"hvdkit.{self._framework}")
        if not engine.ours:
            log.warning(
                "Horovod %s was not built by `hvdkit build`: over Gloo, ranks wait without a "
                "timeout for a missing rank, jobs on several hosts may bind to the wrong "
                "interface, and float16 is slow; gradients are copied more often than needed. "
                "Results are the same.",
                engine.version,
            )
        built_for = engine.frameworks[self._framework]
        if built_for not in ("unknown", self._version):
            log.warning(
                "Horovod %s was built for %s %s, and this is %s %s: run `hvdkit build`.",
                engine.version,
                self._framework,
                built_for,
                self._framework,
                self._version,
            )


def limit_stalls(environ: MutableMapping[str, str]) -> None:
    """Set a stall timeout in `environ`, unless the user has set one.

    Raises:
        UsageError: a variable is not a whole number.
    """
    if _integer(environ, "HOROVOD_STALL_CHECK_DISABLE"):
        return
    # Horovod ignores a shutdown time below its check time (default: 60 s), so set both.
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


def ranks_started_by_torchrun(environ: Mapping[str, str]) -> int:
    """Return how many ranks torchrun started, this one included; 0 if it did not.

    Horovod's variables take precedence, because `hvdkit run` sets those of torchrun as well.
    torchrun's take precedence over those of MPI and Slurm, because `srun torchrun` starts one
    torchrun per node.

    Raises:
        HvdkitError: torchrun was started by a rank of another job.
    """
    started = (_integer(environ, "WORLD_SIZE") or 0) if environ.keys() >= _TORCHRUN else 0
    if "HOROVOD_SIZE" not in environ and "HOROVOD_RANK" not in environ:
        return started
    outer = _integer(environ, "HOROVOD_SIZE")
    if started and outer is not None and started != outer:
        raise HvdkitError(
            f"torchrun has started {started} ranks inside a rank of a job of {outer} "
            f"(HOROVOD_SIZE): start the script with torchrun alone, or without it"
        )
    return 0


def processes_started_for_mpi(environ: Mapping[str, str]) -> int:
    """Return how many processes mpirun or srun started, this one included; 0 if unknown.

    It is unknown under Horovod's launchers, which set Horovod's variables only.
    """
    if "HOROVOD_SIZE" in environ or "HOROVOD_RANK" in environ:
        return 0
    for name in _SIZE_VARIABLES:
        if name in environ:
            return _integer(environ, name) or 0
    return 0 if "PMIX_RANK" in environ else 1


@contextmanager
def one_rank_over_gloo(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let Horovod create a job of one rank over Gloo; MPI, its default, would start a daemon.

    The settings are removed after the block, so that a launcher which the script starts does not
    inherit them. A controller that the user has chosen is kept.
    """
    settings = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Otherwise Gloo resolves the hostname, which may fail.
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
