"""Run an interleaved benchmark: all variants, in turns, on each network and model."""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks import hosts as network_hosts
from benchmarks.jobs import HOSTS, Job
from benchmarks.report import show
from benchmarks.variants import NETWORKS, Benchmark, Machine, Variant, some_of
from hvdkit.errors import HvdkitError, UsageError

#: The largest relative difference of the gradients' norms: 16-bit wire formats change far less.
AGREEMENT = 0.02

# The next job needs the memory of the largest one, and a reserve for what it allocates in a step.
SPARE_MEMORY = 1.5


def run_command(work: Callable[[], None], program: str) -> int:
    """Call `work`. Print errors and return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As for Ctrl-C, so that jobs and files are removed.
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
    """Write the results so far to the file of --json, if given."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Measure the variants on each network and model, and print the results."""
    machine = Machine(benchmark, options)
    models = some_of(options.models, benchmark.models, "--models")
    networks = some_of(options.networks, NETWORKS, "--networks")
    limited = [network for network in networks if network != "loopback"]
    if limited and (reason := network_missing()):
        raise HvdkitError(f"--networks {','.join(limited)}: {reason}")
    result: dict[str, Any] = {"ranks": HOSTS * options.ranks_per_host, "runs": []}
    for network in networks:
        with contextlib.ExitStack() as stack:
            cluster = None
            if network != "loopback":
                # Stock Horovod listens on the address of the hostname, whatever its interface.
                made = network_hosts.hosts(HOSTS, own_name_is_local=False)
                cluster = stack.enter_context(made)
                for host in cluster.hosts:
                    network_hosts.limit_rate(host, network)
            controllers = ["gloo", "mpi"] if cluster is None else ["gloo"]
            variants_by_controller = machine.variants_by_controller(controllers)
            for model in models:
                for controller, variants in variants_by_controller.items():
                    run = one_run(machine, variants, network, cluster, model)
                    result["runs"].append(run | {"controller": controller})
                    save(options, result)
                    show(benchmark, run)


def network_missing() -> str | None:
    """Return why this machine cannot limit a link between hosts; None if it can."""
    if reason := network_hosts.missing():
        return reason
    for program, package in (("tc", "iproute2"), ("iperf3", "iperf3")):
        if shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            return f"needs the program {program}: apt-get install {package}"
    return None


def one_run(
    machine: Machine,
    variants: Sequence[Variant],
    network: str,
    cluster: network_hosts.Cluster | None,
    model: str,
) -> dict[str, Any]:
    """Measure all variants with one model on one network."""
    options = machine.options
    turns = options.steps or 20
    size = HOSTS * options.ranks_per_host
    run: dict[str, Any] = {"network": network, "model": model, "size": size}
    if cluster is not None:
        run["bytes_per_second"] = link_rate(cluster)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        jobs: list[Job] = []
        for variant in variants:
            print(f"{network}, {model}: starting {variant.name}", flush=True)
            check_memory(jobs)
            spec = {"task": "turns", "model": model, "size": size}
            job = Job(machine, variant, folder, spec, cluster)
            stack.callback(job.close)
            job.start()
            if not options.keep_running:
                job.pause()
            jobs.append(job)
        check_consistency(jobs)
        run |= {"parameters": jobs[0].facts["parameters"], "bytes": jobs[0].facts["bytes"]}
        run["idle"] = {job.variant.name: job.idle_share() for job in jobs}
        run["seconds"] = {job.variant.name: [] for job in jobs}
        run["cpu"] = {job.variant.name: [] for job in jobs}
        for turn in range(turns):
            # A random order, so that no variant always follows the same other one.
            for job in random.Random(turn).sample(jobs, len(jobs)):
                job.resume()
                seconds, cpu = job.step()
                if not options.keep_running:
                    job.pause()
                run["seconds"][job.variant.name].append(seconds)
                run["cpu"][job.variant.name].append(cpu)
            if (turn + 1) % 5 == 0 or turn + 1 == turns:
                print(f"{network}, {model}: turn {turn + 1} of {turns}", flush=True)
        if cluster is not None:
            # The mean of the rate before and after the steps.
            run["bytes_per_second"] = (run["bytes_per_second"] + link_rate(cluster)) / 2
        for job in jobs:
            job.finish()
    run["load"] = psutil.getloadavg()[0]
    return run


def check_memory(jobs: "Sequence[Job]") -> None:
    """Raise if there is too little memory for one more job."""
    largest = max((job.resident() for job in jobs), default=0)
    available = psutil.virtual_memory().available
    if available < SPARE_MEMORY * largest:
        raise HvdkitError(
            f"too little memory for all variants at once: {available / 2**30:.1f} GiB left, "
            f"with {len(jobs)} started, the largest with {largest / 2**30:.1f} GiB. Name fewer "
            f"with --variants"
        )


def check_consistency(jobs: "Sequence[Job]") -> None:
    """Raise if the first reduced gradients of the variants differ."""
    norms = {
        j.variant.name: j.norms
        for j in jobs
        if j.variant.controller and not any(map(math.isnan, j.norms))
    }
    if not norms:
        return
    expected = next(iter(norms.values()))[0]
    for name, of_ranks in norms.items():
        for rank, norm in enumerate(of_ranks):
            if not math.isclose(norm, expected, rel_tol=AGREEMENT):
                raise HvdkitError(
                    f"{name} computes other gradients than {next(iter(norms))}: their norm on "
                    f"rank {rank} is {norm:g}; expected {expected:g}"
                )


def link_rate(cluster: network_hosts.Cluster) -> float:
    """Return the TCP bandwidth between two hosts in bytes/s, both ways at once: the slower way."""
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
            in_host = client.command(command)
            done = subprocess.run(in_host, capture_output=True, text=True, timeout=60, check=False)
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
