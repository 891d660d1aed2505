"""The time limits of a job."""

from dataclasses import dataclass

from hvdkit.launch.control.messages import LOST_SECONDS
from hvdkit.runtime.recorder import STALL_SECONDS


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a job, in seconds.

    Attributes:
        start: for hosts to answer, and for ranks to register after the first rank has registered.
        stop: for an orderly stop (a checkpoint) after it was requested.
        end: between SIGTERM and SIGKILL, for ranks that still run after a failure.
        lost: the time without a message after which the launcher and an agent give each other up.
        stall: for running ranks after other ranks have ended or called `hvd.shutdown()`, until the
            launcher reports what they do: the ranks' HVDKIT_STALL_TIMEOUT. 0 for no report.
    """

    start: float = 60.0
    stop: float = 120.0
    end: float = 10.0
    lost: float = LOST_SECONDS
    stall: float = STALL_SECONDS
