"""Run an agent: that of a host, or that of one rank of mpirun or srun.

    python -m hvdkit.launch.agent.main

The agent of a host (`Agent`) gets the launcher's messages on its standard input. mpirun and srun
start one agent for each rank instead (`RankAgent`). Two environment variables tell such an agent
how to connect to the launcher. With `--nodes`, users start the agents (`nodes.node_agent`).
"""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from hvdkit.launch.agent.agent import Agent
from hvdkit.launch.control import messages
from hvdkit.system.sealed import Refused, SealedConnection, WrongKey, introduce

# Between two attempts to connect to the launcher.
_RETRY_SECONDS = 0.2
#: The variables in which Open MPI, Hydra and Slurm store the rank. Slurm is last, because srun may
#: have started mpirun.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class RankAgent(Agent):
    """The agent of one rank, which mpirun or srun has started.

    The rank inherits the rank variables of mpirun or srun. The agent ends only after the launcher
    has closed the connection, or is lost.
    """

    def _inherited(self) -> tuple[Mapping[str, str], Sequence[int]]:
        # Hydra, the mpirun of MPICH, communicates with ranks over a descriptor that they inherit.
        hydra = os.environ.get("PMI_FD")
        return dict(os.environ), () if hydra is None else (int(hydra),)

    def _waits_for_launcher(self) -> bool:
        # When the agent of a rank that has failed ends, mpirun ends the other ranks at once. They
        # could not report their errors, and their SIGTERM would look like another failure.
        return self._done and not self._link.lost

    def _explain(self, reason: str) -> None:
        """Write nothing: mpirun and srun would show it, although they may have sent a signal."""

    def _send_news(self, with_records: bool = True) -> None:
        super()._send_news(with_records)
        state = self._ranks.records.init_state()
        for rank in self._ranks.all:
            if state != rank.init_state:
                start, connected, leaving = rank.init_state = state
                if connected:
                    self._ranks.find_mpich_files()
                self._send(
                    "init", rank=rank.rank, start=start, connected=connected, leaving=leaving
                )


def main() -> None:
    """Run the agent of a host, or the agent of one rank of mpirun or srun."""
    address = os.environ.pop(messages.ADDRESS_VARIABLE, None)
    if address is not None:
        _connect_and_run(address, os.environ.pop(messages.TOKEN_VARIABLE))
        return
    # The launcher reads this process's standard output: nothing else may be printed there.
    receive_fd, send_fd = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    terminal = os.environ.pop(messages.TERMINAL_VARIABLE, "")
    descriptors = [int(text) for text in terminal.split(",") if text]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # only one rank gets the terminal
    Agent(io.FileIO(receive_fd), io.FileIO(send_fd, "wb"), terminal=descriptors).run()


def _connect_and_run(address: str, token: str) -> None:
    """Run as an agent of the launcher that listens at `address`."""
    host, _, port = address.rpartition(":")
    rank = next(os.environ[name] for name in _RANK_VARIABLES if name in os.environ)
    try:
        connection = _connect((host, int(port)), token, int(rank))
    except (OSError, WrongKey, Refused) as error:
        # mpirun shows this text of every agent, so it is short.
        reason = getattr(error, "strerror", None) or str(error) or "it has another token"
        sys.exit(f"rank {rank} cannot connect to the launcher at {address}: {reason}")
    with connection:
        RankAgent(connection, connection, job=address).run()


def _connect(address: tuple[str, int], token: str, rank: int) -> SealedConnection:
    """Connect to the launcher. Try again if it closes the connection, as if many strangers connect.

    Raises:
        OSError, WrongKey, Refused: as `introduce` and `socket.create_connection`.
    """
    deadline = time.monotonic() + messages.LOST_SECONDS
    while True:
        connection = socket.create_connection(address, timeout=messages.LOST_SECONDS)
        try:
            left = max(1.0, deadline - time.monotonic())
            return introduce(connection, token.encode(), {"rank": rank}, left)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


if __name__ == "__main__":
    main()
