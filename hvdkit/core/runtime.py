"""Starting and ending Horovod in a process. An adapter makes one `Runtime`, over its Horovod."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from hvdkit.errors import HvdkitError, UsageError

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

# Variables that only processes started by torchrun have all of.
_TORCHRUN = frozenset(
    {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
)

# The module of each framework that loads Horovod's extension for it.
_EXTENSIONS = {"torch": "horovod.torch.mpi_ops", "tensorflow": "horovod.tensorflow.mpi_ops"}


class Engine(Protocol):
    """What has to be known of the installed Horovod; `hvdkit.engine.describe.Engine` has it."""

    @property
    def version(self) -> str:
        """As pip knows it."""
        ...

    @property
    def frameworks(self) -> Mapping[str, str]:
        """Framework -> the version that its extension was compiled against."""
        ...

    @property
    def ours(self) -> bool:
        """Whether `hvdkit build` made it."""
        ...


class Horovod(Protocol):
    """The functions of a framework's `horovod.*.mpi_ops` that are needed here."""

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
        """This process's rank among those of its host."""
        ...

    def local_size(self) -> int:
        """The number of ranks on its host."""
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
    """Within it, an adapter imports its Horovod.

    Args:
        framework: `torch` or `tensorflow`.
        version: the version of it that is imported.
        engine: the installed Horovod.
        errors: what importing an extension that does not fit raises.

    Raises:
        ImportError: it does not load with this version of the framework, or another framework's
            is loaded already: two in one process crash or hang.
    """
    for other, extension in _EXTENSIONS.items():
        if other != framework and extension in sys.modules:
            raise ImportError(
                f"horovod.{other} is loaded already, and Horovod works with one framework per "
                f"process: import either hvdkit.{framework} or hvdkit.{other}"
            )
    with warnings.catch_warnings():
        # On another version of the framework than it was built for, Horovod advises a pip command
        # that cannot work. `init` says it again, with one that can.
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
    """Horovod's life in this process.

    Args:
        framework: `torch` or `tensorflow`.
        version: the version of it that is imported.
        engine: the installed Horovod.
        horovod: the framework's `mpi_ops`.
        use_own_gpu: told the local rank, makes that GPU this process's; only called where several
            ranks share a host.
        meet_under_torchrun: returns Horovod's variables for this rank's place; called where
            torchrun started several ranks.
    """

    def __init__(
        self,
        framework: str,
        version: str,
        engine: Engine,
        horovod: Horovod,
        use_own_gpu: Callable[[int], None],
        meet_under_torchrun: Callable[[], Mapping[str, str]],
    ) -> None:
        self._framework = framework
        self._version = version
        self._engine = engine
        self._horovod = horovod
        self._use_own_gpu = use_own_gpu
        self._meet_under_torchrun = meet_under_torchrun
        self._generation = 0
        self._announced = False

    @property
    def generation(self) -> int:
        """Changes, on all ranks alike, when what they agreed on before may be void."""
        return self._generation

    def renew(self) -> None:
        """What the ranks agreed on is void: for when they come back from `join`."""
        self._generation += 1

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialise Horovod; takes what Horovod's `init` takes (`comm`, `process_sets`).

        Beyond that, a collective that not all ranks enter ends the job after half an hour instead
        of never (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and its relatives, where set, win), and a
        plain `python script.py` is a job of one rank that needs neither MPI nor a network. Ranks
        that torchrun started find each other through its store. Of several ranks on a host, each
        works on the GPU of its local rank, unless the script chooses.

        Raises:
            HvdkitError: a launcher started several processes, and they did not become one job.
        """
        horovod = self._horovod
        limit_stalls(os.environ)
        # Ranks given as `comm` are the user's choice, and may well be a part of those started.
        whole_world = not (args or kwargs.get("comm"))
        by_torchrun = ranks_started_by_torchrun(os.environ)
        if by_torchrun > 1:
            if not horovod.gloo_built():
                raise HvdkitError(
                    f"{by_torchrun} ranks were started by torchrun, and Horovod "
                    f"{self._engine.version} here has no Gloo to connect them. Run `hvdkit build "
                    f"--controllers gloo,mpi`, or start the script with mpirun."
                )
            # They stay, for `init` after `shutdown`.
            os.environ.update(self._meet_under_torchrun())
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
                f"{processes} processes were started by mpirun or srun, but each became a job of "
                f"its own. The launcher must be of the MPI that Horovod was built with (see "
                f"`hvdkit doctor`), and srun may need --mpi=pmix."
            )
        if horovod.local_size() > 1:
            self._use_own_gpu(horovod.local_rank())
        self.renew()
        self._announce()

    def shutdown(self) -> None:
        """End Horovod in this process. Ranks that wait for this one get an error."""
        self._horovod.shutdown()

    def _announce(self) -> None:
        """Say on rank 0, once, what will be missing."""
        if self._announced or self._horovod.rank() != 0:
            return
        self._announced = True
        engine = self._engine
        log = logging.getLogger(f"hvdkit.{self._framework}")
        if not engine.ours:
            log.warning(
                "Horovod %s was not built by `hvdkit build`: over Gloo a rank that never comes is "
                "waited for without end, jobs on several hosts may bind to the wrong interface, "
                "and float16 is slow; gradients are copied more often than needed. Results are "
                "the same.",
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
    """Let a collective that not all ranks enter end the job, unless `environ` says otherwise.

    Raises:
        UsageError: one of Horovod's variables for this is not a whole number.
    """
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


def ranks_started_by_torchrun(environ: Mapping[str, str]) -> int:
    """Return how many ranks torchrun started, this one included; 0 where it did not.

    Horovod's own variables win, because `hvdkit run` sets those of torchrun as well. These win over
    those of MPI and Slurm, because `srun torchrun` starts one torchrun on each node.

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
def one_rank_over_gloo(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let Horovod make a job of one rank without MPI, its default, which would start a daemon.

    The settings are taken back, so that a launcher which the script itself starts does not get
    them. A controller that the user has chosen stays.
    """
    settings = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Otherwise Gloo wants the address of the hostname, which may not resolve.
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
