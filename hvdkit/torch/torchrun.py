"""Connect ranks that `torchrun` has started, through its store.

torchrun passes each process its rank and the address of a store. Each rank writes the network
interfaces of its host to the store. Rank 0 chooses a network, starts the rendezvous server, and
writes the environment variables of all ranks to the store.
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
from hvdkit.launch.agent import open_files
from hvdkit.launch.agent.host_facts import engine_revision
from hvdkit.launch.control.network import (
    LOOPBACK,
    HostNetwork,
    Interface,
    choose_interfaces,
    own_interfaces,
    source_address,
)
from hvdkit.rendezvous.server import KEY_REVISION, RendezvousServer, gloo_environment
from hvdkit.system.plain_files import parse_json

#: How long a rank waits until all ranks have called `hvd.init()`. Some may prepare data first.
TIMEOUT = timedelta(minutes=30)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def horovod_variables(timeout: timedelta = TIMEOUT) -> dict[str, str]:
    """Return Horovod's environment variables for this rank. Every rank calls it.

    Args:
        timeout: the time to wait for the other ranks.

    Raises:
        HvdkitError: a rank does not call it in time, no network connects the hosts, or another
            process has written to torchrun's store.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    open_files.raise_limit(open_files.needed_by_rank(size))
    store = _store(rank, size, timeout)
    store.set(f"host.{rank}", json.dumps(_own_host()))
    if rank == 0:
        hosts = [parse_json(_get(store, f"host.{each}", each, timeout)) for each in range(size)]
        store.set("variables", json.dumps(_variables(hosts)))
    found = dict(parse_json(_get(store, "variables", 0, timeout))[rank])
    # Any process that reaches the store can write to it.
    if found.keys() != gloo_environment(rank, size, "", 0, key="").keys():
        raise HvdkitError(
            f"torchrun's store has the variables {', '.join(sorted(found))} for rank {rank}, which "
            f"rank 0 does not write. Another process writes to the port MASTER_PORT: find it, or "
            f"start the ranks with `hvdkit run`"
        )
    return found


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    """Connect to the store at MASTER_ADDR. It belongs to torchrun's agent or to rank 0."""
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
            # The script's init_process_group() may use the same port.
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise HvdkitError(
            f"cannot connect to torchrun's store at {address}:{port} (MASTER_ADDR, MASTER_PORT): "
            f"{error}"
        ) from error
    _kept_alive.append(store)
    run, restart = os.environ["TORCHELASTIC_RUN_ID"], os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return PrefixStore(f"hvdkit/{run}/{restart or 0}", store)


# Objects needed until the end of the process: the store and rank 0's rendezvous server.
_kept_alive: list[Any] = []


def _get(store: Store, key: str, rank: int, timeout: timedelta) -> bytes:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise HvdkitError(
            f"rank {rank} did not call hvd.init() within {timeout.total_seconds():g} s: every rank "
            f"that torchrun starts must call it"
        ) from error
    return bytes(store.get(key))


def _own_host() -> dict[str, Any]:
    """Return the facts about this rank and its host that rank 0 needs."""
    return {
        "machine": f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}",
        "node": int(os.environ.get("GROUP_RANK", 0)),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "engine": engine_revision(),
        "interfaces": [asdict(interface) for interface in own_interfaces()],
        "reached_at": source_address(os.environ["MASTER_ADDR"]),
    }


def _variables(hosts: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Start the rendezvous server; return each rank's environment variables."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for host in hosts:
        nodes.setdefault(host["node"], []).append(host)
    interfaces = _interfaces(nodes)
    open_files.raise_limit(
        open_files.needed_by_rank(len(hosts)) + open_files.needed_by_launcher(len(hosts), 0)
    )
    server = RendezvousServer(
        interfaces[hosts[0]["node"]].address,
        size=len(hosts),
        stores_without_key=any(host["engine"] < KEY_REVISION for host in hosts),
    )
    atexit.register(server.close)
    _kept_alive.append(server)
    sizes = {node: len(ranks) for node, ranks in nodes.items()}
    variables = []
    for rank, host in enumerate(hosts):
        node, local_rank = host["node"], host["local_rank"]
        interface = interfaces[node]
        # The nodes that have a rank with this local rank.
        across = sorted(other for other, size in sizes.items() if size > local_rank)
        variables.append(
            gloo_environment(
                rank,
                len(hosts),
                server.address,
                server.port,
                interface.name,
                # Several nodes may be on one machine.
                f"node{node}",
                local_rank,
                sizes[node],
                across.index(node),
                len(across),
                server.key,
            )
        )
    return variables


def _interfaces(nodes: dict[int, list[dict[str, Any]]]) -> dict[int, Interface]:
    """Return the network interface for the ranks of each node."""
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
