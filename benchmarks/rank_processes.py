"""Run the ranks of a benchmark, on this machine or on two hosts in network namespaces."""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.bench import namespaces

_ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 900


def arguments(description: str | None, variants: Sequence[str]) -> argparse.Namespace:
    """Return the options of a benchmark of several variants."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--turns", type=int, default=10, help="steps of each (default: 10)")
    parser.add_argument("--variants", default=",".join(variants), help="default: %(default)s")
    parser.add_argument("--two-hosts", metavar="RATE", help="two hosts, such as 1Gbit (tc's units)")
    return parser.parse_args()


def measure(module: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Run `python -m MODULE VARIANTS TURNS DEVICE` on each rank; return what the first prints."""
    rank = [sys.executable, "-m", module, options.variants, str(options.turns)]
    with contextlib.ExitStack() as stack:
        if options.two_hosts is None:
            return _ranks([[*rank, "lo"]] * options.np, "127.0.0.1", 1)
        if (reason := namespaces.missing()) is not None:
            raise SystemExit(reason)
        cluster = stack.enter_context(namespaces.hosts(2, own_name_is_local=False))
        for host in cluster.hosts:
            namespaces.limit_rate(host, options.two_hosts)
        commands = [
            host.command([*rank, host.interface])
            for host in cluster.hosts
            for _ in range(options.np // 2)
        ]
        return _ranks(commands, cluster.hosts[0].address, 2)


def _ranks(commands: Sequence[Sequence[str]], address: str, hosts: int) -> Mapping[str, Any]:
    """Run one rank for each command, and return what the first one prints."""
    of_host = len(commands) // hosts
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    base = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(commands))}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "TORCHELASTIC_RUN_ID": "bench"}
    started = [
        subprocess.Popen(
            command,
            env=os.environ
            | base
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % of_host),
                "GROUP_RANK": str(rank // of_host),
            },
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        output, _ = started[0].communicate(timeout=_SECONDS)
        if any(process.wait(timeout=60) for process in started):
            raise SystemExit("a rank has failed; see its error above")
    finally:
        for process in started:
            process.kill()
    return dict(json.loads(output))
