"""The errors that hvdkit raises on purpose.

Each says in one or two lines what was given, what was expected and what to do, so that the command
line can print it as it is and a training script's last lines are readable on every rank.
"""

import signal


class HvdkitError(RuntimeError):
    """Something that hvdkit needs is missing, broken or failed. Command line: exit status 1."""

    # An error that is raised while TensorFlow traces a function keeps its class only if this is
    # its constructor.
    __init__ = Exception.__init__


class UsageError(HvdkitError, ValueError):
    """The user's arguments cannot be carried out as given. Command line: exit status 2."""


#: Exit status of a job that has saved, stopped because it was asked to, and can be started again
#: (sysexits.h's EX_TEMPFAIL).
RESUMABLE = 75


def status_before_start(number: signal.Signals) -> int:
    """Return the exit status of a job that a signal stopped before any rank was started.

    A batch system's signals mean that the job is to be put back. Ctrl-C and a lost terminal do not.
    """
    by_system = number in (signal.SIGTERM, signal.SIGUSR1)
    return RESUMABLE if by_system else 128 + number
