"""The agents that mpirun or srun starts, one for each rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hvdkit.errors import HvdkitError
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.listener import AgentListener
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.socket_connection import SocketConnection
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.launchers.external_command import ExternalLauncher, cannot_accept


@contextmanager
def agents_started_by(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    listener: AgentListener,
    plan: Plan,
    timeout: float,
    holds: bool = False,
) -> Iterator[AgentPool]:
    """Run mpirun or srun, which starts an agent for each rank, and accept the agents.

    Yields the agents, in the order of ranks. On exit all have ended, and the listener is closed.

    Args:
        name: mpirun or srun.
        listener: the listener for its agents.
        timeout: seconds for all agents to connect.
        holds: whether to hold back the command's messages about ranks that have failed.

    Raises:
        HvdkitError: the command cannot be started or ends, or agents do not connect in time.
    """
    connected: dict[int, SocketConnection] = {}

    def is_consequence(explained: bool) -> bool:
        """Return whether what mpirun says now may follow from the end of an agent."""
        has_ended = len(connected) == plan.size and any(c.ended for c in connected.values())
        return holds and (explained or has_ended)

    launcher = ExternalLauncher(name, command, env, is_consequence)
    deadline = time.monotonic() + timeout
    try:
        with AgentPool(listener.silence) as agents:
            while len(connected) < plan.size:
                launcher.check(listener.problem)
                if time.monotonic() > deadline:
                    missing = [rank for rank in range(plan.size) if rank not in connected]
                    if listener.problem:
                        raise HvdkitError(cannot_accept(listener.problem))
                    queued = name == "srun" and not connected
                    also = ", and that no other step uses the allocation (`squeue --steps`)"
                    raise StartError(
                        f"{plan.describe(missing)} did not connect within {timeout:g} s "
                        f"(--start-timeout). Check that its host can connect to "
                        f"{listener.address[0]}"
                        f"{also if queued else ''}",
                        [plan.places[rank].host.name for rank in missing],
                    )
                if (accepted := listener.accept()) is not None:
                    rank, connection = accepted
                    host = plan.places[rank].host
                    connected[rank] = SocketConnection(
                        host, connection, agents.events, name, launcher.lost_line
                    )
                    # Add it at once: an agent without heartbeats takes the launcher for lost.
                    agents.connections.append(connected[rank])
            agents.connections[:] = [connected[rank] for rank in sorted(connected)]
            agents.external = launcher
            listener.close()
            yield agents
    except KeyboardInterrupt:
        # A signal before the start of the ranks. Agents that start later cannot connect any more.
        launcher.explained = holds
        raise
    finally:
        listener.close()
        launcher.end()
        if not launcher.explained:
            launcher.show_held()
