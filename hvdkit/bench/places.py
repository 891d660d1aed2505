"""The places for the ranks of a benchmark: this machine, network namespaces, or other hosts."""

import argparse
import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvdkit.bench import link, namespaces
from hvdkit.bench.control import TOKEN_VARIABLE
from hvdkit.errors import UsageError
from hvdkit.launch.control import network
from hvdkit.launch.hosts import allocation, hosts
from hvdkit.launch.hosts.allocation import batch_hosts
from hvdkit.ranks import RankCommand, RankGroup, start_gloo, start_mpi, start_ranks
from hvdkit.rendezvous.server import RendezvousServer, gloo_environment
from hvdkit.system.processes import python_command

_HOSTS = 2


@dataclass(frozen=True, kw_only=True)
class Place(ABC):
    """A place for ranks.

    Attributes:
        size: the number of ranks.
        addresses: addresses of this machine. Ranks try them in this order.
        mpirun: the program that starts ranks over MPI.
        link_rate: the rate of the link between hosts, in bytes per second; None if unknown.
        shares_files: whether all ranks have the files and installations of this machine.
        controllers: the controllers that jobs can have here.
        python: the Python of the ranks.
    """

    size: int
    addresses: Sequence[str] = ("127.0.0.1",)
    mpirun: str = "mpirun"
    link_rate: float | None = None
    shares_files: ClassVar[bool] = True
    controllers: ClassVar[Sequence[str]] = ("gloo", "mpi")
    python: str = sys.executable

    @property
    def most_ranks_per_machine(self) -> int:
        """The largest number of ranks that share the memory of one machine."""
        return self.size

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on the first host. A namespace is a host."""
        return self.size

    @abstractmethod
    def describe(self) -> str:
        """Return a text, such as `2 ranks on this machine`."""

    @abstractmethod
    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        controller: str,
        size: int,
    ) -> RankGroup:
        """Start `size` ranks of `command` over `controller`, with exactly the environment `env`."""


class ThisMachine(Place):
    """All ranks on this machine."""

    def describe(self) -> str:
        """See `Place`."""
        return f"{self.size} rank{'s' * (self.size > 1)} on this machine"

    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        controller: str,
        size: int,
    ) -> RankGroup:
        """See `Place`."""
        if controller == "mpi":
            return start_mpi(command, size, mpirun=self.mpirun, env=env)
        # torch.distributed must use the same interface. Stock engines send no key.
        env = {**env, "GLOO_SOCKET_IFNAME": "lo"}
        return start_gloo(command, size, env=env, stores_without_key=True)


@dataclass(frozen=True, kw_only=True)
class LimitedHosts(Place):
    """Network namespaces of this machine, with limited links between them.

    Attributes:
        cluster: the namespaces.
        rate: the rate of each link, as the user has given it.
    """

    cluster: namespaces.Cluster
    rate: str
    controllers: ClassVar[Sequence[str]] = ("gloo",)

    @property
    def ranks_per_host(self) -> int:
        """See `Place`."""
        return self.size // len(self.cluster.hosts)

    def describe(self) -> str:
        """See `Place`."""
        count = len(self.cluster.hosts)
        each = self.size // count
        return f"{count} hosts (network namespaces, {self.rate}) x {each} rank{'s' * (each > 1)}"

    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        controller: str,  # noqa: ARG002
        size: int,
    ) -> RankGroup:
        """See `Place`."""
        each = max(1, size // len(self.cluster.hosts))
        # Stock engines send no key.
        server = RendezvousServer(self.cluster.address, stores_without_key=True)
        try:
            commands = []
            for rank in range(size):
                i, local = divmod(rank, each)
                host = self.cluster.hosts[i]
                gloo = gloo_environment(
                    rank,
                    size,
                    server.address,
                    server.port,
                    key=server.key,
                    interface=namespaces.INTERFACE,
                    hostname=host.name,
                    local_rank=local,
                    local_size=each,
                    cross_rank=i,
                    cross_size=size // each,
                )
                gloo["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
                commands.append(RankCommand(host.command(command), {**env, **gloo}))
            return start_ranks(commands, on_stop=[server.close])
        except BaseException:
            server.close()
            raise


@dataclass(frozen=True, kw_only=True)
class ClusterHosts(Place):
    """The hosts of a cluster. `hvdkit run` starts the ranks.

    Attributes:
        job_hosts: the hosts and their slots.
        words: arguments of `hvdkit run`: the hosts, and how to reach them.
    """

    job_hosts: Sequence[hosts.Host]
    words: Sequence[str]
    shares_files: ClassVar[bool] = False

    @property
    def most_ranks_per_machine(self) -> int:
        """See `Place`. Not more than `size`, because a job may leave slots empty."""
        return min(self.size, max(host.slots for host in self.job_hosts))

    @property
    def ranks_per_host(self) -> int:
        """See `Place`. The ranks fill one host after another."""
        return min(self.size, self.job_hosts[0].slots)

    def describe(self) -> str:
        """See `Place`."""
        names = ", ".join(f"{host.name}:{host.slots}" for host in self.job_hosts[:8])
        more = ", ..." if len(self.job_hosts) > 8 else ""
        return f"{self.size} rank{'s' * (self.size > 1)} on {names}{more}"

    def launch(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        controller: str,
        size: int,
    ) -> RankGroup:
        """See `Place`. The only process of the group is `hvdkit run`."""
        run = python_command("-m", "hvdkit", "run", "-np", str(size), *self.words)
        run += ["-x", TOKEN_VARIABLE]
        if controller == "mpi":
            run += ["--launcher", "mpi", "--mpirun", self.mpirun]
        elif not allocation.inside(env):
            run += ["--launcher", "gloo"]
        # Ranks are stopped between their turns. `hvdkit run` must not report a stall then.
        quiet = {"HVDKIT_STALL_TIMEOUT": "0"}
        return start_ranks([RankCommand([*run, *command], {**env, **quiet})])


@contextlib.contextmanager
def opened(options: argparse.Namespace, mpirun: str | None) -> Iterator[Place]:
    """Yield the place that the options of the command line describe.

    The namespaces of `--two-hosts` exist until the end of the context.

    Args:
        options: see `hvdkit.bench.arguments`.
        mpirun: the path of mpirun; None if there is none.

    Raises:
        UsageError: the options contradict each other, or the number of ranks is not possible.
    """
    if options.num_proc is not None and options.num_proc < 1:
        raise UsageError(f"-np is {options.num_proc}: expected at least 1")
    if options.two_hosts is None:
        yield _choose(options, mpirun or "mpirun")
        return
    size = _size_of_two_hosts(options)
    limited = link.parse_rate(options.two_hosts, "--two-hosts")
    # Stock Horovod listens on the address of the hostname, even if it was given another interface.
    with namespaces.hosts(_HOSTS, own_name_is_local=False) as cluster:
        link.limit(cluster, limited)
        measured = link.measure(cluster) if link.can_measure() else None
        yield LimitedHosts(
            cluster=cluster,
            size=size,
            rate=options.two_hosts,
            addresses=(cluster.address,),
            link_rate=measured or limited,
        )


def _choose(options: argparse.Namespace, mpirun: str) -> Place:
    size = options.num_proc
    found = _hosts(options)
    if found is None:
        return ThisMachine(size=2 if size is None else size, mpirun=mpirun)
    slots = hosts.total_slots(found)
    if size is not None and size > slots:
        raise UsageError(
            f"-np is {size}, but the hosts have {hosts.name_slots(slots)}: expected at most these"
        )
    words = ["--python", options.python]
    for option, value in (
        ("-H", options.hosts),
        ("--hostfile", options.hostfile),
        ("--ssh-port", options.ssh_port),
        ("--ssh-identity", options.ssh_identity),
        ("--network", options.network),
        ("--start-timeout", options.start_timeout),
    ):
        if value is not None:
            words += [option, str(value)]
    words += [f"--ssh-arg={argument}" for argument in options.ssh_arg]
    # Any address may be the one that the hosts can reach.
    own = [interface.address for interface in network.own_interfaces()]
    return ClusterHosts(
        job_hosts=found,
        size=slots if size is None else size,
        words=words,
        addresses=own or ["127.0.0.1"],
        mpirun=mpirun,
        python=options.python,
    )


def _size_of_two_hosts(options: argparse.Namespace) -> int:
    """Return the number of ranks of `--two-hosts`.

    Raises:
        UsageError: it is odd, or hosts were named too.
    """
    if options.hosts is not None or options.hostfile is not None:
        raise UsageError("--two-hosts makes its own hosts: remove -H or --hostfile")
    size = _HOSTS if options.num_proc is None else int(options.num_proc)
    if size < _HOSTS or size % _HOSTS:
        raise UsageError(f"-np is {size} with --two-hosts: expected an even number")
    return size


def _hosts(options: argparse.Namespace) -> Sequence[hosts.Host] | None:
    """Return the hosts of the options or of the batch system; None for this machine."""
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts)
    if options.hostfile is not None:
        return hosts.read_hostfile(options.hostfile)
    if allocation.inside(os.environ):
        return allocation.read(os.environ).hosts
    found = batch_hosts(os.environ)
    return None if found is None else found[1]
