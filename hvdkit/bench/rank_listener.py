"""The runner's listener for the ranks of one job, and for their guards (`hvdkit.bench.guard`)."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.bench.control import TOKEN_VARIABLE, Peer
from hvdkit.launch.control import messages
from hvdkit.launch.control.listener import AgentListener


class RankListener:
    """Accept the connections of one job.

    Args:
        addresses: the addresses of this machine that ranks try, in this order.
        size: the number of ranks.
    """

    def __init__(self, addresses: Sequence[str], size: int) -> None:
        self._size = size
        self._addresses = list(addresses)
        bind = addresses[0] if len(addresses) == 1 else ""
        # The guard of rank r reports the number size + r.
        self._listener = AgentListener(bind, 2 * size)

    @property
    def spec(self) -> dict[str, Any]:
        """The part of a rank's specification that `control.connect` needs."""
        port = self._listener.address[1]
        return {"addresses": self._addresses, "port": port, "size": self._size}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable with the token."""
        return {TOKEN_VARIABLE: self._listener.variables()[messages.TOKEN_VARIABLE]}

    def accept(
        self, seconds: float, running: Callable[[], bool]
    ) -> tuple[list[Peer], list[Peer]] | None:
        """Wait for all ranks.

        Args:
            seconds: the time until all ranks must have connected.
            running: returns whether the job still runs.

        Returns:
            The connections of the ranks and of the guards, both by rank; None if the job has ended
            or the time is over.
        """
        deadline = time.monotonic() + seconds
        found: dict[int, Peer] = {}
        try:
            while len(found) < 2 * self._size:
                accepted = self._listener.accept()
                if accepted is not None:
                    found[accepted[0]] = Peer(accepted[1])
                elif not running() or time.monotonic() > deadline:
                    for peer in found.values():
                        peer.close()
                    return None
        finally:
            self._listener.close()
        peers = [found[number] for number in range(2 * self._size)]
        return peers[: self._size], peers[self._size :]

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._listener.close()
