"""Connect ranks that `torchrun` has started, through its store.

torchrun tells each process its rank and where its store is. Through the store the ranks tell each
other what networks their hosts have. Rank 0 chooses one, and runs Horovod's rendezvous.
"""

import atexit
import json
import os
import socket
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from hvdkit.errors import HvdkitError
from hvdkit.launch import open_files
from hvdkit.launch.network import (
    LOOPBACK,
    HostNetwork,
    Interface,
    choose_interfaces,
    own_interfaces,
    source_address,
)
from hvdkit.rendezvous import RendezvousServer, gloo_environment

#: For ranks to call `hvd.init()`, and not just to be started: they may prepare data before.
TIMEOUT = timedelta(minutes=30)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def horovod_variables(timeout: timedelta = TIMEOUT) -> dict[str, str]:
    """Return Horovod's variables for the place of this rank. Every rank calls it.

    Args:
        timeout: how long to wait for the other ranks.

    Raises:
        HvdkitError: ranks do not come, or no network connects their hosts.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    open_files.raise_limit(open_files.needed_by_rank(size))
    store = _store(rank, size, timeout)
    store.set(f"host.{rank}", json.dumps(_own_host()))
    if rank == 0:
        hosts = [json.loads(_get(store, f"host.{each}", each, timeout)) for each in range(size)]
        store.set("places", json.dumps(_places(hosts)))
    return dict(json.loads(_get(store, "places", 0, timeout))[rank])


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    """Connect to the store at MASTER_ADDR, which torchrun's agent may have; else rank 0 has it."""
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            address,
            port,
            world_size=size,
            is_master=rank == 0 and not of_agent,
            timeout=timeout,
            wait_for_workers=False,
            # The script's own init_process_group() may make one there, too.
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise HvdkitError(
            f"torchrun's store at {address}:{port} cannot be reached (MASTER_ADDR, MASTER_PORT): "
            f"{error}"
        ) from error
    _kept.append(store)
    run, restart = os.environ["TORCHELASTIC_RUN_ID"], os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return PrefixStore(f"hvdkit/{run}/{restart or 0}", store)


# What must live as long as the process: rank 0's store and rendezvous.
_kept: list[Any] = []


def _get(store: Store, key: str, rank: int, timeout: timedelta) -> bytes:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise HvdkitError(
            f"rank {rank} did not come to hvd.init() within {timeout.total_seconds():g} s: every "
            f"rank that torchrun starts must call it"
        ) from error
    return bytes(store.get(key))


def _own_host() -> dict[str, Any]:
    """Return what rank 0 has to know of this rank and its host."""
    return {
        "machine": f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}",
        "node": int(os.environ.get("GROUP_RANK", 0)),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "interfaces": [asdict(interface) for interface in own_interfaces()],
        "reached_at": source_address(os.environ["MASTER_ADDR"]),
    }


def _places(hosts: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Start the rendezvous; return each rank's variables."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for host in hosts:
        nodes.setdefault(host["node"], []).append(host)
    interfaces = _interfaces(nodes)
    open_files.raise_limit(
        open_files.needed_by_rank(len(hosts)) + open_files.needed_by_launcher(len(hosts), 0)
    )
    server = RendezvousServer(interfaces[hosts[0]["node"]].address, size=len(hosts))
    atexit.register(server.close)
    _kept.append(server)
    sizes = {node: len(ranks) for node, ranks in nodes.items()}
    places = []
    for rank, host in enumerate(hosts):
        node, local_rank = host["node"], host["local_rank"]
        interface = interfaces[node]
        # Ranks with the same local rank, one of each node that has as many.
        across = sorted(other for other, size in sizes.items() if size > local_rank)
        places.append(
            gloo_environment(
                rank,
                len(hosts),
                server.address,
                server.port,
                interface.name,
                # Tells nodes apart, several of which may be on one machine.
                f"node{node}",
                local_rank,
                sizes[node],
                across.index(node),
                len(across),
                server.key,
            )
        )
    return places


def _interfaces(nodes: dict[int, list[dict[str, Any]]]) -> dict[int, Interface]:
    """Return what the ranks of each node talk over."""
    first = {node: ranks[0] for node, ranks in nodes.items()}
    if len({host["machine"] for host in first.values()}) == 1:
        return dict.fromkeys(nodes, LOOPBACK)
    networks = {
        f"node {node}": HostNetwork(
            [Interface(**fields) for fields in host["interfaces"]], host["reached_at"]
        )
        for node, host in first.items()
    }
    chosen = choose_interfaces(networks)
    return {node: chosen[f"node {node}"] for node in nodes}
